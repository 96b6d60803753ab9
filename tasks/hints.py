"""Publishes what comes next as Celery messages: hints, with ids and numbers and no content."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import redis
from celery import Celery
from kombu.exceptions import OperationalError

from runner import keys
from runner.errors import RedisUnavailable
from runner.loop import CallTools, Finish, Next, NextStep
from runner.settings import STEPS_QUEUE, TOOLS_QUEUE
from runner.store import RunStore
from tasks.deliver import deliver

logger = logging.getLogger(__name__)

START, STEP, CALL_TOOL = "celeriac.start", "celeriac.step", "celeriac.call_tool"
PING = "celeriac.ping"


def publish(app: Celery, store: RunStore, next: Next) -> None:
    """Send what a transition answered. What can't be sent is no loss: the run is in `due`."""
    try:
        publish_granted(app, store)
        match next:
            case NextStep(run_id, step):
                _send(app, STEP, STEPS_QUEUE, run_id, (run_id, step))
            case CallTools(run_id, step, calls):
                for index in calls:
                    _send(app, CALL_TOOL, TOOLS_QUEUE, run_id, (run_id, step, index))
            case Finish(run_id, promised=promised, following=following):
                if following is not None:
                    _send(app, STEP, STEPS_QUEUE, following, (following, 0))
                if promised:
                    deliver(app, store, run_id)
            case _:
                pass
    except (OperationalError, redis.RedisError, RedisUnavailable, OSError) as error:
        logger.warning(
            "run=%s can't publish what comes next (%s); recovery will",
            next.run_id,
            type(error).__name__,
        )


def publish_granted(app: Celery, store: RunStore) -> None:
    """Send the hints of whatever got its turn by a transition made here: a place is free."""
    with contextlib.suppress(IndexError):  # other threads take from it too
        while True:
            run_id, step, *index = store.granted.popleft().split(".")
            name, queue = (CALL_TOOL, TOOLS_QUEUE) if index else (STEP, STEPS_QUEUE)
            _send(app, name, queue, run_id, (run_id, int(step), *map(int, index)))


def _send(app: Celery, name: str, queue: str, run_id: str, args: tuple[Any, ...]) -> None:
    # The run is the root of all its tasks, also when recovery or somebody else's task publishes.
    app.send_task(name, args=args, task_id=keys.trace_id(*args), root_id=run_id, queue=queue)
