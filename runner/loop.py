"""The agent loop: what one step decides, and what becomes of one call.

    step:  begin -> ask the model -> commit: call tools | finish | wait
    call:  begin -> run the tool -> record: the last result opens the next step

Each function answers what comes next as a value; whoever drives the loop (Celery tasks, a test)
publishes it. A decision is written before it is announced, so a lost announcement loses nothing.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import redis
from pydantic import JsonValue

from runner import background
from runner.agents import Agent, Agents
from runner.answers import check_answer
from runner.calls import CallRunner
from runner.context import (
    Message,
    answer_message,
    assistant_message,
    build_request,
    correction,
    describe_agent,
    describe_request,
    tool_message,
)
from runner.decide import count_invalid, decide_calls
from runner.errors import CeleriacError, ModelError, RedisUnavailable
from runner.failpoints import Point, reach
from runner.model import OpenAIModel, retry_delay
from runner.models import (
    Final,
    Limits,
    Model,
    ModelReply,
    ModelRequest,
    RunError,
    RunErrorType,
    StopReason,
    ToolCalls,
    ToolErrorInfo,
    ToolErrorType,
    ToolResult,
    Usage,
)
from runner.nudge import Nudges
from runner.record import RunRecord
from runner.settings import Settings
from runner.store import BegunCall, EndedRun, Outcome, RunStore
from runner.tools import Executed, Tool, error_result

logger = logging.getLogger(__name__)

PASS_ON_DELAY = 1.0
"""Seconds until another worker is to look at what this one can't handle."""

MAX_PASSES = 10
"""How often a call is passed on by workers that lack its tool, before the model is told."""

P = ParamSpec("P")
T = TypeVar("T")

INSIST_EVERY = 0.2
"""Seconds between two tries to write to a Redis that is away."""

RETRY_DELAY = 0.5
"""Seconds before an idempotent tool that timed out is started again; doubled each time."""

CLOSER = error_result(
    "",
    "",
    ToolErrorInfo(type=ToolErrorType.CANCELLED, message="the run ended before this call did"),
).content
"""What stands in the history for a call that was open when its run ended."""


# --- what comes next ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallTools:
    """Publish a hint for each of these calls of a step."""

    run_id: str
    step: int
    calls: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NextStep:
    """Publish a hint for this step."""

    run_id: str
    step: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The run has ended; `promised`: its result is to be delivered to somebody."""

    run_id: str
    stop_reason: StopReason
    promised: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to publish: other calls are still open, or the run is parked in `due`."""

    run_id: str


@dataclass(frozen=True, slots=True)
class Skip:
    """Somebody else has it, or it is over; the outcome says which."""

    run_id: str
    outcome: Outcome


Next = CallTools | NextStep | Finish | Wait | Skip


