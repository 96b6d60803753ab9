"""`celeriac replay` and `celeriac fork`: exit codes, what they print, and what they don't tell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner import keys
from runner.agents import load_agents
from runner.loop import NextStep
from runner.recording import load_recording
from runner.testing import Reply, ScriptedModel, calls, replay
from support.command import Invoke
from support.loops import drive, loop_of_worker
from tasks import Client, Run

NO_SUCH_RUN = "01a00000-0000-7000-8000-000000000000"
AGENTS = {"CELERIAC_AGENTS": "support.agents"}


@pytest.fixture
def ended(client: Client) -> Run:
    """A run of the agent `helper` with two turns and an answer."""
    agents = load_agents(["support.agents"])
    asked = [calls(("add", {"a": a, "b": a + 1})) for a in (1, 3)]
    turns: list[Reply] = [*asked, "Seven."]
    run = client.submit("What is 3 and 4?", agent="helper")
    with loop_of_worker(client.store, *agents.values(), model=ScriptedModel(turns)) as loop:
        drive(loop, NextStep(run.id, 0))
    assert run.result(timeout=1).answer == "Seven."
    return run


def damage(client: Client, run: Run) -> None:
    """The history says otherwise than the trace."""
    key = keys.messages(run.id)
    client.store.redis.lset(key, 2, json.dumps({**run.messages()[2], "content": "a secret"}))


def test_a_run_that_comes_out_the_same_is_said_in_one_line(invoke: Invoke, ended: Run) -> None:
    ran = invoke("replay", ended.id, **AGENTS)
    assert (ran.code, ran.out, ran.err) == (0, f"same: {ended.id}, steps 3\n", "")


def test_a_difference_is_told_without_its_content_unless_asked(
    invoke: Invoke, client: Client, ended: Run
) -> None:
    damage(client, ended)
    ran = invoke("replay", ended.id, **AGENTS)
    assert ran.code == 1
    assert ran.out.startswith("step 0, messages[2].content: recorded 8 characters (")
    assert "secret" not in ran.out
    shown = invoke("replay", ended.id, "--show", **AGENTS)
    assert 'recorded "a secret", replayed "3"' in shown.out


def test_a_script_reads_the_same_as_json(invoke: Invoke, client: Client, ended: Run) -> None:
    assert json.loads(invoke("replay", ended.id, "--json", **AGENTS).out)["same"] is True
    damage(client, ended)
    ran = invoke("replay", ended.id, "--json", **AGENTS)
    told = json.loads(ran.out)
    assert (ran.code, told["same"], "secret" in ran.out) == (1, False, False)
    [difference] = told["differences"]
    assert (difference["step"], difference["field"]) == (0, "messages[2].content")


def test_a_changed_agent_is_said_first(invoke: Invoke, client: Client, ended: Run) -> None:
    key = keys.trace(ended.id)
    first = json.loads(str(client.store.redis.lindex(key, 0)))
    first["agent"]["fingerprint"] = "another"
    client.store.redis.lset(key, 0, json.dumps(first))
    damage(client, ended)
    lines = invoke("replay", ended.id, **AGENTS).out.splitlines()
    assert lines[0].startswith("the agent has changed")
    assert len(lines) == 2


def test_a_recording_is_saved_for_a_test_and_replayed_there(
    invoke: Invoke, ended: Run, tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    ran = invoke("replay", ended.id, "--save", str(path), CELERIAC_REDACT="goal,a")
    assert (ran.code, ran.out) == (0, f"saved {path}\n")
    assert load_recording(path).hidden == ("a", "goal")
    found = replay(path, load_agents(["support.agents"])["helper"])
    assert found.same


def test_a_file_that_cannot_be_written_is_refused(
    invoke: Invoke, ended: Run, tmp_path: Path
) -> None:
    ran = invoke("replay", ended.id, "--save", str(tmp_path / "none" / "run.json"))
    ran.refused(2, "can't write run.json")


def test_a_replay_needs_the_agent(invoke: Invoke, ended: Run) -> None:
    invoke("replay", ended.id).refused(2, "CELERIAC_AGENTS")
    other = invoke("replay", ended.id, CELERIAC_AGENTS="examples.orders")
    other.refused(2, "no agent named 'helper'")


def test_a_fork_prints_the_id_of_a_run_that_waits_for_a_worker(
    invoke: Invoke, client: Client, ended: Run
) -> None:
    ran = invoke("fork", ended.id, "--step", "1")
    assert (ran.code, ran.err) == (0, "")
    info = client.get(ran.out.strip()).info()
    assert (info.agent, info.status, info.step) == ("helper", "queued", 1)
    assert info.metadata["forked_from"] == {"run": ended.id, "step": 1}


def test_a_fork_may_be_of_another_agent_and_is_told_as_json(
    invoke: Invoke, client: Client, ended: Run
) -> None:
    ran = invoke("fork", ended.id, "--step", "0", "--agent", "typed", "--json", **AGENTS)
    assert client.get(json.loads(ran.out)["run_id"]).info().agent == "typed"


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--step", "7"], 2, "it can be at: 0, 1, 2"),
        (["--step", "1", "--agent", "nobody"], 2, "no agent named 'nobody'"),
        (["--step", "-1"], 2, "--step"),
        ([], 2, "--step"),
    ],
)
def test_a_fork_that_cannot_be_is_refused(
    invoke: Invoke, client: Client, ended: Run, args: list[str], code: int, words: str
) -> None:
    before = len(client.list())
    invoke("fork", ended.id, *args, **AGENTS).refused(code, words)
    assert len(client.list()) == before


@pytest.mark.parametrize("command", [["replay"], ["fork", "--step", "1"]])
def test_a_run_that_is_not_there_has_its_exit_code(invoke: Invoke, command: list[str]) -> None:
    invoke(*command, NO_SUCH_RUN, **AGENTS).refused(4, "no run")
