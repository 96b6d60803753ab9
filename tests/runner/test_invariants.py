"""The checker finds nothing in sound runs, and says what is wrong with each damaged one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from runner import Agent, Limits, ModelError, ToolError, keys, tool
from runner.agents import Agents
from runner.clarify import ask_user
from runner.context import goal_message
from runner.errors import RunNotFound
from runner.invariants import check_run
from runner.loop import CallTools, Loop, Next, NextStep, cancel_run
from runner.models import RunErrorType, RunStatus, StopReason
from runner.settings import STEPS_QUEUE, Settings
from runner.store import BegunCall, Outcome, RunStore
from runner.testing import Reply, ScriptedModel, calls

RUN = "run-under-test"


@tool(idempotent=True)
def echo(text: str) -> str:
    """Say it again."""
    return text


@tool
def fail() -> None:
    """Fail."""
    raise ToolError("no")


@tool(final=True)
def answer(text: str) -> str:
    """Give the run's answer."""
    return text


@tool(idempotent=True, redact={"token"})
def unlock() -> dict[str, str]:
    """Return a secret."""
    return {"token": "hunter2", "door": "open"}


TURNS: list[Reply] = [
    calls(("echo", {"text": "a"}), ("fail", {}), ("echo", {"text": "c"})),
    calls(("echo", {"text": "d"}), ("nope", {}), ("echo", {"text": "f"})),
]


def start(
    store: RunStore, replies: Sequence[Reply], *, promised: bool = False, **limits: Any
) -> Loop:
    agent = Agent(
        name="a",
        model=ScriptedModel(replies),
        tools=[echo, fail, answer, unlock, ask_user],
        limits=Limits(**limits),
        response_retries=0,
    )
    store.create_run(
        run_id=RUN,
        agent="a",
        messages=[goal_message("go")],
        limits=agent.limits,
        promised=promised,
    )
    return Loop(store, Agents([agent]), settings=Settings())


def drive(loop: Loop, first: Next | None = None) -> None:
    """Take the run as far as it goes; whatever it looks like on the way must be sound."""
    pending: list[Next] = [first or NextStep(RUN, 0)]
    while pending:
        match pending.pop(0):
            case NextStep(_, step):
                pending.append(loop.advance(RUN, step))
            case CallTools(_, step, indexes):
                pending += [loop.call_tool(RUN, step, index) for index in indexes]
            case _:
                pass
        assert check_run(loop.store, RUN) == []


def finish(store: RunStore, replies: Sequence[Reply] = (*TURNS, "done"), **options: Any) -> Loop:
    loop = start(store, replies, **options)
    drive(loop)
    loop.close()
    return loop


def open_calls(store: RunStore, **limits: Any) -> Loop:
    """A run whose second step has its first call done and its others open."""
    loop = start(store, [*TURNS, "done"], **limits)
    drive(loop, CallTools(RUN, 0, ()))
    match loop.advance(RUN, 0):
        case CallTools(_, _, indexes):
            for index in indexes:
                loop.call_tool(RUN, 0, index)
    loop.advance(RUN, 1)
    loop.call_tool(RUN, 1, 0)
    loop.close()
    assert check_run(store, RUN) == []
    return loop


# --- sound runs -----------------------------------------------------------------------------------


def test_a_run_is_sound_from_its_first_step_to_its_end(store: RunStore) -> None:
    finish(store)
    assert store.read_run(RUN).stop_reason is StopReason.COMPLETED


def test_a_run_is_sound_while_its_calls_take_turns(store: RunStore) -> None:
    finish(store, max_parallel_calls=1)


def test_a_run_that_a_tool_answers_is_sound(store: RunStore) -> None:
    finish(store, [TURNS[0], calls(("answer", {"text": "done"}))])
    assert store.read_run(RUN).answer == "done"


def test_a_run_whose_trace_hides_a_secret_is_sound(store: RunStore) -> None:
    finish(store, [calls(("unlock", {})), "done"])
    assert "hunter2" not in str(store.read_trace(RUN))


def test_a_run_that_waits_for_its_user_is_sound(store: RunStore) -> None:
    finish(store, [calls(("ask_user", {"question": "which?"}), ("echo", {"text": "a"}))])
    assert store.read_run(RUN).status is RunStatus.WAITING

    cancel_run(store, RUN, "enough")

    assert check_run(store, RUN) == []


def test_a_run_of_refused_calls_alone_is_sound(store: RunStore) -> None:
    finish(store, [calls(("nope", {}), ("none", {})), "done"])


