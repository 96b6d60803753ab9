"""Whoever has committed, parked or let go of a step has no say in the run any more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runner import keys
from runner.loop import CLOSER
from runner.models import Limits, StopReason, ToolDecision, ToolResult, Usage
from runner.record import RunRecord
from runner.store import BegunStep, OpenCall, Outcome, RunStore

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


def commit_and_close(store: RunStore, held: RunRecord) -> None:
    decision = ToolDecision(call_id="0.0", name="ping", arguments="{}")
    store.commit_step(
        held,
        messages=[{"role": "assistant", "tool_calls": [{"id": "c"}]}],
        calls=[OpenCall("c", decision, starts=1)],
        parallel=1,
        invalid=0,
        usage=Usage(),
        trace={},
        event={},
        fingerprint="f",
    )
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
