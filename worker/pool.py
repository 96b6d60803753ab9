"""Celery's pools, each with what it lacks for a worker that takes a hint only when it can act.

Prefork: it looks five times a second whether a child has died. Celery looks as the child's pipe
closes, which is a moment before it can be reaped, and then again only every five seconds: a death
in that gap would go unanswered for as long.

Threads: the end of a task wakes the worker's loop, which may now take the next hint. Celery's own
does so only by the way, when it tells an event of the task.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.concurrency.asynpool import AsynPool
from celery.concurrency.prefork import TaskPool
from celery.concurrency.thread import TaskPool as ThreadPool
from kombu.asynchronous import get_event_loop

LOOK_EVERY = 0.2


class _Pool(AsynPool):
    @property
    def timers(self) -> dict[Callable[[], None], float]:
        return {self.maintain_pool: LOOK_EVERY}


class ToolPool(TaskPool):
    Pool = _Pool


class StepPool(ThreadPool):
    def on_apply(self, *args: Any, **kwargs: Any) -> Any:
        applied = super().on_apply(*args, **kwargs)
        applied.f.add_done_callback(_wake_loop)
        return applied


def _wake_loop(_: object) -> None:
    loop: Any = get_event_loop()
    if loop is not None:
        loop.call_soon(_nothing)


def _nothing() -> None:
    """That the loop goes round once is all that is wanted."""
