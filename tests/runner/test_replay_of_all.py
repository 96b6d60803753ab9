"""A replay of runs in which the user, a person who approves and a view of the history take part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runner import Agent, Limits, StopReason, tool
from runner.ask import Released
from runner.invariants import check_run
from runner.loop import NextStep, approve_call, cancel_run, deny_call
from runner.recording import read_recording
from runner.replay import Replayed, replay
from runner.store import RunStore
from runner.testing import ScriptedModel, calls
from support.loops import RUN, Loops, drive, open_loops

ran: list[str] = []
"""The calls of tools that ran: a replay adds nothing."""


@tool(approval=True, idempotent=True)
def pay(cents: int) -> str:
    """Pay."""
    ran.append(f"pay {cents}")
    return f"paid {cents}"


@tool(idempotent=True)
def look(chars: int) -> str:
    """Look."""
    ran.append("look")
    return "x" * chars


@tool(final=True)
def answer(text: str) -> str:
    """Give the answer."""
    return text


@pytest.fixture
def loops(store: RunStore, no_leaked_keys: None) -> Iterator[Loops]:
    ran.clear()
    yield from open_loops(store)


def agent_of(*replies: Any, **options: Any) -> Agent:
    given: dict[str, Any] = {"model": ScriptedModel(replies), "tools": [pay, look, answer]}
    return Agent(name="a", **(given | options))


def replayed(loops: Loops) -> Replayed:
    """The replay of the run, which asks nobody and runs nothing."""
    before = list(ran)
    assert check_run(loops.store, RUN) == []
    found = replay(read_recording(loops.store, RUN), loops.agents[RUN])
    assert ran == before
    assert [each.describe(show=True) for each in found.differences] == []
    return found


def say(store: RunStore, text: str, then: Any = None) -> Callable[[Any], Any]:
    """A reply during whose making the user says something."""

    def reply(_: object) -> Any:
        store.send_message(RUN, text, text)
        return then

    return reply


PAY_TWICE = calls(("pay", {"cents": 1}), ("pay", {"cents": 2}), ("look", {"chars": 3}))


@pytest.mark.parametrize("parallel", [1, 2, 3])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_calls_that_were_approved_in_any_order_come_out_the_same(
    loops: Loops, order: tuple[int, int], parallel: int
) -> None:
    limits = Limits(max_parallel_calls=parallel)
    loop = loops.start(agent_of(PAY_TWICE, "done", limits=limits))
    first = loop.advance(RUN, 0)
    follow = [approve_call(loops.store, RUN, f"0.{index}") for index in order]
    for each in (first, *follow):
        drive(loop, each)
    assert loops.result.answer == "done"
    replayed(loops)


def test_a_call_that_was_denied_comes_out_the_same(loops: Loops) -> None:
    loop = loops.start(agent_of(PAY_TWICE, "done"))
    drive(loop, loop.advance(RUN, 0))
    drive(loop, approve_call(loops.store, RUN, "0.1", by="a"))
    drive(loop, deny_call(loops.store, RUN, "0.0", "not today", by="b"))
    assert loops.result.stop_reason is StopReason.COMPLETED
    assert ran == ["look", "pay 2"]
    replayed(loops)


def test_a_run_that_was_cancelled_while_it_waited_comes_out_the_same(loops: Loops) -> None:
    loop = loops.start(agent_of(PAY_TWICE))
    drive(loop, loop.advance(RUN, 0))
    loops.store.send_message(RUN, "op", "never mind")
    cancel_run(loops.store, RUN, "changed my mind")
    assert loops.store.read_messages(RUN)[-1]["content"] == "never mind"
    replayed(loops)


def test_messages_before_in_and_behind_steps_come_out_the_same(loops: Loops) -> None:
    loop = loops.start(agent_of(say(loops.store, "b", calls(("look", {"chars": 3}))), "done"))
    loops.store.send_message(RUN, "a", "a")
    drive(loop)
    said = [each["content"] for each in loops.store.read_messages(RUN) if each["role"] == "user"]
    assert said == ["go", "a", "b"]
    replayed(loops)


def test_answers_after_which_the_run_went_on_come_out_the_same(loops: Loops) -> None:
    by_tool = calls(("answer", {"text": "second"}))
    script = (say(loops.store, "a", "first"), say(loops.store, "b", by_tool), "third")
    loop = loops.start(agent_of(*script))
    drive(loop)
    assert loops.result.answer == "third"
    replayed(loops)


def test_a_message_that_a_step_cap_left_unread_comes_out_the_same(loops: Loops) -> None:
    loop = loops.start(agent_of(say(loops.store, "a", "first"), limits=Limits(max_steps=1)))
    drive(loop)
    assert loops.result.stop_reason is StopReason.MAX_STEPS
    replayed(loops)


def test_a_run_whose_principal_may_not_use_its_agent_comes_out_the_same(loops: Loops) -> None:
    loop = loops.start(agent_of(requires={"admin"}))
    drive(loop)
    assert loops.result.stop_reason is StopReason.PERMISSION_DENIED
    replayed(loops)


@pytest.mark.parametrize("summarize", [False, True])
def test_a_history_that_was_shown_in_part_comes_out_the_same(loops: Loops, summarize: bool) -> None:
    def reply(request: Any) -> Any:
        if not request.tools:
            return "It was looked at often."
        return calls(("look", {"chars": 1500})) if len(ran) < 30 else "done"

    agent = agent_of(*[reply] * 90, context_tokens=2000, summarize=summarize)
    loop = loops.start(agent, limits=Limits(max_steps=50, max_repeats=50))
    drive(loop)
    assert loops.result.answer == "done"
    views = [
        each["request"].get("view", {})
        for entry in loops.store.read_trace(RUN)
        if entry["kind"] == "model"
        for each in entry["exchanges"]
    ]
    assert any(view.get("dropped") for view in views)
    replayed(loops)


def test_a_step_that_was_let_go_of_after_an_answer_comes_out_the_same(loops: Loops) -> None:
    def stop(_: object) -> Any:
        loop.release()
        raise Released

    agent = agent_of("", stop, "done")
    loop = loops.start(agent)
    loop.advance(RUN, 0)
    other = loops.open(agent)
    drive(other, NextStep(RUN, 0))
    replayed(loops)
