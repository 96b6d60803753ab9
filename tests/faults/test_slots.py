"""Limits across the fleet with real workers; a ledger outside of Redis says what ran when."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from runner import StopReason
from support.model_server import calls
from support.stage import Stage, by_turn, open_stage

AGENTS = r'''
import os
import time

from runner import Agent, Context, Limits, tool
from support.agents import note

ROOMY = Limits(max_calls_per_turn=300, max_tool_calls=1000, max_parallel_calls=300, timeout=120)


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


@tool(max_concurrency=5, idempotent=True, attempts=100)
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
            stage = stack.enter_context(open_stage(folder, agents="slot_agents", **environ))
            stage.fleet.stop("tools")
            names = [f"tools-{number}" for number in range(workers)]
            for name in names:
                stage.fleet.start("tools", name=name, concurrency=concurrency)
            for name in names:
                stage.fleet.wait_for(lambda name=name: "ready" in stage.fleet.log(name), timeout=30)
            return stage

        yield make


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


def held_now(stage: Stage, known: set[str]) -> list[list[str]]:
    """Lines of bodies that took a place since `known`: trace id, process, time."""
    lines = [line for line in stage.fleet.ledger if line.startswith("held") and line not in known]
    return [line.split()[1:] for line in lines]


def kill_holders(stage: Stage, count: int) -> list[float]:
    """Kill a holder with its whole worker, again and again; seconds until 5 places are held."""
    took = []
    known: set[str] = set()
    held = {trace: int(pid) for trace, pid, _ in held_now(stage, known)}
    for number in range(count):
        known |= set(stage.fleet.ledger)
        name = sorted(stage.fleet.workers)[1:][number % 2]
        lost = [trace for trace, pid in held.items() if parent_of(pid) == name_pid(stage, name)]
        killed_at = time.monotonic()
        stage.fleet.kill(name)
        stage.fleet.start("tools", name=name, concurrency=8)
        new = stage.fleet.wait_for(lambda: whole(held_now(stage, known), len(lost)), timeout=30)
        took.append(max([float(at) for *_, at in new], default=killed_at) - killed_at)
        held = {trace: pid for trace, pid in held.items() if trace not in lost}
        held |= {trace: int(pid) for trace, pid, _ in new}
        assert len(held) == 5
        stage.fleet.wait_for(lambda name=name: "ready" in stage.fleet.log(name), timeout=30)
    return took


def whole(new: list[list[str]], wanted: int) -> list[list[str]] | bool:
    return (new or True) if len(new) == wanted else False


def name_pid(stage: Stage, name: str) -> int:
    return stage.fleet.workers[name].pid


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def check_dead_holders(stage: Stage, count: int, lease: float) -> None:
    stage.fleet.start("tools", name="tools-1", concurrency=8)
    stage.fleet.wait_for(lambda: "ready" in stage.fleet.log("tools-1"), timeout=30)
    run = stage.submit(by_turn([calls(*[("hold", {"n": n}) for n in range(12)])]), agent="limited")
    stage.fleet.wait_for(lambda: len(held_now(stage, set())) == 5)

    took = kill_holders(stage, count)

    say(f"{count} workers killed: 5 places held again after at most {max(took):.2f} s")
    assert max(took) < lease + 1
    (stage.fleet.folder / "ledger.go").touch()
    assert run.result(timeout=60).ok
    redis = raw_client(stage.fleet.redis_url)
    assert redis.exists(keys.slots("hold"), keys.waiting("hold"), keys.CROWDED) == 0
    redis.close()
