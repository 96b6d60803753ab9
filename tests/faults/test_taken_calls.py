"""A child that has taken a further call by itself: whoever deals with it must know which."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from functools import partial

import pytest
from celery import Celery

from runner import StopReason
from support.model_server import calls, final
from support.stage import OpenStage, Stage, open_stage
from tasks import Run

PATIENT = {"CELERIAC_LEASE": "60", "CELERIAC_RENEW_EVERY": "20"}
"""A lease that no test here waits for."""


def make_narrow(stage: Stage) -> Stage:
    """Give a stage a tools worker with one child, which takes whatever waits behind a call."""
    stage.fleet.kill("tools")
    stage.fleet.start("tools", name="narrow", concurrency=1)
    stage.fleet.wait_for(partial(is_ready, stage, "narrow"))
    return stage


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with open_stage(tmp_path_factory.mktemp("taken"), **PATIENT) as stage:
        yield make_narrow(stage)


def is_ready(stage: Stage, name: str) -> bool:
    return " ready" in stage.fleet.log(name)


def came_by_celery(stage: Stage, run: Run, call: str) -> bool:
    return f"celeriac.call_tool[{run.id}.{call}] received" in stage.fleet.log("narrow")


def started(run: Run, call: str) -> bool:
    events = run._store.read_events(run.id, "0")
    return any((each.type, each.call) == ("call.started", call) for each in events)


def test_a_child_takes_the_call_behind_its_own_by_itself(narrow: Stage) -> None:
    run = narrow.submit([calls(("ping", {}), ("ping", {}), ("add", {"a": 1, "b": 2}))])

    assert run.result(timeout=20).ok

    assert narrow.results(run) == ["pong", "pong", "3"]
    assert came_by_celery(narrow, run, "0.0")
    assert not came_by_celery(narrow, run, "0.1")
    assert not came_by_celery(narrow, run, "0.2")


def test_a_child_that_dies_in_a_call_that_it_took_is_answered_at_once(narrow: Stage) -> None:
    begun_at = time.monotonic()
    run = narrow.submit([calls(("ping", {}), ("die", {}))])

    assert run.result(timeout=20).ok

    pong, unknown = narrow.results(run)
    assert pong == "pong"
    assert json.loads(unknown)["error"]["type"] == "OUTCOME_UNKNOWN"
    assert not came_by_celery(narrow, run, "0.1")
    assert time.monotonic() - begun_at < 15  # the lease alone would have taken a minute


def test_a_call_that_kills_whoever_took_it_is_started_as_often_as_it_may_be(narrow: Stage) -> None:
    run = narrow.submit([calls(("ping", {}), ("die_always", {}))])

    assert run.result(timeout=40).ok

    assert json.loads(narrow.results(run)[1])["error"]["type"] == "POISONED"
    starts = [line for line in narrow.fleet.ledger if line.startswith("die_always")]
    assert starts == ["die_always 1", "die_always 2", "die_always 3"]


def test_a_revoke_reaches_a_call_that_was_taken_and_nothing_but_that(narrow: Stage) -> None:
    run = narrow.submit([calls(("ping", {}), ("wait_for_end", {}))])
    narrow.fleet.wait_for(lambda: started(run, "0.1"))
    app = Celery("shop", broker=narrow.fleet.redis_url, set_as_current=False)

    app.control.revoke(f"{run.id}.0.1", terminate=True)

    assert run.result(timeout=5).stop_reason is StopReason.CANCELLED
    after = narrow.submit([calls(("ping", {}))])
    assert after.result(timeout=10).ok
    assert not came_by_celery(narrow, run, "0.1")
    app.close()


def test_a_child_takes_nothing_while_somebody_is_told_of_each_task(narrow: Stage) -> None:
    app = Celery("flower", broker=narrow.fleet.redis_url, set_as_current=False)
    assert app.control.broadcast("enable_events", reply=True)
    try:
        run = narrow.submit([calls(("ping", {}), ("ping", {}), ("ping", {}))])
        assert run.result(timeout=20).ok
        assert all(came_by_celery(narrow, run, f"0.{index}") for index in range(3))
    finally:
        app.control.broadcast("disable_events", reply=True)
        app.close()


def test_a_cold_stop_hands_a_call_over_that_was_taken(open_fleet: OpenStage) -> None:
    stage = make_narrow(open_fleet(**PATIENT))
    run = stage.submit([calls(("ping", {}), ("slow_until_second", {})), final("done")])
    stage.fleet.wait_for(lambda: started(run, "0.1"))
    stage.fleet.start("tools", name="second")
    stage.fleet.wait_for(partial(is_ready, stage, "second"))

    stage.fleet.stop("narrow", signal.SIGQUIT, timeout=15)

    assert run.result(timeout=15).ok
    assert stage.results(run) == ["pong", "second"]
    assert "Traceback" not in stage.fleet.log("narrow")
