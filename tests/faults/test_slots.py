"""Limits across the fleet with real workers; a ledger outside of Redis says what ran when."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from runner import StopReason, keys
from support.fleet import raw_client
from support.model_server import calls, final
from support.stage import Stage, by_turn, open_stage

AGENTS = r'''
import os
import time

from runner import Agent, Context, Limits, tool
from support.agents import note

ROOMY = Limits(max_calls_per_turn=300, max_tool_calls=1000, max_parallel_calls=300, timeout=600)


def work(ctx: Context, seconds: float) -> None:
    begun = time.monotonic()
    time.sleep(seconds)
    note(f"{ctx.trace_id} {ctx.attempt} {begun} {time.monotonic()}")


@tool(limit="crm", max_concurrency=5, idempotent=True)
def read_crm(ctx: Context, n: int) -> int:
    """Read for 50 ms."""
    work(ctx, 0.05)
    return n


@tool(limit="crm", max_concurrency=5, idempotent=True)
def write_crm(ctx: Context, n: int) -> int:
    """Write for 50 ms."""
    work(ctx, 0.05)
    return n


@tool(max_concurrency=5, idempotent=True, attempts=100, timeout=600)
def hold(ctx: Context, n: int) -> int:
    """Hold a place for a minute, unless the ledger's folder says that all may go."""
    note(f"held {ctx.trace_id} {os.getpid()} {time.monotonic()}")
    while not os.path.exists(os.environ["CELERIAC_TEST_LEDGER"] + ".go"):
        time.sleep(0.02)
    return n


@tool(rate="10/s", idempotent=True)
def metered(ctx: Context, n: int) -> int:
    """Start at most ten times a second."""
    work(ctx, 0.0)
    return n


@tool(idempotent=True)
def free(ctx: Context, n: int) -> int:
    """Run without any limit."""
    work(ctx, 0.0)
    return n


