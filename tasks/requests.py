"""How a worker's main process sees its tasks: what it shows, and what it does when one is lost."""

from __future__ import annotations

from typing import Any, ClassVar

from billiard.exceptions import Terminated, WorkerLostError
from celery.worker.request import Request

from runner.loop import Loop
from tasks.hints import publish

HIDDEN = "{...}"


class HiddenRequest(Request):
    """For `celeriac.start`, the one task with content: events and `inspect` don't show it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._argsrepr = self._kwargsrepr = HIDDEN

    def info(self, safe: bool = False) -> dict[str, Any]:  # noqa: ARG002 - never the real ones
        shown: dict[str, Any] = super().info(safe=True)
        return shown


class StepRequest(Request):
    """For `celeriac.step`: a thread can't be killed, but its model call can be let go of."""

    loop: ClassVar[Loop]

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:  # noqa: ARG002
        """A cold stop: the step's thread lets go, and another worker takes the step."""
        self.loop.release()


class CallRequest(Request):
    """For `celeriac.call_tool`: a lost child is answered at once, not at its lease's end."""

    loop: ClassVar[Loop]

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
        run_id, step, index = self.args
        publish(
            self.app, self.loop.store, self.loop.lose_call(run_id, step, index, pid=self.worker_pid)
        )
