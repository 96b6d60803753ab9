"""What must be right before a worker starts. Each refusal is one line that names the cure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from celery import Celery

from runner.errors import SettingsError
from runner.settings import Settings
from runner.store import RunStore
from tasks.deliver import check_backend
from tasks.hints import CALL_TOOL, PING, START, STEP
from worker.config import PROMISES, worker_config

_VARIABLES = {
    "broker_url": ("CELERY_BROKER_URL",),
    "broker_read_url": ("CELERY_BROKER_READ_URL",),
    "broker_write_url": ("CELERY_BROKER_WRITE_URL",),
    "result_backend": ("CELERY_RESULT_BACKEND",),
}
"""Celery's own environment variables, which go before any configuration."""


def check_start(app: Celery, store: RunStore, settings: Settings, *, queue: str, pool: str) -> None:
    """Raise `SettingsError` where a worker would run, but break a promise."""
    check_redis_url("CELERIAC_REDIS_URL", settings.redis_url, settings)
    check_configuration(app, settings)
    _check_eviction(store)
    _check_pool(settings, queue, pool)


def check_configuration(app: Celery, settings: Settings) -> None:
    """Raise `SettingsError` where Celery's settings break a promise, whoever has changed them."""
    _check_promises(app, settings)
    # By now these are what Celery connects to, whatever else the environment says.
    check_redis_url("CELERIAC_BROKER_URL", app.conf.broker_read_url, settings)
    check_redis_url("CELERIAC_BROKER_URL", app.conf.broker_write_url, settings)
    check_redis_url("CELERIAC_RESULT_BACKEND", app.conf.result_backend or "", settings)
    _check_config(app)


def check_redis_url(variable: str, url: str, settings: Settings) -> None:
    """A Redis on another host needs a password or TLS: whoever reaches it can run anything."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss"):  # a socket, or a result backend of another kind
        return
    if settings.allow_insecure_redis or _is_loopback(parts.hostname):
        return
    if parts.scheme != "rediss" and not parts.password:
        raise SettingsError(
            f"{variable} is on another host, without a password or TLS: whoever reaches it can "
            "start tasks. Use rediss:// or a password, or set CELERIAC_ALLOW_INSECURE_REDIS=1"
        )


def _is_loopback(host: str | None) -> bool:
    if host in (None, "", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def _check_eviction(store: RunStore) -> None:
    policy = store.eviction_policy()
    if policy != "noeviction":
        raise SettingsError(
            f"Redis may evict keys (maxmemory-policy is {policy}), and runs would vanish; "
            "set it to noeviction"
        )


def _check_pool(settings: Settings, queue: str, pool: str) -> None:
    if queue == "tools" and pool != "prefork" and not settings.allow_unlimited_tools:
        raise SettingsError(
            f"the {pool} pool can't end a tool that hangs: time limits need --pool prefork. "
            "To go without them, set CELERIAC_ALLOW_UNLIMITED_TOOLS=1"
        )


def _check_promises(app: Celery, settings: Settings) -> None:
    """Neither a module of the operator's nor Celery's own environment variables may change these.

    A value isn't shown: it may hold a password.
    """
    ours = worker_config(settings)
    for name, cure in PROMISES.items():
        if (getattr(app.conf, name) or None) != (ours[name] or None):
            where = " or ".join(["CELERIAC_CELERY_CONFIG", *_VARIABLES.get(name, ())])
            raise SettingsError(f"{name} was changed by {where}; take it out: {cure}")
    options = app.conf.broker_transport_options
    if not isinstance(options, Mapping) or options.get("ack_emulation") is not False:
        raise SettingsError(
            "broker_transport_options: ack_emulation must stay False, or hints are delivered "
            "twice; leave it out"
        )
    if options.get("global_keyprefix"):
        raise SettingsError(
            "broker_transport_options: a global_keyprefix hides the queues from clients; leave it "
            "out, and use another database in CELERIAC_BROKER_URL"
        )
    for task in (app.tasks[name] for name in (START, STEP, CALL_TOOL, PING)):
        if task.acks_late or task.reject_on_worker_lost or not task.ignore_result:
            raise SettingsError(
                f"task_annotations change how {task.name} is acknowledged or its result kept; "
                "leave acks_late, reject_on_worker_lost and ignore_result out"
            )
        if task.rate_limit or task.priority is not None:
            raise SettingsError(
                f"task_annotations hold hints of {task.name} where recovery can't see them; "
                "leave rate_limit and priority out"
            )


def _check_config(app: Celery) -> None:
    conf = app.conf
    for name in ("task_serializer", "result_serializer"):
        if conf[name] != "json":
            raise SettingsError(f"{name} is {conf[name]!r}; only json is safe to read from a queue")
    for name in ("accept_content", "result_accept_content"):
        accepted = conf[name]
        if not isinstance(accepted, list | tuple | set) or list(accepted) != ["json"]:
            raise SettingsError(f"{name} is {accepted}; it must be ['json'] and nothing else")
    if conf.task_acks_on_timeout is False:
        raise SettingsError(
            "task_acks_on_timeout=False delivers a task that timed out again and again; leave it on"
        )
    if app.tasks[CALL_TOOL].soft_time_limit or conf.task_soft_time_limit:
        raise SettingsError(
            "task_soft_time_limit would interrupt a tool when its work is done and not written "
            "yet; leave it out: @tool(timeout=) ends a tool's body and nothing else"
        )
    check_backend(app)
