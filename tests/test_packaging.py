"""What a user installs: a wheel with all that runs and nothing else; pinned dependencies."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

PACKAGES = ("runner", "tasks", "web", "worker")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_module_and_every_script(names: set[str]) -> None:
    sources = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".lua", ".typed", ".html", ".css", ".js", ".svg")
    }
    assert len([name for name in sources if name.endswith(".lua")]) > 15
    entry = "worker/entry/celeriac.py"  # in the wheel it stands at the top
    assert sources - {entry} <= names
    assert "celeriac.py" in names


def test_the_wheel_holds_nothing_else(names: set[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    info = next(top for top in tops if top.endswith(".dist-info"))
    assert tops == {*PACKAGES, "celeriac.py", info}
    kinds = {Path(name).suffix for name in names if not name.startswith(info)}
    assert kinds <= {".py", ".lua", ".typed", ".html", ".css", ".js", ".svg", ""}
    assert not [name for name in names if "__pycache__" in name or "test_" in name]
    assert f"{info}/licenses/LICENSE" in names


def test_the_wheel_runs_where_it_is_unpacked(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        "import sys, celeriac, runner.store, worker.app\n"
        "print(runner.__file__, flush=True)\n"
        "sys.exit(celeriac.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"],
        cwd=elsewhere,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site))
    assert "usage: celeriac" in done.stdout


def test_the_command_is_the_module_with_a_name_of_its_own() -> None:
    assert PROJECT["project"]["scripts"] == {"celeriac": "celeriac:main"}


# --- constraints -------------------------------------------------------------------------------


def constraint_lines() -> list[str]:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return [line.split("#")[0].strip() for line in text.splitlines() if line.split("#")[0].strip()]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, list[Requirement]]:
    """Each name with its pins: several where they differ by Python version or platform."""
    found: dict[str, list[Requirement]] = {}
    for line in constraint_lines():
        requirement = Requirement(line)
        found.setdefault(normal(requirement.name), []).append(requirement)
    return found


def dependencies() -> list[Requirement]:
    project = PROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    found = [Requirement(text) for group in groups for text in group]
    return [each for each in found if each.name != project["name"]]


def test_a_constraint_is_a_name_and_a_version_and_no_address() -> None:
    assert constraint_lines()
    for line in constraint_lines():
        assert re.fullmatch(r"[A-Za-z0-9][\w.-]*==[\w.!+]+( *;.*)?", line), line
        assert "://" not in line
        assert "@" not in line


def test_no_name_is_pinned_twice_for_the_same_place() -> None:
    for name, requirements in pins().items():
        markers = [str(each.marker) for each in requirements]
        assert len(set(markers)) == len(markers), name
        assert len(markers) == 1 or "None" not in markers, name


@pytest.mark.parametrize("dependency", dependencies(), ids=str)
def test_every_dependency_is_pinned_within_its_range(dependency: Requirement) -> None:
    pinned = pins().get(normal(dependency.name), [])
    assert pinned, f"{dependency.name} isn't in constraints.txt"
    for each in pinned:
        [one] = each.specifier
        assert one.operator == "=="
        assert Version(one.version) in dependency.specifier


def test_what_is_installed_here_is_what_the_constraints_say() -> None:
    for dependency in dependencies():
        if dependency.name == "flower":  # an extra that the tests don't need
            continue
        here = [
            each
            for each in pins().get(normal(dependency.name), [])
            if each.marker is None or each.marker.evaluate()
        ]
        for each in here:
            assert Version(version(dependency.name)) in each.specifier, dependency.name
