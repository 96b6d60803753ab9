"""How Redis is reached: a client with bounded waits, one sentence for each of its errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import NoPermissionError
from redis.retry import Retry

from runner.errors import RedisUnavailable

CERT_WORD = re.compile(r"ssl_cert_reqs=CERT_(\w+)")
"""How Celery writes what redis-py calls required, optional or none."""

REFUSES_FOR_NOW = ("MISCONF", "NOREPLICAS", "MASTERDOWN", "BUSY")
"""How the errors start that redis-py has no class for and that pass."""


def connect(url: str) -> redis.Redis:
    """A client with bounded waits: a dead server is an error within seconds, never a hang."""
    # redis-py refuses this option for a socket in the file system.
    url = CERT_WORD.sub(lambda found: f"ssl_cert_reqs={found[1].lower()}", url)
    over_network = {} if url.startswith("unix:") else {"socket_keepalive": True}
    return redis.Redis.from_url(
        url,
        decode_responses=True,
        socket_timeout=5,
        socket_connect_timeout=3,
        **over_network,
        health_check_interval=15,
        # The default is 100, and a steps worker may have more threads than that.
        max_connections=10_000,
        retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), 3),
    )


class Sender:
    """Sends commands of one client, for those of which there are many.

    Around each command redis-py's client and its pool measure, look up and tell, at about what it
    costs to send it. This keeps connections of the pool that it took once, and does no more than is
    needed: it sends, and sends again where the connection breaks, as the client's settings say.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._pool = client.connection_pool
        self._idle: list[Any] = []

    def send(self, *command: str | float) -> Any:
        """What Redis answers; raises what redis-py raises."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._pool.get_connection()
        try:
            return connection.retry.call_with_retry(partial(_send, connection, command), _no_more)
        finally:
            self._idle.append(connection)


_senders: WeakKeyDictionary[redis.Redis, Sender] = WeakKeyDictionary()


def sender_of(client: redis.Redis) -> Sender:
    """The one of this client, whoever uses it."""
    return _senders.get(client) or _senders.setdefault(client, Sender(client))


def _send(connection: Any, command: tuple[str | float, ...]) -> Any:
    try:
        if not connection.is_connected:
            # Once for each try: to send would make four tries of its own to connect.
            connection.connect_check_health(check_health=False, retry_socket_connect=False)
        connection.send_command(*command)
        return connection.read_response()
    except redis.ResponseError:
        raise  # the answer to this command, whole
    except BaseException:
        # Broken, or left half way, as by the interrupt of a tool that tells of its progress: what
        # is read from it later would be the answer to another command.
        connection.disconnect()
        raise


def _no_more(_: Exception) -> None:
    """The connection is closed already, and is made again as the next command is sent."""


@contextlib.contextmanager
def reporting_redis_errors() -> Iterator[None]:
    """Turn what redis-py raises into one clear sentence, without the URL and its password."""
    try:
        yield
    except redis.AuthenticationError as error:
        raise RedisUnavailable(
            "Redis refused the credentials; check user and password in CELERIAC_REDIS_URL"
        ) from error
    except (redis.InvalidResponse, UnicodeDecodeError) as error:
        raise RedisUnavailable(
            "what answers at CELERIAC_REDIS_URL isn't Redis; check host and port"
        ) from error
    except (redis.ConnectionError, redis.TimeoutError) as error:
        raise RedisUnavailable(
            "Redis doesn't answer at CELERIAC_REDIS_URL; start it, or check host and port"
        ) from error
    except redis.ReadOnlyError as error:
        raise RedisUnavailable(
            "Redis is a replica and takes no writes; wait for the failover, or name the primary"
        ) from error
    except redis.OutOfMemoryError as error:
        raise RedisUnavailable(
            "Redis is out of memory and refuses writes; raise maxmemory or delete old runs"
        ) from error
    except NoPermissionError as error:
        raise RedisUnavailable(
            "the Redis user may not do what is needed; give it scripts, pub/sub and our keys"
        ) from error
    except redis.ResponseError as error:
        if not str(error).startswith(REFUSES_FOR_NOW):
            raise
        raise RedisUnavailable(
            "Redis takes no writes for now (its disk, its replicas or a long script); see its log"
        ) from error
