"""How long a run stands still when the worker that holds its model call or its tool is killed."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from runner import keys
from support.fleet import raw_client
from support.model_server import calls, final
from support.stage import Stage, open_stage
from tasks import Run

LEASE = 3.0

MARGIN = 2.0
"""Seconds after the lease within which another worker must have begun."""

KILLS = int(os.environ.get("CELERIAC_CHAOS_KILLS", "30"))


class Round:
    """One run whose holder is killed; the other worker of its queue takes it over."""

    def __init__(self, stage: Stage, queue: str, run: Run, *, started: str) -> None:
        self._stage = stage
        self._queue = queue
        self._run = run
        self._started = started
        self._killed_at = 0.0

    def kill_holder(self, redis: Any) -> None:
        where = (
            (keys.run(self._run.id), "attempt")
            if self._queue == "steps"
            else (keys.calls(self._run.id), "0.attempt")
        )
        pid = int(redis.hget(*where).split("/")[1])
        workers = self._stage.fleet.workers
        (name,) = [name for name, each in workers.items() if each.pid == os.getpgid(pid)]
        self._killed_at = time.time()
        self._stage.fleet.kill(name)

    def measure(self) -> float:
        """Seconds from the kill to the next begin."""
        assert self._run.result(timeout=20).ok
        begins = [each.at for each in self._run.events() if each.type == self._started]
        assert len(begins) >= 2
        return begins[1] - self._killed_at


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with ExitStack() as stack:
        made = stack.enter_context(
            open_stage(tmp_path / "stage", CELERIAC_LEASE=f"{LEASE:g}", CELERIAC_RENEW_EVERY="1")
        )
        made.fleet.start("steps", name="steps-second")
        made.fleet.start("tools", name="tools-second")
        wait_until_ready(made)
        yield made


def wait_until_ready(stage: Stage) -> None:
    fleet = stage.fleet
    fleet.wait_for(lambda: all("ready" in fleet.log(name) for name in fleet.workers), timeout=30)


def play_round(stage: Stage, redis: Any, names: Callable[[], str]) -> tuple[float, float]:
    """Kill the holder of a model call and the holder of a tool call at once."""
    asking = stage.submit([final("never read") | {"delay": 60}, final("from the second")])
    calling = stage.submit([calls(("slow_until_second", {})), final("done")])
    stage.fleet.wait_for(lambda: stage.requests(asking))
    begun = f"slow_until_second {calling.id}.0.0"
    stage.fleet.wait_for(lambda: begun in stage.fleet.ledger)
    rounds = [
        Round(stage, "steps", asking, started="step.started"),
        Round(stage, "tools", calling, started="call.started"),
    ]
    for each in rounds:
        each.kill_holder(redis)
    for queue in ("steps", "tools"):
        stage.fleet.start(queue, name=names())
    model, tool = [each.measure() for each in rounds]
    wait_until_ready(stage)
    return model, tool


def check_recovery(stage: Stage, kills: int) -> None:
    numbers = itertools.count()
    redis = raw_client(stage.fleet.redis_url)
    found = [play_round(stage, redis, lambda: f"replacement-{next(numbers)}") for _ in range(kills)]
    redis.close()
    for what, times in zip(("model call", "tool call"), zip(*found, strict=True), strict=True):
        ordered = sorted(times)
        p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
        print(  # noqa: T201
            f"killed in a {what}: n={kills} p50={statistics.median(ordered):.2f} s "
            f"p99={p99:.2f} s max={ordered[-1]:.2f} s, lease {LEASE:g} s"
        )
        assert p99 <= LEASE + MARGIN


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_another_worker_begins_in_time_after_each_of_many_kills(stage: Stage) -> None:
    check_recovery(stage, KILLS)
