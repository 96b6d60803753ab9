"""Runs one tool call to its result, or to the reason why this attempt has no say any more."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

from runner import keys
from runner.errors import RedisUnavailable
from runner.interrupt import Body, ToolInterrupted
from runner.keeper import KILL_GRACE, HeldCall, keeper_of_this_thread
from runner.models import ToolErrorInfo, ToolErrorType
from runner.render import clean, to_json
from runner.store import BegunCall, Outcome, RunStore
from runner.tools import Context, Executed, Tool, error_result, execute

logger = logging.getLogger(__name__)


class CallRunner:
    """Turns a begun call into its result, or into the reason why this attempt has lost its say.

    `kill` ends this process when a tool won't let go (None: it is waited for, as in a test).
    """

    def __init__(
        self,
        store: RunStore,
        renew_every: float,
        kill: Callable[[], None] | None,
    ) -> None:
        self._store = store
        self._renew_every = renew_every
        self._kill = kill

    def run(self, call: BegunCall, tool: Tool | None) -> Executed | Outcome:
        """Run a call to its result, held by the keeper of this thread."""
        error = _refusal(call, tool)
        if error is not None or tool is None:
            return _error(call, error or _unknown_tool())
        body = Body(ends_with_process=self._kill is not None)
        held = HeldCall(
            renew=lambda: self._store.renew_call(call),
            renew_every=self._renew_every,
            timeout=tool.timeout,
            remaining=call.record.remaining,
            body=body,
            give_up=lambda reason: self._give_up(call, tool, reason),
        )
        started = time.monotonic()
        with keeper_of_this_thread().hold(held):
            try:
                return execute(
                    tool,
                    self._context(call, held),
                    call.decision.arguments,
                    body,
                    in_its_place=call.record.failed.get(tool.name, 0) >= tool.fallback_after,
                )
            except ToolInterrupted:
                if held.reason is not None:
                    return held.reason
        return _error(call, _timeout(tool), duration=time.monotonic() - started)

    def give_up_on(self, call: BegunCall) -> Executed:
        """The result of a call whose holder died and that may not be started again."""
        return _error(call, _refusal(call, None) or _unknown_tool())

    def _context(self, call: BegunCall, held: HeldCall) -> Context:
        record, call_id = call.record, call.decision.call_id
        trace_id = keys.trace_id(record.run_id, record.step, call.index)

        def report(done: float, total: float | None, note: str) -> None:
            data = {"done": to_json(done), "total": to_json(total), "note": clean(str(note))[:200]}
            try:
                self._store.add_event(
                    record.run_id, "call.progress", step=record.step, call=call_id, data=data
                )
            except RedisUnavailable as error:
                # No reason to break off a tool half way: only followers miss something.
                logger.warning("call=%s can't tell its progress: %s", call_id, error)

        return Context(
            run_id=record.run_id,
            call_id=call_id,
            trace_id=trace_id,
            attempt=call.attempt,
            idempotency_key=trace_id,
            principal=record.principal,
            deadline=datetime.fromtimestamp(record.deadline / 1000, UTC),
            metadata=dict(record.metadata),
            report=report,
            is_cancelled=lambda: held.reason is not None,
        )

    def _give_up(self, call: BegunCall, tool: Tool, reason: Outcome | None) -> None:
        """The body won't let go: record that in its place, and end the process that it holds.

        With a `reason` the call has no say any more, and nothing is recorded.
        """
        if self._kill is None:
            return
        run_id, step = call.record.run_id, call.record.step
        logger.warning(
            "run=%s call=%s tool=%s won't let go; ending its process",
            run_id,
            call.decision.call_id,
            tool.name,
        )
        try:
            if reason is None:
                result = _error(call, _timeout(tool), duration=tool.timeout + KILL_GRACE).result
                self._store.record_result(run_id, step, call.index, result, fatal=None)
        finally:
            self._kill()  # whatever becomes of the write: the slot is somebody else's


def _refusal(call: BegunCall, tool: Tool | None) -> ToolErrorInfo | None:
    """Why this call doesn't run (again)."""
    match call.outcome:
        case Outcome.LOST:
            return ToolErrorInfo(
                type=ToolErrorType.OUTCOME_UNKNOWN,
                message="the worker died while this tool ran; it may or may not have taken "
                "effect, and it isn't safe to run it again",
            )
        case Outcome.POISONED:
            return ToolErrorInfo(
                type=ToolErrorType.POISONED,
                message=f"the worker died in the last of {call.attempt} attempts of this call",
            )
        case _ if tool is None:
            return _unknown_tool()
        case _:
            return call.decision.error


def _unknown_tool() -> ToolErrorInfo:
    return ToolErrorInfo(
        type=ToolErrorType.UNKNOWN_TOOL, message="the tools worker has no tool of that name"
    )


def _timeout(tool: Tool) -> ToolErrorInfo:
    return ToolErrorInfo(
        type=ToolErrorType.TIMEOUT,
        message=f"{tool.name} didn't finish within {tool.timeout:g} s",
        retryable=tool.idempotent,
    )


def _error(call: BegunCall, error: ToolErrorInfo, *, duration: float = 0.0) -> Executed:
    result = error_result(
        call.decision.call_id,
        call.decision.name,
        error,
        attempt=max(1, call.attempt),
        duration_ms=int(duration * 1000),
    )
    return Executed(result)
