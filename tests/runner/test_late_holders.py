"""Whoever has committed, parked or let go of a step has no say in the run any more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runner import keys
from runner.loop import CLOSER
from runner.models import Limits, StopReason, ToolDecision, ToolResult, Usage
from runner.record import RunRecord
from runner.store import BegunCall, BegunStep, OpenCall, Outcome, RunStore

RUN = "run-under-test"


def begin(store: RunStore) -> RunRecord:
    store.create_run(
        run_id=RUN,
        agent="a",
        messages=[{"role": "user", "content": "go"}],
        limits=Limits(),
    )
    begun = store.begin_step(RUN, 0)
    assert isinstance(begun, BegunStep)
    return begun.record


def end(store: RunStore, held: RunRecord) -> Outcome:
    ended = store.end_run(RUN, StopReason.ERROR, epoch=held.epoch, held=True, closer=CLOSER)
    return ended.outcome


def open_call(index: int, limits: dict[str, str] | None = None) -> OpenCall:
    decision = ToolDecision(call_id=f"0.{index}", name="ping", arguments="{}")
    return OpenCall(f"c{index}", decision, starts=3, limits=limits or {})


def commit_calls(store: RunStore, held: RunRecord, calls: list[OpenCall]) -> None:
    store.commit_step(
        held,
        messages=[
            {"role": "assistant", "tool_calls": [{"id": call.provider_id} for call in calls]}
        ],
        calls=calls,
        parallel=16,
        invalid=0,
        usage=Usage(),
        trace={},
        event={},
        fingerprint="f",
    )


def commit_and_close(store: RunStore, held: RunRecord) -> None:
    commit_calls(store, held, [open_call(0)])
    result = ToolResult(call_id="0.0", name="ping", ok=True, content="pong")
    assert store.record_result(RUN, 0, 0, result)[0] is Outcome.LAST


def park(store: RunStore, held: RunRecord) -> None:
    store.park_step(held, delay=1, usage=Usage(), trace=None, event={})


def release(store: RunStore, held: RunRecord) -> None:
    store.release_step(held)


@pytest.mark.parametrize("leave", [commit_and_close, park, release])
def test_a_holder_that_is_done_with_its_step_cannot_end_the_run(
    store: RunStore, leave: Callable[[RunStore, RunRecord], None]
) -> None:
    held = begin(store)
    leave(store, held)

    assert end(store, held) is Outcome.FENCED

    assert store.read_run(RUN).stop_reason is None


def test_a_holder_whose_lease_is_over_ends_the_run_while_nobody_else_has_it(
    store: RunStore,
) -> None:
    held = begin(store)
    store.redis.hset(keys.run(RUN), "lease", 1)
    assert end(store, held) is Outcome.OK


def test_a_retry_that_comes_again_leaves_a_call_its_place_in_the_queue(store: RunStore) -> None:
    held = begin(store)
    limits = {"one": "1"}
    commit_calls(store, held, [open_call(0, limits), open_call(1, limits)])
    first = store.begin_call(RUN, 0, 0)
    assert isinstance(first, BegunCall)
    failed = ToolResult(call_id="0.0", name="ping", ok=False, content="failed")
    assert store.retry_call(first, delay=0, result=failed) is Outcome.OK
    assert isinstance(store.begin_call(RUN, 0, 1), BegunCall)
    assert store.begin_call(RUN, 0, 0) is Outcome.PARKED
    place = store.redis.zscore(keys.waiting("one"), f"{RUN}.0.0")

    assert store.retry_call(first, delay=0, result=failed) is Outcome.ALREADY

    assert store.redis.zscore(keys.waiting("one"), f"{RUN}.0.0") == place is not None
    assert len(store.read_trace(RUN)) == 2