@pytest.mark.parametrize(
    ("replies", "limits", "stop_reason"),
    [
        ([ModelError("no", type=RunErrorType.AUTH_ERROR)], {}, StopReason.ERROR),
        ([*TURNS, ModelError("no", type=RunErrorType.AUTH_ERROR)], {}, StopReason.ERROR),
        (TURNS, {"max_steps": 2}, StopReason.MAX_STEPS),
        (TURNS, {"max_tool_calls": 3}, StopReason.BUDGET_EXHAUSTED),
        (TURNS, {"max_tokens": 5}, StopReason.BUDGET_EXHAUSTED),
        ([calls(("nope", {}))] * 2, {"max_invalid_calls": 1}, StopReason.REPEATED_ERROR),
    ],
)
def test_a_run_that_a_limit_or_an_error_ends_is_sound(
    store: RunStore, replies: list[Reply], limits: dict[str, Any], stop_reason: StopReason
) -> None:
    finish(store, replies, **limits)
    assert store.read_run(RUN).stop_reason is stop_reason


@pytest.mark.parametrize("limits", [{"max_steps": 1}, {"max_steps": 2}])
def test_a_resumed_run_is_sound(store: RunStore, limits: dict[str, Any]) -> None:
    loop = finish(store, [*TURNS, *TURNS, "done"], **limits)
    record = store.read_run(RUN)

    assert store.resume_run(record, Limits()) is Outcome.OK

    drive(loop, NextStep(RUN, record.step))
    assert store.read_run(RUN).stop_reason is StopReason.COMPLETED


def test_a_run_resumed_after_a_model_error_is_sound(store: RunStore) -> None:
    error = ModelError("no", type=RunErrorType.AUTH_ERROR)
    loop = finish(store, [TURNS[0], error, TURNS[1], "done"])
    record = store.read_run(RUN)

    assert store.resume_run(record, Limits()) is Outcome.OK

    drive(loop, NextStep(RUN, record.step))
    assert store.read_run(RUN).stop_reason is StopReason.COMPLETED


def test_a_run_that_is_cancelled_with_open_calls_is_sound(store: RunStore) -> None:
    open_calls(store)
    cancel_run(store, RUN, "enough")
    assert check_run(store, RUN) == []


def test_a_result_that_comes_too_late_breaks_no_rule(store: RunStore) -> None:
    loop = open_calls(store)
    late = store.begin_call(RUN, 1, 2)
    assert isinstance(late, BegunCall)
    executed = loop._calls.run(late, echo)
    cancel_run(store, RUN, "enough")

    outcome, _ = store.record_result(RUN, 1, 2, executed.result, fatal=None)  # type: ignore[union-attr]

    assert outcome is Outcome.STALE
    assert check_run(store, RUN) == []


def test_a_promised_run_may_stay_due_after_its_end(store: RunStore) -> None:
    finish(store, promised=True)
    assert store.redis.zscore(keys.DUE, RUN) is not None


def test_a_run_that_waits_is_sound(store: RunStore) -> None:
    busy = ModelError("busy", type=RunErrorType.RATE_LIMITED, retryable=True, retry_after=60)
    loop = start(store, [busy])
    drive(loop)
    loop.close()
    assert store.read_run(RUN).status == "waiting"


def test_there_is_no_verdict_on_a_run_that_never_was(store: RunStore) -> None:
    with pytest.raises(RunNotFound):
        check_run(store, RUN)


# --- damage to a finished run ---------------------------------------------------------------------

Damage = Callable[[Any], object]
"""What is done to the keys behind the store's back, by a raw client."""

MESSAGES, TRACE, EVENTS = keys.messages(RUN), keys.trace(RUN), keys.events(RUN)


def rewrite(redis: Any, key: str, change: Callable[[list[str]], list[str]]) -> None:
    """Change a list, and leave its TTL as it was."""
    left, items = redis.pttl(key), change(redis.lrange(key, 0, -1))
    redis.delete(key)
    redis.rpush(key, *items)
    if left > 0:
        redis.pexpire(key, left)


def swapped(items: list[str], one: int, other: int) -> list[str]:
    items[one], items[other] = items[other], items[one]
    return items


def edited(items: list[str], at: int, **fields: Any) -> list[str]:
    items[at] = json.dumps(json.loads(items[at]) | fields)
    return items


def add_event(redis: Any, type: str, step: str = "", call: str = "", **data: Any) -> Any:
    return redis.xadd(
        EVENTS, {"at": 1, "type": type, "step": step, "call": call, "data": json.dumps(data)}
    )


def drop_event(redis: Any, type: str) -> None:
    entry = next(each for each, fields in redis.xrange(EVENTS) if fields["type"] == type)
    redis.xdel(EVENTS, entry)


