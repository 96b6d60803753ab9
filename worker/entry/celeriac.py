"""The way in: `celeriac` and `python -m celeriac`. Explains a clash of names before it can puzzle.

The project's packages are called `runner`, `tasks`, `web` and `worker`, as are many files of users.
Only one module of a name can be imported, so a second one is named here in one line. A user's own
`redis.py` beside their agents does no harm, since the current folder is searched last; on
PYTHONPATH it would be imported in place of the real one, and is named too. Nothing of the project,
and nothing beyond the standard library, is imported before that.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

PACKAGES = ("runner", "tasks", "web", "worker")

DEPENDENCIES = {
    "celery": "app",
    "kombu": "transport",
    "redis": "asyncio",
    "pydantic": "fields.py",
    "openai": "resources",
    "rich": "progress.py",
    "tenacity": "wait.py",
}
"""What we import from others, each with a part of it that a user's file of that name hasn't."""

BAD_CONFIGURATION = 2
INTERRUPTED = 130


def main() -> int:
    """Run the command line; answers the exit code, which `worker.cli` explains."""
    _search_current_folder_last()
    clash = find_clash() or find_shadow()
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


def find_shadow() -> str | None:
    """One line about the first module found in place of one that we depend on; None is well."""
    for name, part in DEPENDENCIES.items():
        if name in sys.modules:
            continue  # imported already, so that this is what is used
        spec = importlib.util.find_spec(name)
        # One that isn't installed at all is an ImportError that says so.
        if spec is None or spec.origin is None:
            continue
        if not any((place / part).exists() for place in _places(spec)):
            kind, shown = _kind_of(spec.origin)
            return (
                f"{shown} is found in place of the package {name!r} that celeriac needs; "
                f"rename that {kind}, or take its folder off PYTHONPATH"
            )
    return None


def _kind_of(found: str) -> tuple[str, Path]:
    path = Path(found)
    return ("package", path.parent) if path.name == "__init__.py" else ("module", path)


def _explain(name: str, found: str) -> str:
    kind, shown = _kind_of(found)
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
    return list(dict.fromkeys([str(Path.cwd()), *_pythonpath()]))


def _pythonpath() -> list[str]:
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [str(Path(each).absolute()) for each in given if each]


def _search_current_folder_last() -> None:
    """So that CELERIAC_AGENTS=shop.agents finds ./shop/agents.py, and ./redis.py shadows nothing.

    `python -m` puts the folder first; whoever names it on PYTHONPATH wants it where it stands.
    """
    here = str(Path.cwd())
    if here not in _pythonpath():
        sys.path[:] = [each for each in sys.path if each not in ("", here)]
        sys.path.append(here)


if __name__ == "__main__":
    sys.exit(main())
