"""The loop on a store, with a scripted model: what comes next, and what a run has become."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic_core import core_schema

from conftest import MakeStore
from runner import (
    Agent,
    AgentError,
    Draft,
    Evidence,
    Limits,
    ModelError,
    Result,
    Retry,
    ToolDefinitionError,
    ToolError,
    background,
    tool,
)
from runner import keys as redis_keys
from runner.agents import Agents
from runner.context import goal_message
from runner.loop import (
    CLOSER,
    MAX_PASSES,
    CallTools,
    Finish,
    Loop,
    Next,
    NextStep,
    Skip,
    Wait,
    cancel_run,
)
from runner.models import (
    Final,
    FinalResult,
    ModelReply,
    ModelRequest,
    ProposedCall,
    RunErrorType,
    RunStatus,
    StopReason,
    ToolCalls,
    Usage,
)
from runner.store import BegunCall, Outcome, RunStore
from runner.tools import Context
from support.loops import RUN, check_requests, close_loops, drive
from support.replays import check_replay

pytestmark = pytest.mark.usefixtures("no_leaked_keys")

USAGE = Usage(requests=1, prompt_tokens=10, completion_tokens=5, total_tokens=15)
PROMPT = 1.0
"""Seconds within which a cancel has to be through; no test waits for it to pass."""

Reply = ModelReply | Exception


class Script:
    """Answers with the given replies in order, and keeps what it was asked."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = deque(replies)
        self.requests: list[ModelRequest] = []

    async def respond(self, request: ModelRequest) -> ModelReply:
        self.requests.append(request)
        reply = self.replies.popleft()
        if isinstance(reply, Exception):
            raise reply
        return reply


class Silent:
    """Never answers; says when it was asked and when it was let go."""

    def __init__(self) -> None:
        self.asked, self.let_go = threading.Event(), threading.Event()

    async def respond(self, request: ModelRequest) -> ModelReply:
        self.asked.set()
        try:
            await asyncio.sleep(3)
        finally:
            self.let_go.set()
        raise ModelError("nobody let go of this call")


def final(text: str = "done") -> Final:
    return Final(text, USAGE, raw=json.dumps({"text": text}))


def calls(*proposed: tuple[str, str]) -> ToolCalls:
    made = tuple(ProposedCall(f"c{n}", *each) for n, each in enumerate(proposed))
    return ToolCalls(made, text=None, usage=USAGE, raw=json.dumps({"calls": len(made)}))


ECHO = ("echo", '{"text":"a"}')

started: list[str] = []
"""What the tools of these tests have done, in order."""

entered = threading.Event()


@pytest.fixture(autouse=True)
def _forget() -> None:
    started.clear()
    entered.clear()


@tool(idempotent=True)
def echo(text: str) -> str:
    """Say it again."""
    started.append(text)
    return text


@tool(timeout=0.2)
def hang() -> str:
    """Never end."""
    started.append("hang")
    entered.set()
    time.sleep(5)
    return "late"


@tool(timeout=0.2, idempotent=True, attempts=2)
async def hang_safely() -> str:
    """Never end, without an effect."""
    started.append("hang_safely")
    await asyncio.sleep(60)
    return "late"


@tool
def long() -> str:
    """Run for long."""
    entered.set()
    time.sleep(5)
    return "late"


@tool
def fail(fatal: bool) -> str:
    """Fail on purpose."""
    raise ToolError("the till is closed", type="CLOSED", fatal=fatal)


@tool
def crash() -> str:
    """Fail by mistake."""
    raise KeyError("a secret")


@tool
def inspect_context(ctx: Context) -> dict[str, Any]:
    """Tell what a tool may know."""
    ctx.progress(1, float("nan"), "half\ud800")
    return {"key": ctx.idempotency_key, "call": ctx.call_id, "metadata": dict(ctx.metadata)}


AGENT = Agent(
    name="a",
    instructions="Be brief.",
    tools=[echo, hang, hang_safely, long, fail, crash, inspect_context],
    model_retry=Retry(initial_delay=0, max_attempts=3),
)

Start = Callable[..., Loop]


