"""A step reads of the history only what its process hasn't read before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from runner import Agent, tool
from runner import history as histories
from runner.context import goal_message
from runner.history import Histories, History
from runner.models import Limits
from runner.store import BegunStep, RunStore
from runner.testing import ScriptedModel, calls
from support.loops import RUN, Loops, open_loops


@pytest.fixture
def loops(store: RunStore) -> Iterator[Loops]:
    yield from open_loops(store)


@tool(idempotent=True)
def look(n: int) -> str:
    """Look."""
    return "x" * n


def tails_of(store: RunStore) -> list[int]:
    """How many messages each begin of a step brings from Redis, from here on."""
    found: list[int] = []
    run = store._run

    def noting(*args: Any) -> list[Any]:
        reply = run(*args)
        if args[0] == "begin_step" and len(reply) > 3:
            found.append(len(reply[4]))
        return reply

    store._run = noting  # type: ignore[assignment, method-assign]
    return found


def test_a_process_that_had_the_run_before_reads_the_tail_alone(loops: Loops) -> None:
    model = ScriptedModel([calls(("look", {"n": 1 + step})) for step in range(6)] + ["done"])
    loop = loops.start(Agent(name="a", tools=[look], model=model))
    tails = tails_of(loops.store)
    for step in range(6):
        loop.advance(RUN, step)
        loop.call_tool(RUN, step, 0)
    loop.advance(RUN, 6)

    assert loops.result.answer == "done"
    assert tails == [1, *[2] * 6], "the goal, and then each turn with its result"
    assert len(model.requests[-1].messages) == 13


def test_another_process_reads_all_of_it(loops: Loops) -> None:
    model = ScriptedModel([calls(("look", {"n": 1})), "done"])
    loop = loops.start(Agent(name="a", tools=[look], model=model))
    loop.advance(RUN, 0)
    loop.call_tool(RUN, 0, 0)

    other = RunStore(loops.store.settings, loops.store.redis)
    begun = other.begin_step(RUN, 1)

    assert isinstance(begun, BegunStep)
    assert begun.history == loops.store.read_messages(RUN)
    loops.moved_by_hand()


def test_what_was_said_meanwhile_is_in_the_tail(loops: Loops) -> None:
    model = ScriptedModel([calls(("look", {"n": 1})), "done"])
    loop = loops.start(Agent(name="a", tools=[look], model=model))
    loop.advance(RUN, 0)
    loops.store.send_message(RUN, "one", "also look there")
    loop.call_tool(RUN, 0, 0)
    loop.advance(RUN, 1)

    assert [each["role"] for each in model.requests[-1].messages][-1] == "user"
    assert model.requests[-1].messages[-1]["content"] == "also look there"


def test_a_run_of_the_same_id_that_was_deleted_lends_it_nothing(loops: Loops) -> None:
    store = loops.store
    loop = loops.start(Agent(name="a", tools=[look], model=ScriptedModel(["done"])))
    loop.advance(RUN, 0)
    store.redis.hset(f"celeriac:{RUN}", "created", 1)
    loops.moved_by_hand()
    store.delete_run(RUN)
    goal = [goal_message("something else"), goal_message("entirely")]
    store.create_run(run_id=RUN, agent="a", messages=goal, limits=Limits())

    begun = store.begin_step(RUN, 0)

    assert isinstance(begun, BegunStep)
    assert begun.history == goal


def test_what_is_kept_is_bounded_and_the_oldest_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(histories, "MAX_CHARS", 100)
    kept = Histories()
    for number in range(5):
        kept.keep(History(f"run-{number}", created=1, messages=({},), chars=40))
    kept.keep(History("run-4", created=1, messages=({}, {}), chars=60))

    assert [len(kept.take(f"run-{number}").messages) for number in range(5)] == [0, 0, 0, 1, 2]
    assert kept.take("run-4").messages == ()
    kept.keep(History("long", created=1, messages=({},), chars=101))
    assert kept.take("long").messages == ()
