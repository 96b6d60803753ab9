"""What client and command line show of results that were cut, and of views that were sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner import Agent, InvalidInput, Limits, ModelError, RunNotFound, tool
from runner.context import goal_message
from runner.loop import NextStep
from runner.models import RunErrorType
from runner.testing import Reply, ScriptedModel, calls
from support.command import Invoke
from support.loops import drive, loop_of_worker
from tasks import Client, Run

NO_SUCH_RUN = "01a00000-0000-7000-8000-000000000000"


@tool
def dump_table(rows: int) -> str:
    """Print a table."""
    return "row\x1b[0m\n" * rows


def run_table(client: Client, *replies: Reply, **options: Any) -> Run:
    """A run that ended, in this process."""
    model = ScriptedModel([*replies, "Done."])
    agent = Agent(
        name="a", model=model, tools=[dump_table], limits=Limits(max_repeats=50), **options
    )
    client.store.create_run(
        run_id="run-under-test", agent="a", messages=[goal_message("go")], limits=agent.limits
    )
    with loop_of_worker(client.store, agent) as loop:
        drive(loop, NextStep("run-under-test", 0))
    return client.get("run-under-test")


@pytest.mark.parametrize("rows", [20_000, 3])
def test_a_result_is_read_whole_by_its_call(client: Client, invoke: Invoke, rows: int) -> None:
    run = run_table(client, calls(("dump_table", {"rows": rows})))
    whole = "row\x1b[0m\n" * rows
    assert run.whole_result("0.0") == whole
    assert invoke("result", run.id, "0.0").out == whole + "\n"
    told = json.loads(invoke("result", run.id, "0.0", "--json").out)
    assert told == {"run_id": run.id, "call": "0.0", "text": whole}


@pytest.mark.parametrize("call", ["0.1", "7.0", "", "0", 0, None])
def test_a_call_that_has_no_result_is_refused(client: Client, invoke: Invoke, call: object) -> None:
    run = run_table(client, calls(("dump_table", {"rows": 1})))
    with pytest.raises(InvalidInput, match=r"no result of such a call \(yet\)"):
        run.whole_result(call)  # type: ignore[arg-type]
    ran = invoke("result", run.id, str(call) or "0.1")
    assert (ran.code, ran.out, len(ran.err.splitlines())) == (2, "", 1)


def test_a_run_that_is_not_there_is_told(client: Client, invoke: Invoke) -> None:
    with pytest.raises(RunNotFound):
        Run(client.store, NO_SUCH_RUN, client._app).whole_result("0.0")
    assert invoke("result", NO_SUCH_RUN, "0.0").code == 4


def test_a_trace_shows_the_view_that_was_sent_and_the_summary_that_was_asked_for(
    client: Client, invoke: Invoke
) -> None:
    turns = [calls(("dump_table", {"rows": 40 + n}), text="t" * 3_000) for n in range(6)]
    too_long = ModelError("too long", type=RunErrorType.CONTEXT_OVERFLOW)
    run = run_table(client, *turns, too_long, "It has rows.", summarize=True)
    assert run.result().ok
    [step] = json.loads(invoke("trace", run.id, "--json").out)["steps"][6:]
    [attempt] = step["attempts"]
    refused, summary, sent = attempt["exchanges"]
    assert refused["error"]["type"] == "CONTEXT_OVERFLOW"
    assert "# What will be left out" in summary["request"]["messages"][0]["content"]
    assert "It has rows." in sent["request"]["messages"][1]["content"]
    assert len(sent["request"]["messages"]) < len(refused["request"]["messages"])
    assert "error CONTEXT_OVERFLOW" in invoke("trace", run.id).out
