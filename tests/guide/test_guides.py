"""The quick start and the guides, followed block after block by somebody who has their workers."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.command import PYTHONPATH
from support.fleet import ROOT, Fleet, fleet, url_of, valkey
from support.guide import Follower, commands_of, path_of, start
from support.model_server import ModelServer, Reply, calls, final
from support.readme import Block, blocks_of, write_files
from support.stage import by_turn
from tasks import Client
from worker import cli

QUICK_START = ROOT / "docs" / "quick-start.md"
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
DOCUMENTS = [QUICK_START, *GUIDES]

each_guide = pytest.mark.parametrize("document", GUIDES, ids=lambda path: path.stem)

SCRIPTS: dict[str, list[Reply]] = {
    "Should we buy lamps?": [
        calls(("count_stock", {"item": "lamp"})),
        final('{"item": "lamp", "buy": false, "why": "3 are left"}'),
    ],
    "Book a table": [
        calls(("ask_user", {"question": "For how many?"})),
        final("A table for two."),
    ],
    "Export the orders": [calls(("export", {}))],
    "Cheer up ada": [
        calls(("send_voucher", {"customer": "ada", "cents": 5000})),
        final("Ada has a voucher."),
    ],
    "Hello": [],
}
"""What the model says to a goal of the guides."""


def answer(body: dict[str, Any]) -> Reply:
    goal = next(each["content"] for each in body["messages"] if each["role"] == "user")
    return by_turn(SCRIPTS[goal])(body)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder, with all files that the README, the quick start and the guides show."""
    return write_files(tmp_path_factory.mktemp("user"), *DOCUMENTS)


@pytest.fixture(scope="module")
def workers(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The workers of the quick start, which know the guides' agents too: for all tests here."""
    place = tmp_path_factory.mktemp("fleet")
    data = place / "redis"
    data.mkdir()
    with (
        valkey(data) as server,
        ModelServer(answer) as model,
        fleet(
            url_of(server),
            place,
            model=model,
            agents=",".join(agent_modules()),
            PYTHONPATH=path_of(folder) + ":" + PYTHONPATH,
        ) as made,
    ):
        first = [each for each in blocks_of(QUICK_START) if (each.how or "").startswith("start ")]
        assert [each.how for each in first] == [f"start {what}" for what in STARTED]
        for block in first[1:3]:
            start(made, block, folder)
        with made.client() as client:
            made.wait_for(client.store.read_agents)
        yield made
        assert model.violations == []
        with made.client() as client:
            check_events(client)


def check_events(client: Client) -> None:
    """No event holds a key that the reference doesn't tell of."""
    section = REFERENCE.split("\n## Events\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1:4] for line in section.splitlines() if line.startswith("| `")]
    told = {name.strip(" `"): set(re.findall(r"`(\w+)`", data)) for name, _, data in rows}
    seen: defaultdict[str, set[str]] = defaultdict(set)
    for info in client.list():
        for event in client.get(info.id).events():
            seen[event.type] |= set(event.data)
    assert {kind: data - told[kind] for kind, data in seen.items() if data - told[kind]} == {}


STARTED = ["server", "steps", "tools", "tools"]


def agent_modules() -> list[str]:
    """The modules of the documents with an agent in them."""
    files = [
        (block.how.removeprefix("file "), block.code)
        for document in DOCUMENTS
        for block in blocks_of(document)
        if block.how and block.how.startswith("file ")
    ]
    return [
        name.removesuffix(".py").replace("/", ".")
        for name, code in files
        if re.search(r"^\w+ = Agent\(", code, re.MULTILINE)
    ]


@pytest.fixture
def follower(workers: Fleet, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Follower:
    monkeypatch.syspath_prepend(str(folder))
    return Follower(workers, folder, monkeypatch)


def test_the_quick_start_leads_from_nothing_to_a_tool_on_two_workers(follower: Follower) -> None:
    said: list[set[str]] = []
    for block in after_the_start(QUICK_START):
        follower.do(block)
        if block.how == "output" and "worker" in block.code:
            said.append(set(re.findall(r"worker (\d+)", follower.shown)))

    assert [len(workers) for workers in said] == [1, 2]


def after_the_start(document: Path) -> list[Block]:
    """The blocks without those that the fixture has started."""
    blocks = blocks_of(document)
    up = [block for block in blocks if (block.how or "").startswith("start ")][:3]
    return [block for block in blocks if block not in up[:2] and block is not up[2]]


@each_guide
def test_a_guide_can_be_followed(follower: Follower, document: Path) -> None:
    follower.follow(document)


def test_the_tests_that_the_guides_show_pass(folder: Path) -> None:
    shown = sorted(path.name for path in folder.glob("test_*.py") if path.name not in READMES)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "pytest", "-q", "--rootdir", folder, *shown],
        cwd=folder,
        env={"PYTHONPATH": path_of(ROOT, folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


READMES = ("test_agents.py", "test_replay.py")
"""Tests that `tests/test_docs.py` runs."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_command_that_is_shown_is_one(document: Path) -> None:
    parser = cli.make_parser()
    for block in blocks_of(document):
        for line in commands_of(block.code):
            found = re.search(r"(?:^|\$\()(?:[A-Z_]+=\S+ )*celeriac (.*?)\)?$", line)
            if found and block.how != "output":
                parser.parse_args(shlex.split(found[1], comments=True))
