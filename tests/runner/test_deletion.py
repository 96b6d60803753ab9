"""A deleted run leaves nothing behind, and whoever still holds something of it changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from conftest import MakeStore, check_keys
from runner import Limits, RunNotFound, StopReason
from runner import keys as redis_keys
from runner.errors import SettingsError
from runner.invariants import check_run
from runner.loop import CLOSER
from runner.models import Evidence, ToolDecision, ToolResult, Usage
from runner.settings import Settings
from runner.store import BegunCall, BegunStep, OpenCall, Outcome, RunStore

RUN = "run-under-test"
OTHER = "run-of-another"


def create(store: RunStore, run_id: str = RUN, **options: Any) -> None:
    outcome, _ = store.create_run(
        run_id=run_id,
        agent="a",
        messages=[{"role": "user", "content": "go"}],
        limits=Limits(),
        **options,
    )
    assert outcome in (Outcome.CREATED, Outcome.WAIT)


def begin(store: RunStore, step: int = 0) -> BegunStep:
    begun = store.begin_step(RUN, step)
    assert isinstance(begun, BegunStep)
    return begun


def commit(store: RunStore, begun: BegunStep, count: int = 1) -> Outcome:
    step = begun.record.step
    decisions = [
        ToolDecision(call_id=f"{step}.{n}", name="ping", arguments="{}") for n in range(count)
    ]
    outcome, _ = store.commit_step(
        begun.record,
        messages=[{"role": "assistant"}],
        calls=[OpenCall(f"c{n}", each, starts=1) for n, each in enumerate(decisions)],
        parallel=16,
        invalid=0,
        usage=Usage(requests=1),
        trace={"kind": "model", "step": step},
        event={},
        fingerprint="f",
    )
    return outcome


def record(store: RunStore, index: int = 0) -> Outcome:
    found = (Evidence(source="x"),)
    result = ToolResult(call_id="0.0", name="ping", ok=True, content="pong", evidence=found)
    return store.record_result(RUN, 0, index, result)[0]


def end(store: RunStore, run_id: str = RUN, reason: StopReason = StopReason.CANCELLED) -> None:
    assert store.end_run(run_id, reason, closer=CLOSER).outcome is Outcome.OK


def traces_of(store: RunStore, run_id: str = RUN) -> list[str]:
    """Every key that names the run, and every key that holds its id."""
    named = [str(key) for key in store.redis.scan_iter("*") if run_id in str(key)]
    holding: list[str] = []
    held: Sequence[Any]
    for key in store.redis.scan_iter("*"):
        match store.redis.type(key):
            case "string":
                held = [store.redis.get(key)]
            case "list":
                held = store.redis.lrange(key, 0, -1)
            case "zset":
                held = store.redis.zrange(key, 0, -1)
            case "set":
                held = list(store.redis.smembers(key))
            case _:
                held = []
        holding += [str(key)] if any(run_id in str(each) for each in held) else []
    return sorted({*named, *holding})


def live_through_much(store: RunStore) -> None:
    """A run that has had every kind of key."""
    create(store, idempotency_key="k", conversation="c-1", promised=True)
    store.send_message(RUN, "op", "hello")
    commit(store, begin(store), 2)
    store.begin_call(RUN, 0, 0)
    record(store)
    store.send_message(RUN, "op2", "hello again")


def test_nothing_of_a_deleted_run_is_left(store: RunStore) -> None:
    live_through_much(store)
    assert {redis_keys.inbox(RUN), redis_keys.calls(RUN), redis_keys.results(RUN)} < set(
        traces_of(store)
    )
    end(store)
    assert store.delete_run(RUN) is Outcome.OK
    assert traces_of(store) == []
    with pytest.raises(RunNotFound):
        check_run(store, RUN)
    check_keys(store.redis)


def test_a_second_delete_changes_nothing(store: RunStore) -> None:
    live_through_much(store)
    create(store, OTHER)
    end(store)
    assert store.delete_run(RUN) is Outcome.OK
    before = sorted(map(str, store.redis.scan_iter("*")))
    assert store.delete_run(RUN) is Outcome.STALE
    assert sorted(map(str, store.redis.scan_iter("*"))) == before


def test_a_run_that_hasnt_ended_is_not_deleted(store: RunStore) -> None:
    live_through_much(store)
    before = traces_of(store)
    assert store.delete_run(RUN) is Outcome.BUSY
    assert traces_of(store) == before


def test_another_run_under_the_same_idempotency_key_is_left(store: RunStore) -> None:
    create(store, idempotency_key="k")
    end(store)
    key = store.redis.hget(redis_keys.run(RUN), "idempotency")
    assert key is not None
    store.redis.set(key, OTHER, px=60_000)
    store.delete_run(RUN)
    assert store.redis.get(key) == OTHER


def test_whoever_holds_something_of_a_deleted_run_is_told_and_writes_nothing(
    store: RunStore,
) -> None:
    create(store)
    begun = begin(store)
    commit(store, begun)
    call = store.begin_call(RUN, 0, 0)
    assert isinstance(call, BegunCall)
    end(store)
    store.delete_run(RUN)

    late = ToolResult(call_id="0.0", name="ping", ok=True, content="pong")
    spent: dict[str, Any] = {"usage": Usage(), "trace": {}, "event": {}}
    answers = [
        store.begin_step(RUN, 1),
        store.renew_step(RUN, begun.record.epoch),
        commit(store, begun),
        store.park_step(begun.record, delay=1, **spent),
        store.release_step(begun.record),
        store.begin_call(RUN, 0, 0),
        store.renew_call(call),
        store.retry_call(call, delay=0, result=late),
        record(store),
        store.lose_call(RUN, 0, 0, pid=1, stopped=False),
        store.end_run(RUN, StopReason.COMPLETED, epoch=1, held=True, closer=CLOSER).outcome,
        store.settle_run(begun.record),
        store.resume_run(begun.record, Limits()),
        store.send_message(RUN, "op", "hello"),
        store.add_event(RUN, "x", step=None, call=None, data={}),
        store.recover_run(RUN).outcome,
    ]
    assert set(answers) == {Outcome.STALE}
    assert store.adopt_limits(RUN, Limits()) is None
    assert traces_of(store) == []


def test_the_idempotency_key_of_a_deleted_run_is_free(store: RunStore) -> None:
    create(store, idempotency_key="k")
    end(store)
    store.delete_run(RUN)
    create(store, OTHER, idempotency_key="k")


def test_a_conversation_whose_last_run_is_deleted_begins_anew(store: RunStore) -> None:
    create(store, conversation="c-1")
    end(store)
    store.delete_run(RUN)
    create(store, OTHER, conversation="c-1")
    assert [each["content"] for each in store.read_messages(OTHER)] == ["go"]
    end(store, OTHER)
    check_keys(store.redis)


def test_a_run_that_went_on_from_a_deleted_one_keeps_its_history(store: RunStore) -> None:
    create(store, conversation="c-1")
    create(store, OTHER, conversation="c-1", when_busy="enqueue")
    end(store)
    store.delete_run(RUN)
    assert len(store.read_messages(OTHER)) == 2
    assert store.begin_step(OTHER, 0) is not Outcome.STALE


# --- how long an ended run stays ---------------------------------------------------------------


def test_a_run_stays_as_long_as_its_stop_reason_says(make_store: MakeStore) -> None:
    store = make_store(retention_by_stop_reason=("COMPLETED=60", "ERROR=3600"))
    kept = {StopReason.COMPLETED: 60, StopReason.ERROR: 3600, StopReason.TIMEOUT: 604_800}
    for reason, seconds in kept.items():
        run_id = f"run-{reason}".replace("_", "-")
        create(store, run_id, conversation=run_id)
        store.send_message(run_id, "op", "hello")
        end(store, run_id, reason)
        score = store.redis.zscore(redis_keys.RUNS, run_id)
        assert score is not None
        for key in store.redis.scan_iter(f"celeriac:{run_id}*"):
            assert seconds * 1000 - 5000 < store.redis.pttl(key) <= seconds * 1000, key
    conversations = [store.redis.pttl(key) for key in store.redis.scan_iter("*conversation*")]
    assert [round(ttl / 1000) for ttl in sorted(conversations)] == sorted(kept.values())
    check_keys(store.redis)


@pytest.mark.parametrize("text", ["COMPLETED", "DONE=60", "ERROR=0", "ERROR=soon", "ERROR=nan"])
def test_a_retention_that_cant_be_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="CELERIAC_RETENTION_BY_STOP_REASON takes"):
        Settings.from_env({"CELERIAC_RETENTION_BY_STOP_REASON": f"TIMEOUT=60,{text}"})


def test_it_is_read_from_its_variable() -> None:
    given = {"CELERIAC_RETENTION_BY_STOP_REASON": "COMPLETED=3600, ERROR=604800"}
    settings = Settings.from_env(given)
    assert settings.retention_of(StopReason.COMPLETED) == 3600
    assert settings.retention_of(StopReason.MAX_STEPS) == settings.retention


def test_ended_runs_are_found_by_age_and_by_stop_reason(store: RunStore) -> None:
    for name, reason in (("aaaaaaaa", StopReason.COMPLETED), ("bbbbbbbb", StopReason.ERROR)):
        create(store, name)
        end(store, name, reason)
    create(store, "cccccccc")
    create(store, "dddddddd", promised=True)
    end(store, "dddddddd")
    store.redis.hset(redis_keys.run("aaaaaaaa"), "ended", 1)
    assert set(store.ended_before(0)) == {"aaaaaaaa", "bbbbbbbb"}
    assert set(store.ended_before(3600)) == {"aaaaaaaa"}
    assert set(store.ended_before(0, StopReason.ERROR)) == {"bbbbbbbb"}
    assert set(store.ended_before(3600, StopReason.ERROR)) == set()
