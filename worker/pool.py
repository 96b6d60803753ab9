"""Celery's pools, each with one thing mended that would leave a call or a worker unanswered."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError
from celery.concurrency.asynpool import AsynPool
from celery.concurrency.prefork import TaskPool
from celery.concurrency.thread import TaskPool as ThreadPool

from tasks.stint import tell_of_free_time

LOOK_EVERY = 0.2


class _Pool(AsynPool):
    """Looks five times a second whether a child has died.

    Celery looks as the child's pipe closes, which is a moment before it can be reaped, and then
    again only every five seconds: a death in that gap would go unanswered for as long.
    """

    @property
    def timers(self) -> dict[Callable[[], None], float]:
        return {self.maintain_pool: LOOK_EVERY}


class ToolPool(TaskPool):
    """Processes, for tools."""

    Pool = _Pool


class OneLineOfLoss(logging.Filter):
    """The traceback of a child's death shows Celery's frames alone: its first line says enough."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(getattr(error, "exc", error), WorkerLostError):  # it may be wrapped
            record.exc_info = None
        return True


class StepPool(ThreadPool):
    """Threads, for steps.

    What a task raises outside of its body (a message may name what follows on it, and wrongly) is
    lost in Celery's pool, and the task's place with it: after some such messages a worker is deaf.

    And a worker that had no thread free takes its next message as its event loop turns: Celery's
    threads don't wake it when they are done, so that would be up to a second later.

    All threads are there from the start: made one by one as steps come, each would keep the event
    loop waiting, and a burst of steps with it.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)

    def on_start(self) -> None:
        all_there = threading.Event()
        for _ in range(self.limit):  # none is idle meanwhile, so each gets a thread of its own
            self.executor.submit(all_there.wait)
        all_there.set()

    def register_with_event_loop(self, loop: Any) -> None:
        loop.add_reader(self._woken, self._hear)
        tell_of_free_time(self._wake)

    def on_apply(self, target: Callable[..., Any], *args: Any, **options: Any) -> Any:
        applied = super().on_apply(partial(_answer, target), *args, **options)
        applied.f.add_done_callback(lambda _: self._wake())
        return applied

    def on_stop(self) -> None:
        super().on_stop()
        self._waker.close()
        self._woken.close()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # it has yet to hear of others, or ends
            self._waker.send(b".")

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)


def _answer(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the target answers; in place of an exception, the answer of a task that failed."""
    try:
        return target(*args, **kwargs)
    except Exception:  # noqa: BLE001 - whatever it is, somebody waits for it
        return 1, ExceptionInfo(), 0.0