class _LetGo(Exception):
    """This attempt may not go on; its outcome says why."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class _Released(Exception):
    """This process stops: another is to take the attempt."""


@dataclass(slots=True)
class _Asked:
    """What asking the model cost so far in this attempt: every exchange, not only the last."""

    usage: Usage = field(default_factory=Usage)
    exchanges: list[dict[str, Any]] = field(default_factory=list)
    answer: JsonValue = None
    ended: bool = False
    call: concurrent.futures.Future[ModelReply] | None = None

    def hold(self, call: concurrent.futures.Future[ModelReply]) -> None:
        self.call = call
        if self.ended:
            call.cancel()

    def end(self) -> None:
        """The run was ended from outside: drop the model call, if one is running."""
        self.ended = True
        if self.call is not None:
            self.call.cancel()


class Loop:
    """Drives runs. Holds no state of a run: that is in the store alone.

    `model` answers for agents that name a model; `kill` ends this process when a tool won't let go
    (None: it is waited for, as in a test).
    """

    def __init__(
        self,
        store: RunStore,
        agents: Agents,
        *,
        settings: Settings,
        model: Model | None = None,
        kill: Callable[[], None] | None = None,
    ) -> None:
        self.store = store
        self.agents = agents
        self.settings = settings
        self._model = model or OpenAIModel()
        self._nudges = Nudges(store)
        self._model_calls: set[concurrent.futures.Future[ModelReply]] = set()
        self.stopping = False
        self._calls = CallRunner(store, settings.renew_every, kill)

    def release(self) -> None:
        """This process stops: let go of every model call, so that another worker makes it."""
        self.stopping = True
        for future in tuple(self._model_calls):
            future.cancel()

    def close(self) -> None:
        """Stop listening for nudges."""
        self._nudges.close()

    # --- one step ---------------------------------------------------------------------------------

    def advance(self, run_id: str, step: int) -> Next:
        """Take one step of a run: ask the model, then call tools, finish or wait."""
        if self.stopping:
            return NextStep(run_id, step)  # popped on the way out: it is for another worker
        asked = _Asked()
        # Watched from before it begins: no end from outside falls into a gap.
        with self._nudges.watch(run_id, asked.end):
            return self._advance(run_id, step, asked)

    def _advance(self, run_id: str, step: int, asked: _Asked) -> Next:
        begun = self.store.begin_step(run_id, step)
        if isinstance(begun, Outcome):
            return Skip(run_id, begun)
        record = begun.record
        if begun.outcome is Outcome.EXPIRED and self._gain_time(record):
            return self._advance(run_id, step, asked)
        if begun.outcome is not Outcome.OK:
            return self._stop(record, begun.outcome)
        reach(Point.STEP_BEGUN)
        started = time.monotonic()
        try:
            answer = self._take_step(record, asked)
        except (CeleriacError, redis.RedisError, AssertionError):
            raise  # Redis is away: recovery brings the step back. A test's script is the test's.
        except Exception as error:  # noqa: BLE001 - what is the agent's own may raise anything
            answer = self._give_up(record, error, asked)
        finally:
            _log_step(record, asked, started)
        reach(Point.STEP_COMMITTED)
        return answer

    def _take_step(self, record: RunRecord, asked: _Asked) -> Next:
        agent = self.agents.get(record.agent)
        if agent is None:
            return self._without_agent(record, asked)
        record = self._adopt_limits(record) or record
        try:
            reply = self._ask(agent, record, asked)
        except ModelError as error:
            return self._fail_or_wait(record, agent, error, asked)
        except _LetGo as reason:
            return self._let_go(record, reason.outcome)
        except _Released:
            outcome = self.store.release_step(record)
            done = outcome in (Outcome.OK, Outcome.ALREADY)
            return NextStep(record.run_id, record.step) if done else Skip(record.run_id, outcome)
        reach(Point.STEP_ANSWERED)
        match reply:
            case Final():
                return self._finish(agent, record, reply, asked)
            case ToolCalls():
                return self._call_tools(agent, record, reply, asked)

    def _give_up(self, record: RunRecord, error: Exception, asked: _Asked) -> Next:
        """Count what was paid for, and end the run with a word for it instead of three tries."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        name = type(error).__name__
        logger.error(
            "run=%s step=%d failed with %s at %s:%s",
            record.run_id,
            record.step,
            name,
            where.filename,
            where.lineno,
        )
        message = f"the step failed with {name}; the worker's log says where"
        return self._fail(record, RunErrorType.CONFIG_ERROR, message, asked)

    def _adopt_limits(self, record: RunRecord) -> RunRecord | None:
        """The record with its agent's limits; None where it has its own, or nobody knows any."""
        if record.limits is not None:
            return None
        agent = self.agents.get(record.agent)
        limits = agent.limits if agent else self.store.read_agents().get(record.agent)
        return None if limits is None else self.store.adopt_limits(record.run_id, limits)

    def _gain_time(self, record: RunRecord) -> bool:
        """Whether a run that looks expired isn't, by the limits of its agent: it had none yet."""
        adopted = self._adopt_limits(record)
        return adopted is not None and adopted.remaining > 0

    def _without_agent(self, record: RunRecord, asked: _Asked) -> Next:
        """Leave the step to a worker that has its agent, if any has: mid-deployment, say."""
        if record.agent not in self.store.read_agents():
            known = ", ".join(sorted(self.agents)) or "none"
            message = f"no agent named {record.agent!r}; known agents: {known}"
            return self._fail(record, RunErrorType.CONFIG_ERROR, message, asked)
        outcome = self._insist(
            self.store.park_step,
            record,
            delay=PASS_ON_DELAY,
            usage=Usage(),
            trace={"kind": "passed_on", "step": record.step},
            event={"reason": "UNKNOWN_AGENT", "delay": PASS_ON_DELAY},
            attempts=0,
        )
        return Wait(record.run_id) if outcome is Outcome.OK else self._let_go(record, outcome)

    def _ask(self, agent: Agent, record: RunRecord, asked: _Asked) -> ModelReply:
        """Ask until the answer can be used; ask again at most `response_retries` times."""
        history = self.store.read_messages(record.run_id)
        corrections: list[Message] = []
        for left in range(agent.response_retries, -1, -1):
            request = build_request(
                agent,
                model=self._model_name(agent),
                history=history,
                corrections=corrections,
                step=record.step,
                timeout=max(0.001, min(self.settings.model_timeout, record.remaining)),
            )
            described = describe_request(
                request, history=len(history), corrections=len(corrections)
            )
            try:
                reply = self._exchange(agent, record, request, described, asked)
            except ModelError as error:
                if error.bad_response and left:
                    continue
                raise
            if isinstance(reply, ToolCalls):
                return reply
            asked.answer, problem = check_answer(agent, reply.text)
            if problem is None:
                return reply
            corrections += correction(reply, problem)
        raise ModelError(
            "the final answer didn't match the agent's output_type", type=RunErrorType.INVALID_FINAL
        )

    def _exchange(
        self,
        agent: Agent,
        record: RunRecord,
        request: ModelRequest,
        described: dict[str, Any],
        asked: _Asked,
    ) -> ModelReply:
        """One request and its response, both for the trace."""
        exchange: dict[str, Any] = {"request": described}
        asked.exchanges.append(exchange)
        started = time.monotonic()
        try:
            reply = self._hold_step(record, agent, request, asked)
        except ModelError as error:
            usage = error.usage or Usage(requests=1, known=False)
            exchange["error"] = {"type": error.type, "message": str(error), "status": error.status}
            exchange["response"] = error.raw
            raise
        else:
            usage = reply.usage
            exchange["response"] = reply.raw
            return reply
        finally:
            exchange["duration_ms"] = int((time.monotonic() - started) * 1000)
            if "response" in exchange:
                exchange["usage"] = usage.model_dump()
                asked.usage += usage

    def _hold_step(
        self, record: RunRecord, agent: Agent, request: ModelRequest, asked: _Asked
    ) -> ModelReply:
        """Keep the lease while the model answers; let go when the store says so."""
        model = self._model if agent.model is None or isinstance(agent.model, str) else agent.model
        if self.stopping:
            raise _Released
        future = background.submit(_respond(model, request))
        self._model_calls.add(future)
        asked.hold(future)
        if self.stopping:
            future.cancel()  # the stop came between the two lines above, and didn't see it
        try:
            while True:
                concurrent.futures.wait([future], timeout=self.settings.renew_every)
                if future.done() and not future.cancelled():
                    return _reply_of(future)
                try:
                    outcome = self.store.renew_step(record.run_id, record.epoch)
                except RedisUnavailable as error:
                    if future.cancelled():
                        raise
                    # A Redis that is away for a while is no reason to lose what was asked:
                    # the lease decides.
                    logger.warning("run=%s can't renew its lease: %s", record.run_id, error)
                    continue
                if outcome is not Outcome.OK:
                    future.cancel()
                    raise _LetGo(outcome)
                if future.cancelled():
                    # Nobody ended the run, so it is this process that ends.
                    raise _Released
        finally:
            future.cancel()  # whatever went wrong here: nobody waits for the answer any more
            self._model_calls.discard(future)

    def _call_tools(self, agent: Agent, record: RunRecord, reply: ToolCalls, asked: _Asked) -> Next:
        limits = _limits(record)
        calls = decide_calls(
            agent, reply.calls, step=record.step, limits=limits, used=record.tool_calls
        )
        decisions = [
            {
                **call.decision.model_dump(mode="json"),
                "provider_id": call.provider_id,
                "raw_name": proposed.raw_name,
                "raw_arguments": proposed.raw_arguments,
            }
            for call, proposed in zip(calls, reply.calls, strict=True)
        ]
        trace = self._trace(agent, record, asked, decisions=decisions)
        invalid = count_invalid(calls)
        stop: tuple[StopReason, str] | None = None
        if record.step + 1 >= limits.max_steps:
            # Nobody would read the results: the calls of the last step don't run.
            stop = StopReason.MAX_STEPS, "max_steps"
        elif record.tool_calls >= limits.max_tool_calls > 0:
            stop = StopReason.BUDGET_EXHAUSTED, "max_tool_calls"
        elif record.invalid_calls + invalid > limits.max_invalid_calls:
            stop = StopReason.REPEATED_ERROR, "max_invalid_calls"
        if stop is not None:
            return self._end(record, *stop, asked=asked, trace=trace, held=True)
        messages = [assistant_message(reply)]
        refused = all(call.result for call in calls)
        if refused:
            messages += [
                tool_message(call.provider_id, call.result.content)
                for call in calls
                if call.result is not None
            ]
            trace["results"] = [
                call.result.model_dump(mode="json") for call in calls if call.result is not None
            ]
        outcome, hints = self._insist(
            self.store.commit_step,
            record,
            messages=messages,
            calls=[] if refused else calls,
            parallel=limits.max_parallel_calls if agent.parallel_tool_calls else 1,
            invalid=invalid,
            usage=asked.usage,
            trace=trace,
            event={"calls": len(calls), "refused": sum(call.result is not None for call in calls)},
            fingerprint=agent.fingerprint,
        )
        if outcome not in (Outcome.OK, Outcome.ALREADY):
            return self._let_go(record, outcome)
        if refused:
            return NextStep(record.run_id, record.step + 1)
        return CallTools(record.run_id, record.step, hints)

    def _finish(self, agent: Agent, record: RunRecord, reply: Final, asked: _Asked) -> Next:
        return self._end(
            record,
            StopReason.COMPLETED,
            None,
            asked=asked,
            trace=self._trace(agent, record, asked),
            held=True,
            answer=asked.answer,
            message=answer_message(reply.text),
        )

    def _fail_or_wait(
        self, record: RunRecord, agent: Agent, error: ModelError, asked: _Asked
    ) -> Next:
        """A failed model attempt: park the run for the next one, or end it."""
        delay = None
        if not error.bad_response:
            delay = retry_delay(agent.model_retry, record.model_attempts + 1, error)
        if delay is None or delay >= record.remaining:
            return self._fail(record, error.type, str(error), asked)
        outcome = self._insist(
            self.store.park_step,
            record,
            delay=delay,
            usage=asked.usage,
            trace=self._trace(agent, record, asked),
            event={"reason": error.type, "delay": round(delay, 3), "status": error.status},
        )
        return Wait(record.run_id) if outcome is Outcome.OK else self._let_go(record, outcome)

    # --- one call ---------------------------------------------------------------------------------

    def call_tool(self, run_id: str, step: int, index: int) -> Next:
        """Run one call of a step, and record its result; the last one opens the next step."""
        woken = threading.Event()
        with self._nudges.watch(run_id, woken.set):
            return self._call_tool(run_id, step, index, woken)

    def _call_tool(self, run_id: str, step: int, index: int, woken: threading.Event) -> Next:
        call = self.store.begin_call(run_id, step, index)
        if isinstance(call, Outcome):
            return Skip(run_id, call)
        if call.outcome is Outcome.EXPIRED:
            return self._stop(call.record, call.outcome)
        reach(Point.CALL_BEGUN)
        tool = self._tool(call)
        executed = self._calls.run(call, tool, woken)
        reach(Point.CALL_RAN)
        if isinstance(executed, Outcome):
            return self._let_go(call.record, executed)
        result = executed.result
        _log_call(call.record, result)
        if tool is None and call.outcome is Outcome.OK:
            outcome = self._insist(
                self.store.retry_call, call, delay=PASS_ON_DELAY, result=result, passes=MAX_PASSES
            )
            if outcome is not Outcome.LOST:
                return Wait(run_id) if outcome is Outcome.OK else Skip(run_id, outcome)
        timed_out = result.error is not None and result.error.type == ToolErrorType.TIMEOUT
        if timed_out and tool is not None and tool.idempotent and call.attempt < tool.attempts:
            delay = RETRY_DELAY * 2 ** (call.attempt - 1)
            outcome = self._insist(self.store.retry_call, call, delay=delay, result=result)
            return Wait(run_id) if outcome is Outcome.OK else Skip(run_id, outcome)
        answer = self._record(run_id, step, index, executed)
        reach(Point.CALL_RECORDED)
        return answer

    def _record(self, run_id: str, step: int, index: int, executed: Executed) -> Next:
        fatal = None
        if executed.fatal:
            error = executed.result.error
            message = error.message if error else "a tool ended the run"
            fatal = RunError(type=RunErrorType.TOOL_ERROR, message=message)
        outcome, turn = self._insist(
            self.store.record_result, run_id, step, index, executed.result, fatal=fatal
        )
        if outcome not in (Outcome.WAIT, Outcome.LAST):
            return Skip(run_id, outcome)
        if fatal is not None:
            # The record holds the fatal error, so the next step would stop too: this is sooner.
            record = self.store.read_run(run_id)
            if record.fatal is not None:
                return self._stop(record, Outcome.FAILED)
        if outcome is Outcome.LAST:
            return NextStep(run_id, step + 1)
        return Wait(run_id) if turn is None else CallTools(run_id, step, (turn,))

    def lose_call(self, run_id: str, step: int, index: int, *, pid: int) -> Next:
        """A child that held a call is gone: say so now, without waiting for its lease."""
        call = self.store.lose_call(run_id, step, index, pid=pid, stopped=self.stopping)
        if call is Outcome.OK:
            return CallTools(run_id, step, (index,))
        if isinstance(call, Outcome):
            return Skip(run_id, call)
        return self._record(run_id, step, index, self._calls.give_up_on(call))

    # --- ends and recovery ------------------------------------------------------------------------

    def recover(self, run_id: str) -> Next:
        """Look at a run that nobody has moved for a while; answers the hints to publish again."""
        lost = self.store.recover_run(run_id)
        match lost.outcome:
            case Outcome.STEP:
                return NextStep(run_id, lost.step)
            case Outcome.CALLS:
                return CallTools(run_id, lost.step, lost.calls)
            case Outcome.EXPIRED if lost.record is not None:
                if self._gain_time(lost.record):
                    return NextStep(run_id, lost.record.step)
                return self._stop(lost.record, lost.outcome)
            case Outcome.DELIVER:
                stop_reason = self.store.read_run(run_id).stop_reason or StopReason.ERROR
                return Finish(run_id, stop_reason, promised=True)
            case _:
                return Skip(run_id, lost.outcome)

    def _stop(self, record: RunRecord, outcome: Outcome) -> Next:
        """End a run that a limit has reached."""
        match outcome:
            case Outcome.EXPIRED:
                return self._end(record, StopReason.TIMEOUT, "timeout")
            case Outcome.CAPPED:
                return self._end(record, StopReason.MAX_STEPS, "max_steps")
            case Outcome.EXHAUSTED:
                return self._end(record, StopReason.BUDGET_EXHAUSTED, "max_tokens")
            case Outcome.FAILED:
                return self._end(record, StopReason.ERROR, None, error=record.fatal)
            case _:
                error = RunError(
                    type=RunErrorType.POISONED,
                    message=f"the worker died in each of {record.deaths} attempts of step "
                    f"{record.step}",
                )
                return self._end(record, StopReason.ERROR, None, error=error)

    def _insist(self, write: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Write down what was paid for: a Redis that is away for less than a lease loses none."""
        ends_at = time.monotonic() + self.settings.lease
        while True:
            try:
                return write(*args, **kwargs)
            except RedisUnavailable:
                if self.stopping or time.monotonic() >= ends_at:
                    raise
                time.sleep(INSIST_EVERY)

    def _let_go(self, record: RunRecord, outcome: Outcome) -> Next:
        if outcome is Outcome.EXPIRED:
            return self._stop(record, outcome)
        return Skip(record.run_id, outcome)

    def _fail(self, record: RunRecord, type: RunErrorType, message: str, asked: _Asked) -> Next:
        agent = self.agents.get(record.agent)
        return self._end(
            record,
            StopReason.ERROR,
            None,
            asked=asked,
            trace=self._trace(agent, record, asked),
            held=True,
            error=RunError(type=type, message=message),
        )

    def _end(
        self,
        record: RunRecord,
        stop_reason: StopReason,
        limit: str | None,
        *,
        asked: _Asked | None = None,
        trace: dict[str, Any] | None = None,
        held: bool = False,
        answer: JsonValue = None,
        error: RunError | None = None,
        message: Message | None = None,
    ) -> Next:
        if limit is not None:
            error = RunError(type=stop_reason, message=_limit_message(limit, _limits(record)))
        ended = self._insist(
            self.store.end_run,
            record.run_id,
            stop_reason,
            epoch=record.epoch,
            held=held,
            answer=answer,
            error=error,
            limit=limit,
            message=message,
            closer=CLOSER,
            usage=asked.usage if asked else None,
            steps=1 if asked and asked.exchanges else 0,
            trace=trace,
        )
        if ended.outcome is not Outcome.OK:
            return Skip(record.run_id, ended.outcome)
        logger.info(
            "run=%s finished stop_reason=%s error=%s",
            record.run_id,
            stop_reason,
            error.type if error else None,
        )
        return Finish(record.run_id, stop_reason, promised=ended.promised)

    def _trace(
        self,
        agent: Agent | None,
        record: RunRecord,
        asked: _Asked,
        *,
        decisions: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "kind": "model",
            "step": record.step,
            "epoch": record.epoch,
            "at": record.now,
            "exchanges": asked.exchanges,
            "decisions": decisions or [],
        }
        if agent is not None and record.fingerprint != agent.fingerprint:
            entry["agent"] = describe_agent(agent)
        return entry

    def _model_name(self, agent: Agent) -> str:
        if agent.model is None:
            return self.settings.model
        return agent.model if isinstance(agent.model, str) else type(agent.model).__name__

    def _tool(self, call: BegunCall) -> Tool | None:
        agent = self.agents.get(call.record.agent)
        return None if agent is None else agent.toolbox.get(call.decision.name)


async def _respond(model: Model, request: ModelRequest) -> ModelReply:
    try:
        return await model.respond(request)
    except (SystemExit, KeyboardInterrupt) as error:
        # Either would end the loop of this process, and with it every later model call.
        name = type(error).__name__
        raise ModelError(
            f"the model raised {name}", type=RunErrorType.MODEL_BAD_RESPONSE
        ) from error


def _reply_of(future: concurrent.futures.Future[ModelReply]) -> ModelReply:
    """The reply; whatever a user's own model raises is an error of the model's, not of the loop."""
    error = future.exception()
    if error is None or isinstance(error, ModelError | AssertionError):
        return future.result()  # an AssertionError is a scripted model's, for the test to see
    name = type(error).__name__
    raise ModelError(f"the model raised {name}", type=RunErrorType.MODEL_BAD_RESPONSE) from error


def cancel_run(store: RunStore, run_id: str, reason: str) -> EndedRun:
    """End a run as `CANCELLED`. Needs no worker: the flag and the end are one write."""
    return store.end_run(
        run_id,
        StopReason.CANCELLED,
        error=RunError(type=StopReason.CANCELLED, message=reason),
        closer=CLOSER,
    )


def _limits(record: RunRecord) -> Limits:
    return record.limits or Limits()


def _limit_message(limit: str, limits: Limits) -> str:
    value = getattr(limits, limit)
    return f"stopped by {limit}={value:g}" if isinstance(value, float | int) else limit


def _log_step(record: RunRecord, asked: _Asked, started: float) -> None:
    failed = [each["error"]["type"] for each in asked.exchanges if "error" in each]
    logger.info(
        "run=%s step=%d requests=%d tokens=%d errors=%s ms=%d",
        record.run_id,
        record.step,
        len(asked.exchanges),
        asked.usage.total_tokens,
        ",".join(failed) or "none",
        int((time.monotonic() - started) * 1000),
    )


def _log_call(record: RunRecord, result: ToolResult) -> None:
    logger.info(
        "run=%s call=%s tool=%s outcome=%s attempt=%d chars=%d ms=%d",
        record.run_id,
        result.call_id,
        result.name,
        result.error.type if result.error else "OK",
        result.attempt,
        result.output_chars,
        result.duration_ms,
    )
