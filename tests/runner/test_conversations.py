"""What a run goes on from, and that a conversation has one live run: every transition of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import MakeStore, check_keys
from runner import Agent, Draft, Limits, Principal, RunStatus, StopReason
from runner import keys as redis_keys
from runner.context import goal_message
from runner.invariants import check_run
from runner.loop import CLOSER, Finish, Loop, NextStep, Skip, cancel_run
from runner.record import RunInfo, digest
from runner.store import MAX_QUEUED_RUNS, EndedRun, Lost, Outcome, RunStore
from runner.testing import ScriptedModel
from support.loops import Loops, drive, open_loops

ONE, TWO, THREE, FOUR = "run-number-one", "run-number-two", "run-number-three", "run-number-four"


@pytest.fixture
def loops(store: RunStore, no_leaked_keys: None) -> Iterator[Loops]:
    yield from open_loops(store)


def create(store: RunStore, run_id: str, **options: Any) -> tuple[Outcome, str]:
    tenant = options.pop("tenant", "")
    return store.create_run(
        run_id=run_id,
        agent="a",
        messages=options.pop("messages", [goal_message(f"goal of {run_id}")]),
        limits=options.pop("limits", Limits()),
        principal=Principal(id="u", tenant=tenant) if tenant else None,
        **options,
    )


def talk(store: RunStore, run_id: str, when_busy: str = "enqueue", **options: Any) -> Outcome:
    """A run of the conversation."""
    return create(store, run_id, conversation="c-1", when_busy=when_busy, **options)[0]


def end(store: RunStore, run_id: str, reason: StopReason = StopReason.COMPLETED) -> EndedRun:
    """With an answer of its own, where it completes."""
    done = reason is StopReason.COMPLETED
    return store.end_run(
        run_id,
        reason,
        closer=CLOSER,
        message={"role": "assistant", "content": f"answer of {run_id}"} if done else None,
    )


def history(store: RunStore, run_id: str) -> list[str]:
    return [str(each["content"]) for each in store.read_messages(run_id)]


def line(store: RunStore, tenant: str = "") -> list[str]:
    key = redis_keys.conversation(tenant, digest("c-1"))
    return [str(each) for each in store.redis.lrange(key, 0, -1)]


def due_in(store: RunStore, run_id: str) -> float:
    score = store.redis.zscore(redis_keys.DUE, run_id)
    assert score is not None
    seconds, micros = store.redis.time()
    return float(score) / 1000 - (seconds + micros / 1e6)


# --- after -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_leaked_keys")
@pytest.mark.parametrize("reason", list(StopReason))
def test_a_run_goes_on_from_an_ended_one_however_it_ended(
    store: RunStore, reason: StopReason
) -> None:
    create(store, ONE)
    end(store, ONE, reason)
    assert create(store, TWO, after=ONE) == (Outcome.CREATED, TWO)
    assert history(store, TWO) == [*history(store, ONE), f"goal of {TWO}"]
    record = store.read_run(TWO)
    assert (record.after, RunInfo.of(record).after) == (ONE, ONE)
    assert history(store, TWO)[record.goal] == f"goal of {TWO}"
    end(store, TWO)


def test_a_long_history_is_copied_whole(store: RunStore) -> None:
    said = [{"role": "user", "content": str(n)} for n in range(2500)]
    create(store, ONE, messages=said)
    end(store, ONE, StopReason.CANCELLED)
    create(store, TWO, after=ONE)
    assert history(store, TWO) == [*map(str, range(2500)), f"goal of {TWO}"]


def test_earlier_messages_stand_between_the_history_and_the_goal(store: RunStore) -> None:
    create(store, ONE)
    end(store, ONE)
    create(store, TWO, after=ONE, messages=[goal_message("between"), goal_message("goal")])
    assert history(store, TWO)[-2:] == ["between", "goal"]
    assert store.read_run(TWO).goal == 3


def test_a_live_run_an_unknown_one_and_one_of_another_tenant_are_not_gone_on_from(
    store: RunStore,
) -> None:
    create(store, ONE, tenant="acme")
    assert create(store, TWO, after=ONE, tenant="acme") == (Outcome.BUSY, ONE)
    end(store, ONE)
    assert create(store, TWO, after=ONE) == (Outcome.STALE, ONE)
    assert create(store, TWO, after=ONE, tenant="other") == (Outcome.STALE, ONE)
    assert create(store, TWO, after=THREE, tenant="acme") == (Outcome.STALE, THREE)
    assert [str(key) for key in store.redis.scan_iter(f"*{TWO}*")] == []
    assert create(store, TWO, after=ONE, tenant="acme") == (Outcome.CREATED, TWO)


def test_a_run_that_goes_on_keeps_every_invariant_and_its_validators_get_its_goal(
    loops: Loops,
) -> None:
    goals: list[str] = []

    def remember(draft: Draft) -> None:
        goals.append(draft.goal)

    agent = Agent(name="a", model=ScriptedModel(["one", "two"]), validators=[remember])
    loop = loops.open(agent)
    create(loops.store, ONE)
    assert drive(loop, NextStep(ONE, 0)) == Finish(ONE, StopReason.COMPLETED)
    create(loops.store, TWO, after=ONE)
    assert drive(loop, NextStep(TWO, 0)) == Finish(TWO, StopReason.COMPLETED)
    assert history(loops.store, TWO) == [f"goal of {ONE}", "one", f"goal of {TWO}", "two"]
    assert goals == [f"goal of {ONE}", f"goal of {TWO}"]
    assert check_run(loops.store, TWO) == []


# --- one live run ------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_leaked_keys")
def test_the_first_run_of_a_conversation_begins_at_once_and_the_next_has_its_history(
    store: RunStore,
) -> None:
    assert talk(store, ONE, "reject") is Outcome.CREATED
    assert RunInfo.of(store.read_run(ONE)).conversation == "c-1"
    end(store, ONE)
    assert talk(store, TWO, "reject") is Outcome.CREATED
    assert history(store, TWO) == [f"goal of {ONE}", f"answer of {ONE}", f"goal of {TWO}"]
    assert store.read_run(TWO).after == ONE
    assert line(store) == [TWO]
    end(store, TWO)


def test_a_second_one_is_refused_with_the_id_of_the_live_one(store: RunStore) -> None:
    talk(store, ONE)
    refused = create(store, TWO, conversation="c-1", when_busy="reject", idempotency_key="k")
    assert refused == (Outcome.BUSY, ONE)
    assert [str(key) for key in store.redis.scan_iter(f"*{TWO}*")] == []
    assert list(store.redis.scan_iter("celeriac:idem:*")) == []
    assert line(store) == [ONE]


def test_conversations_of_other_names_and_tenants_are_others(store: RunStore) -> None:
    talk(store, ONE)
    assert talk(store, TWO, "reject", tenant="acme") is Outcome.CREATED
    other = create(store, THREE, conversation="c-2", when_busy="reject")
    assert other == (Outcome.CREATED, THREE)
    assert (line(store), line(store, "acme")) == ([ONE], [TWO])


@pytest.mark.usefixtures("no_leaked_keys")
def test_enqueued_runs_wait_and_begin_in_order_each_with_the_history_before_it(
    store: RunStore,
) -> None:
    talk(store, ONE)
    assert [talk(store, each) for each in (TWO, THREE)] == [Outcome.WAIT, Outcome.WAIT]
    waiting = store.read_run(TWO)
    assert (waiting.status, waiting.stop_reason) == (RunStatus.WAITING, None)
    assert [each.type for each in store.read_events(TWO, "0")] == ["run.created", "run.waiting"]
    assert store.begin_step(TWO, 0) is Outcome.STALE

    assert end(store, ONE).following == TWO

    begun = store.read_run(TWO)
    assert (begun.status, begun.phase, begun.after) == (RunStatus.QUEUED, "model", ONE)
    assert history(store, TWO)[begun.goal] == f"goal of {TWO}"
    assert due_in(store, TWO) <= store.settings.hint_grace
    assert line(store) == [TWO, THREE]
    assert end(store, TWO).following == THREE
    assert history(store, THREE) == [
        *(f"goal of {ONE}", f"answer of {ONE}", f"goal of {TWO}", f"answer of {TWO}"),
        f"goal of {THREE}",
    ]
    assert end(store, THREE).following is None


def test_the_time_of_a_run_that_waited_counts_from_its_turn(store: RunStore) -> None:
    talk(store, ONE)
    talk(store, TWO, limits=Limits(timeout=60))
    store.redis.hset(redis_keys.run(TWO), "deadline", 1)
    assert store.recover_run(TWO) == Lost(Outcome.WAIT), "an expired one would be ended"
    end(store, ONE)
    score = store.redis.zscore(redis_keys.DUE, TWO)
    assert score is not None
    begun = score - store.settings.hint_grace * 1000
    assert store.read_run(TWO).deadline == begun + 60_000
    end(store, TWO)
    check_keys(store.redis)


def test_limits_that_come_late_count_from_there_too(store: RunStore) -> None:
    talk(store, ONE)
    create(store, TWO, conversation="c-1", when_busy="enqueue", limits=None)
    store.redis.hset(redis_keys.run(TWO), "created", 1)
    end(store, ONE)
    adopted = store.adopt_limits(TWO, Limits(timeout=60))
    assert adopted is not None
    assert 55 < adopted.remaining <= 60


@pytest.mark.usefixtures("no_leaked_keys")
def test_a_waiting_run_that_is_cancelled_leaves_the_line(store: RunStore) -> None:
    talk(store, ONE)
    talk(store, TWO)
    talk(store, THREE)
    assert cancel_run(store, TWO, "no").following is None
    assert line(store) == [ONE, THREE]
    assert end(store, ONE).following == THREE
    end(store, THREE)


@pytest.mark.usefixtures("no_leaked_keys")
def test_an_interrupting_run_is_next_and_begins_with_what_there_is(store: RunStore) -> None:
    talk(store, ONE)
    talk(store, TWO)
    assert create(store, THREE, conversation="c-1", when_busy="interrupt") == (Outcome.WAIT, ONE)
    assert line(store) == [ONE, THREE, TWO]
    assert cancel_run(store, ONE, "make room").following == THREE
    assert history(store, THREE) == [f"goal of {ONE}", f"goal of {THREE}"]
    end(store, THREE)
    end(store, TWO)


def test_recovery_interrupts_where_the_submit_didnt_come_to_it(loops: Loops) -> None:
    store = loops.store
    loop = loops.open(Agent(name="a", model=ScriptedModel([])))
    talk(store, ONE)
    talk(store, TWO, "interrupt")
    assert due_in(store, TWO) <= store.settings.hint_grace

    assert loop.recover(TWO) == Finish(ONE, StopReason.CANCELLED)
    assert store.granted[-1] == f"{TWO}.0", "its hint is to be published"

    assert loop.recover(TWO) == Skip(TWO, Outcome.WAIT)
    assert store.read_run(TWO).phase == "model"
    cancel_run(store, TWO, "enough")


def test_recovery_lets_a_run_wait_whose_conversation_is_busy(loops: Loops) -> None:
    loop = loops.open(Agent(name="a", model=ScriptedModel([])))
    talk(loops.store, ONE)
    talk(loops.store, TWO)
    assert loop.recover(TWO) == Skip(TWO, Outcome.WAIT)
    assert due_in(loops.store, TWO) > 50
    for run_id in (ONE, TWO):
        cancel_run(loops.store, run_id, "enough")


@pytest.mark.parametrize("lost", ["the line", "the run in front", "its place"])
def test_recovery_begins_a_run_that_nothing_else_would(store: RunStore, lost: str) -> None:
    talk(store, ONE)
    talk(store, TWO)
    key = redis_keys.conversation("", digest("c-1"))
    match lost:
        case "the line":
            store.redis.delete(key)
        case "the run in front":
            store.redis.delete(redis_keys.run(ONE))
        case "its place":
            store.redis.lrem(key, 0, TWO)
            assert store.recover_run(TWO).outcome is Outcome.WAIT
            assert line(store) == [ONE, TWO]
            end(store, ONE)
            return
    assert store.recover_run(TWO) == Lost(Outcome.STEP)
    assert line(store) == [TWO]
    assert history(store, TWO)[-1] == f"goal of {TWO}"
    assert store.begin_step(TWO, 0) is not Outcome.STALE


def test_recovery_publishes_the_first_step_of_a_run_whose_turn_nobody_told(
    make_store: MakeStore,
) -> None:
    store = make_store(hint_grace=0.0005)
    talk(store, ONE)
    talk(store, TWO)
    end(store, ONE)  # and whoever ended it dies before it publishes
    while store.recover_run(TWO) != Lost(Outcome.STEP):
        pass
    assert store.begin_step(TWO, 0) is not Outcome.STALE
    end(store, TWO)


def test_no_more_than_so_many_wait(store: RunStore) -> None:
    talk(store, ONE)
    for n in range(MAX_QUEUED_RUNS):
        assert talk(store, f"run-number-{n}") is Outcome.WAIT
    assert talk(store, TWO) is Outcome.BUSY
    assert talk(store, TWO, "interrupt") is Outcome.BUSY


def test_the_same_request_sent_twice_is_one_run_in_the_line(store: RunStore) -> None:
    talk(store, ONE)
    assert [talk(store, TWO), talk(store, TWO)] == [Outcome.WAIT, Outcome.EXISTS]
    assert line(store) == [ONE, TWO]
    assert [end(store, ONE).outcome for _ in range(2)] == [Outcome.OK, Outcome.ALREADY]
    assert history(store, TWO).count(f"goal of {ONE}") == 1


def test_a_message_to_a_waiting_run_is_read_behind_its_goal(store: RunStore) -> None:
    talk(store, ONE)
    talk(store, TWO)
    assert store.send_message(TWO, "op", "and A002") is Outcome.OK
    end(store, ONE)
    store.begin_step(TWO, 0)
    assert history(store, TWO)[-2:] == [f"goal of {TWO}", "and A002"]


# --- resuming ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_leaked_keys")
def test_the_last_run_of_a_conversation_can_be_resumed_and_is_live_again(store: RunStore) -> None:
    talk(store, ONE)
    end(store, ONE, StopReason.TIMEOUT)
    assert store.resume_run(store.read_run(ONE), Limits()) is Outcome.OK
    assert talk(store, TWO, "reject") is Outcome.BUSY
    end(store, ONE)


def test_one_that_the_conversation_has_left_behind_cant(store: RunStore) -> None:
    talk(store, ONE)
    end(store, ONE, StopReason.TIMEOUT)
    talk(store, TWO)
    assert store.resume_run(store.read_run(ONE), Limits()) is Outcome.BUSY
    assert store.read_run(ONE).status is RunStatus.FINISHED
    assert line(store) == [TWO]


# --- a loop that follows -----------------------------------------------------------------------


def test_the_end_of_a_run_says_which_run_begins(loops: Loops) -> None:
    agent = Agent(name="a", model=ScriptedModel(["one", "two"]))
    loop: Loop = loops.open(agent)
    talk(loops.store, ONE)
    talk(loops.store, TWO)
    assert drive(loop, NextStep(ONE, 0)) == Finish(ONE, StopReason.COMPLETED)
    assert loops.store.granted[-1] == f"{TWO}.0"
    assert drive(loop, NextStep(TWO, 0)) == Finish(TWO, StopReason.COMPLETED)
    assert [check_run(loops.store, each) for each in (ONE, TWO)] == [[], []]


# --- any interleaving --------------------------------------------------------------------------

numbers = itertools.count()
ACTS = ["enqueue", "interrupt", "reject", "end", "end", "cancel", "recover", "resume", "delete"]


@given(st.lists(st.sampled_from(ACTS), min_size=10, max_size=40), st.integers(0, 2**32))
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_happens_one_run_is_live_and_none_is_forgotten(
    make_store: MakeStore, names: list[str], seed: int
) -> None:
    store, choose = make_store(hint_grace=0.0005), random.Random(seed)
    store.redis.flushdb()
    runs: list[str] = []
    for name in names:
        if name in ("enqueue", "interrupt", "reject"):
            made = f"run-number-{next(numbers)}"
            if talk(store, made, name) in (Outcome.CREATED, Outcome.WAIT):
                runs.append(made)
        elif runs:
            change(store, name, choose.choice(runs), runs)
        check_line(store, runs)
    check_keys(store.redis)


def change(store: RunStore, name: str, chosen: str, runs: list[str]) -> None:
    match name:
        case "end":
            for live in line(store)[:1]:
                end(store, live, StopReason.CANCELLED)
        case "cancel":
            end(store, chosen, StopReason.CANCELLED)
        case "recover":
            if live := store.recover_run(chosen).live:
                cancel_run(store, live, "make room")
        case "resume":
            store.redis.hset(redis_keys.run(chosen), "stop_reason", "TIMEOUT")
            store.resume_run(store.read_run(chosen), Limits())
        case "delete":
            if store.delete_run(chosen) is Outcome.OK:
                runs.remove(chosen)


def check_line(store: RunStore, runs: list[str]) -> None:
    """The live run stands first, the waiting ones behind it, and nobody else stands there."""
    records = {each: store.read_run(each) for each in runs}
    unfinished = {each for each in runs if records[each].status is not RunStatus.FINISHED}
    live = {each for each in unfinished if records[each].phase != "parked"}
    standing = line(store)
    assert len(live) <= 1, "two live runs"
    assert len(standing) == len(set(standing))
    if unfinished:
        assert set(standing) == unfinished
        assert {standing[0]} == live, "nobody is live, but somebody waits"
    else:
        assert len(standing) <= 1
