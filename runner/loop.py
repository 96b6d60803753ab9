"""The agent loop: what one step decides, and what becomes of one call.

    step:  begin -> ask the model -> commit: call tools | finish | wait
    call:  begin -> run the tool -> record: the last result opens the next step

Each function answers what comes next as a value; whoever drives the loop (Celery tasks, a test)
publishes it. A decision is written before it is announced, so a lost announcement loses nothing.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

import redis
from pydantic import JsonValue

from runner import keys
from runner.agents import Agent, Agents, Draft
from runner.answers import Fault, find_fault, read_answer
from runner.approvals import TIMED_OUT, UNDECIDED, approve, denial, deny
from runner.ask import Asked, Asker, LetGo, Released, Turns
from runner.budgets import warn_of_budgets
from runner.calls import CallRunner
from runner.clarify import ask_user
from runner.context import (
    Message,
    answer_message,
    assistant_message,
    build_request,
    build_summary,
    correction,
    describe_agent,
    describe_request,
    describe_summary,
    notice,
    tool_message,
)
from runner.decide import count_invalid, decide_calls, gives_answer, missing_scopes
from runner.errors import (
    CeleriacError,
    InvalidInput,
    ModelError,
    RedisUnavailable,
    RunNotFound,
)
from runner.failpoints import Point, reach
from runner.guards import look_at_progress
from runner.images import image_parts
from runner.keeper import keeper_of_this_thread
from runner.limits import model_limits, name_endpoint
from runner.model import OpenAIModel, retry_delay
from runner.models import (
    Decided,
    Final,
    Limits,
    Model,
    ModelReply,
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
from runner.observe import Observer
from runner.record import RunOfCall, RunRecord, dump
from runner.redact import redact
from runner.render import clean
from runner.settings import Settings
from runner.store import (
    BegunCall,
    EndedRun,
    Hint,
    Lost,
    OpenCall,
    Outcome,
    RunStore,
    Taken,
    Turn,
    WithResult,
    unique_id,
)
from runner.tools import Executed, Tool, error_result
from runner.view import View
from runner.window import Window

logger = logging.getLogger(__name__)

PASS_ON_DELAY = 1.0
"""Seconds until another worker is to look at what this one can't handle."""

MAX_PASSES = 10
"""How often a call is passed on by workers that lack its tool, before the model is told."""

NUDGE_AFTER = 2
"""Unusable answers in a row after which the model is told to answer directly."""

NUDGE = (
    "Your last two turns held nothing that can be used. Answer the user directly now, in plain "
    "text, or make one tool call."
)

OUT = {
    RunErrorType.RATE_LIMITED,
    RunErrorType.QUOTA_EXHAUSTED,
    RunErrorType.AUTH_ERROR,
    RunErrorType.MODEL_TIMEOUT,
    RunErrorType.MODEL_HTTP_ERROR,
    RunErrorType.MODEL_BAD_RESPONSE,
    RunErrorType.EMPTY_RESPONSE,
}
"""Errors of a model, or of the way to it, that another one needn't have."""

P = ParamSpec("P")
T = TypeVar("T")

LINGER = 0.02
"""Seconds that a thread which goes on waits for a next hint, before Celery has its turn again."""

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


INTERRUPTED = "interrupted by the next run of its conversation"
"""The reason of a cancel that made room for another run."""


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
    """Nothing to publish: other calls are open, the run is in `due`, or the script has sent it."""

    run_id: str


@dataclass(frozen=True, slots=True)
class Skip:
    """Somebody else has it, or it is over; the outcome says which."""

    run_id: str
    outcome: Outcome


Next = CallTools | NextStep | Finish | Wait | Skip


