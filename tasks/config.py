"""What a process needs of Celery that only publishes; workers add to it."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from runner.settings import Settings


def publishing_config(settings: Settings) -> dict[str, Any]:
    return {
        "broker_url": _broker_url(settings.queue_url),
        # Nothing but JSON is ever sent or read: a pickle from a stranger is refused, not run.
        "task_serializer": "json",
        "accept_content": ["json"],
        "result_serializer": "json",
        "result_accept_content": ["json"],
        # The run's record is the result; a result backend would hold a second, weaker truth.
        "task_ignore_result": True,
        **(
            {"result_backend": _verified(_without_waits(settings.result_backend))}
            if settings.result_backend
            else {}
        ),
        # A broker that is away costs a submit about a second, a silent one about six: recovery
        # publishes later.
        "task_publish_retry_policy": {
            "max_retries": 1,
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
            "socket_timeout": 2,
            "socket_connect_timeout": 3,
            "socket_keepalive": True,
            "health_check_interval": 5,
        },
    }


def _broker_url(url: str) -> str:
    """The URL as Kombu spells it: a socket in the file system has a scheme of its own there."""
    if not url.startswith("unix:"):
        return _verified(_without_waits(url))
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    password = unquote(parts.password or "") or options.get("password", "")
    login = f":{quote(password, safe='')}@" if password else ""
    return f"redis+socket://{login}{parts.path}?virtual_host={options.get('db', '0')}"


def _without_waits(url: str) -> str:
    """The URL without what redis-py alone reads in its query; our own time-outs are set above."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss"):
        return url
    options = dict(parse_qsl(parts.query))
    known = {name: options[name] for name in options if name.startswith("ssl_")}
    if known == options:
        return url
    path = f"/{options['db']}" if "db" in options else parts.path
    login, _, host = parts.netloc.rpartition("@")
    if not login and "password" in options:
        login = ":".join(quote(options.get(name, ""), safe="") for name in ("username", "password"))
    return parts._replace(
        netloc=f"{login}@{host}" if login else host, path=path, query=urlencode(known)
    ).geturl()


def _verified(url: str) -> str:
    """With TLS the server's certificate is checked, as redis-py does; Kombu does not by itself."""
    if not url.startswith("rediss:") or "ssl_cert_reqs" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}ssl_cert_reqs=required"
