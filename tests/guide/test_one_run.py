"""One run, followed from submit to answer through every layer, in one process and in order.

Read it beside `docs/architecture.md`: each part below is one stop on the way.
"""

from __future__ import annotations

import fakeredis
import pytest

from runner import Agent, Evidence, Result, StopReason, tool
from runner.agents import Agents
from runner.context import goal_message, rebuild_request
from runner.loop import CallTools, Finish, Loop, NextStep, Skip
from runner.settings import Settings
from runner.store import Outcome, RunStore
from runner.testing import ScriptedModel, calls, run_agent


@tool(idempotent=True)
def get_order(order_id: str) -> Result[dict[str, str]]:
    """Look up an order by its number."""
    return Result(
        {"id": order_id, "status": "delivered"}, evidence=[Evidence(source=f"order {order_id}")]
    )


@tool(idempotent=True)
def get_policy() -> str:
    """Read the refund policy."""
    return "30 days"


support = Agent(name="support", instructions="Help customers.", tools=[get_order, get_policy])

TURN = calls(("get_order", {"order_id": "A001"}), ("get_policy", {}))


def test_a_run_from_submit_to_answer() -> None:
    model = ScriptedModel([TURN, "It can be refunded."])
    settings = Settings()
    store = RunStore(settings, fakeredis.FakeRedis(decode_responses=True))
    loop = Loop(store, Agents([support]), settings=settings, model=model)
    run_id = "run-0001"

    # Submit writes the record first. From here on the run is due until it ends.
    outcome, _ = store.create_run(
        run_id=run_id,
        agent="support",
        messages=[goal_message("Can A001 be refunded?")],
        limits=support.limits,
    )
    assert outcome is Outcome.CREATED

    # Step 0 asks the model, which wants two tools: the turn is written, and two hints come back.
    assert loop.advance(run_id, 0) == CallTools(run_id, 0, (0, 1))
    # The same hint again finds nothing to do: a message is only a hint.
    assert loop.advance(run_id, 0) == Skip(run_id, Outcome.STALE)

    # The calls may finish in any order. The one that completes the set opens the next step.
    loop.call_tool(run_id, 0, 1)
    assert loop.call_tool(run_id, 0, 0) == NextStep(run_id, 1)
    assert loop.call_tool(run_id, 0, 0) == Skip(run_id, Outcome.STALE)

    # The history holds the turn and its results as one block, in the order of the calls.
    assert [each["role"] for each in store.read_messages(run_id)] == [
        "user",
        "assistant",
        "tool",
        "tool",
    ]
    assert store.read_messages(run_id)[-1]["content"] == "30 days"

    # Step 1 answers, and the run ends. Exactly one end is ever written.
    assert loop.advance(run_id, 1) == Finish(run_id, StopReason.COMPLETED)
    result = store.read_result(run_id)
    assert result is not None
    assert (result.answer, result.steps) == ("It can be refunded.", 2)
    assert [(each.source, each.call_id) for each in result.evidence] == [("order A001", "0.0")]

    # Whoever followed saw it happen.
    assert [each.type for each in store.read_events(run_id, "0")] == [
        "run.created",
        "step.started",
        "model.answered",
        "call.queued",
        "call.queued",
        "call.started",
        "call.finished",
        "call.started",
        "call.finished",
        "step.started",
        "model.answered",
        "run.finished",
    ]

    # And the trace rebuilds what the model was sent, word for word.
    trace = [entry for entry in store.read_trace(run_id) if entry["kind"] == "model"]
    history = store.read_messages(run_id)
    for entry, sent in zip(trace, model.requests, strict=True):
        described = entry["exchanges"][0]["request"]
        rebuilt = rebuild_request(described, trace[0]["agent"], history)
        assert rebuilt["messages"] == list(sent.messages)
        assert rebuilt["tools"] == list(sent.tools)
    loop.close()


def test_a_users_own_test_needs_no_server() -> None:
    model = ScriptedModel([TURN, lambda request: f"{len(request.messages)} messages"])

    result = run_agent(support, "Can A001 be refunded?", model=model)

    assert result.ok
    assert result.answer == "5 messages"
    assert [each["role"] for each in model.requests[1].messages][-2:] == ["tool", "tool"]


def test_a_script_that_is_too_short_says_so() -> None:
    with pytest.raises(AssertionError, match="its script is shorter"):
        run_agent(support, "go", model=ScriptedModel([TURN]))