class Loop:
    """Drives runs. Holds no state of a run: that is in the store alone.

    `model` answers for agents that name a model; `kill` ends this process when a tool won't let go
    (None: it is waited for, as in a test); `observer` looks on.
    """

    def __init__(
        self,
        store: RunStore,
        agents: Agents,
        *,
        settings: Settings,
        model: Model | None = None,
        kill: Callable[[], None] | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.store = store
        self.observer = observer or Observer()
        self.agents = agents
        self.settings = settings
        self._model = model or OpenAIModel(profile=settings.model_profile or None)
        self._nudges = Nudges(store)
        self._asker = Asker(store, settings, self.observer)
        self._calls = CallRunner(store, settings.renew_every, kill)

    @property
    def stopping(self) -> bool:
        """Whether this process is to end soon, so that others take over what it holds."""
        return self._asker.stopping

    @stopping.setter
    def stopping(self, value: bool) -> None:
        self._asker.stopping = value

    def release(self) -> None:
        """This process stops: let go of every model call, so that another worker makes it."""
        self._asker.release()

    def hear_ends(self) -> None:
        """Tell the observer of ends that come from outside, such as a client's cancel."""
        self._nudges.hear(self.observer.ended)

    def close(self) -> None:
        """Stop listening for nudges."""
        self._nudges.close()

    # --- one step ---------------------------------------------------------------------------------

    def advance(self, run_id: str, step: int) -> Next:
        """Take one step of a run: ask the model, then call tools, finish or wait."""
        return self._hold_step(Hint(run_id, step), Asked())

    def _hold_step(self, hint: Hint, asked: Asked) -> Next:
        run_id, step = hint.run_id, hint.step
        if self.stopping:
            return NextStep(run_id, step)  # popped on the way out: it is for another worker
        # Watched from before it begins: no end from outside falls into a gap.
        with self._nudges.watch(run_id, asked.wake):
            return self._advance(run_id, step, asked)

    def take_steps(self, run_id: str, step: int, turns: Turns) -> Iterator[Next]:
        """Take a step as `advance`, and while it `goes_on` those whose hints wait behind it.

        What comes next of each is to be published before the next one is asked for.
        """
        hint: Hint | None = Hint(run_id, step)
        while hint is not None:
            asked = Asked(turns=turns)
            coming = self._hold_step(hint, asked)
            yield coming
            hint = asked.taken
            if hint is None and turns.goes_on():
                hint = self.store.wait_for_hint("step", LINGER)

    def _advance(self, run_id: str, step: int, asked: Asked) -> Next:
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
            answer = self.observer.step(
                record, lambda: self._take_step(record, begun.history, asked)
            )
        except (CeleriacError, redis.RedisError):
            raise  # Redis is away: recovery brings the step back. A test's script is the test's.
        except Exception as error:  # noqa: BLE001 - what is the agent's own may raise anything
            answer = self._give_up(record, error, asked)
        finally:
            _log_step(record, asked, started)
        reach(Point.STEP_COMMITTED)
        return answer

    def _take_step(self, record: RunRecord, history: list[Message], asked: Asked) -> Next:
        agent = self.agents.get(record.agent)
        if agent is None:
            return self._without_agent(record, asked)
        if missing := missing_scopes(agent.requires, record.principal):
            return self._deny_agent(record, missing)
        record = self._adopt_limits(record) or record
        admitted = self._admit(agent, record)
        if admitted is not Outcome.OK:
            parked = admitted is Outcome.PARKED
            return Wait(record.run_id) if parked else self._let_go(record, admitted)
        most = _limits(record).max_repeats
        asked.progress = look_at_progress(history, most)
        if asked.progress.same_errors > most:
            return self._end(record, StopReason.REPEATED_ERROR, "max_repeats", held=True)
        try:
            reply = self._ask(agent, record, history, asked)
        except ModelError as error:
            return self._fail_or_wait(record, agent, error, asked)
        except LetGo as reason:
            return self._let_go(record, reason.outcome)
        except Released:
            paid = asked.usage.requests > 0
            outcome = self.store.release_step(
                record,
                usage=asked.usage,
                trace=self._trace(agent, record, asked) | {"released": True} if paid else None,
            )
            done = outcome in (Outcome.OK, Outcome.ALREADY)
            return NextStep(record.run_id, record.step) if done else Skip(record.run_id, outcome)
        reach(Point.STEP_ANSWERED)
        match reply:
            case Final():
                return self._finish(agent, record, reply, asked)
            case ToolCalls():
                return self._call_tools(agent, record, reply, asked)

    def _deny_agent(self, record: RunRecord, missing: list[str]) -> Next:
        """End a run whose principal may not use its agent; the model isn't asked."""
        message = (
            f"agent {record.agent} needs the permission {', '.join(missing)}, which the principal "
            "of this run doesn't have"
        )
        reason = StopReason.PERMISSION_DENIED
        error = RunError(type=reason, message=message)
        return self._end(record, reason, None, held=True, error=error)

    def _give_up(self, record: RunRecord, error: Exception, asked: Asked) -> Next:
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

    def _admit(self, agent: Agent, record: RunRecord) -> Outcome:
        """Whether the step may ask its model now, by what all workers share; else it is parked."""
        requests = self.settings.model_requests_per_minute
        tokens = self.settings.model_tokens_per_minute
        if not (agent.model_concurrency or requests or tokens):
            return Outcome.OK
        model, name = self._model_of(agent, record)
        endpoint = name_endpoint(getattr(model, "address", ""), name)
        return self.store.admit_step(
            record,
            endpoint=endpoint,
            limits=model_limits(endpoint, agent.model_concurrency, requests),
            tokens_per_minute=tokens,
        )

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

    def _without_agent(self, record: RunRecord, asked: Asked) -> Next:
        """Leave the step to a worker that has its agent, if any has: mid-deployment, say."""
        if record.agent not in self.store.read_agents():
            known = ", ".join(sorted(self.agents)) or "none"
            message = (
                f"the steps worker has no agent named {record.agent!r}; known agents: {known}; "
                "restart it where the code is newer"
            )
            return self._fail(record, RunErrorType.CONFIG_ERROR, message, asked)
        outcome = self._insist(
            self.store.park_step,
            record,
            delay=PASS_ON_DELAY,
            usage=Usage(),
            trace=None,
            event={"reason": "UNKNOWN_AGENT", "delay": PASS_ON_DELAY},
            attempts=0,
        )
        return Wait(record.run_id) if outcome is Outcome.OK else self._let_go(record, outcome)

    def _ask(
        self, agent: Agent, record: RunRecord, history: list[Message], asked: Asked
    ) -> ModelReply:
        """Ask until the answer can be used; ask again at most `response_retries` times."""
        _, name = self._model_of(agent, record)
        told = asked.progress.notice(_limits(record).max_repeats)
        corrections = [notice(told)] if told else []
        window = Window(
            self.store,
            agent,
            record,
            history,
            model=name,
            summarize=partial(self._summarize, agent, record, history, asked),
            goal=record.goal,
        )
        unusable, refused_by = 0, ""
        for left in range(agent.response_retries, -1, -1):
            try:
                reply = self._exchange(agent, record, history, window, corrections, asked)
            except ModelError as error:
                if not (error.bad_response and left):
                    raise
                unusable += 1
                if unusable == NUDGE_AFTER:
                    corrections.append(notice(NUDGE))
                continue
            unusable = 0
            if isinstance(reply, ToolCalls):
                return reply
            check = partial(self._check_answer, agent, record, history, reply, asked)
            # Only checks of the user's may take long.
            slow = agent.validators or agent.output is not None
            fault = self._asker.keep_lease(record, asked, check) if slow else check()
            if fault is None:
                return reply
            corrections += correction(reply, fault.text)
            refused_by = fault.check
        raise ModelError(
            f"the final answer didn't pass its check: {refused_by}", type=RunErrorType.INVALID_FINAL
        )

    def _exchange(
        self,
        agent: Agent,
        record: RunRecord,
        history: list[Message],
        window: Window,
        corrections: list[Message],
        asked: Asked,
    ) -> ModelReply:
        """One answer; a shorter request is made once where the server says that it is too long."""
        model, name = self._model_of(agent, record)
        build = partial(
            build_request,
            agent,
            model=name,
            history=history,
            corrections=corrections,
            step=record.step,
            timeout=self._timeout(record),
        )
        request = window.fit(lambda view: build(view=view))
        while True:
            described = describe_request(
                request, history=len(history), corrections=len(corrections), view=window.view
            )
            try:
                reply = self._asker.exchange(
                    record,
                    model,
                    request,
                    described,
                    asked,
                    price=agent.prices.get(name),
                    stream=agent.stream,
                )
            except ModelError as error:
                if not window.refuse(request, error):
                    raise
                request = build(view=window.view)
            else:
                window.learn(request, reply.usage)
                return reply

    def _summarize(
        self,
        agent: Agent,
        record: RunRecord,
        history: list[Message],
        asked: Asked,
        view: View,
        start: int,
        most: int,
    ) -> str | None:
        """Ask the model to sum up what `view` leaves out from `start` on: an exchange of the step.

        None where it fails, whatever the reason: the run can go on without.
        """
        model, name = self._model_of(agent, record)
        request = build_summary(
            history, view, start=start, most=most, model=name, timeout=self._timeout(record)
        )
        described = describe_summary(
            request, history=len(history), view=view, start=start, most=most
        )
        price = agent.prices.get(name)
        try:
            reply = self._asker.exchange(record, model, request, described, asked, price=price)
        except ModelError:
            return None
        return reply.text if isinstance(reply, Final) and reply.text.strip() else None

    def _check_answer(
        self, agent: Agent, record: RunRecord, history: list[Message], reply: Final, asked: Asked
    ) -> Fault | None:
        """What is wrong with a final answer."""
        asked.answer, fault = read_answer(agent, reply.text)
        if fault is not None or not (agent.validators or agent.evidence_required):
            return fault
        draft = Draft(
            goal=str(history[record.goal]["content"]),
            text=reply.text,
            answer=asked.answer,
            results=_results_in(self.store.read_trace(record.run_id)),
            evidence=self.store.read_evidence(record.run_id),
            principal=record.principal,
            metadata=record.metadata,
        )
        return find_fault(agent, draft)

    def _call_tools(self, agent: Agent, record: RunRecord, reply: ToolCalls, asked: Asked) -> Next:
        limits = _limits(record)
        calls = decide_calls(
            agent,
            reply.calls,
            step=record.step,
            limits=limits,
            used=record.tool_calls,
            used_by_tool=record.used,
            principal=record.principal,
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
        answers = gives_answer(agent, calls)
        asks = any(call.question is not None for call in calls)
        if asked.progress.repeats(reply.calls, limits.max_repeats):
            stop = StopReason.REPEATED_ERROR, "max_repeats"
        elif record.step + 1 >= limits.max_steps and not answers:
            # Nobody would read the results: the calls of the last step don't run.
            stop = StopReason.MAX_STEPS, "max_steps"
        elif record.tool_calls >= limits.max_tool_calls > 0 and not (answers or asks):
            stop = StopReason.BUDGET_EXHAUSTED, "max_tool_calls"
        elif record.invalid_calls + invalid > limits.max_invalid_calls:
            stop = StopReason.REPEATED_ERROR, "max_invalid_calls"
        if stop is not None:
            return self._end(
                record, *stop, asked=asked, trace=trace, held=True, answered=_answered(calls)
            )
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
        turn: Turn = {
            "messages": messages,
            "calls": [] if refused else calls,
            "parallel": limits.max_parallel_calls if agent.parallel_tool_calls else 1,
            "invalid": invalid,
            "usage": asked.usage,
            "trace": trace,
            "event": _answered(calls),
            "fingerprint": agent.fingerprint,
            "warning": warn_of_budgets(
                agent,
                record,
                limits,
                asked.usage,
                [
                    call.decision.name
                    for call in calls
                    if call.result is None and call.question is None
                ],
                invalid,
            ),
            "hidden": self._hidden(agent),
        }
        hints: tuple[int, ...] = ()
        if asked.turns is not None and asked.turns.goes_on():
            outcome, asked.taken = self._insist(self.store.take_step, record, **turn)
        else:
            outcome, hints = self._insist(self.store.commit_step, record, **turn)
        if outcome not in (Outcome.OK, Outcome.ALREADY):
            return self._let_go(record, outcome)
        if refused:
            return NextStep(record.run_id, record.step + 1)
        return CallTools(record.run_id, record.step, hints)

    def _finish(self, agent: Agent, record: RunRecord, reply: Final, asked: Asked) -> Next:
        return self._end(
            record,
            StopReason.COMPLETED,
            None,
            asked=asked,
            trace=self._trace(agent, record, asked),
            held=True,
            answer=asked.answer,
            message=answer_message(reply.text),
            answered=_answered([]),
        )

    def _fail_or_wait(
        self, record: RunRecord, agent: Agent, error: ModelError, asked: Asked
    ) -> Next:
        """A failed model attempt: park the run for the next one, or end it."""
        delay = self._retry_delay(agent, record, error)
        if delay is not None and delay >= record.remaining:
            # Nobody would be there any more; another model may be sooner.
            delay, asked.exchanges[-1]["out_of_time"] = None, True
        event: dict[str, Any] = {"reason": error.type, "status": error.status}
        switch = delay is None and _is_out(error) and record.model + 1 < len(agent.models)
        if switch:
            delay = 0.0
            event["model"] = self._model_name(agent.models[record.model + 1])
        if delay is None:
            return self._fail(record, error.type, str(error), asked)
        outcome = self._insist(
            self.store.park_step,
            record,
            delay=delay,
            usage=asked.usage,
            trace=self._trace(agent, record, asked),
            event=event | {"delay": round(delay, 3)},
            switch=switch,
            warning=warn_of_budgets(agent, record, _limits(record), asked.usage, [], 0),
            # Also where the server doesn't say for how long it wants to be left alone.
            pause=max(delay, error.retry_after or 0.0)
            if error.type is RunErrorType.RATE_LIMITED
            else 0.0,
        )
        return Wait(record.run_id) if outcome is Outcome.OK else self._let_go(record, outcome)

    def _retry_delay(self, agent: Agent, record: RunRecord, error: ModelError) -> float | None:
        """Seconds until the same model is asked again; None where it isn't."""
        if error.bad_response:
            return None
        return retry_delay(agent.model_retry, record.model_attempts + 1, error)

    # --- one call ---------------------------------------------------------------------------------

    def call_tool(
        self, run_id: str, step: int, index: int, *, tell: Callable[[str], object] = str
    ) -> Next:
        """Run one call of a step, and record its result; the last one opens the next step.

        `tell` is told the tool and how it went, in two words.
        """
        [coming] = self.take_calls(run_id, step, index, _no_more, tell=tell)
        return coming

    def take_calls(
        self,
        run_id: str,
        step: int,
        index: int,
        goes_on: Callable[[], bool],
        *,
        tell: Callable[[str], object] = str,
    ) -> Iterator[Next]:
        """Run a call as `call_tool`, and while it `goes_on` those whose hints wait behind it.

        What comes next of each is to be published before the next one is asked for.
        """
        keeper = keeper_of_this_thread()
        begin = partial(self.store.begin_call, run_id, step, index)
        # One that is taken is begun before it is known whom to watch.
        with self._nudges.overhear() as ended:
            while True:
                keeper.expect()
                with self._nudges.watch(run_id, keeper.nudge):
                    begun = begin()
                    if run_id in ended:
                        keeper.nudge()
                    coming, taken = self._call_tool(run_id, begun, goes_on, tell)
                yield coming
                if taken is not None:
                    run_id, begin = taken.run_id, partial(_given, taken.begun)
                elif goes_on() and (hint := self.store.wait_for_hint("call", LINGER)):
                    run_id, begin = hint.run_id, partial(self.store.begin_call, *hint, taken=True)
                else:
                    return

    def _call_tool(
        self,
        run_id: str,
        call: BegunCall | Outcome,
        goes_on: Callable[[], bool],
        tell: Callable[[str], object],
    ) -> tuple[Next, Taken | None]:
        if isinstance(call, Outcome):
            return Skip(run_id, call), None
        if call.outcome is Outcome.EXPIRED:
            return self._let_go_of_call(call, call.outcome), None
        reach(Point.CALL_BEGUN)
        tool = self._tool(call)
        executed = self.observer.call(call, lambda: self._calls.run(call, tool))
        reach(Point.CALL_RAN)
        if isinstance(executed, Outcome):
            return self._let_go_of_call(call, executed), None
        result = executed.result
        _log_call(call.record, result)
        tell(f"{result.name} {result.error.type if result.error else 'OK'}")
        put_back = self._put_back(call, tool, result)
        if put_back is not None:
            return put_back, None
        # Nothing may fail between a take and its call: a fatal result ends its run first.
        answer = self._record(call, executed, tool, take=goes_on() and not executed.fatal)
        reach(Point.CALL_RECORDED)
        return answer

    def _put_back(self, call: BegunCall, tool: Tool | None, result: ToolResult) -> Next | None:
        """Put a call back whose failure may pass; None where its result counts."""
        run_id = call.record.run_id
        if tool is None and call.outcome is Outcome.OK:
            outcome = self._insist(
                self.store.retry_call, call, delay=PASS_ON_DELAY, result=result, passes=MAX_PASSES
            )
            if outcome is not Outcome.LOST:
                return Wait(run_id) if outcome is Outcome.OK else Skip(run_id, outcome)
        timed_out = result.error is not None and result.error.type == ToolErrorType.TIMEOUT
        if timed_out and tool is not None and tool.idempotent and call.attempt < tool.attempts:
            delay = RETRY_DELAY * 2 ** (call.attempt - 1)
            outcome = self._insist(
                self.store.retry_call,
                call,
                delay=delay,
                result=result,
                hidden=self._hidden(self.agents.get(call.record.agent)),
            )
            if outcome is not Outcome.LOST:
                return Wait(run_id) if outcome is Outcome.OK else Skip(run_id, outcome)
        return None

    def _record(
        self, call: BegunCall, executed: Executed, tool: Tool | None, *, take: bool = False
    ) -> tuple[Next, Taken | None]:
        """Record a result; to `take` is to begin the next call in the same write."""
        run_id, step, index = call.record.run_id, call.record.step, call.index
        fatal = None
        if executed.fatal:
            error = executed.result.error
            message = error.message if error else "a tool ended the run"
            fatal = RunError(type=RunErrorType.TOOL_ERROR, message=message)
        with_it: WithResult = {
            "fatal": fatal,
            "final": tool is not None and tool.final,
            "parts": image_parts(executed.images, call.decision.call_id),
            "hidden": self._hidden(self.agents.get(call.record.agent)),
            "operation": unique_id(),
            "whole": executed.whole,
        }
        given = run_id, step, index, executed.result
        turn: int | None = None
        taken: Taken | None = None
        if take:
            outcome, taken = self._insist(self.store.take_call, *given, **with_it)
        else:
            outcome, turn = self._insist(self.store.record_result, *given, **with_it)
        if outcome not in (Outcome.WAIT, Outcome.LAST):
            return Skip(run_id, outcome), taken
        if fatal is not None:
            # The record holds the fatal error, so the next step would stop too: this is sooner.
            record = self.store.read_run(run_id)
            if record.fatal is not None:
                return self._stop(record, Outcome.FAILED), taken
        return _after_result(run_id, step, outcome, turn), taken

    def lose_call(self, run_id: str, step: int, index: int, *, pid: int) -> Next:
        """A child that held a call is gone: say so now, without waiting for its lease."""
        call = self.store.lose_call(run_id, step, index, pid=pid, stopped=self.stopping)
        if call is Outcome.OK:
            return CallTools(run_id, step, (index,))
        if isinstance(call, Outcome):
            return Skip(run_id, call)
        given_up = self._calls.give_up_on(call)
        self.observer.call(call, lambda: given_up)
        coming, _ = self._record(call, given_up, None)
        return coming

    # --- ends and recovery ------------------------------------------------------------------------

    def recover(self, run_id: str) -> Next:
        """Look at a run that nobody has moved for a while; answers the hints to publish again."""
        lost = self.store.recover_run(run_id)
        match lost.outcome:
            case Outcome.STEP:
                return NextStep(run_id, lost.step)
            case Outcome.CALLS:
                return CallTools(run_id, lost.step, lost.calls)
            case Outcome.UNDECIDED:
                return self._deny_undecided(run_id, lost)
            case Outcome.EXPIRED if lost.record is not None:
                answered = lost.record.phase == "model" and lost.record.final is not None
                if answered or self._gain_time(lost.record):
                    return NextStep(run_id, lost.record.step)
                return self._stop(lost.record, lost.outcome)
            case Outcome.DELIVER:
                stop_reason = self.store.read_run(run_id).stop_reason or StopReason.ERROR
                return Finish(run_id, stop_reason, promised=True)
            case Outcome.BUSY:
                return self._interrupt(lost.live)
            case _:
                return Skip(run_id, lost.outcome)

    def _deny_undecided(self, run_id: str, lost: Lost) -> Next:
        """Give the calls that nobody decided on in time their result; then look at the others."""
        names = {each.call_id: each.tool for each in self.store.read_approvals(run_id)}
        for index in lost.calls:
            call_id = keys.call_id(lost.step, index)
            outcome, turn = self.store.record_result(
                run_id,
                lost.step,
                index,
                denial(call_id, names.get(call_id, ""), UNDECIDED),
                waits="approval",
                decided=TIMED_OUT,
            )
            if outcome is Outcome.LAST:
                return _after_result(run_id, lost.step, outcome, turn)
        return self.recover(run_id)

    def _interrupt(self, run_id: str) -> Next:
        """End a run that a submit was to interrupt, and didn't come to."""
        ended = cancel_run(self.store, run_id, INTERRUPTED)
        if ended.outcome is not Outcome.OK:
            return Skip(run_id, ended.outcome)
        return Finish(run_id, StopReason.CANCELLED, ended.promised)

    def _stop(self, record: RunRecord, outcome: Outcome) -> Next:
        """End a run that a limit has reached."""
        match outcome:
            case Outcome.EXPIRED:
                return self._end(record, StopReason.TIMEOUT, "timeout")
            case Outcome.CAPPED:
                return self._end(record, StopReason.MAX_STEPS, "max_steps")
            case Outcome.EXHAUSTED:
                most = _limits(record).max_tokens
                out_of_tokens = most is not None and record.usage.total_tokens >= most
                limit = "max_tokens" if out_of_tokens else "max_cost"
                return self._end(record, StopReason.BUDGET_EXHAUSTED, limit)
            case Outcome.ANSWERED:
                answer = record.final
                text = answer if isinstance(answer, str) else dump(answer)
                return self._end(
                    record,
                    StopReason.COMPLETED,
                    None,
                    answer=answer,
                    message=answer_message(text),
                )
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

    def _let_go_of_call(self, call: BegunCall, outcome: Outcome) -> Next:
        run_id = call.record.run_id
        if outcome is Outcome.EXPIRED:
            try:
                record = self.store.read_run(run_id)
            except RunNotFound:
                return Skip(run_id, Outcome.STALE)
            # By the epoch of the call: the run may have ended, and gone on, since it was begun.
            return self._stop(replace(record, epoch=call.record.epoch), outcome)
        return Skip(run_id, outcome)

    def _fail(self, record: RunRecord, type: RunErrorType, message: str, asked: Asked) -> Next:
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
        asked: Asked | None = None,
        trace: dict[str, Any] | None = None,
        held: bool = False,
        answer: JsonValue = None,
        error: RunError | None = None,
        message: Message | None = None,
        answered: dict[str, Any] | None = None,
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
            answered=answered,
        )
        if ended.outcome is Outcome.STEP:
            return NextStep(record.run_id, ended.step)
        if ended.outcome is not Outcome.OK:
            return Skip(record.run_id, ended.outcome)
        logger.info(
            "run=%s finished stop_reason=%s error=%s",
            record.run_id,
            stop_reason,
            error.type if error else None,
        )
        self.observer.ended(record.run_id)
        return Finish(record.run_id, stop_reason, ended.promised)

    def _trace(
        self,
        agent: Agent | None,
        record: RunRecord,
        asked: Asked,
        *,
        decisions: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        hidden = self._hidden(agent)
        # One without a response was let go of: nobody knows what it would have been.
        answered = [exchange for exchange in asked.exchanges if "response" in exchange]
        given = decisions or []
        entry: dict[str, Any] = {
            "kind": "model",
            "step": record.step,
            "epoch": record.epoch,
            "at": record.now,
            "exchanges": [_hide(exchange, hidden) for exchange in answered],
            "decisions": [_hide_decision(decision, hidden) for decision in given],
        }
        if entry["exchanges"] != answered or entry["decisions"] != given:
            entry["hidden"] = sorted(hidden)
        if agent is not None and record.fingerprint != agent.fingerprint:
            entry["agent"] = describe_agent(agent)
        return entry

    def _model_of(self, agent: Agent, record: RunRecord) -> tuple[Model, str]:
        """The model that this run asks now, and its name."""
        chosen = agent.models[min(record.model, len(agent.models) - 1)]
        model = self._model if chosen is None or isinstance(chosen, str) else chosen
        return model, self._model_name(chosen)

    def _timeout(self, record: RunRecord) -> float:
        """Seconds for one request."""
        return max(0.001, min(self.settings.model_timeout, record.remaining))

    def _model_name(self, model: str | Model | None) -> str:
        if model is None:
            return self.settings.model
        if isinstance(model, str):
            return model
        return getattr(model, "name", None) or type(model).__name__

    def _hidden(self, agent: Agent | None) -> frozenset[str]:
        """The names of fields whose values no trace shows."""
        return frozenset(self.settings.redact) | (agent.redacted if agent else frozenset())

    def _tool(self, call: BegunCall) -> Tool | None:
        agent = self.agents.get(call.record.agent)
        return None if agent is None else agent.toolbox.get(call.decision.name)


def _hide(exchange: dict[str, Any], hidden: frozenset[str]) -> dict[str, Any]:
    request = exchange["request"]
    corrections = [
        each | {"content": redact(each["content"], hidden)} for each in request["corrections"]
    ]
    request = request | {"corrections": corrections}
    if "view" in request:
        view = request["view"]
        request["view"] = {k: redact(v, hidden) if k == "note" else v for k, v in view.items()}
    shown = exchange | {"request": request}
    if "response" in exchange:
        shown["response"] = redact(exchange["response"], hidden)
    if "reply" in exchange:
        shown["reply"] = _hide_reply(exchange["reply"], hidden)
    return shown


def _hide_reply(reply: dict[str, Any], hidden: frozenset[str]) -> dict[str, Any]:
    shown = {key: each if key == "calls" else redact(each, hidden) for key, each in reply.items()}
    if "calls" in reply:
        shown["calls"] = [
            {key: redact(each, hidden) for key, each in call.items()} for call in reply["calls"]
        ]
    return shown


def _hide_decision(decision: dict[str, Any], hidden: frozenset[str]) -> dict[str, Any]:
    told = {key: redact(decision[key], hidden) for key in ("arguments", "raw_arguments")}
    if error := decision["error"]:
        told["error"] = error | {key: redact(error[key], hidden) for key in ("message", "fields")}
    return decision | told


def _results_in(trace: list[dict[str, Any]]) -> list[ToolResult]:
    """The results of all calls, as the trace keeps them; those that a fork has kept come first."""
    found: list[Any] = []
    for entry in trace:
        match entry["kind"]:
            case "forked":
                found += entry["results"]
            case "result":
                found.append(entry["result"])
    return [ToolResult.model_validate(each) for each in found]


def _is_out(error: ModelError) -> bool:
    """Whether another model may well answer what this one didn't."""
    return error.type in OUT or (error.type is RunErrorType.CONFIG_ERROR and error.status == 404)


def _answered(calls: list[OpenCall]) -> dict[str, Any]:
    """What an event says of a model's turn."""
    return {"calls": len(calls), "refused": sum(call.result is not None for call in calls)}


def _no_more() -> bool:
    return False


def _given(value: T) -> T:
    return value


def _after_result(run_id: str, step: int, outcome: Outcome, turn: int | None) -> Next:
    if turn is None:
        return Wait(run_id)
    return NextStep(run_id, turn) if outcome is Outcome.LAST else CallTools(run_id, step, (turn,))


def answer_question(store: RunStore, run_id: str, text: str, call_id: str | None) -> Next:
    """Give the user's reply to what the model asked (`ask_user`); needs no worker.

    Raises `InvalidInput` where no question is open, or `call_id` has to say which.
    """
    questions = store.read_questions(run_id)
    if call_id is None and len(questions) == 1:
        [call_id] = questions
    if call_id not in questions:
        known = ", ".join(questions) or "none"
        raise InvalidInput(f"run {run_id} has no such open question; open: {known}")
    step, _, index = call_id.partition(".")
    reply = clean(text)
    result = ToolResult(
        call_id=call_id,
        name=ask_user.name,
        ok=True,
        content=reply,
        data=reply,
        output_chars=len(reply),
    )
    outcome, turn = store.record_result(
        run_id,
        int(step),
        int(index),
        result,
        hidden=frozenset(store.settings.redact),
        waits="asked",
    )
    if outcome not in (Outcome.WAIT, Outcome.LAST):
        raise InvalidInput(f"question {call_id} of run {run_id} was answered or closed meanwhile")
    return _after_result(run_id, int(step), outcome, turn)


def approve_call(
    store: RunStore,
    run_id: str,
    call_id: str,
    *,
    by: str | None = None,
    digest: str | None = None,
) -> Next:
    """Let a call run that waits for an approval; needs no worker.

    Raises `AlreadyDecided`, `RunFinished`, or `InvalidInput` where the call doesn't wait or has
    other arguments than those of the `digest`; then nothing was changed.
    """
    step, hint = approve(store, run_id, call_id, by=by, digest=digest)
    return Wait(run_id) if hint is None else CallTools(run_id, step, (hint,))


def deny_call(
    store: RunStore,
    run_id: str,
    call_id: str,
    reason: str,
    *,
    by: str | None = None,
    digest: str | None = None,
) -> Next:
    """Have the model read this reason in place of a result; needs no worker. Raises likewise."""
    decided = Decided(approved=False, by=by)
    step, outcome, turn = deny(store, run_id, call_id, reason, decided=decided, digest=digest)
    return _after_result(run_id, step, outcome, turn)


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


def _log_step(record: RunRecord, asked: Asked, started: float) -> None:
    failed = [each["error"]["type"] for each in asked.exchanges if "error" in each]
    logger.info(
        "run=%s step=%d attempt=%d requests=%d tokens=%d errors=%s ms=%d",
        record.run_id,
        record.step,
        record.deaths + 1,
        len(asked.exchanges),
        asked.usage.total_tokens,
        ",".join(failed) or "none",
        int((time.monotonic() - started) * 1000),
    )


def _log_call(record: RunOfCall, result: ToolResult) -> None:
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
