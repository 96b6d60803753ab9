"""How a worker's main process sees its tasks: what it shows, and what it does when one is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar

from billiard.exceptions import Terminated, WorkerLostError
from celery.exceptions import InvalidTaskError
from celery.worker import state as worker_state
from celery.worker.request import Request
from celery.worker.strategy import default as celery_strategy
from kombu.exceptions import ContentDisallowed, DecodeError

from runner.errors import CeleriacError
from runner.loop import Loop, cancel_run
from runner.store import Hint, RunStore
from tasks.hints import publish
from tasks.stint import ALONE, is_told

logger = logging.getLogger(__name__)

HIDDEN = "{...}"

REVOKED = "revoked through Celery"
"""The reason of a cancel that came as a revoke."""


def cancel_if_revoked(store: RunStore, run_id: str) -> bool:
    """Cancel a run whose id was revoked while it had no record; this process remembers for hours.

    A revoke is heard by every worker, so the one that takes the start, or else the first step,
    knows of it.
    """
    if run_id not in worker_state.revoked:
        return False
    try:
        cancel_run(store, run_id, REVOKED)
    except CeleriacError as error:
        logger.warning("run=%s was revoked and can't be cancelled yet: %s", run_id, error)
        return False
    return True


UNREADABLE = (
    ContentDisallowed,
    DecodeError,
    InvalidTaskError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    OverflowError,
    RecursionError,
)
"""What Celery raises for a message that isn't one of a task; most of these would end the worker."""


ENDING = ("timelimit", "stamped_headers", "stamps")
"""Headers that hints don't have, and that end a worker or its pool where they are malformed."""


def refuse_unreadable(task: Any, app: Any, consumer: Any, **options: Any) -> Callable[..., Any]:
    """Celery's way from a message to a request, but for what no request can be made of.

    Such a message would end its worker, go back to its queue on the way out, and end the next one.
    Nor does the log show its body, as Celery's would.
    """
    take = celery_strategy(task, app, consumer, **options)

    def take_or_refuse(message: Any, body: Any, ack: Any, reject: Any, *rest: Any) -> None:
        for header in ENDING:
            message.headers.pop(header, None)
        try:
            take(message, body, ack, reject, *rest)
        except UNREADABLE as error:
            shown = error if isinstance(error, ContentDisallowed) else type(error).__name__
            logger.warning("%s: invalid task message: %s; it is dropped", task.name, shown)
            reject(logger, consumer.connection_errors, False)

    return take_or_refuse


class HiddenRequest(Request):
    """For `celeriac.start`, the one task with content: events and `inspect` don't show it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._argsrepr = self._kwargsrepr = HIDDEN
        # The task's id is the run's: what Celery would store for a start, when the sender wants its
        # result, would stand in the way of the run's own.
        self._request_dict["ignore_result"] = True

    def info(self, safe: bool = False) -> dict[str, Any]:  # noqa: ARG002 - never the real ones
        shown: dict[str, Any] = super().info(safe=True)
        return shown

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """Nothing is ended: a start takes a moment, and its run is cancelled right after it."""


class HintRequest(Request):
    """For what a hint asks for: its task may go on with others, unless each is to be told of."""

    loop: ClassVar[Loop]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._request_dict[ALONE] = is_told(self._eventer)


class StepRequest(HintRequest):
    """For `celeriac.step`: a thread can't be killed, but its model call can be let go of."""

    def revoked(self) -> bool:
        """Asked before the step is begun: here a revoke that came before the run is made good."""
        # A start in a process of its own has no part in what this process remembers.
        cancel_if_revoked(self.loop.store, self.id.partition(".")[0])
        revoked: bool = super().revoked()
        return revoked

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:  # noqa: ARG002
        """A cold stop: the step's thread lets go, and another worker takes the step."""
        self.loop.release()


class CallRequest(HintRequest):
    """For `celeriac.call_tool`: a lost child is answered at once, not at its lease's end."""

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> Any:
        answer = super().on_failure(exc_info, send_failed_event, return_ok)
        error = getattr(exc_info.exception, "exc", exc_info.exception)
        if isinstance(error, WorkerLostError | Terminated | SystemExit | KeyboardInterrupt):
            self._lose_call()
        return answer

    def on_timeout(self, soft: bool, timeout: float) -> None:
        super().on_timeout(soft, timeout)
        if not soft:
            self._lose_call()

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:  # noqa: ARG002
        """A cold stop: the child is ended, and another worker takes the call if it may."""
        self.loop.stopping = True
        super().cancel(pool, signal="KILL", emit_retry=False)
        self._lose_call()

    def _lose_call(self) -> None:
        if self.worker_pid is None:
            return  # never begun: its hint is lost like any other
        store = self.loop.store
        for run_id, step, index in held_by(store, self):
            publish(self.app, store, self.loop.lose_call(run_id, step, index, pid=self.worker_pid))


def held_by(store: RunStore, request: Request) -> set[Hint]:
    """The calls that a child may hold: the one that its task began with, and what it took since."""
    taken = store.read_taken(request.worker_pid)
    return {Hint(*request.args)} | ({taken} if taken else set())
