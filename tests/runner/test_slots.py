"""Limits across the fleet: who finds no place is parked, and has its turn by order of arrival.

`limits` of a call are what its tool asks for; `granted` are the hints that a transition hands on.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from conftest import MakeStore
from runner import keys
from runner.models import Limits, StopReason, ToolDecision, ToolResult, Usage
from runner.record import RunRecord
from runner.store import BegunCall, BegunStep, Lost, OpenCall, Outcome, RunStore

pytestmark = pytest.mark.usefixtures("no_leaked_keys")

ONE = {"crm": "1"}
CLOSER = '{"closed":true}'
DEAD: dict[str, float] = {"lease": 0.0005, "renew_every": 0.0001, "hint_grace": 0.0005}


# --- the state before --------------------------------------------------------------------------


def begin_run(store: RunStore, run_id: str) -> RunRecord:
    store.create_run(run_id=run_id, agent="a", messages=[{"role": "user"}], limits=Limits())
    assert store.granted.pop() == f"{run_id}.0"
    return begin_step(store, run_id)


def begin_step(store: RunStore, run_id: str) -> RunRecord:
    begun = store.begin_step(run_id, 0)
    assert isinstance(begun, BegunStep)
    return begun.record


def open_run(
    store: RunStore, run_id: str, *limits: dict[str, str], starts: int = 3, parallel: int = 64
) -> None:
    """A run at step 0 with a call for each of these limits."""
    record = begin_run(store, run_id)
    calls = [
        OpenCall(
            f"c{index}",
            ToolDecision(call_id=f"0.{index}", name="ping", arguments="{}"),
            starts=starts,
            limits=each,
        )
        for index, each in enumerate(limits)
    ]
    outcome, _ = store.commit_step(
        record,
        messages=[{"role": "assistant"}],
        calls=calls,
        parallel=parallel,
        invalid=0,
        usage=Usage(requests=1),
        trace={},
        event={},
        fingerprint="f",
    )
    assert outcome is Outcome.OK


def begin(store: RunStore, run_id: str, index: int = 0) -> BegunCall:
    begun = store.begin_call(run_id, 0, index)
    assert isinstance(begun, BegunCall)
    assert begun.outcome is Outcome.OK
    return begun


def result(index: int = 0) -> ToolResult:
    return ToolResult(call_id=f"0.{index}", name="ping", ok=True, content="pong")


def record(store: RunStore, run_id: str, index: int = 0) -> Outcome:
    return store.record_result(run_id, 0, index, result(index))[0]


def cancel(store: RunStore, run_id: str) -> None:
    assert store.end_run(run_id, StopReason.CANCELLED, closer=CLOSER).outcome is Outcome.OK


def admit(store: RunStore, record: RunRecord, **given: Any) -> Outcome:
    usual: dict[str, Any] = {"endpoint": "host.model", "limits": ONE, "tokens_per_minute": 0}
    return store.admit_step(record, **(usual | given))


# --- what is there now -------------------------------------------------------------------------


def hints(store: RunStore) -> list[str]:
    """The hints handed on since the last look."""
    found = list(store.granted)
    store.granted.clear()
    return found


def holders(store: RunStore, limit: str = "crm") -> list[str]:
    redis: Any = store.redis
    return list(redis.zrange(keys.slots(limit), 0, -1))


def queue(store: RunStore, limit: str = "crm") -> list[str]:
    redis: Any = store.redis
    return list(redis.zrange(keys.waiting(limit), 0, -1))


def state(store: RunStore, run_id: str, index: int = 0) -> Any:
    return store.redis.hget(keys.calls(run_id), f"{index}.state")


def waits(store: RunStore, run_id: str) -> list[dict[str, Any]]:
    return [e.data for e in store.read_events(run_id, "0") if e.type.endswith(".waiting")]


def end_all(store: RunStore, *run_ids: str) -> None:
    for each in run_ids:
        store.end_run(each, StopReason.CANCELLED, closer=CLOSER)


# --- taking and freeing a place ----------------------------------------------------------------


def test_a_step_sends_hints_only_for_calls_that_have_a_place(store: RunStore) -> None:
    two = {"crm": "2"}
    open_run(store, "run-one-0", two, two, two, {}, two)
    open_run(store, "run-two-0", two)

    assert [state(store, "run-one-0", index) for index in range(5)] == [
        "queued",
        "queued",
        "parked",
        "queued",
        "parked",
    ]
    assert queue(store) == [f"run-one-0.0.{n}" for n in (0, 1, 2, 4)] + ["run-two-0.0.0"]
    assert waits(store, "run-two-0") == [{"reason": "LIMIT", "limit": "crm"}]
    assert holders(store) == []


def test_a_call_whose_hint_comes_late_keeps_its_turn(store: RunStore) -> None:
    open_run(store, "run-one-0", ONE, ONE)

    assert store.begin_call("run-one-0", 0, 1) is Outcome.PARKED

    begin(store, "run-one-0", 0)


def test_a_call_that_finds_no_place_is_parked_and_says_so_once(store: RunStore) -> None:
    open_run(store, "run-one-0", ONE)
    open_run(store, "run-two-0", ONE)

    begin(store, "run-one-0")
    parked = [store.begin_call("run-two-0", 0, 0) for _ in range(3)]

    assert parked == [Outcome.PARKED] * 3
    assert state(store, "run-two-0") == "parked"
    assert waits(store, "run-two-0") == [{"reason": "LIMIT", "limit": "crm"}]
    assert (holders(store), queue(store)) == (["run-one-0.0.0"], ["run-two-0.0.0"])
    assert store.redis.hget(keys.calls("run-two-0"), "0.started") is None


def test_whoever_frees_a_place_is_told_whose_turn_it_is_and_a_repeat_tells_nobody_else(
    store: RunStore,
) -> None:
    open_run(store, "run-one-0", ONE, {})
    open_run(store, "run-two-0", ONE)
    open_run(store, "run-three", ONE)
    begin(store, "run-one-0")

    assert record(store, "run-one-0") is Outcome.WAIT
    assert hints(store) == ["run-two-0.0.0"]
    assert state(store, "run-two-0") == "queued"
    assert record(store, "run-one-0") is Outcome.DUPLICATE
    assert hints(store) == []

    begin(store, "run-two-0")
    assert (holders(store), queue(store)) == (["run-two-0.0.0"], ["run-three.0.0"])
    end_all(store, "run-one-0", "run-two-0", "run-three")


def test_a_newcomer_does_not_overtake_those_that_wait(store: RunStore) -> None:
    for run_id in ("run-one-0", "run-two-0", "run-three"):
        open_run(store, run_id, ONE)
    begin(store, "run-one-0")
    assert store.begin_call("run-two-0", 0, 0) is Outcome.PARKED
    record(store, "run-one-0")

    assert store.begin_call("run-three", 0, 0) is Outcome.PARKED  # the place is free, but not its
    begin(store, "run-two-0")
    record(store, "run-two-0")

    assert hints(store) == ["run-two-0.0.0", "run-three.0.0"]
    begin(store, "run-three")


def test_two_tools_that_share_a_limit_share_its_places(store: RunStore) -> None:
    shared = {"crm": "2"}
    open_run(store, "run-one-0", shared, shared, shared, {"other": "1"})

    begun = [store.begin_call("run-one-0", 0, index) for index in range(4)]

    words = [each if isinstance(each, Outcome) else each.outcome for each in begun]
    assert words == [Outcome.OK, Outcome.OK, Outcome.PARKED, Outcome.OK]


def test_a_call_takes_places_under_all_its_limits_or_under_none(store: RunStore) -> None:
    open_run(store, "run-one-0", {"b": "1"}, {"a": "1", "b": "1"}, {"a": "1"})
    begin(store, "run-one-0", 0)

    assert store.begin_call("run-one-0", 0, 1) is Outcome.PARKED
    assert holders(store, "a") == []
    begin(store, "run-one-0", 2)  # what waits for b keeps nobody from a

    record(store, "run-one-0", 0)
    assert hints(store) == ["run-one-0.0.1"]
    assert store.begin_call("run-one-0", 0, 1) is Outcome.PARKED  # b is free, a isn't any more
    assert (queue(store, "a"), queue(store, "b")) == (["run-one-0.0.1"], [])
    record(store, "run-one-0", 2)
    assert hints(store) == ["run-one-0.0.1"]
    begin(store, "run-one-0", 1)


def test_a_call_that_has_waited_for_long_keeps_its_turn_under_each_of_its_limits(
    store: RunStore,
) -> None:
    crm, erp = {"crm": "1"}, {"erp": "1"}
    for run_id, limits in {"crm-holder": crm, "erp-holder": erp}.items():
        open_run(store, run_id, limits)
        begin(store, run_id)
    open_run(store, "both-long", crm | erp)
    long_ago = int((time.time() - 60) * 1_000_000)
    store.redis.hset(keys.calls("both-long"), "0.order", long_ago)
    for name in ("crm", "erp"):
        store.redis.zadd(keys.waiting(name), {"both-long.0.0": long_ago})
    open_run(store, "crm-later", crm)
    open_run(store, "erp-later", erp)

    # One of its two places is free, and it doesn't let those that need only this one pass.
    assert record(store, "crm-holder") is Outcome.LAST
    assert store.begin_call("both-long", 0, 0) is Outcome.PARKED
    assert store.begin_call("crm-later", 0, 0) is Outcome.PARKED
    assert record(store, "erp-holder") is Outcome.LAST
    assert store.begin_call("erp-later", 0, 0) is Outcome.PARKED
    begin(store, "both-long")

    assert record(store, "both-long") is Outcome.LAST
    begin(store, "crm-later")
    begin(store, "erp-later")


def test_a_call_that_can_not_use_its_turn_passes_it_on(store: RunStore) -> None:
    open_run(store, "run-one-0", ONE, {"crm": "1", "b": "1"}, ONE, {"b": "1"})
    begin(store, "run-one-0", 0)
    begin(store, "run-one-0", 3)
    for index in (1, 2):
        assert store.begin_call("run-one-0", 0, index) is Outcome.PARKED
    record(store, "run-one-0", 0)
    assert hints(store) == ["run-one-0.0.1"]

    assert store.begin_call("run-one-0", 0, 1) is Outcome.PARKED

    assert hints(store) == ["run-one-0.0.2"]
    begin(store, "run-one-0", 2)


def test_the_limit_of_the_queue_holds_for_calls_of_all_tools(make_store: MakeStore) -> None:
    store = make_store(tools_concurrency=2)
    open_run(store, "run-one-0", {}, ONE, {})
    begin(store, "run-one-0", 0)
    begin(store, "run-one-0", 1)

    assert store.begin_call("run-one-0", 0, 2) is Outcome.PARKED

    assert len(holders(store, "queue.tools")) == 2
    assert queue(store, "queue.tools") == ["run-one-0.0.2"]


def test_a_call_that_fails_for_now_gives_its_place_to_the_next(store: RunStore) -> None:
    open_run(store, "run-one-0", ONE, ONE)
    first = begin(store, "run-one-0", 0)
    assert store.begin_call("run-one-0", 0, 1) is Outcome.PARKED

    assert store.retry_call(first, delay=0, result=result()) is Outcome.OK
    assert hints(store) == ["run-one-0.0.1"]

    assert store.begin_call("run-one-0", 0, 0) is Outcome.PARKED  # behind the other now
    begin(store, "run-one-0", 1)


def test_a_child_that_is_gone_frees_the_place_of_its_call(store: RunStore) -> None:
    open_run(store, "run-one-0", ONE, ONE)
    begin(store, "run-one-0", 0)
    assert store.begin_call("run-one-0", 0, 1) is Outcome.PARKED
    attempt = str(store.redis.hget(keys.calls("run-one-0"), "0.attempt"))

    pid = int(attempt.split("/")[1])
    assert store.lose_call("run-one-0", 0, 0, pid=pid, stopped=False) is Outcome.OK

    assert hints(store) == ["run-one-0.0.1"]
    assert holders(store) == []


def test_a_cancel_frees_the_places_and_the_turns_of_its_run(store: RunStore) -> None:
    open_run(store, "run-one-0", ONE, ONE)
    open_run(store, "run-two-0", ONE)
    open_run(store, "run-three", ONE)
    begin(store, "run-one-0")
    for run_id, index in (("run-one-0", 1), ("run-two-0", 0), ("run-three", 0)):
        assert store.begin_call(run_id, 0, index) is Outcome.PARKED
    assert queue(store) == ["run-one-0.0.1", "run-two-0.0.0", "run-three.0.0"]

    cancel(store, "run-one-0")

    assert hints(store) == ["run-two-0.0.0"]
    assert (holders(store), queue(store)) == ([], ["run-two-0.0.0", "run-three.0.0"])
    cancel(store, "run-two-0")
    assert hints(store) == ["run-three.0.0"]
    cancel(store, "run-three")
    assert store.redis.exists(keys.slots("crm"), keys.waiting("crm"), keys.CROWDED) == 0


# --- holders that die --------------------------------------------------------------------------


def test_the_place_of_a_dead_holder_is_free_with_its_lease(make_store: MakeStore) -> None:
    dead, store = make_store(**DEAD), make_store()
    open_run(store, "run-one-0", ONE, starts=1)
    open_run(store, "run-two-0", ONE)
    assert isinstance(dead.begin_call("run-one-0", 0, 0), BegunCall)

    begin(store, "run-two-0")

    assert holders(store) == ["run-two-0.0.0"]


def test_a_sweep_gives_the_places_of_dead_holders_to_the_heads_of_the_queue(
    make_store: MakeStore,
) -> None:
    store = make_store(lease=0.5, renew_every=0.1)
    two = {"crm": "2"}
    open_run(store, "run-one-0", *[two] * 5)
    for index in range(2):
        begin(store, "run-one-0", index)
    for index in (2, 3, 4):
        assert store.begin_call("run-one-0", 0, index) is Outcome.PARKED
    wait = store.grant_slots()
    assert hints(store) == []
    assert 0 < wait <= 0.5

    until = time.monotonic() + 5
    while len(store.granted) < 2 and time.monotonic() < until:
        store.grant_slots()

    assert hints(store) == ["run-one-0.0.2", "run-one-0.0.3"]
    assert store.grant_slots() <= 1  # those have their turn; nobody else
    assert hints(store) == []


def test_a_holder_that_comes_back_goes_on_only_if_its_place_is_still_free(
    make_store: MakeStore,
) -> None:
    dead, store = make_store(**DEAD), make_store()
    open_run(store, "run-one-0", ONE, ONE)
    frozen = dead.begin_call("run-one-0", 0, 0)
    assert isinstance(frozen, BegunCall)
    assert store.renew_call(frozen) is Outcome.OK
    assert holders(store) == ["run-one-0.0.0"]
    assert dead.renew_call(frozen) is Outcome.OK  # and froze again
    begin(store, "run-one-0", 1)

    assert store.renew_call(frozen) is Outcome.FENCED

    assert holders(store) == ["run-one-0.0.1"]


def test_a_call_whose_holder_died_is_parked_in_front_of_those_that_came_later(
    make_store: MakeStore,
) -> None:
    dead, store = make_store(**DEAD), make_store()
    open_run(store, "run-one-0", ONE, ONE, ONE)
    frozen = dead.begin_call("run-one-0", 0, 0)
    assert isinstance(frozen, BegunCall)
    begin(store, "run-one-0", 1)
    assert store.begin_call("run-one-0", 0, 2) is Outcome.PARKED

    assert store.begin_call("run-one-0", 0, 0) is Outcome.PARKED

    assert queue(store) == ["run-one-0.0.0", "run-one-0.0.2"]
    assert store.renew_call(frozen) is Outcome.FENCED


def test_queues_of_runs_that_are_gone_are_passed_over(store: RunStore) -> None:
    open_run(store, "run-one-0", ONE, ONE)
    begin(store, "run-one-0", 0)
    store.redis.zadd(keys.waiting("crm"), {"run-gone.0.0": 1, "run-one-0.7.0": 2})
    assert store.begin_call("run-one-0", 0, 1) is Outcome.PARKED

    record(store, "run-one-0", 0)

    assert hints(store) == ["run-one-0.0.1"]
    assert queue(store) == ["run-one-0.0.1"]


# --- nothing is forgotten ----------------------------------------------------------------------


def test_recovery_leaves_a_parked_call_to_its_queue(make_store: MakeStore) -> None:
    store = make_store(hint_grace=0.0005)
    open_run(store, "run-one-0", ONE)
    open_run(store, "run-two-0", ONE)
    begin(store, "run-one-0")
    assert store.begin_call("run-two-0", 0, 0) is Outcome.PARKED
    store.redis.delete(keys.CROWDED)

    assert store.recover_run("run-two-0") == Lost(Outcome.WAIT, 0)

    assert store.redis.smembers(keys.CROWDED) == {"crm"}
    assert state(store, "run-two-0") == "parked"


def test_recovery_asks_again_for_a_parked_call_that_fell_out_of_its_queue(
    make_store: MakeStore,
) -> None:
    store = make_store(hint_grace=0.0005)
    open_run(store, "run-one-0", ONE)
    for run_id in ("run-two-0", "run-three"):
        open_run(store, run_id, ONE)
    begin(store, "run-one-0")
    for run_id in ("run-two-0", "run-three"):
        assert store.begin_call(run_id, 0, 0) is Outcome.PARKED
    store.redis.zrem(keys.waiting("crm"), "run-two-0.0.0")

    assert store.recover_run("run-two-0") == Lost(Outcome.CALLS, 0, (0,))
    assert store.begin_call("run-two-0", 0, 0) is Outcome.PARKED

    assert queue(store) == ["run-two-0.0.0", "run-three.0.0"]  # at its old place


def test_a_turn_whose_hint_is_lost_is_found_by_recovery(make_store: MakeStore) -> None:
    store = make_store(hint_grace=0.0005)
    open_run(store, "run-one-0", ONE)
    open_run(store, "run-two-0", ONE)
    begin(store, "run-one-0")
    assert store.begin_call("run-two-0", 0, 0) is Outcome.PARKED
    record(store, "run-one-0")
    due = store.redis.zscore(keys.DUE, "run-two-0")

    assert due is not None
    assert due / 1000 <= time.time() + 1.5
    time.sleep(0.002)  # the grace of a hint, which has to be over
    assert store.recover_run("run-two-0") == Lost(Outcome.CALLS, 0, (0,))


# --- rates -------------------------------------------------------------------------------------


def test_a_rate_counts_starts_and_not_what_runs(store: RunStore) -> None:
    rate = {"rate.ping": "2/60000"}
    open_run(store, "run-one-0", rate, rate, rate)
    for index in range(2):
        begin(store, "run-one-0", index)
        record(store, "run-one-0", index)

    assert store.begin_call("run-one-0", 0, 2) is Outcome.PARKED

    assert hints(store) == []
    assert len(holders(store, "rate.ping")) == 2
    assert 0.9 < store.grant_slots(longest=1) <= 1


def test_a_rate_never_lets_more_start_within_any_period(make_store: MakeStore) -> None:
    store = make_store()
    rate = {"rate.ping": "3/100"}
    open_run(store, "run-one-0", *[rate] * 10)
    waiting = [f"run-one-0.0.{index}" for index in range(10)]
    starts: list[float] = []
    until = time.monotonic() + 20
    while len(starts) < 10 and time.monotonic() < until:
        for holder in waiting:
            begun = store.begin_call("run-one-0", 0, int(holder.split(".")[2]))
            if isinstance(begun, BegunCall):
                starts.append(begun.record.now)
        store.grant_slots()
        waiting = hints(store)

    assert len(starts) == 10
    assert all(later - first >= 100 for first, later in zip(starts, starts[3:], strict=False))


def test_each_start_of_a_call_counts_for_its_rate(store: RunStore) -> None:
    rate = {"rate.ping": "2/60000"}
    open_run(store, "run-one-0", rate)
    for _ in range(2):
        assert store.retry_call(begin(store, "run-one-0"), delay=0, result=result()) is Outcome.OK

    assert store.begin_call("run-one-0", 0, 0) is Outcome.PARKED


# --- a model's limits --------------------------------------------------------------------------


def test_a_step_waits_for_a_place_at_its_model_and_has_its_turn(store: RunStore) -> None:
    first, second = begin_run(store, "run-one-0"), begin_run(store, "run-two-0")
    assert admit(store, first) is Outcome.OK
    assert admit(store, first) is Outcome.OK  # the same again

    assert admit(store, second) is Outcome.PARKED
    assert admit(store, second) is Outcome.PARKED
    assert store.read_run("run-two-0").status == "waiting"
    assert waits(store, "run-two-0") == [{"reason": "LIMIT", "limit": "crm"}]
    assert store.begin_step("run-two-0", 0) is Outcome.BUSY

    spent: dict[str, Any] = {"usage": Usage(requests=1), "trace": {}, "event": {}}
    assert store.park_step(first, delay=9, **spent) is Outcome.OK
    assert hints(store) == ["run-two-0.0"]
    assert admit(store, begin_step(store, "run-two-0")) is Outcome.OK
    assert (holders(store), queue(store)) == (["run-two-0.0"], [])


@pytest.mark.parametrize("how", ["commit", "release", "end"])
def test_a_step_that_is_over_frees_its_place_at_the_model(store: RunStore, how: str) -> None:
    first, second = begin_run(store, "run-one-0"), begin_run(store, "run-two-0")
    assert admit(store, first) is Outcome.OK
    assert admit(store, second) is Outcome.PARKED

    match how:
        case "commit":
            store.commit_step(
                first,
                messages=[],
                calls=[],
                parallel=1,
                invalid=0,
                usage=Usage(requests=1),
                trace={},
                event={},
                fingerprint="f",
            )
        case "release":
            store.release_step(first)
        case _:
            cancel(store, "run-one-0")

    assert hints(store) == ["run-two-0.0"]
    assert holders(store) == []


def test_a_step_that_renews_keeps_its_place_at_the_model(make_store: MakeStore) -> None:
    dead, store = make_store(**DEAD), make_store()
    first, second = begin_run(store, "run-one-0"), begin_run(store, "run-two-0")
    assert admit(store, first) is Outcome.OK
    before = store.redis.zscore(keys.slots("crm"), "run-one-0.0")

    assert make_store(lease=60).renew_step("run-one-0", first.epoch) is Outcome.OK
    after = store.redis.zscore(keys.slots("crm"), "run-one-0.0")
    assert before is not None
    assert after is not None
    assert after > before + 40_000

    assert dead.renew_step("run-one-0", first.epoch) is Outcome.OK  # it dies
    assert admit(store, second) is Outcome.OK
    assert store.renew_step("run-one-0", first.epoch) is Outcome.FENCED


def test_a_parked_step_of_a_cancelled_run_leaves_the_queue(store: RunStore) -> None:
    first, second = begin_run(store, "run-one-0"), begin_run(store, "run-two-0")
    assert admit(store, first) is Outcome.OK
    assert admit(store, second) is Outcome.PARKED

    cancel(store, "run-two-0")

    assert queue(store) == []


def test_a_pause_that_one_run_was_told_holds_for_all_of_that_model(store: RunStore) -> None:
    first, second = begin_run(store, "run-one-0"), begin_run(store, "run-two-0")
    third = begin_run(store, "run-three")
    assert admit(store, first, limits={}) is Outcome.OK
    spent: dict[str, Any] = {"usage": Usage(requests=1), "trace": {}, "event": {}}
    assert store.park_step(first, delay=30, pause=30, **spent) is Outcome.OK

    assert admit(store, second, limits={}) is Outcome.PARKED
    assert admit(store, third, limits={}, endpoint="host.other") is Outcome.OK

    due = store.redis.zscore(keys.DUE, "run-two-0")
    assert due is not None
    assert 25 < due / 1000 - time.time() < 31
    assert store.begin_step("run-two-0", 0) is Outcome.BUSY


def test_a_model_whose_tokens_of_a_minute_are_used_up_is_asked_later(store: RunStore) -> None:
    first, second = begin_run(store, "run-one-0"), begin_run(store, "run-two-0")
    assert admit(store, first, limits={}, tokens_per_minute=1000) is Outcome.OK
    assert admit(store, second, limits={}, tokens_per_minute=1000) is Outcome.OK
    usage = Usage(requests=1, total_tokens=1500)
    spent: dict[str, Any] = {"usage": usage, "trace": {}, "event": {}}
    assert store.park_step(first, delay=0, **spent) is Outcome.OK

    assert (
        admit(store, begin_step(store, "run-one-0"), limits={}, tokens_per_minute=1000)
        is Outcome.PARKED
    )

    due = store.redis.zscore(keys.DUE, "run-one-0")
    assert due is not None
    assert 25 < due / 1000 - time.time() < 31  # half a minute's worth too many
    assert admit(store, second, limits={}, tokens_per_minute=1000) is Outcome.OK
