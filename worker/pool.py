"""The prefork pool, looking five times a second whether a child has died.

Celery looks as the child's pipe closes, which is a moment before it can be reaped, and then again
only every five seconds: a death in that gap would go unanswered for as long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from billiard.exceptions import WorkerLostError
from celery.concurrency.asynpool import AsynPool
from celery.concurrency.prefork import TaskPool

LOOK_EVERY = 0.2


class _Pool(AsynPool):
    @property
    def timers(self) -> dict[Callable[[], None], float]:
        return {self.maintain_pool: LOOK_EVERY}


class ToolPool(TaskPool):
    Pool = _Pool


class OneLineOfLoss(logging.Filter):
    """The traceback of a child's death shows Celery's frames alone: its first line says enough."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(getattr(error, "exc", error), WorkerLostError):  # it may be wrapped
            record.exc_info = None
        return True
