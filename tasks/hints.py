"""Publishes what comes next as Celery messages: hints, with ids and numbers and no content."""

from __future__ import annotations

import logging
from typing import Any

import redis
from celery import Celery
from kombu.exceptions import OperationalError

from runner import keys
from runner.loop import CallTools, Next, NextStep
from runner.settings import STEPS_QUEUE, TOOLS_QUEUE, Settings

logger = logging.getLogger(__name__)

START, STEP, CALL_TOOL = "celeriac.start", "celeriac.step", "celeriac.call_tool"


def publish(app: Celery, next: Next, **options: Any) -> None:
    """Publish the hints of a transition. One that can't be sent is no loss: the run is in `due`."""
    try:
        match next:
            case NextStep(run_id, step):
                _send(app, STEP, STEPS_QUEUE, run_id, (run_id, step), options)
            case CallTools(run_id, step, calls):
                for index in calls:
                    _send(app, CALL_TOOL, TOOLS_QUEUE, run_id, (run_id, step, index), options)
            case _:
                pass
    except (OperationalError, redis.RedisError, OSError, TimeoutError) as error:
        logger.warning(
            "run=%s can't publish a hint (%s); recovery will", next.run_id, type(error).__name__
        )


def _send(
    app: Celery, name: str, queue: str, run_id: str, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    # The run is the root of all its tasks, also when recovery or somebody else's task publishes.
    app.send_task(
        name, args=args, task_id=keys.trace_id(*args), root_id=run_id, queue=queue, **options
    )


def publishing_config(settings: Settings) -> dict[str, Any]:
    """What a process needs that only publishes; workers add to it."""
    return {
        "broker_url": settings.queue_url,
        # Nothing but JSON is ever sent or read: a pickle from a stranger is refused, not run.
        "task_serializer": "json",
        "accept_content": ["json"],
        "result_serializer": "json",
        "result_accept_content": ["json"],
        # The run's record is the result; a result backend would hold a second, weaker truth.
        "task_ignore_result": True,
        # A broker that is away costs a submit about a second: recovery publishes later.
        "task_publish_retry_policy": {
            "max_retries": 2,
            "interval_start": 0.1,
            "interval_step": 0.2,
            "interval_max": 0.5,
        },
        # The default waits for a free connection for ever.
        "broker_pool_acquire_timeout": 5,
        "broker_transport_options": {
            # The broker's own book of unacknowledged messages buys nothing here: the run's record
            # recovers a lost hint, and redelivery after a visibility timeout would double it.
            "ack_emulation": False,
            # A half-open connection is found within seconds, not within a minute.
            "socket_timeout": 10,
            "socket_connect_timeout": 3,
            "socket_keepalive": True,
            "health_check_interval": 5,
        },
    }
