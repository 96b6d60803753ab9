"""What needs minutes: thousands of steps, runs and calls. Run by `make soak`.

`CELERIAC_SOAK_SCALE` makes it smaller (0.02 is a minute) or larger; the bounds stay the same.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runner import StopReason, keys
from runner.settings import TOOLS_QUEUE
from support.fleet import is_lasting, raw_client
from support.model_server import Reply, calls, final
from support.stage import Stage, open_stage
from tasks import Run

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

SCALE = float(os.environ.get("CELERIAC_SOAK_SCALE", "1"))

AGENTS = r'''
import time

from runner import Agent, Context, Limits, tool
from support.agents import TOOLS, note


@tool(idempotent=True)
def load(n: int) -> str:
    """Return eight thousand characters."""
    return f"{n:06}" + "x" * 8_000


@tool(timeout=60)
def linger(ctx: Context) -> None:
    """Sleep for a minute, and say when that was cut short."""
    note(f"linger-begin {ctx.trace_id}")
    try:
        time.sleep(60)
    finally:
        note(f"linger-end {ctx.trace_id} {time.time()}")


soaked = Agent(
    name="soaked",
    tools=[*TOOLS, load, linger],
    limits=Limits(max_steps=100, timeout=3000, max_tool_calls=1000, max_parallel_calls=64),
)
short = Agent(name="short", tools=[*TOOLS, load, linger], limits=Limits(timeout=600))
'''


def scaled(number: int, least: int) -> int:
    return max(least, int(number * SCALE))


def say(text: str) -> None:
    """What was measured, for whoever runs pytest with -s or -rA."""
    print(text)  # noqa: T201


OpenSoak = Callable[..., Stage]


@pytest.fixture
def open_soak(tmp_path: Path) -> Iterator[OpenSoak]:
    with ExitStack() as stack:

        def make(**environ: str) -> Stage:
            folder = tmp_path / "stage"
            folder.mkdir()
            (folder / "soaked_agents.py").write_text(AGENTS)
            made = stack.enter_context(open_stage(folder, agents="soaked_agents", **environ))
            made.fleet.wait_for(lambda: "ready" in made.fleet.log("tools"))
            return made

        yield make


def forgetting(replies: list[Reply]) -> Callable[[dict[str, Any]], Reply]:
    """The reply of the turn; the body isn't kept, which would be gigabytes of a test's own."""

    def reply(body: dict[str, Any]) -> Reply:
        turn = sum(each["role"] == "assistant" for each in body["messages"])
        body.clear()
        return replies[turn] if turn < len(replies) else final("done")

    return reply


def family(pid: int) -> list[int]:
    found = subprocess.run(
        ["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    return [pid, *map(int, found)]


def memory(stage: Stage) -> dict[int, float]:
    """MB of its own that each process of the workers holds."""
    found = {}
    for name in ("steps", "tools"):
        for pid in family(stage.fleet.workers[name].pid):
            status = Path(f"/proc/{pid}/status").read_text()
            (line,) = [each for each in status.splitlines() if each.startswith("RssAnon")]
            found[pid] = int(line.split()[1]) / 1024
    return found


def descriptors(stage: Stage) -> dict[int, int]:
    """Open file descriptors of each process of the workers."""
    workers = [stage.fleet.workers[name].pid for name in ("steps", "tools")]
    pids = [pid for worker in workers for pid in family(worker)]
    return {pid: len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids}


def wait_for_all(runs: list[Run]) -> Counter[StopReason]:
    return Counter(run.result(timeout=1800).stop_reason for run in runs)


def test_r27_memory_and_descriptors_stay_flat_over_thousands_of_steps(open_soak: OpenSoak) -> None:
    """Runs of 50 steps, whose history grows to 400 KB: 200 KB on average."""
    stage = open_soak()
    turns = [calls(("load", {"n": n})) for n in range(49)]
    total = scaled(100, 8)

    def drive(count: int) -> None:
        runs = []
        for _ in range(count):
            runs.append(stage.submit(forgetting(turns), agent="soaked"))
            if len(runs) % 8 == 0:
                assert set(wait_for_all(runs[-8:])) == {StopReason.COMPLETED}
                for run in runs[-8:]:  # nor does the server keep all histories until their TTL
                    redis = stage.client.store.redis
                    redis.delete(keys.trace(run.id), keys.messages(run.id))
                    stage.fleet.tampered.add(run.id)
        assert set(wait_for_all(runs)) == {StopReason.COMPLETED}
        assert {run.result(timeout=1).steps for run in runs} == {50}

    drive(max(16, total // 5))
    warm, opened = memory(stage), descriptors(stage)
    started = time.monotonic()
    drive(total)
    took = time.monotonic() - started
    after = memory(stage)
    growth = {pid: after[pid] - warm[pid] for pid in warm if pid in after}
    say(
        f"{total * 50} steps in {took:.0f} s; MB before {[round(each) for each in warm.values()]}, "
        f"growth {[round(each, 1) for each in growth.values()]}"
    )
    assert after.keys() == warm.keys()
    assert max(growth.values()) < 30
    more = {pid: count - opened[pid] for pid, count in descriptors(stage).items()}
    say(f"file descriptors before {list(opened.values())}, growth {list(more.values())}")
    assert max(more.values()) <= 4


def test_r43_ten_thousand_runs_leave_no_key_behind(open_soak: OpenSoak) -> None:
    stage = open_soak(CELERIAC_RETENTION="5")
    redis = raw_client(stage.fleet.redis_url)

    def left() -> list[str]:
        return [key for key in redis.scan_iter("*", count=1000) if not is_lasting(key)]

    total = scaled(10_000, 200)
    script = forgetting([calls(("ping", {}))])
    started = time.monotonic()

    def submit(_: int) -> Run:
        return stage.submit(script, agent="soaked")

    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(submit, range(total)))
    submitted = time.monotonic() - started
    stage.fleet.wait_for(lambda: redis.zcard(keys.DUE) == 0, timeout=1800)
    say(
        f"{total} runs: submitted in {submitted:.0f} s, ended in {time.monotonic() - started:.0f} s"
    )

    assert [key for key in left() if redis.pttl(key) == -1] == []
    pinged = Counter(line.split()[1] for line in stage.fleet.ledger if line.startswith("ping"))
    assert pinged.keys() == {f"{run.id}.0.0" for run in runs}
    twice = sum(count > 1 for count in pinged.values())
    say(f"calls started twice: {twice} of {total}")
    assert twice <= 0.03 * total
    stage.fleet.wait_for(lambda: left() == [], timeout=60)
    assert submit(0).result(timeout=10).ok
    assert redis.zcard(keys.RUNS) == 1
    redis.close()


def test_r39_a_new_run_starts_at_once_behind_ten_thousand_waiting_calls(
    open_soak: OpenSoak,
) -> None:
    stage = open_soak()
    stage.fleet.stop("tools")
    redis = raw_client(stage.fleet.redis_url)
    turn = calls(*[("add", {"a": n, "b": n}) for n in range(64)])
    script = forgetting([turn])
    runs = [stage.submit(script, agent="soaked") for _ in range(scaled(157, 8))]
    waiting = 64 * len(runs)
    stage.fleet.wait_for(lambda: redis.llen(TOOLS_QUEUE) >= waiting, timeout=600)

    times = []
    for _ in range(20):
        run = stage.submit(forgetting([]), agent="soaked")
        assert run.result(timeout=20).ok
        at = {each.type: each.at for each in run.events()}
        times.append(at["step.started"] - at["run.created"])
    # Recovery has looked at all of them several times by now, and left them where they are.
    looked_until = time.time() + 10
    stage.fleet.wait_for(lambda: time.time() > looked_until, timeout=20)
    say(
        f"behind {waiting} calls a first step starts after p50={statistics.median(times):.3f} s "
        f"max={max(times):.3f} s; hints on the queue: {redis.llen(TOOLS_QUEUE)}"
    )
    assert max(times) < 1
    assert redis.llen(TOOLS_QUEUE) == waiting
    stage.fleet.start("tools", name="tools")

    assert set(wait_for_all(runs)) == {StopReason.COMPLETED}

    added = Counter(line.split()[1] for line in stage.fleet.ledger if line.startswith("add"))
    assert len(added) == waiting
    twice = sum(count > 1 for count in added.values())
    say(f"calls started twice: {twice} of {waiting}")
    assert twice <= 0.03 * waiting
    redis.close()


def test_r30_a_hundred_cancels_each_end_what_runs_within_a_second(open_soak: OpenSoak) -> None:
    stage = open_soak()
    count = scaled(100, 20)
    model, tool = [], []
    for _ in range(count):
        run = stage.submit([final("too late") | {"delay": 30}], agent="soaked")
        stage.fleet.wait_for(partial(stage.requests, run))
        before = stage.model.disconnects
        at = time.monotonic()
        run.cancel()
        while stage.model.disconnects == before:
            assert time.monotonic() - at < 5
        model.append(time.monotonic() - at)
    for _ in range(count):
        run = stage.submit([calls(("linger", {}))], agent="soaked")
        stage.fleet.wait_for(partial(lines_of, stage, run, 1))
        cancelled_at = time.time()
        run.cancel()
        _, end = stage.fleet.wait_for(partial(lines_of, stage, run, 2))
        tool.append(float(end.split()[-1]) - cancelled_at)
    for what, times in (("model call", model), ("tool", tool)):
        times.sort()
        p99 = times[int(0.99 * (len(times) - 1))]
        say(
            f"cancel of a {what}: n={count} p50={statistics.median(times):.3f} s p99={p99:.3f} s "
            f"max={times[-1]:.3f} s"
        )
        assert p99 <= 1


def lines_of(stage: Stage, run: Run, count: int) -> list[str]:
    lines = [line for line in stage.fleet.ledger if run.id in line]
    return lines if len(lines) == count else []
