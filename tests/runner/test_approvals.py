"""A call may need somebody's approval: decided once, on what was shown, while nobody waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runner import (
    Agent,
    AlreadyDecided,
    Approval,
    InvalidInput,
    Limits,
    Principal,
    RunFinished,
    RunNotFound,
    RunStatus,
    StopReason,
    ToolDefinitionError,
    tool,
)
from runner import keys as redis_keys
from runner.approvals import denial
from runner.errors import CeleriacError
from runner.invariants import check_run
from runner.loop import (
    CLOSER,
    CallTools,
    Finish,
    Loop,
    NextStep,
    Skip,
    Wait,
    approve_call,
    cancel_run,
    deny_call,
)
from runner.models import Decided
from runner.store import Outcome, RunStore
from runner.testing import ScriptedModel, calls, run_agent
from support.loops import RUN, Loops, check_requests, drive, open_loops

PAY = ("pay", {"cents": 5})
PAY_MORE = ("pay", {"cents": 7})
LOOK: tuple[str, dict[str, Any]] = ("look", {})
ASK = ("ask_user", {"question": "Which order?"})


@tool(idempotent=True)
def look() -> str:
    """Look somewhere."""
    return "seen"


@tool(approval=True)
def pay(cents: int) -> str:
    """Pay money."""
    return f"paid {cents}"


@pytest.fixture
def loops(store: RunStore, no_leaked_keys: None) -> Iterator[Loops]:
    opened = open_loops(store)
    loops = next(opened)
    yield loops
    assert check_run(store, RUN) == []
    next(opened, None)


def agent_of(*turns: Any, tools: Any = (look, pay), **options: Any) -> Agent:
    model = ScriptedModel([calls(*turn) if isinstance(turn, list) else turn for turn in turns])
    return Agent(name="a", model=model, tools=tools, **options)


def requested(loops: Loops, *turns: Any, **options: Any) -> Loop:
    """A run whose model made this turn, and its loop, after the first step."""
    loop = loops.start(agent_of(*turns, **options))
    loop.advance(RUN, 0)
    return loop


def approve(loops: Loops, call_id: str = "0.0", **options: Any) -> Any:
    return approve_call(loops.store, RUN, call_id, **options)


def deny(loops: Loops, call_id: str = "0.0", reason: str = "too much", **options: Any) -> Any:
    return deny_call(loops.store, RUN, call_id, reason, **options)


def waiting(loops: Loops) -> list[str]:
    return [each.call_id for each in loops.store.read_approvals(RUN)]


# --- asking ------------------------------------------------------------------------------------


def test_a_call_that_needs_an_approval_parks_the_run_and_publishes_nothing(loops: Loops) -> None:
    loop = loops.start(agent_of([PAY]))
    assert loop.advance(RUN, 0) == CallTools(RUN, 0, ())
    assert loops.record.status is RunStatus.WAITING
    [shown] = loops.store.read_approvals(RUN)
    assert (shown.call_id, shown.tool, shown.arguments) == ("0.0", "pay", {"cents": 5})
    assert shown.decide_by is None
    assert loop.call_tool(RUN, 0, 0) == Skip(RUN, Outcome.BUSY)
    assert loops.events("call.queued") == []


def test_followers_are_told_the_tool_and_a_digest_but_no_argument(loops: Loops) -> None:
    requested(loops, [("pay", {"cents": 424242})])
    [event] = loops.events("approval.requested")
    [shown] = loops.store.read_approvals(RUN)
    assert (event.step, event.call) == (0, "0.0")
    assert event.data == {"tool": "pay", "digest": shown.digest}
    assert "424242" not in event.model_dump_json()


def test_other_arguments_have_another_digest_and_the_same_ones_the_same(loops: Loops) -> None:
    requested(loops, [PAY, PAY_MORE, LOOK])
    one, other = loops.store.read_approvals(RUN)
    assert one.digest != other.digest
    assert loops.store.read_approvals(RUN)[0] == one


def test_large_numbers_are_shown_and_run_as_they_are(loops: Loops) -> None:
    loop = requested(loops, [("pay", {"cents": 9007199254740993})], "done")
    assert loops.store.read_approvals(RUN)[0].arguments == {"cents": 9007199254740993}
    drive(loop, approve(loops))
    assert loops.contents() == ["paid 9007199254740993"]


def test_siblings_run_on_and_then_the_run_waits(loops: Loops) -> None:
    loop = loops.start(agent_of([LOOK, PAY, LOOK], "done"))
    assert loop.advance(RUN, 0) == CallTools(RUN, 0, (0, 2))
    seen = [loops.record.status]
    for index in (0, 2):
        assert loop.call_tool(RUN, 0, index) == Wait(RUN)
        seen.append(loops.record.status)
    assert seen == [RunStatus.RUNNING, RunStatus.RUNNING, RunStatus.WAITING]
    assert check_run(loops.store, RUN) == []


def test_a_run_may_wait_for_a_reply_and_for_an_approval(loops: Loops) -> None:
    loop = requested(loops, [ASK, PAY], "done", clarify=True)
    assert loops.record.status is RunStatus.WAITING
    assert drive(loop, approve(loops, "0.1")) == Wait(RUN)
    assert loops.record.status is RunStatus.WAITING
    assert drive(loop, loops.reply("A001")) == Finish(RUN, StopReason.COMPLETED)
    assert loops.contents() == ["A001", "paid 5"]


def test_a_call_that_waits_takes_nobodys_place(loops: Loops) -> None:
    limits = Limits(max_parallel_calls=1)
    loop = loops.start(agent_of([PAY, LOOK, LOOK], "done", limits=limits))
    assert loop.advance(RUN, 0) == CallTools(RUN, 0, (1,))
    assert approve(loops) == Wait(RUN), "the first look is still out"
    assert loop.call_tool(RUN, 0, 1) == CallTools(RUN, 0, (0,))
    assert loop.call_tool(RUN, 0, 0) == CallTools(RUN, 0, (2,))
    assert loop.call_tool(RUN, 0, 2) == NextStep(RUN, 1)


def test_a_denial_lets_no_more_calls_run_at_once(loops: Loops) -> None:
    limits = Limits(max_parallel_calls=1)
    loop = loops.start(agent_of([PAY, LOOK, LOOK], "done", limits=limits))
    assert loop.advance(RUN, 0) == CallTools(RUN, 0, (1,))
    assert deny(loops) == Wait(RUN), "the first look is still out"
    assert loop.call_tool(RUN, 0, 1) == CallTools(RUN, 0, (2,))
    assert loop.call_tool(RUN, 0, 2) == NextStep(RUN, 1)


def test_a_call_that_is_refused_otherwise_is_nobodys_to_approve(loops: Loops) -> None:
    loop = loops.start(
        agent_of([("pay", {"cents": "x"}), ("nope", {})], "done", limits=Limits(max_tool_calls=0))
    )
    drive(loop)
    assert loops.events("approval.requested") == []


def test_a_call_counts_among_those_that_a_run_may_make_while_it_waits(loops: Loops) -> None:
    loop = requested(loops, [PAY, PAY_MORE], "done", limits=Limits(max_tool_calls=1))
    assert waiting(loops) == ["0.0"]
    drive(loop, deny(loops))
    assert ["DENIED" in loops.contents()[0], "CALL_LIMIT" in loops.contents()[1]] == [True, True]


# --- deciding ----------------------------------------------------------------------------------


def test_an_approved_call_runs_and_the_run_goes_on(loops: Loops) -> None:
    loop = requested(loops, [LOOK, PAY], "done")
    loop.call_tool(RUN, 0, 0)
    assert approve(loops, "0.1", by="u42") == CallTools(RUN, 0, (1,))
    assert loops.record.status is RunStatus.RUNNING
    assert drive(loop, CallTools(RUN, 0, (1,))) == Finish(RUN, StopReason.COMPLETED)
    assert loops.contents() == ["seen", "paid 5"]
    [event] = loops.events("approval.decided")
    assert (event.call, event.data) == ("0.1", {"approved": True, "by": "u42"})
    check_requests(loops.store, loop.agents["a"].model.requests)  # type: ignore[union-attr]


def test_a_denied_call_does_not_run_and_the_model_reads_why(loops: Loops) -> None:
    loop = requested(loops, [PAY], "done")
    assert deny(loops, by="u42") == NextStep(RUN, 1)
    assert drive(loop, NextStep(RUN, 1)) == Finish(RUN, StopReason.COMPLETED)
    [content] = loops.contents()
    assert ('"type":"DENIED"' in content, "too much" in content) == (True, True)
    [event] = loops.events("approval.decided")
    assert event.data == {"approved": False, "by": "u42"}
    assert loops.events("call.finished")[0].data["error"] == "DENIED"
    assert loops.events("call.started") == []


def test_a_denial_that_comes_before_the_siblings_are_done_waits_for_them(loops: Loops) -> None:
    loop = requested(loops, [PAY, LOOK], "done")
    assert deny(loops) == Wait(RUN)
    assert loops.record.status is RunStatus.RUNNING
    assert drive(loop, CallTools(RUN, 0, (1,))) == Finish(RUN, StopReason.COMPLETED)


def test_a_denial_is_no_failure_after_which_a_fallback_answers(loops: Loops) -> None:
    def fallback(cents: int) -> str:
        return f"owed {cents}"

    @tool(approval=True, fallback=fallback, fallback_after=1)
    def pay(cents: int) -> str:
        """Pay money."""
        return f"paid {cents}"

    loop = requested(loops, [PAY], [PAY], "done", tools=[pay])
    drive(loop, deny(loops))
    drive(loop, approve(loops, "1.0"))
    assert loops.contents()[1] == "paid 5"


def test_a_reason_is_made_fit_to_be_stored(loops: Loops) -> None:
    loop = requested(loops, [PAY], "done")
    drive(loop, deny(loops, reason='half \ud800 "and"} \0'))
    assert "half \ufffd" in loops.contents()[0]


def approval_and(kind: str) -> Callable[[Loops], Any]:
    return approve if kind == "approved" else deny


@pytest.mark.parametrize("first", ["approved", "denied"])
@pytest.mark.parametrize("second", ["approved", "denied"])
def test_the_second_decision_is_told_of_the_first_and_changes_nothing(
    loops: Loops, first: str, second: str
) -> None:
    loop = requested(loops, [PAY, PAY_MORE], "done")
    approval_and(first)(loops, by="u42")  # type: ignore[call-arg]
    before = loops.store.redis.hgetall(redis_keys.calls(RUN))
    with pytest.raises(AlreadyDecided, match=rf"call 0\.0 was already {first} by u42"):
        approval_and(second)(loops, by="u43")  # type: ignore[call-arg]
    assert loops.store.redis.hgetall(redis_keys.calls(RUN)) == before
    assert len(loops.events("approval.decided")) == 1
    drive(loop, CallTools(RUN, 0, (0,)))
    drive(loop, deny(loops, "0.1"))
    for late in (approve, deny):
        with pytest.raises(AlreadyDecided, match=rf"call 0\.0 was already {first} by u42"):
            late(loops)
    assert loops.result.ok
    assert [entry["kind"] for entry in loops.store.read_trace(RUN)].count("result") == 2


def test_of_many_that_decide_at_the_same_moment_one_wins(loops: Loops) -> None:
    loop = requested(loops, [PAY], "done")
    start = threading.Barrier(8)
    nexts: list[Any] = []
    told: list[str] = []

    def decide(n: int) -> None:
        start.wait(5)
        try:
            nexts.append((approve if n % 2 else deny)(loops, by=f"u{n}"))
        except AlreadyDecided as error:
            told.append(str(error))

    threads = [threading.Thread(target=decide, args=(n,)) for n in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(10)
    assert (len(nexts), len(told)) == (1, 7)
    [event] = loops.events("approval.decided")
    word = "approved" if event.data["approved"] else "denied"
    assert all(f"already {word} by {event.data['by']}" in each for each in told)
    assert drive(loop, nexts[0]) == Finish(RUN, StopReason.COMPLETED)
    assert len(loops.contents()) == 1


def test_the_same_request_twice_gets_the_same_answer(
    loops: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = requested(loops, [PAY, PAY_MORE], "done")
    monkeypatch.setattr(loops.store, "_attempt_id", lambda: "one-operation")
    assert approve(loops) == approve(loops) == CallTools(RUN, 0, (0,))
    assert deny(loops, "0.1") == deny(loops, "0.1") == Wait(RUN)
    monkeypatch.undo()
    assert loop.call_tool(RUN, 0, 0) == NextStep(RUN, 1)
    monkeypatch.setattr(loops.store, "_attempt_id", lambda: "one-operation")
    assert (approve(loops), deny(loops, "0.1")) == (Wait(RUN), Wait(RUN)), "also when it is over"
    assert len(loops.events("approval.decided")) == 2


def test_a_decision_is_bound_to_the_arguments_that_were_shown(loops: Loops) -> None:
    requested(loops, [PAY, PAY_MORE])
    one, other = loops.store.read_approvals(RUN)
    for decide in (approve, deny):
        for digest in (other.digest, "", "0" * 32):
            with pytest.raises(InvalidInput, match=r"call 0\.0 .*other arguments"):
                decide(loops, digest=digest)
    assert waiting(loops) == ["0.0", "0.1"]
    assert approve(loops, digest=one.digest) == CallTools(RUN, 0, (0,))
    assert deny(loops, "0.1", digest=other.digest) == Wait(RUN)


def test_arguments_that_change_in_between_are_not_approved(loops: Loops) -> None:
    """What the script compares is stored: a look that is out of date decides nothing."""
    requested(loops, [PAY])
    [shown] = loops.store.read_approvals(RUN)
    loops.store.redis.hset(redis_keys.calls(RUN), "0.digest", "another")
    for decide in (approve, deny):
        with pytest.raises(InvalidInput, match="other arguments"):
            decide(loops, digest=shown.digest)
    assert loops.events("approval.decided") == []


@pytest.mark.parametrize("call_id", ["0.1", "0.7", "1.0", "7.7"])
def test_a_call_that_waits_for_no_approval_takes_no_decision(loops: Loops, call_id: str) -> None:
    loop = requested(loops, [PAY, LOOK], "done")
    for decide in (approve, deny):
        with pytest.raises(InvalidInput, match=r"waits for no approval; waiting: 0\.0"):
            decide(loops, call_id)
    assert loop.call_tool(RUN, 0, 1) == Wait(RUN)
    assert waiting(loops) == ["0.0"]


@pytest.mark.parametrize("call_id", ["", "x", "0", "0.", ".0", "-1.0", "0.0.0", "0.\u0661", 3.0])
def test_what_is_no_id_of_a_call_is_refused(loops: Loops, call_id: Any) -> None:
    requested(loops, [PAY])
    for decide in (approve, deny):
        with pytest.raises(InvalidInput, match=r"such as 3\.0"):
            decide(loops, call_id)


def test_a_question_is_no_approval_and_the_other_way_round(loops: Loops) -> None:
    requested(loops, [ASK, PAY], clarify=True)
    for decide in (approve, deny):
        with pytest.raises(InvalidInput, match=r"waiting: 0\.1"):
            decide(loops, "0.0")
    with pytest.raises(InvalidInput, match=r"open: 0\.0"):
        loops.reply("A001", "0.1")


def test_a_run_that_is_not_there_takes_no_decision(loops: Loops) -> None:
    requested(loops, [PAY])
    with pytest.raises(RunNotFound):
        approve_call(loops.store, "no-such-run", "0.0")
    with pytest.raises(RunNotFound):
        deny_call(loops.store, "no-such-run", "0.0", "no")


def test_a_decision_on_a_run_that_is_gone_brings_no_key_back(store: RunStore) -> None:
    assert store.decide_call("run-gone", 0, 0, Decided(approved=True), digest="d") == (
        Outcome.STALE,
        None,
    )
    assert list(store.redis.scan_iter("celeriac:run-gone*")) == []


# --- rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "waits"),
    [
        (lambda arguments, _: arguments["cents"] > 6, ["0.1"]),
        (lambda _, principal: principal is None, ["0.0", "0.1"]),
        (lambda arguments, _: arguments["missing"], ["0.0", "0.1"]),
        (lambda _, __: None, ["0.0", "0.1"]),
        (lambda _, __: False, []),
        (lambda arguments, _: arguments["note"] == "", ["0.0", "0.1"]),
    ],
    ids=["on the amount", "on the principal", "raises", "forgets to answer", "never", "default"],
)
def test_a_rule_says_which_calls_need_an_approval_and_in_doubt_all_do(
    loops: Loops, rule: Any, waits: list[str]
) -> None:
    @tool(approval=rule)
    def pay(cents: int, note: str = "") -> str:
        """Pay money."""
        return f"paid {cents}"

    requested(loops, [PAY, PAY_MORE], tools=[pay])
    assert waiting(loops) == waits


def test_a_rule_that_fails_shows_no_argument_in_the_log(
    loops: Loops, caplog: pytest.LogCaptureFixture
) -> None:
    def rule(arguments: dict[str, Any], _: Principal | None) -> bool:
        raise ValueError(f"bad {arguments}")

    @tool(approval=rule)
    def pay(cents: int) -> str:
        """Pay money."""
        return f"paid {cents}"

    requested(loops, [("pay", {"cents": 424242})], tools=[pay])
    assert "ValueError" in caplog.text
    assert "424242" not in caplog.text


async def _async_rule(_: Any, __: Any) -> bool:
    return False


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"approval": "yes"}, "tool pay: approval"),
        ({"approval": lambda: True}, "arguments, principal"),
        ({"approval": _async_rule}, "async"),
        ({"approval_timeout": 5}, "needs approval="),
        ({"approval": True, "approval_timeout": 0}, "approval_timeout"),
        ({"requires": "admin"}, "requires"),
        ({"requires": [1]}, "requires"),
    ],
)
def test_an_option_that_means_nothing_is_refused(options: dict[str, Any], named: str) -> None:
    def pay(cents: int) -> str:
        """Pay money."""
        return f"paid {cents}"

    with pytest.raises(ToolDefinitionError, match=named) as caught:
        tool(**options)(pay)
    assert caught.value.code == "invalid_option"


# --- time, and ends ----------------------------------------------------------------------------


@tool(approval=True, approval_timeout=100)
def pay_soon(cents: int) -> str:
    """Pay money."""
    return f"paid {cents}"


SOON = ("pay_soon", {"cents": 5})


def due(loops: Loops) -> int:
    score = loops.store.redis.zscore(redis_keys.DUE, RUN)
    return int(float(score))  # type: ignore[arg-type]


def run_out(loops: Loops, index: int = 0) -> None:
    """The time to decide on this call is over."""
    loops.store.redis.hset(redis_keys.calls(RUN), f"{index}.decide_by", 1)


def test_a_run_that_waits_is_due_when_somebody_must_have_decided(loops: Loops) -> None:
    loop = requested(loops, [PAY, SOON], tools=[pay, pay_soon])
    assert loop.recover(RUN) == Skip(RUN, Outcome.WAIT)
    shown = loops.store.read_approvals(RUN)[1]
    assert shown.decide_by is not None
    assert due(loops) == round(shown.decide_by * 1000) < loops.record.deadline
    assert 99_000 < due(loops) - loops.record.created < 130_000


def test_without_a_time_to_decide_it_is_due_at_its_deadline(loops: Loops) -> None:
    loop = requested(loops, [PAY])
    assert loop.recover(RUN) == Skip(RUN, Outcome.WAIT)
    assert due(loops) == loops.record.deadline


def test_recovery_denies_what_nobody_decided_in_time(loops: Loops) -> None:
    loop = requested(loops, [SOON, PAY], "done", tools=[pay, pay_soon])
    run_out(loops)
    assert loop.recover(RUN) == Skip(RUN, Outcome.WAIT)
    assert waiting(loops) == ["0.1"]
    [event] = loops.events("approval.decided")
    assert event.data == {"approved": False, "reason": "TIMEOUT"}
    drive(loop, approve(loops, "0.1"))
    assert "nobody decided in time" in loops.contents()[0]
    assert '"type":"DENIED"' in loops.contents()[0]


def test_recovery_opens_the_next_step_where_that_was_the_last_call(loops: Loops) -> None:
    loop = requested(loops, [SOON, LOOK], "done", tools=[look, pay_soon])
    loop.call_tool(RUN, 0, 1)
    run_out(loops)
    assert loop.recover(RUN) == NextStep(RUN, 1)
    assert loop.recover(RUN) == Skip(RUN, Outcome.WAIT), "a second worker finds nothing to do"
    assert drive(loop, NextStep(RUN, 1)) == Finish(RUN, StopReason.COMPLETED)


def test_recovery_finds_lost_hints_beside_what_was_not_decided(loops: Loops) -> None:
    loop = requested(loops, [SOON, LOOK], "done", tools=[look, pay_soon])
    run_out(loops)
    loops.store.redis.hset(redis_keys.calls(RUN), "1.hinted", 1)
    assert loop.recover(RUN) == CallTools(RUN, 0, (1,))


def test_an_approval_after_the_time_to_decide_is_refused(loops: Loops) -> None:
    loop = requested(loops, [SOON], "done", tools=[pay_soon])
    run_out(loops)
    with pytest.raises(AlreadyDecided, match=r"time to decide on call 0\.0 .* is over"):
        approve(loops)
    loop.recover(RUN)
    for decide in (approve, deny):
        with pytest.raises(AlreadyDecided, match="nobody decided in time"):
            decide(loops)


def test_the_hint_of_an_approved_call_that_got_lost_is_found(loops: Loops) -> None:
    loop = requested(loops, [PAY], "done")
    assert loop.recover(RUN) == Skip(RUN, Outcome.WAIT)
    approve(loops)
    assert due(loops) < loops.record.deadline - 100_000
    loops.store.redis.hset(redis_keys.calls(RUN), "0.hinted", 1)
    assert drive(loop, loop.recover(RUN)) == Finish(RUN, StopReason.COMPLETED)


def test_an_approval_puts_off_no_look_that_is_due_sooner(loops: Loops) -> None:
    requested(loops, [PAY])
    loops.store.redis.zadd(redis_keys.DUE, {RUN: 1})
    approve(loops)
    assert due(loops) == 1


def test_a_result_that_no_attempt_brings_is_taken_only_from_a_call_that_waits_for_it(
    loops: Loops,
) -> None:
    loop = requested(loops, [LOOK, PAY, ASK], "done", clarify=True)
    for index, state in ((0, "asked"), (0, "approval"), (1, "asked"), (2, "approval")):
        result = denial(f"0.{index}", "x", "no")
        outcome = loops.store.record_result(RUN, 0, index, result, waits=state)
        assert outcome == (Outcome.FENCED, None)
    drive(loop, CallTools(RUN, 0, (0,)))
    drive(loop, approve(loops, "0.1"))
    drive(loop, loops.reply("A001"))
    assert loops.contents() == ["seen", "paid 5", "A001"]


def test_after_a_cancel_nobody_decides_any_more(loops: Loops) -> None:
    requested(loops, [PAY])
    cancel_run(loops.store, RUN, "enough")
    assert loops.contents() == [CLOSER]
    assert waiting(loops) == []
    trace = loops.store.read_trace(RUN)
    for decide in (approve, deny):
        with pytest.raises(RunFinished, match="already ended CANCELLED; nothing was changed"):
            decide(loops)
    assert loops.store.read_trace(RUN) == trace, "what nobody took is no late truth"
    assert loops.events("approval.decided") == []


def test_a_call_that_was_approved_is_still_cancelled_before_it_starts(loops: Loops) -> None:
    loop = requested(loops, [PAY])
    hint = approve(loops)
    cancel_run(loops.store, RUN, "enough")
    assert drive(loop, hint) == Skip(RUN, Outcome.CANCELLED)
    assert loops.contents() == [CLOSER]


def test_after_the_deadline_nobody_approves_any_more(loops: Loops) -> None:
    loop = requested(loops, [PAY])
    loops.store.redis.hset(redis_keys.run(RUN), "deadline", 1)
    with pytest.raises(AlreadyDecided, match="is over"):
        approve(loops)
    assert loop.recover(RUN) == Finish(RUN, StopReason.TIMEOUT)
    for decide in (approve, deny):
        with pytest.raises(RunFinished, match="already ended TIMEOUT"):
            decide(loops)
    assert loops.contents() == [CLOSER]


def test_a_run_that_nobody_decided_on_is_resumed_and_may_ask_again(loops: Loops) -> None:
    loop = requested(loops, [PAY], [PAY], "done")
    loops.store.redis.hset(redis_keys.run(RUN), "deadline", 1)
    loop.recover(RUN)
    assert loops.store.resume_run(loops.record, Limits()) is Outcome.OK
    loop.advance(RUN, 1)
    assert waiting(loops) == ["1.0"]
    assert drive(loop, approve(loops, "1.0")) == Finish(RUN, StopReason.COMPLETED)
    assert loops.contents() == [CLOSER, "paid 5"]


def test_a_final_tool_gives_its_answer_once_it_is_approved(loops: Loops) -> None:
    @tool(final=True, approval=True)
    def publish(text: str) -> str:
        """Publish the answer."""
        return text

    call = ("publish", {"text": "42"})
    loop = requested(loops, [call], tools=[publish], limits=Limits(max_steps=1))
    drive(loop, approve(loops))
    assert (loops.result.ok, loops.result.answer) == (True, "42")


# --- in a user's test --------------------------------------------------------------------------


def test_run_agent_asks_the_test_for_each_approval() -> None:
    seen: list[Approval] = []

    def decide(call: Approval) -> bool | str:
        seen.append(call)
        return len(seen) == 1 or "once is enough"

    agent = agent_of([PAY, LOOK, PAY_MORE], "done")
    result = run_agent(agent, "go", approve=decide)

    assert result.ok
    assert [each.arguments for each in seen] == [{"cents": 5}, {"cents": 7}]
    model: Any = agent.model
    told = [each["content"] for each in model.requests[-1].messages if each["role"] == "tool"]
    assert told[:2] == ["paid 5", "seen"]
    assert "once is enough" in told[2]


@pytest.mark.parametrize("answer", [False, None, 0])
def test_run_agent_approves_only_where_the_test_says_true(answer: Any) -> None:
    agent = agent_of([PAY], "done")
    assert run_agent(agent, "go", approve=lambda _: answer).ok
    model: Any = agent.model
    assert "DENIED" in model.requests[-1].messages[-1]["content"]


def test_run_agent_says_what_to_do_where_nobody_decides() -> None:
    with pytest.raises(CeleriacError, match=r"call 0\.0 \(pay\).*approve=lambda"):
        run_agent(agent_of([PAY]), "go")


# --- the invariants ----------------------------------------------------------------------------


def test_a_run_that_does_not_say_that_it_waits_breaks_a_rule(loops: Loops) -> None:
    requested(loops, [PAY])
    assert check_run(loops.store, RUN) == []
    loops.store.redis.hset(redis_keys.run(RUN), "status", "running")
    assert check_run(loops.store, RUN) == [
        "it is running, with 1 calls for a person and 0 that move"
    ]
    loops.store.redis.hset(redis_keys.run(RUN), "status", "waiting")


def test_an_approval_that_is_forgotten_breaks_a_rule(loops: Loops) -> None:
    loop = requested(loops, [PAY], "done")
    drive(loop, deny(loops))
    store, events = loops.store, redis_keys.events(RUN)
    [finished] = loops.events("call.finished")
    store.redis.xdel(events, finished.id)
    assert check_run(store, RUN) == ["call 0.0 has no result, though its step is over"]
    store.redis.xdel(events, loops.events("approval.requested")[0].id)