limited = Agent(name="limited", tools=[read_crm, write_crm, hold, metered, free], limits=ROOMY)
single = Agent(name="single", limits=ROOMY, model_concurrency=2)
'''

OpenSlots = Callable[..., Stage]


@pytest.fixture
def open_slots(tmp_path: Path) -> Iterator[OpenSlots]:
    """Opens a stage with the agents of this file, and as many tools workers as wanted."""
    with ExitStack() as stack:

        def make(workers: int = 1, concurrency: int = 8, **environ: str) -> Stage:
            folder = tmp_path / "stage"
            folder.mkdir()
            (folder / "slot_agents.py").write_text(AGENTS)
            lease = {"CELERIAC_LEASE": "2", "CELERIAC_RENEW_EVERY": "0.5"}
            stage = stack.enter_context(open_stage(folder, agents="slot_agents", **lease | environ))
            stage.fleet.stop("tools")
            names = [f"tools-{number}" for number in range(workers)]
            for name in names:
                stage.fleet.start("tools", name=name, concurrency=concurrency)
            for name in names:
                stage.fleet.wait_for(partial(is_ready, stage, name), timeout=30)
            return stage

        yield make


def is_ready(stage: Stage, name: str) -> bool:
    return "ready" in stage.fleet.log(name)


def spans(stage: Stage) -> list[tuple[float, float]]:
    """When each call's body began and ended, by one clock."""
    lines = [line.split() for line in stage.fleet.ledger if not line.startswith("held")]
    return [(float(begun), float(ended)) for _, _, begun, ended in lines]


def most_at_once(found: list[tuple[float, float]]) -> int:
    moments = sorted([(at, 1) for at, _ in found] + [(at, -1) for _, at in found])
    running = most = 0
    for _, change in moments:
        running += change
        most = max(most, running)
    return most


def hand_overs(found: list[tuple[float, float]], places: int) -> list[float]:
    """Seconds from each end to the start that it made room for, while something waited."""
    begun, ended = sorted(at for at, _ in found), sorted(at for _, at in found)
    return sorted(late - early for late, early in zip(begun[places:], ended, strict=False))


def say(text: str) -> None:
    print(text)  # noqa: T201


def measure(stage: Stage, count: int) -> tuple[float, list[float]]:
    """Run so many calls of 50 ms under the limit of 5; their share of the ideal, and hand-overs."""
    (stage.fleet.folder / "ledger").unlink(missing_ok=True)
    names = ("read_crm", "write_crm")
    turn = calls(*[(names[n % 2], {"n": n}) for n in range(50)])
    runs = [stage.submit(by_turn([turn]), agent="limited") for _ in range(count // 50)]

    assert {run.result(timeout=120).stop_reason for run in runs} == {StopReason.COMPLETED}

    found = spans(stage)
    assert len(found) == count
    assert most_at_once(found) == 5
    took = max(at for _, at in found) - min(at for at, _ in found)
    over = hand_overs(found, 5)
    share, p99 = count * 0.05 / 5 / took, over[int(0.99 * len(over))]
    say(
        f"{count} calls of 50 ms under a limit of 5: {took:.2f} s, {share:.0%} of ideal; hand-over "
        f"median {statistics.median(over) * 1000:.1f} ms, p99 {p99 * 1000:.1f} ms"
    )
    return share, over


def test_r36_a_limit_holds_over_all_workers_and_places_are_used_at_once(
    open_slots: OpenSlots,
) -> None:
    stage = open_slots(workers=4)

    share, over = measure(stage, 200)

    # How near to the ideal depends on who else uses the machine: make soak holds it to that.
    assert statistics.median(over) < 0.05
    assert share > 0.5


@pytest.mark.soak
def test_r36_a_limit_is_used_to_nine_tenths(open_slots: OpenSlots) -> None:
    stage = open_slots(workers=4)
    measure(stage, 200)

    assert max(measure(stage, 200)[0] for _ in range(3)) >= 0.9


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def holders(stage: Stage) -> dict[str, int]:
    """Call -> process, for the bodies that hold a place now."""
    lines = [line.split() for line in stage.fleet.ledger if line.startswith("held")]
    return {trace: int(pid) for _, trace, pid, _ in lines if is_alive(int(pid))}


def wait_for_all_places(stage: Stage, killed: set[int], killed_at: float) -> float:
    """Seconds from the kill of these until five bodies hold a place again."""
    # A process may be seen alive for a moment after it was killed.
    stage.fleet.wait_for(lambda: not any(map(is_alive, killed)))
    stage.fleet.wait_for(lambda: len(holders(stage)) >= 5, timeout=30)
    took = time.monotonic() - killed_at
    assert len(holders(stage)) == 5
    return took


def check_killed_holders(stage: Stage, children: int, workers: int, lease: float) -> None:
    run = stage.submit(by_turn([calls(*[("hold", {"n": n}) for n in range(12)])]), agent="limited")
    wait_for_all_places(stage, set(), time.monotonic())

    by_child, by_worker = [], []
    for number in range(children):
        found = holders(stage)
        victim = found[sorted(found)[number % 5]]
        os.kill(victim, signal.SIGKILL)
        by_child.append(wait_for_all_places(stage, {victim}, time.monotonic()))
    for number in range(workers):
        name = f"tools-{number % 2}"
        group = stage.fleet.workers[name].pid
        killed = {pid for pid in holders(stage).values() if os.getpgid(pid) == group}
        stage.fleet.kill(name)
        by_worker.append(wait_for_all_places(stage, killed, time.monotonic()))
        (stage.fleet.folder / f"{name}.log").unlink()
        stage.fleet.start("tools", name=name, concurrency=8)
        stage.fleet.wait_for(partial(is_ready, stage, name), timeout=30)

    say(
        f"places held again: {children} children killed, at most {max(by_child):.2f} s; "
        f"{workers} workers killed, at most {max(by_worker):.2f} s (lease {lease:g} s)"
    )
    assert max(by_child) < lease  # their parent says so, without waiting for a lease
    assert max(by_worker) < lease + 1
    stage.fleet.folder.joinpath("ledger.go").touch()
    assert run.result(timeout=60).ok
    redis = raw_client(stage.fleet.redis_url)
    assert redis.exists(keys.slots("hold"), keys.waiting("hold"), keys.CROWDED) == 0
    redis.close()


def test_r37_the_places_of_killed_holders_are_used_again_within_the_lease(
    open_slots: OpenSlots,
) -> None:
    check_killed_holders(open_slots(workers=2), children=8, workers=2, lease=2)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_r37_the_places_of_a_hundred_killed_holders_are_used_again_within_the_lease(
    open_slots: OpenSlots,
) -> None:
    check_killed_holders(open_slots(workers=2), children=80, workers=20, lease=2)


def test_calls_that_wait_for_a_place_hold_no_worker_and_a_cancel_frees_what_they_had(
    open_slots: OpenSlots,
) -> None:
    stage = open_slots(concurrency=6)
    first = stage.submit(
        by_turn([calls(*[("hold", {"n": n}) for n in range(20)])]), agent="limited"
    )
    stage.fleet.wait_for(lambda: len(holders(stage)) == 5)
    second = stage.submit(by_turn([calls(("hold", {"n": 1}), ("free", {"n": 1}))]), agent="limited")

    # One child is left, behind twenty calls that wait for a place.
    stage.fleet.wait_for(lambda: any(line.startswith(second.id) for line in stage.fleet.ledger))

    cancelled_at = time.monotonic()
    first.cancel()
    stage.fleet.wait_for(lambda: f"{second.id}.0.0" in holders(stage))
    assert time.monotonic() - cancelled_at < 3  # the tools of the first are let go of meanwhile
    stage.fleet.folder.joinpath("ledger.go").touch()
    assert second.result(timeout=20).ok
    assert first.result(timeout=1).stop_reason is StopReason.CANCELLED


def test_a_rate_holds_over_all_workers(open_slots: OpenSlots) -> None:
    stage = open_slots(workers=2, concurrency=4)
    run = stage.submit(
        by_turn([calls(*[("metered", {"n": n}) for n in range(30)])]), agent="limited"
    )

    assert run.result(timeout=30).ok

    # Redis counts from the begin of a call; its body starts some milliseconds later.
    begun = sorted(event.at for event in run.events() if event.type == "call.started")
    assert len(begun) == 30
    gaps = [late - early for early, late in zip(begun, begun[10:], strict=False)]
    assert min(gaps) >= 1
    assert begun[-1] - begun[0] < 4  # two periods, and the time to notice that they are over


def test_a_models_limit_holds_over_all_runs_and_waiting_steps_hold_no_worker(
    open_slots: OpenSlots,
) -> None:
    stage = open_slots()
    runs = [stage.submit([final("ok") | {"delay": 0.3}], agent="single") for _ in range(8)]

    assert all(run.result(timeout=30).ok for run in runs)

    moments = [
        (event.at, event.type)
        for run in runs
        for event in run.events()
        if event.type in ("model.answered", "run.waiting")
    ]
    answered = sorted(at for at, kind in moments if kind == "model.answered")
    assert all(late - early > 0.25 for early, late in zip(answered, answered[2:], strict=False)), (
        "more than two at once"
    )
    assert sum(kind == "run.waiting" for _, kind in moments) >= 6
    assert answered[-1] - answered[0] < 3