# The history of a finished run: the goal, two blocks of a turn and three results, the answer.
FINISHED: dict[str, tuple[Damage, str]] = {
    "the end told twice": (lambda r: add_event(r, "run.finished"), "told 2 times"),
    "the end not told": (lambda r: drop_event(r, "run.finished"), "told 0 times"),
    "no events at all": (lambda r: r.delete(EVENTS), "told 0 times"),
    "a step begun after the end": (
        lambda r: add_event(r, "step.started", "3", attempt=1),
        "after run.finished came step.started",
    ),
    "a call begun after the end": (
        lambda r: add_event(r, "call.started", "1", "1.0", attempt=1),
        "after run.finished came call.started",
    ),
    "no stop reason": (
        lambda r: r.hdel(keys.run(RUN), "stop_reason"),
        "the stop reason none",
    ),
    "a stop reason before the end": (
        lambda r: r.hset(keys.run(RUN), "status", "running"),
        "the status is running, and the stop reason COMPLETED",
    ),
    "not in its last phase": (lambda r: r.hset(keys.run(RUN), "phase", "model"), "in phase model"),
    "a record without a TTL": (lambda r: r.persist(keys.run(RUN)), "has no TTL after the end"),
    "a history without a TTL": (lambda r: r.persist(MESSAGES), "has no TTL after the end"),
    "events without a TTL": (lambda r: r.persist(EVENTS), "has no TTL after the end"),
    "a trace without a TTL": (lambda r: r.persist(TRACE), "has no TTL after the end"),
    "a key that came back": (
        lambda r: r.hset(keys.calls(RUN), "0.state", "done"),
        "has no TTL after the end",
    ),
    "calls left over": (
        lambda r: (r.hset(keys.calls(RUN), "0.state", "done"), r.expire(keys.calls(RUN), 9)),
        "calls or results are still there",
    ),
    "still due": (lambda r: r.zadd(keys.DUE, {RUN: 1}), "promised nothing, but stands in due"),
    "never to expire from the index": (
        lambda r: r.zadd(keys.RUNS, {RUN: "+inf"}),
        "doesn't say when it expires",
    ),
    "lost from the index": (lambda r: r.zrem(keys.RUNS, RUN), "doesn't say when it expires"),
    "a record gone before the rest": (
        lambda r: (r.persist(TRACE), r.delete(keys.run(RUN))),
        "the record is gone, but",
    ),
    "a turn twice": (
        lambda r: rewrite(r, MESSAGES, lambda m: [*m[:5], *m[1:]]),
        "is a turn that no committed step made",
    ),
    "an answer twice": (
        lambda r: rewrite(r, MESSAGES, lambda m: [*m, m[-1]]),
        "final answers stand at",
    ),
    "no answer": (lambda r: r.rpop(MESSAGES), "final answers stand at []"),
    "a turn lost": (
        lambda r: rewrite(r, MESSAGES, lambda m: [*m[:5], m[-1]]),
        "left no turn in the history",
    ),
    "a result lost": (
        lambda r: rewrite(r, MESSAGES, lambda m: [*m[:3], *m[4:]]),
        "has calls ['c0', 'c1', 'c2'], and is followed by ['c0', 'c2']",
    ),
    "a result twice": (
        lambda r: rewrite(r, MESSAGES, lambda m: [*m[:4], *m[3:]]),
        "is followed by ['c0', 'c1', 'c1', 'c2']",
    ),
    "results out of order": (
        lambda r: rewrite(r, MESSAGES, lambda m: swapped(m, 2, 3)),
        "is followed by ['c1', 'c0', 'c2']",
    ),
    "a result before its call": (
        lambda r: rewrite(r, MESSAGES, lambda m: swapped(m, 1, 2)),
        "is a result before any call",
    ),
    "another call's result": (
        lambda r: rewrite(r, MESSAGES, lambda m: edited(m, 2, content="c")),
        "of call 0.0; the trace has another result first",
    ),
    "a result from nowhere": (
        lambda r: rewrite(r, TRACE, lambda t: [e for e in t if '"0.2"' not in e or "model" in e]),
        "of call 0.2; the trace has no result first",
    ),
    "another turn than was decided": (
        lambda r: rewrite(r, TRACE, lambda t: edited(t, 0, decisions=[])),
        "isn't what step 0 decided",
    ),
    "a step committed twice": (
        lambda r: rewrite(r, TRACE, lambda t: [t[0], *t]),
        "committed as [0, 0, 1, 2]",
    ),
    "steps committed out of order": (
        lambda r: rewrite(r, TRACE, lambda t: [*t[1:], t[0]]),
        "committed as [1, 2, 0]",
    ),
    "a step never committed": (lambda r: r.lpop(TRACE), "nothing was committed for steps [0]"),
    "a step beyond the last": (
        lambda r: r.hset(keys.run(RUN), "step", 2),
        "steps [2] were committed, but the run is at step 2",
    ),
    "a step that nobody took": (
        lambda r: r.hset(keys.run(RUN), "step", 4),
        "nothing was committed for steps [3]",
    ),
    "too many steps": (lambda r: r.hset(keys.run(RUN), "step", 21), "its cap is 20"),
    "too many calls": (lambda r: r.hset(keys.run(RUN), "tool_calls", 101), "its cap is 100"),
    "a call without a result": (lambda r: drop_event(r, "call.finished"), "has no result"),
}


