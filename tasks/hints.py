"""Publishes what comes next as Celery messages: hints, with ids and numbers and no content.

What a submit, a step or a result opens, the scripts send by themselves, as messages of which Celery
gave the pattern; where they can't, it is published from here.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, TypeVar

import redis
from celery import Celery
from celery.signals import after_task_publish, before_task_publish
from kombu.exceptions import OperationalError

from runner import keys
from runner.errors import RedisUnavailable
from runner.loop import CallTools, Finish, Next, NextStep
from runner.record import dump
from runner.scripts import Envelope, Envelopes
from runner.settings import STEPS_QUEUE, TOOLS_QUEUE
from runner.store import RunStore
from tasks.deliver import deliver

logger = logging.getLogger(__name__)

START, STEP, CALL_TOOL = "celeriac.start", "celeriac.step", "celeriac.call_tool"
PING = "celeriac.ping"

T = TypeVar("T")

SAMPLE_RUN, SAMPLE_STEP, SAMPLE_INDEX = "{run}", 817263544, 918273645
"""What a sample hint is of: each stands nowhere else in a message."""


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
            case Finish(run_id, promised=True):
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


def let_scripts_send(app: Celery, store: RunStore) -> None:
    """Have the store's scripts send their hints, wherever that is the same as publishing them.

    It isn't where the queues are in another Redis, or have other names in it, or where somebody
    listens to Celery's publish signals, as a telemetry library does.
    """
    renamed = app.conf.broker_transport_options.get("global_keyprefix")
    if store.settings.queue_url != store.settings.redis_url or renamed:
        return
    sample = cache(partial(_in_no_task, partial(take_sample, app)))
    # Looked at each time: what listens may begin to in a pool's child.
    store.envelopes = lambda: None if _is_listened_to() else sample()


def _is_listened_to() -> bool:
    return bool(before_task_publish.receivers or after_task_publish.receivers)


def take_sample(app: Celery) -> Envelopes | None:
    """Celery's own messages for a step and for a call, with holes for the scripts to fill.

    None where this app's messages have none: compressed ones, say.
    """
    args = SAMPLE_RUN, SAMPLE_STEP
    step = _take_one(app, STEP, STEPS_QUEUE, args)
    call = _take_one(app, CALL_TOOL, TOOLS_QUEUE, (*args, SAMPLE_INDEX))
    return Envelopes(step, call) if step and call else None


def _in_no_task(take: Callable[[], T]) -> T:
    """What a function answers outside of any task: Celery names the task that sends a message."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(take).result()


def _take_one(app: Celery, name: str, queue: str, args: tuple[Any, ...]) -> Envelope | None:
    options = {"body_encoding": None}  # as text: a script can't fill holes in base64
    with app.connection_for_write("memory://", transport_options=options) as connection:
        # No result backend is touched: whether it can be used is checked later, and in words.
        no_result = {"result_cls": lambda _: SimpleNamespace()}
        _send(app, name, queue, SAMPLE_RUN, args, connection=connection, **no_result)
        message = connection.default_channel._get(queue)
    body = message["body"]
    if not isinstance(body, str) or not all(str(each) in body for each in args):
        return None
    message["properties"]["delivery_tag"] = "{tag}"
    # The same in each process, so that Redis keeps one text of each script.
    message["headers"]["origin"] = message["properties"]["reply_to"] = "celeriac"
    text = dump(message).replace(str(SAMPLE_STEP), "{step}").replace(str(SAMPLE_INDEX), "{index}")
    return Envelope(queue, name, text)


def _send(
    app: Celery, name: str, queue: str, run_id: str, args: tuple[Any, ...], **options: Any
) -> None:
    # The run is the root of all its tasks, also when recovery or somebody else's task publishes.
    app.send_task(
        name,
        args=args,
        task_id=keys.trace_id(*args),
        root_id=run_id,
        queue=queue,
        ignore_result=True,  # the run's record is the result: nobody listens for this task's
        **options,
    )
