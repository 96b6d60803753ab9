"""One arrow of imports, keys spelled in one place, and imports that do nothing but define."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FOLDERS = {
    "runner": {"runner"},
    "tasks": {"runner", "tasks"},
    "worker": {"runner", "tasks", "web", "worker"},
    "web": {"runner", "tasks", "web"},
}
"""Which of our folders each folder may import."""

ROWS = [
    {"models"},
    {"errors", "failpoints", "background", "interrupt", "scripts", "render", "images", "redact"},
    {"connection", "settings", "keys", "record", "schema", "reader", "profiles", "view", "limits"},
    {"history"},
    {"tools", "store", "stream", "replies"},
    {"clarify", "nudge", "keeper", "model", "invariants", "approvals", "recording", "observe"},
    {"agents"},
    {"context", "answers", "decide", "calls", "budgets", "fork"},
    {"guards", "earlier"},
    {"ask", "window"},
    {"loop"},
    {"replay"},
    {"testing"},
]
"""The modules of `runner/`: each imports only from rows above its own."""

CELERY = {"celery", "kombu", "billiard", "amqp", "vine", "flower"}
VAGUE = {"util", "utils", "base", "common", "helper", "helpers", "manager", "managers", "misc"}


def modules_of(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


OURS = [path for folder in FOLDERS for path in modules_of(folder)]


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, as a dotted name from the top."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{label(path)}: a relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{each.name}" for each in node.names}
    return found


def row_of(module: str) -> int:
    [row] = [number for number, row in enumerate(ROWS) if module in row]
    return row


def runner_imports(path: Path) -> set[str]:
    """The names of the modules of `runner/` that a file imports."""
    known = {each.stem for each in modules_of("runner")}
    parts = [name.split(".") for name in imports_of(path)]
    return {part[1] for part in parts if part[0] == "runner" and part[1:] and part[1] in known}


@pytest.mark.parametrize("path", OURS, ids=label)
def test_imports_between_folders_follow_the_arrow(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    tops = {name.split(".")[0] for name in imports_of(path)}
    assert tops & set(FOLDERS) <= FOLDERS[folder]
    assert not tops & {"tests", "examples", "benchmarks"}


@pytest.mark.parametrize("path", modules_of("runner"), ids=label)
def test_the_runner_knows_nothing_of_celery(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports_of(path)} & CELERY


def test_every_module_of_the_runner_has_its_row() -> None:
    placed = [name for row in ROWS for name in row]
    assert sorted(placed) == sorted(set(placed))
    assert set(placed) == {path.stem for path in modules_of("runner")} - {"__init__"}


@pytest.mark.parametrize("path", modules_of("runner"), ids=label)
def test_a_module_imports_only_from_rows_above_its_own(path: Path) -> None:
    if path.stem == "__init__":
        return
    below = {name for name in runner_imports(path) if row_of(name) >= row_of(path.stem)}
    assert below == set()
    assert "runner" not in imports_of(path) or runner_imports(path), "imports the whole package"


def test_the_package_offers_nothing_that_needs_redis_or_a_model() -> None:
    offered = runner_imports(ROOT / "runner" / "__init__.py")
    assert offered <= {
        "agents",
        "errors",
        "images",
        "models",
        "profiles",
        "settings",
        "tools",
    }


@pytest.mark.parametrize("path", OURS, ids=label)
def test_no_module_has_a_name_that_says_nothing(path: Path) -> None:
    assert path.stem not in VAGUE


@pytest.mark.parametrize("path", OURS, ids=label)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(tree_of(path))


def spelled_keys(path: Path) -> list[str]:
    strings = [
        node.value
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return [text for text in strings if re.match(r"celeriac:(\S|$)", text)]


@pytest.mark.parametrize(
    "path", [path for path in OURS if label(path) != "runner/keys.py"], ids=label
)
def test_only_one_module_spells_a_redis_key(path: Path) -> None:
    assert spelled_keys(path) == []


def test_the_module_that_spells_keys_does() -> None:
    assert len(spelled_keys(ROOT / "runner" / "keys.py")) > 10


WATCH = """
import sys, threading
bad = []
def watch(event, args):
    if event in ("socket.connect", "socket.bind", "subprocess.Popen", "os.fork", "os.system"):
        bad.append((event, args))
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        if not str(args[0]).endswith(".pyc") and "__pycache__" not in str(args[0]):
            bad.append((event, args))
sys.addaudithook(watch)
import importlib
importlib.import_module(sys.argv[1])
threads = [thread.name for thread in threading.enumerate() if thread.name != "MainThread"]
assert not threads, threads
assert not bad, bad
"""


@pytest.mark.parametrize("name", ["runner", "runner.loop", "tasks", "tasks.agent", "web"])
def test_importing_opens_no_socket_and_starts_no_thread(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-B", "-W", "error", "-c", WATCH, name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
