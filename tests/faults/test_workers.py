"""Workers that die, freeze or are told to stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from functools import partial
from typing import Any

import pytest
from celery import Celery

from runner import StopReason
from support.command import COMMAND, PYTHONPATH
from support.model_server import calls, final
from support.stage import OpenStage, Stage
from tasks import Run

LEASE = 2.0


def children_of(pid: int) -> list[int]:
    found = subprocess.run(
        ["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    return [int(each) for each in found]


def test_r08_a_killed_child_is_answered_at_once(open_fleet: OpenStage) -> None:
    stage = open_fleet(CELERIAC_LEASE="60", CELERIAC_RENEW_EVERY="20")
    run = stage.submit([calls(("die", {}), ("ping", {}))])
    started = time.monotonic()

    assert run.result(timeout=20).ok
    unknown, pong = stage.results(run)
    assert json.loads(unknown)["error"]["type"] == "OUTCOME_UNKNOWN"
    assert pong == "pong"
    assert stage.fleet.ledger.count("die") == 1
    assert time.monotonic() - started < 15  # the lease alone would have taken a minute


def test_r21_a_call_that_kills_its_process_each_time_is_poisoned(open_fleet: OpenStage) -> None:
    stage = open_fleet(CELERIAC_LEASE="60", CELERIAC_RENEW_EVERY="20")
    run = stage.submit([calls(("die_always", {}), ("ping", {}))])

    assert run.result(timeout=40).ok
    poisoned, _ = stage.results(run)
    assert json.loads(poisoned)["error"]["type"] == "POISONED"
    starts = [line for line in stage.fleet.ledger if line.startswith("die_always")]
    assert starts == ["die_always 1", "die_always 2", "die_always 3"]


def test_r21_a_step_that_kills_its_worker_each_time_ends_its_run_poisoned(
    open_fleet: OpenStage,
) -> None:
    stage = open_fleet(CELERIAC_LEASE="1", CELERIAC_RENEW_EVERY="0.3")
    run = stage.submit([], agent="lethal")
    for number in range(3):
        if number:
            stage.fleet.start("steps", name=f"steps-{number}")
        name = "steps" if number == 0 else f"steps-{number}"
        assert stage.fleet.workers[name].wait(20) == 9
    stage.fleet.start("steps", name="last")

    result = run.result(timeout=20)

    assert result.stop_reason is StopReason.ERROR
    assert result.error is not None
    assert result.error.type == "POISONED"
    assert "3 attempts of step 0" in result.error.message
    assert stage.fleet.ledger.count("lethal") == 3
    assert stage.submit([]).result(timeout=20).ok


def test_r21_a_step_that_kills_its_worker_poisons_no_neighbour(open_fleet: OpenStage) -> None:
    stage = open_fleet(CELERIAC_LEASE="1", CELERIAC_RENEW_EVERY="0.3")

    def answer(_: object) -> dict[str, Any]:
        spared = stage.fleet.ledger.count("lethal") >= 2
        return final("unharmed") | {"delay": 1.5 if spared else 60}

    neighbour = stage.submit(answer)
    stage.fleet.wait_for(lambda: stage.requests(neighbour))

    killer = stage.submit([], agent="lethal")
    for number in range(3):
        if number:
            stage.fleet.start("steps", name=f"steps-{number}")
        name = "steps" if number == 0 else f"steps-{number}"
        assert stage.fleet.workers[name].wait(30) == 9
    stage.fleet.start("steps", name="last")

    assert neighbour.result(timeout=20).answer == "unharmed"
    error = killer.result(timeout=20).error
    assert error is not None
    assert error.type == "POISONED"


def test_r09_another_worker_goes_on_when_one_is_killed_in_a_model_call(
    open_fleet: OpenStage,
) -> None:
    stage = open_fleet()
    run = stage.submit([final("never read") | {"delay": 60}, final("from the second")])
    stage.fleet.wait_for(lambda: stage.requests(run))
    stage.fleet.start("steps", name="second")
    stage.fleet.wait_for(lambda: "ready" in stage.fleet.log("second"))

    stage.fleet.kill("steps")
    killed_at = time.monotonic()

    assert run.result(timeout=20).answer == "from the second"
    assert time.monotonic() - killed_at < LEASE + 2


def test_r09_another_worker_goes_on_when_one_is_killed_in_a_tool(open_fleet: OpenStage) -> None:
    stage = open_fleet()
    run = stage.submit([calls(("slow_once", {})), final("done")])
    stage.fleet.wait_for(lambda: "slow_once 1" in stage.fleet.ledger)
    stage.fleet.start("tools", name="second")
    stage.fleet.wait_for(lambda: "ready" in stage.fleet.log("second"))

    stage.fleet.kill("tools")
    killed_at = time.monotonic()

    assert run.result(timeout=20).ok
    assert time.monotonic() - killed_at < LEASE + 2
    assert stage.results(run) == ["attempt 2"]


def test_r14_a_step_frozen_past_its_lease_commits_nothing(open_fleet: OpenStage) -> None:
    stage = open_fleet()
    run = stage.submit([final("frozen") | {"delay": 1}, final("from the second")])
    stage.fleet.wait_for(lambda: stage.requests(run))
    frozen = stage.fleet.workers["steps"]
    os.killpg(frozen.pid, signal.SIGSTOP)
    try:
        stage.fleet.start("steps", name="second")
        result = run.result(timeout=20)
    finally:
        os.killpg(frozen.pid, signal.SIGCONT)
    # The thawed worker serves again, and what it held has changed nothing.
    stage.fleet.stop("second")
    after = stage.submit([])
    assert after.result(timeout=20).ok
    assert result.answer == "from the second"
    assert run.result(timeout=1) == result
    assert [each["content"] for each in run.messages()][1:] == ["from the second"]


@pytest.mark.parametrize("how", ["revoke", "terminate"])
@pytest.mark.parametrize("what", ["run", "step", "call"])
def test_r30_a_revoke_of_any_task_of_the_run_cancels_it(
    shared_stage: Stage, how: str, what: str
) -> None:
    stage = shared_stage
    app = plain_app(stage)
    run = stage.submit([calls(("wait_for_end", {}))])
    stage.fleet.wait_for(lambda: types(run).count("call.started"))
    task_id = {"run": run.id, "step": f"{run.id}.0", "call": f"{run.id}.0.0"}[what]

    revoked_at = time.monotonic()
    app.control.revoke(task_id, terminate=how == "terminate")

    assert run.result(timeout=5).stop_reason is StopReason.CANCELLED
    assert time.monotonic() - revoked_at < 1
    # The slot is free again: as many calls as there are children run at once.
    again = stage.submit([calls(*[("slow", {"n": n}) for n in range(4)])])
    assert again.result(timeout=20).ok


def test_r30_terminating_a_step_closes_its_model_call(shared_stage: Stage) -> None:
    stage = shared_stage
    run = stage.submit([final("too late") | {"delay": 30}])
    stage.fleet.wait_for(lambda: stage.requests(run))
    before = stage.model.disconnects

    plain_app(stage).control.revoke(f"{run.id}.0", terminate=True)

    assert run.result(timeout=5).stop_reason is StopReason.CANCELLED
    stage.model.wait_for(lambda server: server.disconnects > before, timeout=1)


def test_r29_a_cancel_with_no_worker_up_is_kept(open_fleet: OpenStage) -> None:
    stage = open_fleet()
    stage.fleet.stop("steps")
    run = stage.submit([])
    run.cancel()
    stage.fleet.start("steps", name="later")
    canary = stage.submit([])

    assert canary.result(timeout=20).ok
    assert run.result(timeout=1).stop_reason is StopReason.CANCELLED
    assert stage.requests(run) == []


def test_a_warm_stop_hands_a_model_call_over_at_no_cost(open_fleet: OpenStage) -> None:
    stage = open_fleet(CELERIAC_DRAIN="0.2", CELERIAC_LEASE="60", CELERIAC_RENEW_EVERY="20")
    run = stage.submit([final("never read") | {"delay": 60}, final("from the second")])
    stage.fleet.wait_for(lambda: stage.requests(run))
    stage.fleet.start("steps", name="second")
    stage.fleet.wait_for(lambda: "ready" in stage.fleet.log("second"))

    assert stage.fleet.stop("steps", signal.SIGTERM, timeout=10) == 0

    assert run.result(timeout=10).answer == "from the second"
    attempts = [each.data["attempt"] for each in run.events() if each.type == "step.started"]
    assert attempts == [1, 1]


def test_a_warm_stop_hands_an_idempotent_call_over_at_no_cost(open_fleet: OpenStage) -> None:
    stage = open_fleet(CELERIAC_DRAIN="0.2", CELERIAC_LEASE="60", CELERIAC_RENEW_EVERY="20")
    run = stage.submit([calls(("slow_until_second", {})), final("done")])
    stage.fleet.wait_for(lambda: types(run).count("call.started"))
    stage.fleet.start("tools", name="second")
    stage.fleet.wait_for(lambda: "ready" in stage.fleet.log("second"))

    assert stage.fleet.stop("tools", signal.SIGTERM, timeout=15) == 0

    assert run.result(timeout=15).ok
    attempts = [each.data["attempt"] for each in run.events() if each.type == "call.started"]
    assert attempts == [1, 1]
    log = stage.fleet.log("tools")
    assert "handed over" in log
    assert "Traceback" not in log


@pytest.mark.parametrize("queue", ["steps", "tools"])
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGQUIT])
def test_an_idle_worker_stops_cleanly(
    open_fleet: OpenStage, queue: str, sig: signal.Signals
) -> None:
    stage = open_fleet()
    stage.fleet.wait_for(lambda: "ready" in stage.fleet.log(queue))
    started = time.monotonic()

    assert stage.fleet.stop(queue, sig, timeout=10) == 0
    assert time.monotonic() - started < 8
    assert "Traceback" not in stage.fleet.log(queue)


def test_r25_a_rolling_restart_fails_no_run_and_repeats_no_step(open_fleet: OpenStage) -> None:
    stage = open_fleet(CELERIAC_DRAIN="5")
    runs = [
        stage.submit([calls(("slow", {"n": 1}), ("ping", {})), calls(("ping", {}))])
        for _ in range(30)
    ]
    for queue in ("steps", "tools"):
        new = stage.fleet.start(queue, name=f"{queue}-new")
        stage.fleet.wait_for(partial(is_ready, stage, new))
        assert stage.fleet.stop(queue, signal.SIGTERM, timeout=30) == 0

    assert [run.result(timeout=60).stop_reason for run in runs] == [StopReason.COMPLETED] * 30
    for run in runs:
        steps = [each.step for each in run.events() if each.type == "model.answered"]
        assert steps == [0, 1, 2]
        assert len(stage.requests(run)) == 3


def is_ready(stage: Stage, name: str) -> bool:
    return "ready" in stage.fleet.log(name)


def types(run: Run) -> list[str]:
    return [each.type for each in run._store.read_events(run.id, "0")]


def plain_app(stage: Stage) -> Celery:
    """An app that knows nothing of ours but the broker."""
    return Celery("shop", broker=stage.fleet.redis_url, set_as_current=False)


def test_a_cold_stop_hands_a_model_call_over_at_once(open_fleet: OpenStage) -> None:
    stage = open_fleet(CELERIAC_LEASE="60", CELERIAC_RENEW_EVERY="20")
    run = stage.submit([final("never read") | {"delay": 60}, final("from the second")])
    stage.fleet.wait_for(lambda: stage.requests(run))
    stage.fleet.start("steps", name="second")
    stage.fleet.wait_for(partial(is_ready, stage, "second"))

    stage.fleet.stop("steps", signal.SIGQUIT, timeout=10)

    assert run.result(timeout=10).answer == "from the second"


def test_a_cold_stop_hands_an_idempotent_call_over_at_once(open_fleet: OpenStage) -> None:
    stage = open_fleet(CELERIAC_LEASE="60", CELERIAC_RENEW_EVERY="20")
    run = stage.submit([calls(("slow_until_second", {})), final("done")])
    stage.fleet.wait_for(lambda: types(run).count("call.started"))
    stage.fleet.start("tools", name="second")
    stage.fleet.wait_for(partial(is_ready, stage, "second"))

    stage.fleet.stop("tools", signal.SIGQUIT, timeout=15)

    assert run.result(timeout=15).ok
    assert stage.results(run) == ["second"]
    assert "Traceback" not in stage.fleet.log("tools")


def test_a_cold_stop_tells_the_model_that_an_outcome_is_unknown(open_fleet: OpenStage) -> None:
    stage = open_fleet(CELERIAC_LEASE="3", CELERIAC_RENEW_EVERY="1")
    run = stage.submit([calls(("wait_for_end", {})), final("done")])
    stage.fleet.wait_for(lambda: types(run).count("call.started"))
    stage.fleet.start("tools", name="second")
    stage.fleet.wait_for(partial(is_ready, stage, "second"))

    stage.fleet.stop("tools", signal.SIGQUIT, timeout=15)

    assert run.result(timeout=15).ok
    assert json.loads(stage.results(run)[0])["error"]["type"] == "OUTCOME_UNKNOWN"
    assert stage.fleet.ledger.count("wait-begin") == 1


def test_r30_a_cancelled_tool_that_swallows_its_interrupt_is_killed_and_its_slot_is_free(
    open_fleet: OpenStage,
) -> None:
    stage = open_fleet()
    held = [stage.submit([calls(("stubborn_for_long", {}))]) for _ in range(4)]
    stage.fleet.wait_for(lambda: stage.fleet.ledger.count("stubborn-begin") == 4)
    cancelled_at = time.monotonic()
    for run in held:
        run.cancel()

    assert [run.result(timeout=1).stop_reason for run in held] == [StopReason.CANCELLED] * 4
    after = stage.submit([calls(("ping", {}))])
    assert after.result(timeout=20).ok
    assert time.monotonic() - cancelled_at < 8  # a grace of two seconds, and new children


def test_the_deadline_holds_while_no_worker_is_up(open_fleet: OpenStage) -> None:
    stage = open_fleet()
    stage.fleet.stop("steps")
    stage.fleet.stop("tools")
    run = stage.submit([], agent="hasty")
    deadline = run.info().deadline
    stage.fleet.wait_for(lambda: time.time() > deadline)
    stage.fleet.start("tools", name="later")

    assert run.result(timeout=10).stop_reason is StopReason.TIMEOUT
    assert stage.requests(run) == []


def test_a_probe_tells_a_worker_that_answers_from_none(open_fleet: OpenStage) -> None:
    stage = open_fleet()

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        environ = stage.fleet.environ | {"PYTHONPATH": PYTHONPATH}
        return subprocess.run(
            [*COMMAND, *words], env=environ, capture_output=True, text=True, check=False, timeout=30
        )

    assert stage.client.ping("tools", timeout=10) is not None
    alive = command("ping", "--queue", "steps", "--timeout", "10")
    assert (alive.returncode, alive.stderr) == (0, "")
    stage.fleet.stop("tools")
    dead = command("ping", "--queue", "tools", "--timeout", "0.5")
    assert dead.returncode == 1
    assert "no worker of the queue tools answered" in dead.stderr

    run = stage.submit([calls(("nothing", {})), calls(("nothing", {}))], agent="two-steps")
    assert run.result(timeout=10).stop_reason is StopReason.MAX_STEPS
    resumed = command("resume", run.id, "--max-steps", "3")
    assert (resumed.returncode, resumed.stdout) == (0, f"resumed {run.id}\n")
    assert run.result(timeout=10).ok
    assert command("resume", run.id).returncode == 5
