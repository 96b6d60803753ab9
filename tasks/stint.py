"""How long a task goes on: with the hints behind its own, as long as that is the same to everybody.

Between two tasks a pool's child hears from its parent, which hears from Redis: several times the
cost of a quick call. So whoever is quickly done takes what waits in the queue itself, for a moment;
then Celery has its turn again. In one process one thread does so at a time: quick steps side by
side would only wait for each other.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from celery import Celery
from celery.signals import (
    task_failure,
    task_postrun,
    task_prerun,
    task_received,
    task_success,
)

from runner.loop import Loop

LONGEST = 0.5
"""Seconds after which a task takes nothing more: a stop, a time limit and `inspect` go by tasks."""

QUICK = 0.05
"""Seconds that the last step or call may have taken, for its task to go on."""

BRISK = 0.1
"""Seconds after which a step is taken to be none of the quick ones, whatever it does."""

ALONE = "alone"
"""Header by which a worker's main process says that somebody counts its tasks one by one."""

HEARD = (task_received, task_prerun, task_postrun, task_success, task_failure)

_stopped = mmap.mmap(-1, 1)
"""One byte that a worker shares with the children that it forks."""

_going_on = threading.Lock()
"""Held by the one thread of this process that goes on."""

_brisk_until = 0.0
"""Until when that thread is taken to be busy with quick steps."""

_told: Callable[[], object] = bool
"""What is to be called when it isn't any more."""


def stop_taking() -> None:
    """This worker is told to stop: neither it nor its children take anything more."""
    _stopped[0] = 1


def tell_of_free_time(callback: Callable[[], object]) -> None:
    """Have `callback` called, from any thread, when a thread that went on with steps is done."""
    global _told
    _told = callback


def is_brisk() -> bool:
    """Whether a thread of this process goes on from one quick step to the next."""
    return time.monotonic() < _brisk_until


def _be_brisk(seconds: float) -> None:
    global _brisk_until
    was_brisk, _brisk_until = is_brisk(), time.monotonic() + seconds
    if was_brisk and not seconds:
        _told()


class Stint:
    """What one task does in a row: its own step or call, and those whose hints it takes."""

    def __init__(self, app: Celery, loop: Loop, request: Any) -> None:
        self._loop = loop
        self._alone = getattr(request, ALONE, True) or is_counted(app)
        self._begun = self._last = time.monotonic()
        self._went_on = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._went_on:
            _going_on.release()

    def goes_on(self) -> bool:
        """Whether the next hint may be taken; asked before each, when something is done."""
        now = time.monotonic()
        quick = now - self._last < QUICK and now - self._begun < LONGEST
        self._last = now
        stopped = _stopped[0] or self._loop.stopping
        # Where hints are published through Celery, the queues are Celery's alone.
        if self._alone or stopped or not quick or self._loop.store.envelopes() is None:
            return False
        self._went_on = self._went_on or _going_on.acquire(blocking=False)
        return self._went_on


class StepStint(Stint):
    """One of steps, for which the other threads of its process are held up."""

    @property
    def holds_up(self) -> bool:
        return self._went_on

    def __exit__(self, *exception: object) -> None:
        self.takes_long()
        super().__exit__(*exception)

    def goes_on(self) -> bool:
        goes_on = super().goes_on()
        if goes_on:
            _be_brisk(BRISK)
        return goes_on

    def takes_long(self) -> None:
        """What is being done waits for somebody else, or is over: the others may go on."""
        if self._went_on:
            _be_brisk(0)


def is_counted(app: Celery) -> bool:
    """Whether each task has to be Celery's: to be told of, or to count for the life of a child."""
    return bool(app.conf.worker_max_tasks_per_child or any(each.receivers for each in HEARD))


def is_told(eventer: Any) -> bool:
    """Whether a worker tells events of its tasks, as it does once Flower has asked for them."""
    return bool(eventer and eventer.enabled and (not eventer.groups or "task" in eventer.groups))
