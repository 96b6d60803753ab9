"""A worker that is told to stop: what runs may finish for a while, then others take it over.

A warm stop waits `drain` seconds; a cold one doesn't. After that, model calls are let go of, and
children with idempotent calls are ended; both are started again elsewhere, at no cost of an
attempt. A tool that isn't idempotent is left to finish: it can't be started twice.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from typing import Any

from celery import Celery
from celery.signals import worker_shutting_down
from celery.worker import state as worker_state

from runner.errors import CeleriacError
from runner.loop import Loop
from tasks.hints import CALL_TOOL, publish
from tasks.requests import held_by
from tasks.stint import stop_taking

logger = logging.getLogger(__name__)


class Drain:
    """Connects to the worker's shutdown for as long as it lives."""

    def __init__(self, app: Celery, loop: Loop, *, seconds: float) -> None:
        self._app = app
        self._loop = loop
        self._seconds = seconds
        self._timer: threading.Timer | None = None
        worker_shutting_down.connect(self._begin, weak=False)

    def _begin(self, how: str = "Warm", **_: Any) -> None:
        # Called from a signal handler: it only sets a byte and starts a thread.
        stop_taking()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(self._seconds if how == "Warm" else 0.0, self._release)
        self._timer.daemon = True
        self._timer.start()

    def _release(self) -> None:
        self._loop.release()
        for request in tuple(worker_state.active_requests):
            if request.name == CALL_TOOL and request.worker_pid not in (None, os.getpid()):
                with contextlib.suppress(CeleriacError, ProcessLookupError):
                    for call in held_by(self._loop.store, request):
                        self._hand_over(*call, pid=request.worker_pid)

    def _hand_over(self, run_id: str, step: int, index: int, *, pid: int) -> None:
        if not self._loop.store.may_restart(run_id, step, index, pid=pid):
            return
        os.kill(pid, signal.SIGKILL)
        logger.info("run=%s call=%s.%s handed over", run_id, step, index)
        publish(self._app, self._loop.store, self._loop.lose_call(run_id, step, index, pid=pid))
