"""The worker's Celery configuration: every line has its reason beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.settings import STEPS_QUEUE, Settings
from tasks.config import publishing_config

HARD_LIMIT_MARGIN = 10.0
"""Seconds beyond a tool's timeout and grace after which its parent kills the child regardless."""

PROMISES = {
    "broker_url": "use CELERIAC_BROKER_URL",
    "broker_read_url": "use CELERIAC_BROKER_URL",
    "broker_write_url": "use CELERIAC_BROKER_URL",
    "broker_transport": "use CELERIAC_BROKER_URL",
    "result_backend": "use CELERIAC_RESULT_BACKEND",
    "task_default_queue": "the queues' names are fixed",
    "task_acks_late": "the run's record recovers what is lost",
    "task_reject_on_worker_lost": "the run's record recovers what is lost",
    "task_ignore_result": "Celery's own result would stand in for the run's",
    "task_store_errors_even_if_ignored": "a refusal would stand in for a run's end",
    "task_always_eager": "a step would run inside the one before it",
    "task_default_priority": "a hint of another priority is in a queue that recovery can't see",
    "task_queue_max_priority": "a hint of another priority is in a queue that recovery can't see",
    "task_default_rate_limit": "a hint in a worker's hands can't be seen",
    "worker_prefetch_multiplier": "a hint in a worker's hands can't be seen",
    "worker_disable_prefetch": "a hint in a worker's hands can't be seen",
}
"""Settings that what we promise rests on, each with the cure where somebody has changed it."""


def worker_config(settings: Settings) -> dict[str, Any]:
    config = publishing_config(settings)
    return config | {
        # Said even where they are the same or none: a check at the start compares with these.
        "broker_read_url": config["broker_url"],
        "broker_write_url": config["broker_url"],
        "broker_transport": None,
        "result_backend": config.get("result_backend"),
        "task_store_errors_even_if_ignored": False,
        "task_always_eager": False,
        "task_default_priority": None,
        "task_queue_max_priority": None,
        "task_default_rate_limit": None,
        # A queue with a name of our own: two apps on the default one discard each other's tasks.
        "task_default_queue": STEPS_QUEUE,
        # A message is acknowledged as it comes: the run's record recovers whatever is lost later.
        # With late acks a restart of Redis under a running task ends the worker.
        "task_acks_late": False,
        "task_reject_on_worker_lost": False,
        # A worker takes a hint only when it can act on it at once, so a hint that isn't acted on
        # is still in its queue, where recovery can see it.
        "worker_prefetch_multiplier": 1,
        "worker_disable_prefetch": True,
        # A Redis that is away, at start or later, is waited for as long as it takes.
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        # A reconnect is no reason to interrupt a model call: its result goes to the record.
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        # A dead socket of the result backend (where one is set) holds a slot for seconds only.
        "redis_socket_timeout": 5,
        "redis_socket_connect_timeout": 3,
        # Told only when somebody listens: three messages for each task are a third of what a hop
        # costs. Flower turns them on by itself (`enable_events`), as `celery control` does.
        "worker_send_task_events": False,
        # Our log lines keep their own form, and a tool's print isn't turned into a warning.
        "worker_redirect_stdouts": False,
    }


def merge_config(settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    """What an operator's module adds: options of the transport are added to ours, one by one."""
    ours = worker_config(settings)["broker_transport_options"]
    options = given.get("broker_transport_options")
    if not isinstance(options, Mapping):
        return dict(given)
    return {**given, "broker_transport_options": {**ours, **options}}
