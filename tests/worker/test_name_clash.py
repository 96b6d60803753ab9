"""A user's own `tasks.py`, `worker.py` or `runner/` is named in one line, with the cure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from support.fleet import ROOT

ENTRY = ROOT / "worker" / "entry"


def celeriac(folder: Path, *args: str, path: str = "", env: dict[str, str] | None = None) -> Ran:
    """Run the command in `folder`, with `path` on PYTHONPATH before what an install would add."""
    ours = f"{ROOT}{os.pathsep}{ENTRY}"
    return subprocess.run(
        [sys.executable, "-m", "celeriac", *(args or ("--help",))],
        cwd=folder,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{path}{os.pathsep}{ours}" if path else ours,
            **(env or {}),
        },
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


Ran = subprocess.CompletedProcess[str]


def assert_named(ran: Ran, path: Path, name: str) -> None:
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.count("\n") == 1
    assert ran.stderr.startswith(f"celeriac: error: {path} clashes with")
    assert f"celeriac's own package '{name}'" in ran.stderr
    assert "rename" in ran.stderr
    assert "another folder" in ran.stderr


@pytest.mark.parametrize("name", ["runner", "tasks", "worker"])
@pytest.mark.parametrize("package", [False, True])
def test_a_clash_in_the_current_folder(tmp_path: Path, name: str, package: bool) -> None:
    made = make(tmp_path, name, package)

    assert_named(celeriac(tmp_path), made, name)


@pytest.mark.parametrize("name", ["runner", "tasks", "worker"])
@pytest.mark.parametrize("behind", [False, True])
def test_a_clash_on_pythonpath_before_or_behind_ours(
    tmp_path: Path, name: str, behind: bool
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    made = make(theirs, name, package=False)
    path = f"{ROOT}{os.pathsep}{theirs}" if behind else str(theirs)

    assert_named(celeriac(tmp_path, path=path), made, name)


def test_a_relative_entry_of_pythonpath_is_named_in_full(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()

    made = make(theirs, "tasks", package=False)

    assert_named(celeriac(tmp_path, path="theirs"), made, "tasks")


def test_it_comes_before_anything_else_of_every_command(tmp_path: Path) -> None:
    made = make(tmp_path, "tasks", package=False)

    for command in (["submit"], ["worker", "--queue", "steps"], ["no-such-command"]):
        assert_named(celeriac(tmp_path, *command), made, "tasks")


def test_a_user_s_module_is_not_imported_to_find_that_out(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("open('imported', 'w').close()")

    assert celeriac(tmp_path).returncode == 2
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("folder", [ROOT, ROOT / "worker", ROOT / "worker" / "entry"])
def test_the_project_s_own_checkout_is_no_clash(folder: Path) -> None:
    assert celeriac(folder).returncode == 0


def test_a_folder_of_that_name_without_code_is_no_clash(tmp_path: Path) -> None:
    for name in ("runner", "tasks", "worker"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("")

    assert celeriac(tmp_path).returncode == 0


def test_agents_beside_the_command_are_found(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "agents.py").write_text(
        "from runner import Agent\nsupport = Agent(name='support')\n"
    )

    ran = celeriac(
        tmp_path,
        *("submit", "goal", "--agent", "nobody"),
        env={"CELERIAC_AGENTS": "shop.agents"},
    )

    assert ran.returncode == 2
    assert "known agents: support" in ran.stderr


def test_the_console_script_finds_them_too(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text("from runner import Agent\nsupport = Agent(name='a')\n")
    code = "import sys; sys.path.remove(''); import celeriac; sys.exit(celeriac.main())"

    ran = subprocess.run(
        [sys.executable, "-c", code, "submit", "goal", "--agent", "nobody"],
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ENTRY}",
            "CELERIAC_AGENTS": "agents",
        },
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert ran.returncode == 2
    assert "known agents: a" in ran.stderr


# --- what we depend on -------------------------------------------------------------------------

DEPENDENCIES = ["celery", "kombu", "openai", "pydantic", "redis", "rich", "tenacity"]


def make_shop(folder: Path) -> None:
    (folder / "shop").mkdir()
    (folder / "shop" / "agents.py").write_text(
        "from runner import Agent\nsupport = Agent(name='support')\n"
    )


def submit_to_nobody(folder: Path, *, path: str = "") -> Ran:
    """A command that imports all that we depend on, and is refused before it needs a Redis."""
    agents = {"CELERIAC_AGENTS": "shop.agents"}
    return celeriac(folder, "submit", "goal", "--agent", "nobody", path=path, env=agents)


@pytest.mark.parametrize("package", [False, True])
def test_a_user_s_files_beside_their_agents_shadow_no_dependency(
    tmp_path: Path, package: bool
) -> None:
    make_shop(tmp_path)
    # The last two are of Python's own, and would end everything as soon.
    for name in (*DEPENDENCIES, "email", "queue"):
        make(tmp_path, name, package)

    ran = submit_to_nobody(tmp_path)

    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert "known agents: support" in ran.stderr


@pytest.mark.parametrize("name", DEPENDENCIES)
@pytest.mark.parametrize("package", [False, True])
def test_one_on_pythonpath_is_named(tmp_path: Path, name: str, package: bool) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    made = make(theirs, name, package)

    ran = submit_to_nobody(tmp_path, path=str(theirs))

    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert ran.stderr.startswith(f"celeriac: error: {made} is found in place of")
    assert f"the package '{name}' that celeriac needs" in ran.stderr
    assert "off PYTHONPATH" in ran.stderr


def test_the_current_folder_stays_where_pythonpath_names_it(tmp_path: Path) -> None:
    made = make(tmp_path, "redis", package=False)

    ran = celeriac(tmp_path, path=str(tmp_path))

    assert ran.returncode == 2
    assert ran.stderr.startswith(f"celeriac: error: {made} is found in place of")


def test_a_folder_of_a_dependency_s_name_without_code_is_no_clash(tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir()
    (tmp_path / "redis" / "redis.conf").write_text("")

    assert celeriac(tmp_path, path=str(tmp_path)).returncode == 0


def test_the_real_ones_on_pythonpath_are_no_clash(tmp_path: Path) -> None:
    make_shop(tmp_path)
    installed = str(Path(redis.__file__).parents[1])

    assert "known agents: support" in submit_to_nobody(tmp_path, path=installed).stderr


# --- CELERIAC_AGENTS ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agents", "words"),
    [
        ("shop.agents", ["No module named 'shop'", "the folder that holds shop", "PYTHONPATH"]),
        ("redis.agents", ["No module named 'redis.agents'", "redis is ", "the folder that holds"]),
        ("json.agents.more", ["No module named 'json.agents'", "json is ", "PYTHONPATH"]),
        ("shop/agents.py", ["dotted name, not a path: shop.agents, not shop/agents.py"]),
        ("./shop/agents", ["dotted name, not a path: shop.agents, not ./shop/agents"]),
        ("agents.py", ["dotted name, not a path: agents, not agents.py"]),
        ("json", ["no Agent at the top level of json (", "json/__init__.py"]),
    ],
)
def test_agents_that_are_not_found_are_told_with_the_cure(
    tmp_path: Path, agents: str, words: list[str]
) -> None:
    ran = celeriac(
        tmp_path, "submit", "goal", "--agent", "support", env={"CELERIAC_AGENTS": agents}
    )

    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert ran.stderr.startswith("celeriac: error: CELERIAC_AGENTS")
    assert [word for word in words if word not in ran.stderr] == [], ran.stderr


def test_an_import_that_fails_inside_a_user_s_module_names_no_folder(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text("import no_such_library\n")

    ran = celeriac(
        tmp_path, "submit", "goal", "--agent", "support", env={"CELERIAC_AGENTS": "agents"}
    )

    assert ran.stderr == (
        "celeriac: error: CELERIAC_AGENTS: can't import 'agents': "
        "ModuleNotFoundError: No module named 'no_such_library'\n"
    )


def make(folder: Path, name: str, package: bool) -> Path:
    path = folder / name if package else folder / f"{name}.py"
    if package:
        path.mkdir()
        (path / "__init__.py").write_text("")
    else:
        path.write_text("")
    return path
