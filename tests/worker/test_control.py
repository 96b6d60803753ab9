"""What `app.control.revoke` does in a worker: a run's own tasks, a user's task, an unknown id."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery.utils.collections import AttributeDict
from celery.worker import state as worker_state
from celery.worker.control import Panel

from runner import Limits, StopReason
from runner.agents import Agents
from runner.settings import Settings
from runner.store import RunStore
from tasks import Client, Run
from tasks.accept import accept_goal
from worker.app import make_app

Revoke = Callable[..., Any]


@pytest.fixture
def revoke(client: Client) -> Iterator[Revoke]:
    """A worker's `revoke` command, as its pidbox calls it."""
    app = make_app(client.store.settings, Agents())
    worker_state.revoked.clear()
    handler = Panel.data["revoke"]
    yield lambda *ids: handler(AttributeDict(app=app, consumer=None), list(ids))
    worker_state.revoked.clear()
    app.close()


@pytest.fixture
def run(client: Client) -> Run:
    return client.submit("wait for me", agent="helper")


def end(store: RunStore, run: Run, reason: StopReason = StopReason.ERROR) -> None:
    store.end_run(run.id, reason, closer="cancelled")


@pytest.mark.parametrize("task", ["", ".0", ".0.3", ".12.0"])
def test_a_revoke_of_any_task_of_a_run_cancels_it(revoke: Revoke, run: Run, task: str) -> None:
    revoke(run.id + task)

    assert run.result(timeout=1).stop_reason is StopReason.CANCELLED


@pytest.mark.parametrize("task", [".finished", ".finished.2"])
def test_a_revoke_of_the_task_on_finish_is_celerys_and_leaves_the_run_alone(
    revoke: Revoke, run: Run, task: str
) -> None:
    revoke(run.id + task)

    assert run.info().stop_reason is None
    assert run.id + task in worker_state.revoked
    assert run.id not in worker_state.revoked


def test_the_task_on_finish_of_a_cancelled_run_can_be_revoked(revoke: Revoke, run: Run) -> None:
    run.cancel()

    revoke(f"{run.id}.finished")

    assert f"{run.id}.finished" in worker_state.revoked


def test_a_revoke_of_an_id_that_has_no_run_yet_is_remembered(
    revoke: Revoke, client: Client
) -> None:
    run_id = str(uuid.uuid4())

    revoke(run_id)

    assert run_id in worker_state.revoked


def test_a_revoke_is_noted_before_the_run_is_looked_for(
    revoke: Revoke, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Noted after the look, a run that is written between the two would be neither found nor warned.
    run_id = str(uuid.uuid4())
    noted: list[bool] = []
    end_run = RunStore.end_run

    def look(store: RunStore, *args: Any, **options: Any) -> Any:
        noted.append(run_id in worker_state.revoked)
        return end_run(store, *args, **options)

    monkeypatch.setattr(RunStore, "end_run", look)
    revoke(run_id)

    assert noted == [True]


def test_a_revoke_while_redis_is_away_is_remembered(client: Client) -> None:
    run_id = str(uuid.uuid4())
    with socket.socket() as taken:  # bound, so that nobody else listens there
        taken.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{taken.getsockname()[1]}/0"
        away = Settings(redis_url=url, broker_url=client.store.settings.redis_url)
        with make_app(away, Agents()) as app:
            Panel.data["revoke"](AttributeDict(app=app, consumer=None), [run_id])

    assert run_id in worker_state.revoked
    worker_state.revoked.clear()


@pytest.mark.parametrize("task", ["", ".0"])
def test_a_revoke_of_an_ended_run_does_not_stand_in_the_way_of_its_resume(
    revoke: Revoke, client: Client, run: Run, task: str
) -> None:
    end(client.store, run)

    revoke(run.id + task)
    run.resume(Limits())

    assert run.info().stop_reason is None
    assert not {run.id, run.id + task} & set(worker_state.revoked)


def test_runs_and_other_tasks_in_one_revoke_each_get_their_own(
    revoke: Revoke, client: Client, run: Run
) -> None:
    kept = client.submit("keep me", agent="helper")

    revoke(run.id, "a-task-of-theirs", f"{kept.id}.finished")

    assert run.result(timeout=1).stop_reason is StopReason.CANCELLED
    assert kept.info().stop_reason is None
    assert {"a-task-of-theirs", f"{kept.id}.finished"} <= set(worker_state.revoked)


def test_a_run_under_an_id_of_the_senders_is_cancelled_too(revoke: Revoke, client: Client) -> None:
    run_id = accept_goal(client.store, "wait", agent="helper", run_id="order_77-again").run_id

    revoke(run_id)

    assert client.get(run_id).result(timeout=1).stop_reason is StopReason.CANCELLED