@pytest.fixture
def start(store: RunStore, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Makes a loop with a run of this agent, whose model has this script."""
    loops: list[Loop] = []

    def make(
        *replies: Reply,
        model: Any = None,
        on: RunStore | None = None,
        limits: Limits | None = None,
        **changes: Any,
    ) -> Loop:
        used = on or store
        agent = replace(AGENT, model=model or Script(*replies), **changes)
        loop = Loop(used, Agents([agent]), settings=used.settings)
        loops.append(loop)
        used.create_run(
            run_id=RUN,
            agent="a",
            messages=[goal_message("go")],
            limits=limits or agent.limits,
            metadata={"ticket": 9007199254740993},
        )
        return loop

    yield make
    close_loops(store, loops)
    if request.node.get_closest_marker("no_replay") is None:
        for loop in loops[:1]:
            check_replay(loop.store, RUN, loop.agents["a"])


def script_of(loop: Loop) -> Script:
    model = loop.agents["a"].model
    assert isinstance(model, Script)
    return model


def result_of(loop: Loop) -> FinalResult:
    found = loop.store.read_result(RUN)
    assert found is not None
    return found


def contents(loop: Loop) -> list[Any]:
    said = [each for each in loop.store.read_messages(RUN) if each["role"] == "tool"]
    return [
        json.loads(each["content"]) if "{" in each["content"] else each["content"] for each in said
    ]


def error_types(loop: Loop) -> list[str | None]:
    return [
        each["error"]["type"] if isinstance(each, dict) and "error" in each else None
        for each in contents(loop)
    ]


# --- answers and calls -------------------------------------------------------------------------


def test_an_answer_ends_the_run(start: Start) -> None:
    loop = start(final("Rome"))
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.COMPLETED)
    assert result_of(loop) == FinalResult(
        run_id=RUN, ok=True, stop_reason=StopReason.COMPLETED, answer="Rome", usage=USAGE, steps=1
    )
    assert loop.store.read_messages(RUN)[-1] == {"role": "assistant", "content": "Rome"}
    check_requests(loop.store, script_of(loop).requests)


def test_calls_run_and_their_results_reach_the_next_step_in_order(start: Start) -> None:
    loop = start(calls(ECHO, ("echo", '{"text":"b"}')), final())
    assert loop.advance(RUN, 0) == CallTools(RUN, 0, (0, 1))
    assert loop.call_tool(RUN, 0, 1) == Wait(RUN)
    assert loop.call_tool(RUN, 0, 0) == NextStep(RUN, 1)
    assert loop.advance(RUN, 1) == Finish(RUN, StopReason.COMPLETED)
    sent = script_of(loop).requests[1].messages
    assert [each["role"] for each in sent] == ["system", "user", "assistant", "tool", "tool"]
    assert [each["tool_call_id"] for each in sent[3:]] == ["c0", "c1"]
    assert [each["content"] for each in sent[3:]] == ["a", "b"]
    assert result_of(loop).usage.total_tokens == 30
    check_requests(loop.store, script_of(loop).requests)


def test_only_as_many_calls_are_hinted_as_may_run_at_once(start: Start) -> None:
    loop = start(calls(ECHO, ECHO, ECHO), limits=Limits(max_parallel_calls=1))
    assert loop.advance(RUN, 0) == CallTools(RUN, 0, (0,))
    assert loop.call_tool(RUN, 0, 0) == CallTools(RUN, 0, (1,))
    assert loop.call_tool(RUN, 0, 1) == CallTools(RUN, 0, (2,))
    assert loop.call_tool(RUN, 0, 2) == NextStep(RUN, 1)


def test_without_parallel_calls_they_run_one_after_another(start: Start) -> None:
    loop = start(calls(ECHO, ECHO), parallel_tool_calls=False)
    assert loop.advance(RUN, 0) == CallTools(RUN, 0, (0,))
    assert script_of(loop).requests[0].parallel_tool_calls is False


def test_an_unknown_tool_is_told_to_the_model_and_its_sibling_runs(start: Start) -> None:
    loop = start(calls(("nope", "{}"), ECHO), final())
    assert loop.advance(RUN, 0) == CallTools(RUN, 0, (1,))
    drive(loop, CallTools(RUN, 0, (1,)))
    assert error_types(loop) == ["UNKNOWN_TOOL", None]
    assert started == ["a"]
    assert result_of(loop).ok


@pytest.mark.parametrize("arguments", ["{}", '{"text":7}', '{"text":"a","more":1}', "[]"])
def test_invalid_arguments_never_reach_a_handler(start: Start, arguments: str) -> None:
    loop = start(calls(("echo", arguments)), final())
    drive(loop)
    assert error_types(loop) == ["INVALID_ARGUMENT"]
    assert started == []


def test_a_turn_whose_calls_were_all_refused_opens_the_next_step_at_once(start: Start) -> None:
    loop = start(calls(("nope", "{}"), ("echo", "{}")), final())
    assert loop.advance(RUN, 0) == NextStep(RUN, 1)
    assert loop.advance(RUN, 1) == Finish(RUN, StopReason.COMPLETED)
    assert error_types(loop) == ["UNKNOWN_TOOL", "INVALID_ARGUMENT"]
    check_requests(loop.store, script_of(loop).requests)
    [first, _] = loop.store.read_trace(RUN)
    assert [each["ok"] for each in first["results"]] == [False, False]


def test_a_tools_exception_is_a_result_without_its_text(start: Start) -> None:
    loop = start(calls(("crash", "{}"), ("fail", '{"fatal":false}')), final())
    drive(loop)
    assert error_types(loop) == ["TOOL_ERROR", "CLOSED"]
    crashed, failed = contents(loop)
    assert "KeyError" in crashed["error"]["message"]
    assert "a secret" not in json.dumps(loop.store.read_trace(RUN))
    assert failed["error"]["message"] == "the till is closed"


def test_a_fatal_tool_error_ends_the_run_and_closes_the_block(start: Start) -> None:
    loop = start(calls(("fail", '{"fatal":true}'), ECHO))
    loop.advance(RUN, 0)
    assert loop.call_tool(RUN, 0, 0) == Finish(RUN, StopReason.ERROR)
    error = result_of(loop).error
    assert error is not None
    assert (error.type, error.message) == (RunErrorType.TOOL_ERROR, "the till is closed")
    assert error_types(loop) == ["CLOSED", "CANCELLED"]
    assert loop.call_tool(RUN, 0, 1) == Skip(RUN, Outcome.STALE)
    assert started == []


def test_a_tool_knows_its_call_and_tells_its_progress(start: Start) -> None:
    loop = start(calls(("inspect_context", "{}")), final())
    drive(loop)
    assert contents(loop) == [
        {"key": f"{RUN}.0.0", "call": "0.0", "metadata": {"ticket": 9007199254740993}}
    ]
    [progress] = [e for e in loop.store.read_events(RUN, "0") if e.type == "call.progress"]
    assert progress.call == "0.0"
    assert progress.data == {"done": 1, "total": None, "note": "half\ufffd"}


# --- hints that come twice, late or for nobody -------------------------------------------------


def test_a_hint_for_what_is_done_or_held_is_skipped(start: Start) -> None:
    loop = start(calls(ECHO, ECHO), final())
    loop.advance(RUN, 0)
    assert loop.advance(RUN, 0) == Skip(RUN, Outcome.STALE)
    assert loop.advance(RUN, 1) == Skip(RUN, Outcome.STALE)
    loop.call_tool(RUN, 0, 0)
    assert loop.call_tool(RUN, 0, 0) == Skip(RUN, Outcome.DUPLICATE)
    drive(loop, CallTools(RUN, 0, (1,)))
    assert loop.call_tool(RUN, 0, 1) == Skip(RUN, Outcome.STALE)
    assert loop.advance(RUN, 1) == Skip(RUN, Outcome.STALE)
    assert started == ["a", "a"]
    assert loop.advance("no-such-run", 0) == Skip("no-such-run", Outcome.STALE)


def test_a_call_that_is_not_idempotent_is_not_run_again_after_a_death(
    start: Start, make_store: MakeStore
) -> None:
    loop = start(calls(("hang", "{}")), final())
    loop.advance(RUN, 0)
    make_store(lease=0.0005, renew_every=0.0001).begin_call(RUN, 0, 0)  # and dies
    assert loop.call_tool(RUN, 0, 0) == NextStep(RUN, 1)
    assert error_types(loop) == ["OUTCOME_UNKNOWN"]
    assert started == []


def test_three_deaths_in_a_step_end_the_run_as_poisoned(
    start: Start, make_store: MakeStore
) -> None:
    loop = start()
    dying = make_store(lease=0.0005, renew_every=0.0001)
    for _ in range(3):
        dying.begin_step(RUN, 0)
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.ERROR)
    error = result_of(loop).error
    assert error is not None
    assert error.type == RunErrorType.POISONED
    assert "3 attempts of step 0" in error.message


# --- limits ------------------------------------------------------------------------------------


def test_an_answer_on_the_last_step_counts(start: Start) -> None:
    loop = start(calls(ECHO), final(), limits=Limits(max_steps=2))
    assert drive(loop) == Finish(RUN, StopReason.COMPLETED)
    assert result_of(loop).steps == 2


def test_the_calls_of_the_last_step_do_not_run(start: Start) -> None:
    loop = start(calls(ECHO), calls(ECHO), limits=Limits(max_steps=2))
    assert drive(loop) == Finish(RUN, StopReason.MAX_STEPS)
    ended = result_of(loop)
    assert (ended.ok, ended.limit, ended.steps, started) == (False, "max_steps", 2, ["a"])
    assert ended.error is not None
    assert "max_steps=2" in ended.error.message
    roles = [each["role"] for each in loop.store.read_messages(RUN)]
    assert roles == ["user", "assistant", "tool"]
    check_requests(loop.store, script_of(loop).requests)


def test_a_turn_may_use_up_the_tool_calls_and_the_next_one_ends_the_run(start: Start) -> None:
    loop = start(calls(ECHO, ECHO), calls(ECHO), limits=Limits(max_tool_calls=1))
    assert drive(loop) == Finish(RUN, StopReason.BUDGET_EXHAUSTED)
    assert error_types(loop) == [None, "CALL_LIMIT"]
    assert (result_of(loop).limit, started) == ("max_tool_calls", ["a"])


def test_an_answer_after_the_last_tool_call_counts(start: Start) -> None:
    loop = start(calls(ECHO), final(), limits=Limits(max_tool_calls=1))
    assert drive(loop) == Finish(RUN, StopReason.COMPLETED)


def test_a_run_that_may_make_no_tool_call_makes_none(start: Start) -> None:
    loop = start(calls(ECHO), final(), limits=Limits(max_tool_calls=0))
    assert drive(loop) == Finish(RUN, StopReason.COMPLETED)
    assert (error_types(loop), started) == (["CALL_LIMIT"], [])


def test_too_many_invalid_calls_end_the_run(start: Start) -> None:
    wrong = calls(("nope", "{}"), ("echo", "{}"))
    loop = start(wrong, wrong, wrong, limits=Limits(max_invalid_calls=4))
    assert drive(loop) == Finish(RUN, StopReason.REPEATED_ERROR)
    assert (result_of(loop).limit, result_of(loop).steps) == ("max_invalid_calls", 3)


def test_the_token_budget_ends_the_run_before_the_next_request(start: Start) -> None:
    loop = start(calls(ECHO), limits=Limits(max_tokens=15))
    assert drive(loop) == Finish(RUN, StopReason.BUDGET_EXHAUSTED)
    assert result_of(loop).limit == "max_tokens"
    assert len(script_of(loop).requests) == 1


@pytest.mark.parametrize("where", ["step", "call", "recovery"])
def test_the_deadline_ends_a_run_wherever_it_is_looked_at(start: Start, where: str) -> None:
    loop = start(calls(ECHO))
    if where != "step":
        loop.advance(RUN, 0)
    loop.store.redis.hset(redis_keys.run(RUN), "deadline", 1)
    looks: dict[str, Callable[[], Next]] = {
        "step": lambda: loop.advance(RUN, 0),
        "call": lambda: loop.call_tool(RUN, 0, 0),
        "recovery": lambda: loop.recover(RUN),
    }
    assert looks[where]() == Finish(RUN, StopReason.TIMEOUT)
    ended = result_of(loop)
    assert (ended.limit, ended.ok, started) == ("timeout", False, [])
    assert error_types(loop) == [] if where == "step" else ["CANCELLED"]


def test_the_deadline_ends_a_model_call_that_hangs(start: Start, make_store: MakeStore) -> None:
    on = make_store(lease=15, renew_every=0.05)
    loop = start(model=Silent(), on=on, limits=Limits(timeout=0.2))
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.TIMEOUT)


@pytest.mark.parametrize("meanwhile", ["resumed", "deleted"])
@pytest.mark.no_replay("the run goes on, or is gone")
def test_a_call_without_time_leaves_a_run_alone_that_was_ended_before(
    start: Start, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    loop = start(calls(ECHO))
    store = loop.store
    loop.advance(RUN, 0)
    store.redis.hset(redis_keys.run(RUN), "deadline", 1)
    begin_call = store.begin_call

    def begin_as_it_ends(*args: Any, **options: Any) -> BegunCall | Outcome:
        begun = begin_call(*args, **options)
        assert loop.recover(RUN) == Finish(RUN, StopReason.TIMEOUT)
        if meanwhile == "deleted":
            assert store.delete_run(RUN) is Outcome.OK
        else:
            assert store.resume_run(store.read_run(RUN), Limits(timeout=600)) is Outcome.OK
        return begun

    monkeypatch.setattr(store, "begin_call", begin_as_it_ends)
    coming = loop.call_tool(RUN, 0, 0)
    if meanwhile == "deleted":
        assert coming == Skip(RUN, Outcome.STALE)
    else:
        assert coming == Skip(RUN, Outcome.FENCED)
        assert store.read_run(RUN).stop_reason is None


def test_a_request_may_take_no_longer_than_the_run(start: Start) -> None:
    loop = start(final(), limits=Limits(timeout=30))
    loop.advance(RUN, 0)
    assert 29 < script_of(loop).requests[0].timeout <= 30


# --- tools that hang ---------------------------------------------------------------------------


def test_a_tool_that_takes_too_long_is_ended_and_says_so(start: Start) -> None:
    loop = start(calls(("hang", "{}")), final())
    begun = time.monotonic()
    assert drive(loop) == Finish(RUN, StopReason.COMPLETED)
    assert time.monotonic() - begun < 5
    assert (error_types(loop), started) == (["TIMEOUT"], ["hang"])


def test_only_an_idempotent_tool_is_tried_again_after_a_timeout(
    start: Start, make_store: MakeStore
) -> None:
    loop = start(calls(("hang_safely", "{}")), final(), on=make_store(hint_grace=0.0005))
    loop.advance(RUN, 0)
    assert loop.call_tool(RUN, 0, 0) == Wait(RUN)
    assert loop.call_tool(RUN, 0, 0) == Skip(RUN, Outcome.BUSY)
    loop.store.redis.hset(redis_keys.calls(RUN), "0.not_before", 1)  # the wait is over
    assert loop.recover(RUN) == CallTools(RUN, 0, (0,))
    assert loop.call_tool(RUN, 0, 0) == NextStep(RUN, 1)
    assert (error_types(loop), started) == (["TIMEOUT"], ["hang_safely"] * 2)
    kinds = [each["kind"] for each in loop.store.read_trace(RUN)]
    assert kinds == ["model", "retried_result", "result"]
    assert loop.store.read_trace(RUN)[-1]["result"]["attempt"] == 2


def test_a_call_is_started_as_often_as_the_worker_that_opened_it_said(start: Start) -> None:
    loop = start(calls(("hang_safely", "{}")), final())
    loop.advance(RUN, 0)
    loop.store.redis.hset(redis_keys.calls(RUN), "0.starts", 1)  # its tool was another there
    assert loop.call_tool(RUN, 0, 0) == NextStep(RUN, 1)
    assert (error_types(loop), started) == (["TIMEOUT"], ["hang_safely"])


# --- a model that fails ------------------------------------------------------------------------


def overloaded(**options: Any) -> ModelError:
    options = {"type": RunErrorType.RATE_LIMITED, "retryable": True, **options}
    return ModelError("too many requests", **options)


def unusable(usage: Usage | None = USAGE) -> ModelError:
    return ModelError(
        "no JSON",
        type=RunErrorType.MODEL_BAD_RESPONSE,
        bad_response=True,
        retryable=True,
        usage=usage,
        raw="<html>",
    )


def test_an_error_that_may_pass_parks_the_run_and_recovery_resumes_it(
    start: Start, make_store: MakeStore
) -> None:
    loop = start(overloaded(), final(), on=make_store(hint_grace=0.0005))
    assert loop.advance(RUN, 0) == Wait(RUN)
    assert loop.store.read_run(RUN).status is RunStatus.WAITING
    assert loop.recover(RUN) == NextStep(RUN, 0)
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.COMPLETED)
    assert result_of(loop).usage.requests == 2
    assert result_of(loop).usage.known is False
    assert [each.type for each in loop.store.read_events(RUN, "0")] == [
        "run.created",
        "step.started",
        "run.waiting",
        "step.started",
        "model.answered",
        "run.finished",
    ]
    check_requests(loop.store, script_of(loop).requests)


def test_a_parked_run_waits_as_long_as_the_server_asks(start: Start) -> None:
    loop = start(overloaded(retry_after=30))
    assert loop.advance(RUN, 0) == Wait(RUN)
    assert loop.advance(RUN, 0) == Skip(RUN, Outcome.BUSY)
    assert loop.recover(RUN) == Skip(RUN, Outcome.WAIT)
    score = loop.store.redis.zscore(redis_keys.DUE, RUN)
    assert score is not None
    assert float(score) / 1000 > time.time() + 25


def test_attempts_end_when_they_are_used_up(start: Start) -> None:
    loop = start(overloaded(), overloaded(), overloaded())
    assert [loop.advance(RUN, 0) for _ in range(2)] == [Wait(RUN)] * 2
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.ERROR)
    error = result_of(loop).error
    assert error is not None
    assert error.type == RunErrorType.RATE_LIMITED
    assert len(loop.store.read_trace(RUN)) == 3


def test_a_wait_beyond_the_deadline_is_not_begun(start: Start) -> None:
    loop = start(overloaded(retry_after=60), limits=Limits(timeout=30))
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.ERROR)


@pytest.mark.parametrize("type", [RunErrorType.AUTH_ERROR, RunErrorType.CONTEXT_OVERFLOW])
def test_an_error_that_does_not_pass_ends_the_run_by_its_type(
    start: Start, type: RunErrorType
) -> None:
    loop = start(ModelError("no", type=type))
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.ERROR)
    ended = result_of(loop)
    assert ended.error is not None
    assert (ended.error.type, ended.steps, ended.usage.requests) == (type, 1, 1)
    [entry] = loop.store.read_trace(RUN)
    error = entry["exchanges"][0]["error"]
    assert (error["type"], error["message"], error["status"]) == (type, "no", None)
    check_requests(loop.store, script_of(loop).requests)


def test_a_response_that_cannot_be_used_is_asked_for_again_at_once(start: Start) -> None:
    loop = start(unusable(), unusable(), final(), response_retries=2)
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.COMPLETED)
    assert result_of(loop).usage == USAGE + USAGE + USAGE
    [entry] = loop.store.read_trace(RUN)
    assert [each["response"] for each in entry["exchanges"]][:2] == ["<html>"] * 2
    check_requests(loop.store, script_of(loop).requests)


def test_a_response_is_asked_for_again_so_often_and_no_oftener(start: Start) -> None:
    loop = start(unusable(), unusable(), final(), response_retries=1)
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.ERROR)
    error = result_of(loop).error
    assert error is not None
    assert error.type == RunErrorType.MODEL_BAD_RESPONSE
    assert len(script_of(loop).requests) == 2


def test_an_answer_of_the_wrong_type_goes_back_with_what_is_wrong(start: Start) -> None:
    loop = start(final("many"), final("[1, 2]"), output_type=list[int])
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.COMPLETED)
    assert result_of(loop).answer == [1, 2]
    told = script_of(loop).requests[1].messages[-2:]
    assert told[0] == {"role": "assistant", "content": "many"}
    assert "JSON schema" in told[1]["content"]
    assert [each["role"] for each in loop.store.read_messages(RUN)] == ["user", "assistant"]
    check_requests(loop.store, script_of(loop).requests)


def test_an_answer_that_stays_wrong_ends_the_run(start: Start) -> None:
    loop = start(*[final("many")] * 3, output_type=list[int], response_retries=2)
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.ERROR)
    ended = result_of(loop)
    assert ended.error is not None
    assert (ended.error.type, ended.answer) == (RunErrorType.INVALID_FINAL, None)
    assert ended.usage.requests == 3


# --- workers that can't honour a run -----------------------------------------------------------


@pytest.mark.no_replay("a replay has the agent")
def test_a_run_of_an_agent_that_the_worker_lacks_ends_with_a_clear_error(start: Start) -> None:
    loop = start()
    loop.store.redis.hset(redis_keys.run(RUN), "agent", "gone")
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.ERROR)
    error = result_of(loop).error
    assert error is not None
    assert (error.type, "gone" in error.message) == (RunErrorType.CONFIG_ERROR, True)


def test_a_call_whose_tool_a_worker_lacks_is_passed_on_a_few_times(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.loop.PASS_ON_DELAY", 0)
    loop = start(calls(ECHO))
    loop.advance(RUN, 0)
    other = Loop(loop.store, Agents(), settings=loop.settings)
    for _ in range(MAX_PASSES):
        assert other.call_tool(RUN, 0, 0) == Wait(RUN)
    assert other.call_tool(RUN, 0, 0) == NextStep(RUN, 1)
    assert error_types(loop) == ["UNKNOWN_TOOL"]
    other.close()


@pytest.mark.no_replay("its record can't be read here")
def test_a_run_of_a_newer_version_is_left_to_newer_workers(start: Start) -> None:
    loop = start()
    loop.store.redis.hset(redis_keys.run(RUN), "schema", 999)
    assert loop.advance(RUN, 0) == Skip(RUN, Outcome.NEWER)
    assert loop.store.redis.hget(redis_keys.run(RUN), "status") == "queued"


def test_a_run_without_limits_adopts_its_agents(start: Start) -> None:
    loop = start(calls(ECHO), limits=Limits(max_steps=9), tools=[echo])
    loop.store.redis.hdel(redis_keys.run(RUN), "limits", "max_steps", "max_tokens")
    agent = replace(loop.agents["a"], limits=Limits(max_steps=1))
    again = Loop(loop.store, Agents([agent]), settings=loop.settings)
    assert again.advance(RUN, 0) == Finish(RUN, StopReason.MAX_STEPS)
    again.close()


# --- cancel ------------------------------------------------------------------------------------


def test_a_cancel_ends_a_model_call_and_nothing_is_written_later(
    start: Start, make_store: MakeStore
) -> None:
    model = Silent()
    loop = start(model=model, on=make_store(lease=15, renew_every=0.1))
    got: list[Next] = []
    thread = threading.Thread(target=lambda: got.append(loop.advance(RUN, 0)), daemon=True)
    thread.start()
    assert model.asked.wait(5)
    assert cancel(loop, "enough") is Outcome.OK
    before = written(loop)
    thread.join(PROMPT)
    assert got == [Skip(RUN, Outcome.CANCELLED)]
    assert model.let_go.wait(PROMPT)
    assert written(loop) == before
    error = result_of(loop).error
    assert error is not None
    assert error.message == "enough"


def test_a_cancel_ends_a_tool_and_nothing_is_written_later(
    start: Start, make_store: MakeStore
) -> None:
    loop = start(calls(("long", "{}")), on=make_store(lease=15, renew_every=0.1))
    loop.advance(RUN, 0)
    cancelled: list[float] = []
    before: list[Any] = []

    def cancel_when_entered() -> None:
        entered.wait(5)
        cancel(loop, "enough")
        before.append(written(loop))
        cancelled.append(time.monotonic())

    thread = threading.Thread(target=cancel_when_entered)
    thread.start()
    assert loop.call_tool(RUN, 0, 0) == Skip(RUN, Outcome.CANCELLED)
    ended = time.monotonic()
    thread.join()
    assert ended - cancelled[0] < PROMPT
    assert [written(loop)] == before
    assert loop.store.read_messages(RUN)[-1]["content"] == CLOSER
    assert loop.advance(RUN, 0) == Skip(RUN, Outcome.CANCELLED)
    assert loop.call_tool(RUN, 0, 0) == Skip(RUN, Outcome.CANCELLED)


def test_a_tool_that_does_not_let_go_is_refused_when_it_ends_after_the_cancel(
    start: Start, make_store: MakeStore
) -> None:
    release, inside = threading.Event(), threading.Event()

    @tool
    def stubborn() -> str:
        """Ignore every interrupt: in a thread there is none for a plain function."""
        inside.set()
        release.wait(10)
        return "too late"

    loop = start(
        calls(("stubborn", "{}")), tools=[stubborn], on=make_store(lease=15, renew_every=0.1)
    )
    loop.advance(RUN, 0)
    got: list[Next] = []
    thread = threading.Thread(target=lambda: got.append(loop.call_tool(RUN, 0, 0)))
    thread.start()
    assert inside.wait(5)
    cancel(loop, "enough")
    messages, record = loop.store.read_messages(RUN), loop.store.read_run(RUN)
    release.set()
    thread.join(5)
    [skipped] = got
    assert isinstance(skipped, Skip)
    assert skipped.outcome in (Outcome.STALE, Outcome.CANCELLED)
    assert loop.store.read_messages(RUN) == messages
    assert replace(loop.store.read_run(RUN), now=0) == replace(record, now=0)


def test_a_finished_run_cannot_be_cancelled(start: Start) -> None:
    loop = start(final())
    loop.advance(RUN, 0)
    assert cancel(loop, "late") is Outcome.ALREADY
    assert result_of(loop).stop_reason is StopReason.COMPLETED


def cancel(loop: Loop, reason: str) -> Outcome:
    return cancel_run(loop.store, RUN, reason).outcome


def written(loop: Loop) -> Any:
    store = loop.store
    record = replace(store.read_run(RUN), now=0)
    return record, store.read_messages(RUN), store.read_events(RUN, "0"), store.read_trace(RUN)


# --- a process that stops ----------------------------------------------------------------------


@pytest.mark.no_replay("the other process' agent has another model")
def test_a_process_that_stops_hands_its_model_call_to_another(start: Start) -> None:
    model = Silent()
    loop = start(model=model)
    got: list[Next] = []
    thread = threading.Thread(target=lambda: got.append(loop.advance(RUN, 0)), daemon=True)
    thread.start()
    assert model.asked.wait(5)
    loop.release()
    thread.join(5)
    assert got == [NextStep(RUN, 0)]
    other = replace(loop.agents["a"], model=Script(final()))
    again = Loop(loop.store, Agents([other]), settings=loop.settings)
    assert again.advance(RUN, 0) == Finish(RUN, StopReason.COMPLETED)
    again.close()


def test_a_stop_that_comes_as_the_model_is_asked_is_not_missed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = start(model=Silent())
    submit = background.submit

    def submit_and_stop(coroutine: Any) -> Any:
        future = submit(coroutine)
        loop.release()  # by the thread that stops this process, before the call is noted
        return future

    monkeypatch.setattr(background, "submit", submit_and_stop)
    assert loop.advance(RUN, 0) == NextStep(RUN, 0)


def test_whatever_a_users_model_raises_ends_the_run_with_a_typed_error(start: Start) -> None:
    loop = start(ZeroDivisionError("sk-secret"))
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.ERROR)
    result = loop.store.read_result(RUN)
    assert result is not None
    assert result.error is not None
    assert result.error.type == "MODEL_BAD_RESPONSE"
    assert "sk-secret" not in result.model_dump_json()


def test_a_fault_in_what_is_the_agents_own_ends_the_run_and_its_cost_is_counted(
    start: Start,
) -> None:
    class Picky(list[int]):
        @classmethod
        def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
            schema = handler(list[int])
            return core_schema.no_info_after_validator_function(
                lambda value: value,
                schema,
                serialization=core_schema.plain_serializer_function_ser_schema(_fail_to_serialize),
            )

    loop = start(final("[1]"), output_type=Picky)

    assert isinstance(drive(loop), Finish)

    result = result_of(loop)
    assert (result.stop_reason, result.usage) == (StopReason.ERROR, USAGE)
    assert result.error is not None
    assert result.error.type == RunErrorType.CONFIG_ERROR
    assert "a secret" not in result.error.message


def _fail_to_serialize(value: Any) -> Any:
    raise KeyError("a secret")


@pytest.mark.parametrize("by", ["a step", "recovery"])
def test_a_run_first_taken_after_the_default_timeout_has_its_agents_own(
    start: Start, store: RunStore, by: str
) -> None:
    loop = start(final("in time"), limits=None)
    key = redis_keys.run(RUN)
    store.redis.hdel(key, "limits")
    store.redis.hincrby(key, "created", -700_000)
    store.redis.hincrby(key, "deadline", -700_000)
    loop.agents = Agents([replace(loop.agents["a"], limits=Limits(timeout=3600))])

    first = loop.recover(RUN) if by == "recovery" else loop.advance(RUN, 0)

    drive(loop, first)
    assert result_of(loop).answer == "in time"


# --- a model that is out, and the ones that stand in for it -------------------------------------


def with_spares(start: Start, first: Script, *spares: Script, **changes: Any) -> Loop:
    for number, each in enumerate((first, *spares)):
        each.name = f"m{number}"  # type: ignore[attr-defined]
    return start(model=first, fallback_models=spares, **changes)


def asked_models(loop: Loop) -> list[str]:
    trace = [each for each in loop.store.read_trace(RUN) if each["kind"] == "model"]
    return [made["request"]["model"] for each in trace for made in each["exchanges"]]


def gone(type: RunErrorType, status: int | None = None) -> ModelError:
    return ModelError("no", type=type, status=status)


def test_the_next_model_is_asked_when_the_attempts_with_the_first_are_used_up(
    start: Start,
) -> None:
    first, spare = Script(*[overloaded()] * 3), Script(calls(ECHO), final())
    loop = with_spares(start, first, spare)
    assert [loop.advance(RUN, 0) for _ in range(3)] == [Wait(RUN)] * 3
    record = loop.store.read_run(RUN)
    assert (record.model, record.model_attempts) == (1, 0)
    assert drive(loop) == Finish(RUN, StopReason.COMPLETED)
    assert asked_models(loop) == ["m0", "m0", "m0", "m1", "m1"]
    waits = [e.data for e in loop.store.read_events(RUN, "0") if e.type == "run.waiting"]
    assert [each.get("model") for each in waits] == [None, None, "m1"]
    assert waits[2] == {"reason": "RATE_LIMITED", "status": None, "delay": 0.0, "model": "m1"}
    check_requests(loop.store, [*first.requests, *spare.requests])


@pytest.mark.parametrize(
    ("type", "status"),
    [
        (RunErrorType.QUOTA_EXHAUSTED, 429),
        (RunErrorType.AUTH_ERROR, 401),
        (RunErrorType.CONFIG_ERROR, 404),
        (RunErrorType.MODEL_BAD_RESPONSE, None),
    ],
)
def test_a_model_that_will_not_come_back_is_replaced_at_once(
    start: Start, type: RunErrorType, status: int | None
) -> None:
    loop = with_spares(start, Script(gone(type, status)), Script(final("spare")))
    assert loop.advance(RUN, 0) == Wait(RUN)
    assert loop.recover(RUN) == NextStep(RUN, 0), "there is nothing to wait for"
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.COMPLETED)
    assert (result_of(loop).answer, asked_models(loop)) == ("spare", ["m0", "m1"])


@pytest.mark.parametrize(
    ("type", "status"),
    [
        (RunErrorType.REFUSED, 200),
        (RunErrorType.CONTENT_FILTERED, 400),
        (RunErrorType.CONTEXT_OVERFLOW, 400),
        (RunErrorType.CONFIG_ERROR, 400),
        (RunErrorType.OUTPUT_TRUNCATED, 200),
    ],
)
def test_what_another_model_would_not_change_ends_the_run(
    start: Start, type: RunErrorType, status: int
) -> None:
    loop = with_spares(start, Script(gone(type, status)), Script(final()))
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.ERROR)
    error = result_of(loop).error
    assert error is not None
    assert (error.type, asked_models(loop)) == (type, ["m0"])


def test_a_model_that_only_answers_rubbish_is_replaced(start: Start) -> None:
    first, spare = Script(*[unusable()] * 3), Script(final())
    loop = with_spares(start, first, spare, response_retries=2)
    assert loop.advance(RUN, 0) == Wait(RUN)
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.COMPLETED)
    assert asked_models(loop) == ["m0", "m0", "m0", "m1"]
    check_requests(loop.store, [*first.requests, *spare.requests])


def test_an_answer_that_stays_wrong_is_no_outage(start: Start) -> None:
    loop = with_spares(start, Script(*[final("many")] * 3), Script(final("[1]")), output_type=list)
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.ERROR)
    assert asked_models(loop) == ["m0"] * 3


def test_the_last_model_ends_the_run_with_its_own_error(start: Start) -> None:
    out = gone(RunErrorType.QUOTA_EXHAUSTED, 429)
    loop = with_spares(start, Script(out), Script(out), Script(gone(RunErrorType.AUTH_ERROR, 401)))
    assert [loop.advance(RUN, 0) for _ in range(2)] == [Wait(RUN)] * 2
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.ERROR)
    error = result_of(loop).error
    assert error is not None
    assert error.type == RunErrorType.AUTH_ERROR
    assert asked_models(loop) == ["m0", "m1", "m2"]


def test_a_resumed_run_starts_with_its_first_model_again(start: Start) -> None:
    first = Script(gone(RunErrorType.AUTH_ERROR, 401), final("back"))
    loop = with_spares(start, first, Script(gone(RunErrorType.AUTH_ERROR, 401)))
    assert loop.advance(RUN, 0) == Wait(RUN)
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.ERROR)
    assert loop.store.resume_run(loop.store.read_run(RUN), Limits()) is Outcome.OK
    assert loop.store.read_run(RUN).model == 0
    assert loop.advance(RUN, 1) == Finish(RUN, StopReason.COMPLETED)
    assert result_of(loop).answer == "back"


def test_a_worker_that_knows_fewer_models_asks_the_last_that_it_knows(start: Start) -> None:
    loop = with_spares(start, Script(final("only")))
    loop.store.redis.hset(redis_keys.run(RUN), "model", 7)
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.COMPLETED)


def test_a_wait_beyond_the_deadline_is_no_reason_to_end_where_there_is_a_spare(
    start: Start,
) -> None:
    loop = with_spares(
        start, Script(overloaded(retry_after=60)), Script(final()), limits=Limits(timeout=30)
    )
    assert loop.advance(RUN, 0) == Wait(RUN)
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.COMPLETED)


# --- answers that are checked, and turns without anything to check ------------------------------


def test_two_unusable_turns_in_a_row_are_told_once(start: Start) -> None:
    loop = start(*[unusable()] * 4, final(), response_retries=4)
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.COMPLETED)
    lengths = [len(request.messages) for request in script_of(loop).requests]
    assert lengths == [2, 2, 3, 3, 3]
    nudge = script_of(loop).requests[2].messages[-1]
    assert nudge["role"] == "user"
    assert "Answer the user directly now" in nudge["content"]
    assert [each["role"] for each in loop.store.read_messages(RUN)] == ["user", "assistant"]
    check_requests(loop.store, script_of(loop).requests)


def test_unusable_turns_that_are_not_in_a_row_are_not_told(start: Start) -> None:
    loop = start(
        unusable(), final("many"), unusable(), final("[1]"), output_type=list, response_retries=3
    )
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.COMPLETED)
    told = [str(each) for each in script_of(loop).requests[-1].messages]
    assert not any("Answer the user directly now" in each for each in told)


def test_a_validator_sees_goal_results_and_evidence_and_sends_the_answer_back(
    start: Start,
) -> None:
    @tool
    def measure() -> Result[int]:
        """Measure something."""
        return Result(7, evidence=[Evidence(source="ruler", text="7 cm")])

    drafts: list[Draft] = []

    def names_the_number(draft: Draft) -> str | None:
        drafts.append(draft)
        return None if "7" in draft.text else "name the number"

    loop = start(
        calls(("measure", "{}"), ECHO),
        final("long"),
        final("7 cm"),
        tools=[measure, echo],
        validators=[names_the_number],
        evidence_required=True,
    )
    assert drive(loop) == Finish(RUN, StopReason.COMPLETED)
    assert result_of(loop).answer == "7 cm"
    assert [each.text for each in drafts] == ["long", "7 cm"]
    assert [each.goal for each in drafts] == ["go", "go"]
    assert [each.data for each in drafts[0].results] == [7, "a"]
    assert [(each.source, each.call_id) for each in drafts[0].evidence] == [("ruler", "0.0")]
    assert dict(drafts[0].metadata) == {"ticket": 9007199254740993}
    told = script_of(loop).requests[-1].messages[-1]["content"]
    assert told == "Your answer was not accepted: name the number"
    check_requests(loop.store, script_of(loop).requests)


@pytest.mark.parametrize(
    ("changes", "text", "check"),
    [
        ({"evidence_required": True}, "yes", "evidence_required"),
        ({"validators": [lambda draft: "no"]}, "yes", "validator <lambda>"),
        ({"output_type": list[int]}, '["no"]', "output_type (0: int_parsing)"),
        ({}, "Let me check the order...", "an announcement"),
    ],
    ids=["evidence", "validator", "type", "announcement"],
)
@pytest.mark.parametrize("retries", [0, 2])
def test_an_answer_that_never_passes_ends_the_run_and_its_error_names_the_check(
    start: Start, changes: dict[str, Any], text: str, check: str, retries: int
) -> None:
    loop = start(*[final(text)] * (retries + 1), response_retries=retries, **changes)
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.ERROR)
    ended = result_of(loop)
    assert ended.error is not None
    assert (ended.error.type, ended.answer) == (RunErrorType.INVALID_FINAL, None)
    assert ended.error.message.startswith(f"the final answer didn't pass its check: {check}")
    assert len(script_of(loop).requests) == retries + 1
    assert [each["role"] for each in loop.store.read_messages(RUN)] == ["user"]
    check_requests(loop.store, script_of(loop).requests)


def test_a_model_that_is_reminded_of_its_call_makes_it(start: Start) -> None:
    loop = start(final("Let me look that up."), calls(ECHO), final("a"))
    assert drive(loop) == Finish(RUN, StopReason.COMPLETED)
    assert started == ["a"]
    roles = [each["role"] for each in loop.store.read_messages(RUN)]
    assert roles == ["user", "assistant", "tool", "assistant"]
    check_requests(loop.store, script_of(loop).requests)


# --- a tool that gives the answer ----------------------------------------------------------------


@tool(final=True)
def submit(answer: str) -> dict[str, str]:
    """Give the answer."""
    started.append("submit")
    if answer == "bad":
        raise ToolError("not that one", type="WRONG")
    return {"answer": answer}


SUBMIT = ("submit", '{"answer":"42"}')
ANSWER = {"answer": "42"}


def start_final(start: Start, *replies: Reply, **changes: Any) -> Loop:
    return start(*replies, tools=[submit, *AGENT.tools], **changes)


def check_answered(loop: Loop) -> None:
    ended = result_of(loop)
    assert (ended.stop_reason, ended.ok, ended.answer) == (StopReason.COMPLETED, True, ANSWER)
    last = loop.store.read_messages(RUN)[-1]
    assert (last["role"], json.loads(last["content"])) == ("assistant", ANSWER)
    check_requests(loop.store, script_of(loop).requests)


def test_what_a_final_tool_returns_is_the_answer_and_no_model_is_asked_again(start: Start) -> None:
    loop = start_final(start, calls(SUBMIT))
    assert drive(loop) == Finish(RUN, StopReason.COMPLETED)
    check_answered(loop)
    assert (result_of(loop).steps, result_of(loop).usage) == (1, USAGE)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_the_siblings_of_a_final_call_run_and_may_fail(
    start: Start, order: tuple[int, ...]
) -> None:
    loop = start_final(start, calls(ECHO, SUBMIT, ("crash", "{}")))
    assert loop.advance(RUN, 0) == CallTools(RUN, 0, (0, 1, 2))
    answers = [loop.call_tool(RUN, 0, index) for index in order]
    assert answers == [Wait(RUN), Wait(RUN), NextStep(RUN, 1)]
    drive(loop, NextStep(RUN, 1))
    assert error_types(loop) == [None, None, "TOOL_ERROR"]
    assert sorted(started) == ["a", "submit"]
    check_answered(loop)


def test_a_sibling_that_is_fatal_ends_the_run_all_the_same(start: Start) -> None:
    loop = start_final(start, calls(SUBMIT, ("fail", '{"fatal":true}')))
    assert drive(loop) == Finish(RUN, StopReason.ERROR)
    assert result_of(loop).answer is None


def test_a_final_call_counts_on_the_last_step(start: Start) -> None:
    loop = start_final(start, calls(ECHO), calls(ECHO, SUBMIT), limits=Limits(max_steps=2))
    assert drive(loop) == Finish(RUN, StopReason.COMPLETED)
    check_answered(loop)


def test_a_final_call_counts_after_the_last_tool_call(start: Start) -> None:
    loop = start_final(start, calls(ECHO), calls(ECHO, SUBMIT), limits=Limits(max_tool_calls=1))
    assert drive(loop) == Finish(RUN, StopReason.COMPLETED)
    assert error_types(loop) == [None, "CALL_LIMIT", None]
    check_answered(loop)


def test_a_final_call_counts_after_the_last_token(start: Start) -> None:
    loop = start_final(start, calls(SUBMIT), limits=Limits(max_tokens=1))
    assert drive(loop) == Finish(RUN, StopReason.COMPLETED)
    check_answered(loop)


def test_a_final_call_that_fails_is_told_to_the_model(start: Start) -> None:
    loop = start_final(start, calls(("submit", '{"answer":"bad"}')), calls(SUBMIT))
    assert drive(loop) == Finish(RUN, StopReason.COMPLETED)
    assert error_types(loop) == ["WRONG", None]
    check_answered(loop)


def test_a_final_call_with_wrong_arguments_gives_no_answer(start: Start) -> None:
    wrong = calls(("submit", '{"answer":7}'))
    loop = start_final(start, wrong, calls(SUBMIT))
    assert loop.advance(RUN, 0) == NextStep(RUN, 1)
    drive(loop, NextStep(RUN, 1))
    check_answered(loop)


@pytest.mark.parametrize("arguments", ['{"answer":7}', '{"answer":"bad"}'])
def test_a_final_call_that_gives_no_answer_on_the_last_step_ends_the_run(
    start: Start, arguments: str
) -> None:
    loop = start_final(start, calls(("submit", arguments)), limits=Limits(max_steps=1))
    assert drive(loop) == Finish(RUN, StopReason.MAX_STEPS)
    assert result_of(loop).answer is None


def test_a_final_tool_that_returns_nothing_ends_the_run_without_an_answer(start: Start) -> None:
    @tool(final=True)
    def close() -> None:
        """Say that it is done."""

    loop = start(calls(("close", "{}")), tools=[close])
    assert drive(loop) == Finish(RUN, StopReason.COMPLETED)
    assert (result_of(loop).ok, result_of(loop).answer) == (True, None)


def test_of_two_answers_in_one_turn_the_first_call_counts(start: Start) -> None:
    loop = start_final(start, calls(SUBMIT, ("submit", '{"answer":"43"}')))
    loop.advance(RUN, 0)
    assert loop.call_tool(RUN, 0, 1) == Wait(RUN)
    drive(loop, loop.call_tool(RUN, 0, 0))
    check_answered(loop)


def test_an_answer_that_is_there_counts_past_the_deadline(start: Start) -> None:
    loop = start_final(start, calls(SUBMIT))
    loop.advance(RUN, 0)
    assert loop.call_tool(RUN, 0, 0) == NextStep(RUN, 1)
    loop.store.redis.hset(redis_keys.run(RUN), "deadline", 1)
    assert drive(loop, loop.recover(RUN)) == Finish(RUN, StopReason.COMPLETED)


@pytest.mark.parametrize(
    "changes",
    [{"validators": [lambda draft: "no"]}, {"evidence_required": True}, {"output_type": int}],
)
def test_a_check_that_a_final_tool_would_go_around_is_refused(
    start: Start, changes: dict[str, Any]
) -> None:
    with pytest.raises(AgentError, match="checked by the tool itself"):
        start_final(start, calls(SUBMIT), **changes)


# --- a tool that stands in for another, and one that is called too often -----------------------


def test_a_fallback_answers_once_its_tool_has_failed_often_enough(start: Start) -> None:
    def look_it_up(city: str) -> str:
        started.append(f"book {city}")
        return f"{city} is old"

    @tool(fallback=look_it_up, fallback_after=2, idempotent=True)
    def ask_server(city: str) -> str:
        """Ask about a city."""
        started.append(f"server {city}")
        raise ToolError("down", type="DOWN")

    turns = [calls(("ask_server", json.dumps({"city": city}))) for city in "abcd"]
    loop = start(*turns, final(), tools=[ask_server, echo])
    assert drive(loop) == Finish(RUN, StopReason.COMPLETED)
    assert started == ["server a", "server b", "book c", "book d"]
    assert error_types(loop) == ["DOWN", "DOWN", None, None]
    assert contents(loop)[2] == "c is old"
    assert loop.store.read_run(RUN).failed == {"ask_server": 2}
    check_requests(loop.store, script_of(loop).requests)


def test_what_a_fallback_returns_is_held_to_the_type_of_its_tool(start: Start) -> None:
    def guess(city: str) -> Any:
        return "many"

    @tool(fallback=guess, fallback_after=1)
    def count(city: str) -> int:
        """Count people."""
        raise ToolError("down", type="DOWN")

    turns = [calls(("count", json.dumps({"city": city}))) for city in "ab"]
    loop = start(*turns, final(), tools=[count])
    drive(loop)
    assert error_types(loop) == ["DOWN", "INVALID_RESULT"]


def test_calls_that_were_refused_do_not_count_as_failures_of_the_tool(start: Start) -> None:
    @tool(fallback=lambda text: "in its place", fallback_after=1)
    def say(text: str) -> str:
        """Say something."""
        return text

    wrong = calls(("say", "{}"))
    loop = start(wrong, calls(("say", '{"text":"itself"}')), final(), tools=[say])
    drive(loop)
    assert contents(loop)[1] == "itself"


def test_a_tool_is_called_so_often_in_a_run_and_no_oftener(start: Start) -> None:
    @tool(max_calls=3, idempotent=True)
    def ring(who: str) -> str:
        """Ring somebody up."""
        started.append(who)
        return f"{who} is out"

    def ring_up(*names: str) -> ModelReply:
        return calls(*[("ring", json.dumps({"who": name})) for name in names])

    loop = start(ring_up("a", "b"), ring_up("c", "d"), ring_up("e"), final(), tools=[ring])
    assert drive(loop) == Finish(RUN, StopReason.COMPLETED)
    assert started == ["a", "b", "c"]
    assert error_types(loop) == [None, None, None, "CALL_LIMIT", "CALL_LIMIT"]
    assert loop.store.read_run(RUN).used == {"ring": 3}
    check_requests(loop.store, script_of(loop).requests)


def test_a_fallback_whose_parameters_cannot_be_read_is_refused_in_words() -> None:
    with pytest.raises(ToolDefinitionError, match="fallback"):

        @tool(fallback=max)
        def look(place: str) -> str:
            """Look somewhere."""
            return place


@pytest.mark.parametrize("fallback", [lambda: "x", lambda other: "x", lambda place, more: "x"])
def test_a_fallback_of_other_parameters_is_refused(fallback: Callable[..., str]) -> None:
    with pytest.raises(ToolDefinitionError, match="the same parameters: place"):

        @tool(fallback=fallback)
        def look(place: str) -> str:
            """Look somewhere."""
            return place


@pytest.mark.parametrize("option", [{"max_calls": 0}, {"fallback_after": 0}, {"redact": "token"}])
def test_an_option_of_a_tool_that_cannot_be_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ToolDefinitionError, match=next(iter(option))):

        @tool(**option)
        def look(place: str) -> str:
            """Look somewhere."""
            return place


def test_word_of_an_end_that_came_before_a_resume_costs_no_model_call(
    start: Start, store: RunStore
) -> None:
    class Patient:
        """Answers when it is told to, and keeps how often it was asked."""

        def __init__(self) -> None:
            self.asked, self.answer = threading.Semaphore(0), threading.Event()

        async def respond(self, request: ModelRequest) -> ModelReply:
            self.asked.release()
            await asyncio.to_thread(self.answer.wait, 5)
            return final("only once")

    model = Patient()
    loop = start(model=model)
    with background_step(loop) as step:
        assert model.asked.acquire(timeout=5)
        before = store.redis.hget(redis_keys.run(RUN), "lease")
        store.redis.publish(redis_keys.NUDGE, RUN)
        renewed = wait_for_lease(store, after=before)
        model.answer.set()
        assert step.result(5) == Finish(RUN, StopReason.COMPLETED)
    assert renewed
    assert not model.asked.acquire(blocking=False)


@contextlib.contextmanager
def background_step(loop: Loop) -> Iterator[concurrent.futures.Future[Next]]:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield pool.submit(loop.advance, RUN, 0)


def wait_for_lease(store: RunStore, *, after: object) -> bool:
    """Whether the lease is renewed soon, and long before its turn: somebody was woken."""
    key = redis_keys.run(RUN)
    ends_at = time.monotonic() + 4
    while time.monotonic() < ends_at:
        if store.redis.hget(key, "lease") != after:
            return True
        time.sleep(0.01)
    return False