@pytest.mark.parametrize(("damage", "fault"), FINISHED.values(), ids=FINISHED.keys())
def test_damage_to_a_finished_run_is_seen(store: RunStore, damage: Damage, fault: str) -> None:
    finish(store)

    damage(store.redis)

    assert_found(store, fault)


def assert_found(store: RunStore, fault: str) -> None:
    found = check_run(store, RUN)
    assert [each for each in found if fault in each] != [], found


# --- damage to a run with open calls --------------------------------------------------------------

CALLS = keys.calls(RUN)

UNFINISHED: dict[str, tuple[Damage, str]] = {
    "not due": (lambda r: r.zrem(keys.DUE, RUN), "doesn't stand in due"),
    "to expire from the index": (lambda r: r.zadd(keys.RUNS, {RUN: 1}), "has it expire"),
    "a record that expires": (lambda r: r.expire(keys.run(RUN), 60), "has a TTL before the end"),
    "a history that expires": (lambda r: r.expire(MESSAGES, 60), "has a TTL before the end"),
    "an end told too early": (lambda r: add_event(r, "run.finished"), "told 1 times instead of 0"),
    "a stop reason": (lambda r: r.hset(keys.run(RUN), "stop_reason", "ERROR"), "stop reason ERROR"),
    "an open turn lost": (lambda r: r.rpop(MESSAGES), "doesn't end with their turn"),
    "too many starts": (lambda r: r.hset(CALLS, "2.started", 4), "call 1.2 was started 4 times"),
    "too many in flight": (
        lambda r: r.hset(keys.run(RUN), "limits", Limits(max_parallel_calls=1).model_dump_json()),
        "1 calls are in flight",
    ),
    "a result lost": (lambda r: r.hdel(keys.results(RUN), "0"), "is done, and has no result"),
    "a result too early": (
        lambda r: r.hset(keys.results(RUN), "2", "{}"),
        "is queued, and has a result",
    ),
    "a stranger's result": (lambda r: r.hset(keys.results(RUN), "7", "{}"), "which nobody made"),
    "a message kept twice": (
        lambda r: r.rpush(keys.inbox(RUN), json.dumps({"role": "user", "content": "hello"})),
        "1 messages of its user were kept for 0 that were sent",
    ),
    "a call lost": (lambda r: r.hdel(CALLS, "2.state"), "call 1.2 is missing"),
    "a step that nobody closes": (
        lambda r: (r.hset(CALLS, "2.state", "done"), r.hset(keys.results(RUN), "2", "{}")),
        "the step is still open",
    ),
    "a call answered twice": (
        lambda r: add_event(r, "call.finished", "0", "0.0"),
        "call 0.0 was answered twice",
    ),
    "a step answered twice": (
        lambda r: add_event(r, "model.answered", "0"),
        "step 0 was answered twice",
    ),
    "a step begun after its answer": (
        lambda r: add_event(r, "step.started", "0", attempt=2),
        "step 0 was started after it was answered",
    ),
    "a call begun after its result": (
        lambda r: add_event(r, "call.started", "0", "0.1", attempt=2),
        "call 0.1 was started after it was answered",
    ),
    "too many attempts of a step": (
        lambda r: add_event(r, "step.started", "2", attempt=4),
        "step 2 was tried 4 times",
    ),
    "attempts that go back": (
        lambda r: (
            add_event(r, "call.started", "1", "1.2", attempt=2),
            add_event(r, "call.started", "1", "1.2", attempt=1),
        ),
        "the attempts of call 1.2 go back from 2 to 1",
    ),
}


@pytest.mark.parametrize(("damage", "fault"), UNFINISHED.values(), ids=UNFINISHED.keys())
def test_damage_to_a_running_run_is_seen(store: RunStore, damage: Damage, fault: str) -> None:
    open_calls(store)
    if fault == "1 calls are in flight":
        store.redis.hset(CALLS, "1.state", "running")
        fault = "are in flight; the limit is 1"

    damage(store.redis)

    assert_found(store, fault)


def test_a_resume_that_follows_no_end_is_seen(store: RunStore) -> None:
    open_calls(store)
    add_event(store.redis, "run.resumed", "1")
    assert_found(store, "told 0 times instead of 1")


def test_looking_changes_nothing(store: RunStore) -> None:
    finish(store)
    names = sorted(store.redis.keys())
    before = [store.redis.dump(name) for name in names]

    check_run(store, RUN)

    assert [store.redis.dump(name) for name in names] == before
    assert keys.seen(STEPS_QUEUE) in names
