"""A steps worker is ready for a burst of steps, and its event loop is told of the end of one."""

from __future__ import annotations

import select
import socket
import threading
from typing import Any

from worker.pool import StepPool


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


def test_the_event_loop_is_woken_by_an_end_that_gives_a_full_pool_a_place_again() -> None:
    pool, hub = StepPool(limit=2), Hub()
    pool.register_with_event_loop(hub)
    ends = [threading.Event() for _ in range(2)]
    applied = [take_task(pool, lambda *_, end=end: end.wait(5)) for end in ends]

    ends[0].set()
    assert hub.was_woken(5)
    ends[1].set()
    applied[1].wait(5)
    pool.on_stop()  # whatever follows an end has followed by then

    assert pool._in_hand == 0


def test_an_end_in_a_pool_with_room_wakes_nobody() -> None:
    pool, hub = StepPool(limit=2), Hub()
    pool.register_with_event_loop(hub)
    for _ in range(3):
        take_task(pool, lambda *_: None).get(5)
        wait_until_given_back(pool)
    assert not hub.was_woken(0)
    pool.on_stop()


def take_task(pool: StepPool, work: Any) -> Any:
    return pool.on_apply(work, ("a task",), {}, callback=str)


def wait_until_given_back(pool: StepPool) -> None:
    """A future tells those who wait before it calls back."""
    while pool._in_hand:
        threading.Event().wait(0.001)
