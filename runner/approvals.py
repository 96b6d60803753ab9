"""Decides on a call that waits for an approval: once, and for the arguments that were shown.

Whoever decides on one that no longer waits is told what became of it, and nothing is changed.
"""

from __future__ import annotations

import re

from runner.errors import AlreadyDecided, CeleriacError, InvalidInput, RunFinished
from runner.models import Approval, Decided, ToolErrorInfo, ToolErrorType, ToolResult
from runner.store import Outcome, RunStore
from runner.tools import error_result

TIMED_OUT = Decided(approved=False, reason="TIMEOUT")
"""What stands for the decision where nobody made one in time."""

UNDECIDED = "nobody decided in time whether this call may run, so it was not run"
"""What the model reads of a call that nobody approved or denied in time."""


CALL_ID = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})")

UNSEEN = "unseen"
"""A digest that no call has: nobody decides on what they can't have seen."""


def approve(
    store: RunStore, run_id: str, call_id: str, *, by: str | None, digest: str | None
) -> tuple[int, int | None]:
    """Let a call run; answers its step, and its index where a hint for it is to go out.

    `digest` is that of the `Approval` that was shown; without one, of what waits now.
    """
    step, index = _parse(run_id, call_id)
    shown = _find(store, run_id, call_id)
    decided = Decided(approved=True, by=by)
    outcome, hint = store.decide_call(
        run_id, step, index, decided, digest=_digest_of(shown, digest)
    )
    if outcome not in (Outcome.OK, Outcome.ALREADY):
        raise _explain(store, run_id, call_id, outcome)
    return step, hint


def deny(
    store: RunStore,
    run_id: str,
    call_id: str,
    reason: str,
    *,
    decided: Decided,
    digest: str | None = None,
) -> tuple[int, Outcome, int | None]:
    """Give a call the `DENIED` result with this reason; answers its step and how the step is now.

    `Outcome.LAST`: that was the last call of its step; then the number of the next one, where its
    hint is to be published. Raises as `approve` does.
    """
    step, index = _parse(run_id, call_id)
    shown = _find(store, run_id, call_id)
    result = denial(call_id, shown.tool if shown else "", reason)
    outcome, turn = store.record_result(
        run_id,
        step,
        index,
        result,
        waits="approval",
        decided=decided,
        digest=_digest_of(shown, digest),
    )
    if outcome not in (Outcome.WAIT, Outcome.LAST):
        raise _explain(store, run_id, call_id, outcome)
    return step, outcome, turn


def denial(call_id: str, name: str, reason: str) -> ToolResult:
    """The result of a call that was not approved, as the model reads it."""
    return error_result(call_id, name, ToolErrorInfo(type=ToolErrorType.DENIED, message=reason))


def describe(call_id: str, decided: Decided) -> str:
    """What was decided, in words for whoever came too late."""
    if decided.reason is not None:
        return f"call {call_id} was denied: nobody decided in time"
    by = "" if decided.by is None else f" by {decided.by}"
    return f"call {call_id} was already {'approved' if decided.approved else 'denied'}{by}"


def _find(store: RunStore, run_id: str, call_id: str) -> Approval | None:
    return next((each for each in store.read_approvals(run_id) if each.call_id == call_id), None)


def _digest_of(shown: Approval | None, given: str | None) -> str:
    """The digest that a decision is bound to; one that no call has where nothing was shown."""
    if given is not None:
        return given or UNSEEN
    return shown.digest if shown else UNSEEN


def _parse(run_id: str, call_id: str) -> tuple[int, int]:
    if not isinstance(call_id, str):
        raise InvalidInput("a call's id is a text: its step and its index, such as 3.0")
    found = CALL_ID.fullmatch(call_id)
    if found is None:
        raise InvalidInput(f"run {run_id}: a call's id is its step and its index, such as 3.0")
    return int(found[1]), int(found[2])


def _explain(store: RunStore, run_id: str, call_id: str, outcome: Outcome) -> CeleriacError:
    """Why a decision wasn't taken."""
    record = store.read_run(run_id)
    decided = store.read_decided(run_id, call_id)
    if decided is not None:
        return AlreadyDecided(f"{describe(call_id, decided)}; nothing was changed (run {run_id})")
    if record.stop_reason is not None:
        return RunFinished(
            f"run {run_id} has already ended {record.stop_reason}; nothing was changed"
        )
    waiting = [each.call_id for each in store.read_approvals(run_id)]
    if outcome is Outcome.EXPIRED:
        return AlreadyDecided(
            f"the time to decide on call {call_id} of run {run_id} is over; nothing was changed"
        )
    if outcome is Outcome.FENCED and call_id in waiting:
        return InvalidInput(
            f"call {call_id} of run {run_id} has other arguments than those that were shown; look "
            "at them again"
        )
    known = ", ".join(waiting) or "none"
    return InvalidInput(f"call {call_id} of run {run_id} waits for no approval; waiting: {known}")
