"""A steps worker is ready for as many steps as it has threads, from the start."""

from __future__ import annotations

from worker.pool import StepPool


def test_all_threads_of_a_steps_worker_are_there_before_its_first_step() -> None:
    pool = StepPool(limit=5)
    pool.start()
    assert pool.info["threads"] == 5
    pool.stop()
