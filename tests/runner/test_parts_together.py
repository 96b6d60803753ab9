"""What the parts do to one another: limits, approvals, messages, views, an end and a deletion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from runner import Agent, Limits, StopReason, keys, tool
from runner.invariants import check_run
from runner.loop import CallTools, NextStep, Wait, approve_call, cancel_run, deny_call
from runner.models import Usage
from runner.recording import read_recording
from runner.replay import replay
from runner.store import BegunStep, Outcome, RunStore
from runner.testing import ScriptedModel, calls
from support.loops import RUN, Loops, drive, open_loops

OTHER = "another-run"
PAY = ("pay", {"cents": 1})
LOOK: tuple[str, dict[str, Any]] = ("look", {})


@tool(approval=True, idempotent=True, max_concurrency=1, limit="crm")
def pay(cents: int) -> str:
    """Pay."""
    return f"paid {cents}"


@tool(idempotent=True, max_concurrency=1, limit="crm")
def look() -> str:
    """Look."""
    return "x" * 70_000


@tool(idempotent=True, rate="1/h")
def rare() -> str:
    """Do it rarely."""
    return "done"


@pytest.fixture
def loops(store: RunStore, no_leaked_keys: None) -> Iterator[Loops]:
    yield from open_loops(store)


def agent_of(*replies: Any, **options: Any) -> Agent:
    given: dict[str, Any] = {"model": ScriptedModel(replies), "tools": [pay, look, rare]}
    return Agent(name="a", **(given | options))


def taken(store: RunStore, limit: str = "crm") -> tuple[list[str], list[str]]:
    """Who holds a place under a limit, and who waits for one."""
    redis: Any = store.redis
    names = keys.slots(limit), keys.waiting(limit)
    return tuple(list(redis.zrange(name, 0, -1)) for name in names)  # type: ignore[return-value]


def states(store: RunStore) -> list[str]:
    found: Any = store.redis.hgetall(keys.calls(RUN))
    count = sum(name.endswith(".state") for name in found)
    return [found[f"{index}.state"] for index in range(count)]


def hold_place(loops: Loops) -> None:
    """Another run holds the one place under the limit."""
    loops.store.redis.zadd(keys.slots("crm"), {f"{OTHER}.0.0": 10**15})


def free_place(loops: Loops) -> None:
    loops.store.redis.delete(keys.slots("crm"))
    loops.store.grant_slots()


def hints(store: RunStore) -> list[str]:
    found = list(store.granted)
    store.granted.clear()
    return found


def follow(loops: Loops, loop: Any) -> None:
    """Do what the hints say that were handed on, until there is none."""
    while found := hints(loops.store):
        for each in found:
            run_id, step, *index = each.split(".")
            if run_id == RUN:
                drive(loop, CallTools(run_id, int(step), tuple(map(int, index))))


def test_a_call_that_waits_for_an_approval_holds_no_place_and_stands_in_no_queue(
    loops: Loops,
) -> None:
    loop = loops.start(agent_of(calls(PAY, LOOK), "done"))
    assert loop.advance(RUN, 0) == CallTools(RUN, 0, (1,))
    assert taken(loops.store) == ([], [f"{RUN}.0.1"])
    assert loop.call_tool(RUN, 0, 1) == Wait(RUN)
    assert taken(loops.store) == ([], [])
    drive(loop, deny_call(loops.store, RUN, "0.0", "no"))
    assert loops.result.answer == "done"


def test_an_approved_call_waits_for_its_place_and_counts_as_one_in_flight(loops: Loops) -> None:
    hold_place(loops)
    limits = Limits(max_parallel_calls=1)
    loop = loops.start(agent_of(calls(PAY, PAY, PAY), "done", limits=limits))
    loop.advance(RUN, 0)
    drive(loop, approve_call(loops.store, RUN, "0.2"))
    assert states(loops.store) == ["approval", "approval", "parked"]
    assert check_run(loops.store, RUN) == []
    assert approve_call(loops.store, RUN, "0.1") == Wait(RUN)
    assert states(loops.store) == ["approval", "held", "parked"]
    assert check_run(loops.store, RUN) == []
    drive(loop, deny_call(loops.store, RUN, "0.0", "no"))
    assert states(loops.store) == ["done", "held", "parked"]
    free_place(loops)
    follow(loops, loop)
    assert loops.result.answer == "done"
    assert taken(loops.store) == ([], [])


def test_a_cancel_frees_the_places_of_calls_that_run_wait_and_are_to_be_approved(
    loops: Loops,
) -> None:
    loop = loops.start(agent_of(calls(LOOK, LOOK, PAY)))
    loop.advance(RUN, 0)
    loops.store.begin_call(RUN, 0, 0)
    loop.call_tool(RUN, 0, 1)
    assert taken(loops.store) == ([f"{RUN}.0.0"], [f"{RUN}.0.1"])
    cancel_run(loops.store, RUN, "enough")
    assert taken(loops.store) == ([], [])


def test_an_answer_that_is_no_end_lets_go_of_its_place_at_the_model(loops: Loops) -> None:
    loops.start(agent_of())
    begun = loops.store.begin_step(RUN, 0)
    assert isinstance(begun, BegunStep)
    admitted = loops.store.admit_step(
        begun.record, endpoint="e", limits={"model.e": "1"}, tokens_per_minute=60
    )
    assert admitted is Outcome.OK
    assert taken(loops.store, "model.e") == ([f"{RUN}.0"], [])
    loops.store.send_message(RUN, "op", "and?")
    ended = loops.store.end_run(
        RUN,
        StopReason.COMPLETED,
        epoch=begun.record.epoch,
        held=True,
        answer="first",
        message={"role": "assistant", "content": "first"},
        closer="",
        usage=Usage(requests=1, total_tokens=120),
        steps=1,
    )
    assert (ended.outcome, ended.step) == (Outcome.STEP, 1)
    assert taken(loops.store, "model.e") == ([], [])
    used: Any = loops.store.redis.hget(keys.pace("e"), "used")
    assert int(used) > loops.record.created + 60_000
    cancel_run(loops.store, RUN, "enough")
    loops.moved_by_hand()


def test_a_step_that_is_let_go_of_says_what_tokens_it_used(loops: Loops) -> None:
    loops.start(agent_of())
    begun = loops.store.begin_step(RUN, 0)
    assert isinstance(begun, BegunStep)
    loops.store.admit_step(
        begun.record, endpoint="e", limits={"model.e": "1"}, tokens_per_minute=60
    )
    used = Usage(requests=1, total_tokens=120)
    assert loops.store.release_step(begun.record, usage=used) is Outcome.OK
    assert taken(loops.store, "model.e") == ([], [])
    until: Any = loops.store.redis.hget(keys.pace("e"), "used")
    assert int(until) > loops.record.created + 60_000
    assert loops.record.usage.total_tokens == 120
    cancel_run(loops.store, RUN, "enough")
    loops.moved_by_hand()


def test_a_deletion_leaves_nothing_of_a_run_that_used_every_part(loops: Loops) -> None:
    agent = agent_of(calls(PAY, LOOK), calls(PAY), context_tokens=1000)
    loop = loops.start(agent)
    drive(loop, loop.advance(RUN, 0))
    loops.store.send_message(RUN, "op", "hurry")
    drive(loop, approve_call(loops.store, RUN, "0.0"))
    assert loops.record.step == 1
    found = list(map(str, loops.store.redis.scan_iter("*")))
    assert {f"celeriac:{RUN}:{each}" for each in ("whole", "sent", "view")} <= set(found)
    cancel_run(loops.store, RUN, "enough")
    assert loops.store.delete_run(RUN) is Outcome.OK
    left = [str(each) for each in loops.store.redis.scan_iter("*") if RUN in str(each)]
    assert left == []
    loops.moved_by_hand()


def test_a_run_whose_tools_have_limits_and_rates_comes_out_the_same_in_a_replay(
    loops: Loops,
) -> None:
    many = calls(("rare", {}), ("rare", {}), LOOK, LOOK)
    loop = loops.start(agent_of(many, "done", model_concurrency=1))
    drive(loop, NextStep(RUN, 0))
    loops.store.redis.delete(keys.slots("rate.rare"))  # the hour is over
    loops.store.grant_slots()
    follow(loops, loop)
    assert loops.result.answer == "done"
    found = replay(read_recording(loops.store, RUN), loops.agents[RUN])
    assert (found.same, found.differences) == (True, ())
