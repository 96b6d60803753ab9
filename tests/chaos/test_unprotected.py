"""Real workers without one of the store's protections: what goes wrong is seen."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from runner.invariants import check_run
from runner.models import ToolResult
from runner.settings import STEPS_QUEUE
from runner.store import RunStore
from support.disarm import disarm
from support.fleet import raw_client
from support.model_server import calls, final
from support.proxy import Proxy
from support.stage import Stage, open_stage
from tasks import Run

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(90)]

LEASE = 2.0


@contextlib.contextmanager
def without(protection: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    disarm(protection, monkeypatch.setattr)
    with open_stage(
        folder,
        agents="support.disarmed_agents",
        CELERIAC_TEST_WITHOUT=protection,
        CELERIAC_LEASE=f"{LEASE:g}",
        CELERIAC_RENEW_EVERY="0.5",
    ) as stage:
        yield stage


def faults_of(stage: Stage, run: Run) -> list[str]:
    """What the checker finds; the run is then left out of what holds for every stage."""
    stage.fleet.tampered.add(run.id)
    return check_run(stage.client.store, run.id)


def test_without_fencing_a_frozen_worker_commits_its_step_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ping = calls(("ping", {}))
    with without("fencing", tmp_path / "stage", monkeypatch) as stage:
        run = stage.submit([ping | {"delay": 1}, ping, final("done") | {"delay": 4}])
        stage.fleet.wait_for(lambda: stage.requests(run))
        frozen = stage.fleet.workers["steps"]
        os.killpg(frozen.pid, signal.SIGSTOP)
        try:
            stage.fleet.start("steps", name="second")
            stage.fleet.wait_for(lambda: len(stage.requests(run)) == 3)
        finally:
            os.killpg(frozen.pid, signal.SIGCONT)
        run.result(timeout=30)

        found = faults_of(stage, run)
        assert any("the steps were committed as [0, 0" in each for each in found), found


def test_without_the_first_write_a_later_result_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with without("first write wins", tmp_path / "stage", monkeypatch) as stage:
        turn = calls(("ping", {}), ("wait_until_told", {"n": 1}))
        run = stage.submit([turn], agent="attentive")
        stage.fleet.wait_for(lambda: "call.finished" in types(stage, run))
        late = ToolResult(call_id="0.0", name="ping", ok=True, content="another")
        stage.client.store.record_result(run.id, 0, 0, late)
        stage.fleet.tell(run.id)
        run.result(timeout=20)

        found = faults_of(stage, run)
        assert "call 0.0 was answered twice" in found


def test_without_operation_ids_a_lost_reply_doubles_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with without("operation ids", tmp_path / "stage", monkeypatch) as stage:
        run = stage.submit([calls(("wait_until_told", {"n": 1}))], agent="attentive")
        stage.fleet.wait_for(lambda: "call.started" in types(stage, run))
        with Proxy(int(stage.fleet.redis_url.split(":")[-1].split("/")[0])) as proxy:
            far = RunStore(replace(stage.fleet.settings, redis_url=proxy.url))
            far.send_message(run.id, "a first one", "so that the script is known")
            proxy.lose_replies()
            far.send_message(run.id, "once", "hello")
            assert proxy.lost == 1
            far.close()
        stage.fleet.tell(run.id)
        run.result(timeout=20)

        found = faults_of(stage, run)
        assert "3 messages of its user were kept for 2 that were sent" in found


def test_without_recovery_a_lost_hint_is_the_end_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with without("recovery", tmp_path / "stage", monkeypatch) as stage:
        stage.fleet.stop("steps")
        run = stage.submit([])
        redis = raw_client(stage.fleet.redis_url)
        redis.delete(STEPS_QUEUE)
        redis.close()
        stage.fleet.start("steps", name="second")
        stage.fleet.wait_for(lambda: " ready." in stage.fleet.log("second"))
        # With it, two seconds.
        with pytest.raises(TimeoutError):
            run.result(timeout=6)
        assert stage.requests(run) == []


def types(stage: Stage, run: Run) -> list[str]:
    return [each.type for each in stage.client.store.read_events(run.id, "0")]
