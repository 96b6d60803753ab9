"""The way in: `celeriac` and `python -m celeriac`. Explains a clash of names before it can puzzle.

The project's packages are called `runner`, `tasks` and `worker`, as are many files of users. Only
one module of a name can be imported, so a second one is named here in one line. Nothing of the
project, and nothing beyond the standard library, is imported before that.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

PACKAGES = ("runner", "tasks", "worker")
BAD_CONFIGURATION = 2
INTERRUPTED = 130


def main() -> int:
    """Run the command line; answers the exit code, which `worker.cli` explains."""
    _add_current_folder()
    clash = find_clash()
    if clash is not None:
        print(f"celeriac: error: {clash}", file=sys.stderr)
        return BAD_CONFIGURATION
    try:
        from worker.cli import main as run_command

        return run_command()
    except KeyboardInterrupt:
        return INTERRUPTED


def find_clash() -> str | None:
    """One line about the first module that has the name of one of our packages; None is well."""
    for name in PACKAGES:
        for folder in _users_folders():
            spec = PathFinder.find_spec(name, [folder])
            # A folder without __init__.py is no module as long as there is a real one elsewhere.
            if spec is not None and spec.origin is not None and not _is_ours(spec):
                return _explain(name, spec.origin)
        spec = importlib.util.find_spec(name)
        if spec is not None and not _is_ours(spec):
            return _explain(name, spec.origin or str(next(iter(_places(spec)), name)))
    return None


def _explain(name: str, found: str) -> str:
    path = Path(found)
    kind, shown = ("package", path.parent) if path.name == "__init__.py" else ("module", path)
    return (
        f"{shown} clashes with celeriac's own package {name!r}: Python can import only one "
        f"{name!r}; rename that {kind}, or run celeriac from another folder and without it on "
        "PYTHONPATH"
    )


def _is_ours(spec: ModuleSpec) -> bool:
    """Whether this is a package of the project: this file stands beside it, or its source does."""
    beside = ("celeriac.py", "worker/entry/celeriac.py")
    return any((place.parent / each).is_file() for place in _places(spec) for each in beside)


def _places(spec: ModuleSpec) -> list[Path]:
    """The folders that a package is in; for a module of one file, the file."""
    if spec.submodule_search_locations is not None:
        return [Path(place) for place in spec.submodule_search_locations]
    return [] if spec.origin is None else [Path(spec.origin)]


def _users_folders() -> list[str]:
    """Where users have their agents: even behind ours on the path, a clash there is one."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return list(dict.fromkeys(str(Path(each).absolute()) for each in (".", *given) if each))


def _add_current_folder() -> None:
    # As Celery and `python -m` do, so that CELERIAC_AGENTS=shop.agents finds ./shop/agents.py.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


if __name__ == "__main__":
    sys.exit(main())
