"""What must be right before a worker starts. Each refusal is one line that names the cure."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from celery import Celery

from runner.errors import SettingsError
from runner.settings import Settings
from runner.store import RunStore
from tasks.hints import CALL_TOOL


def check_start(app: Celery, store: RunStore, settings: Settings, *, queue: str, pool: str) -> None:
    """Raise `SettingsError` where a worker would run, but break a promise."""
    check_redis_url("CELERIAC_REDIS_URL", settings.redis_url, settings)
    check_redis_url("CELERIAC_BROKER_URL", settings.queue_url, settings)
    _check_eviction(store)
    _check_pool(settings, queue, pool)
    _check_config(app)


def check_redis_url(variable: str, url: str, settings: Settings) -> None:
    """A Redis on another host needs a password or TLS: whoever reaches it can run anything."""
    parts = urlsplit(url)
    if settings.allow_insecure_redis or parts.scheme == "unix" or _is_loopback(parts.hostname):
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


def _check_config(app: Celery) -> None:
    conf = app.conf
    for name in ("task_serializer", "result_serializer"):
        if conf[name] != "json":
            raise SettingsError(f"{name} is {conf[name]!r}; only json is safe to read from a queue")
    for name in ("accept_content", "result_accept_content"):
        accepted = list(conf[name] or [])
        if accepted != ["json"]:
            raise SettingsError(f"{name} is {accepted}; it must be ['json'] and nothing else")
    if conf.task_acks_on_timeout is False:
        raise SettingsError(
            "task_acks_on_timeout=False delivers a task that timed out again and again; leave it on"
        )
    soft = app.tasks[CALL_TOOL].soft_time_limit or conf.task_soft_time_limit
    hard = app.tasks[CALL_TOOL].time_limit or conf.task_time_limit
    if soft and hard and soft >= hard:
        raise SettingsError(
            f"task_soft_time_limit ({soft:g} s) must be below the hard limit ({hard:g} s)"
        )
