"""What it costs: commands, bytes, memory, waiting runs, events and traces."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.agents import bench
from benchmarks.gauges import (
    count_bytes,
    cpu_seconds,
    family,
    listening,
    own_memory,
    read_info,
    shared_memory,
    used_memory,
)
from benchmarks.load import Load
from benchmarks.parts.speed import interleave, time_runs
from benchmarks.rigs import Ours, Rig, Workers, obvious, ours, wait_for_runs
from benchmarks.tables import Bar, Cell, Size, Table, median_and_spread, ratio
from runner import keys
from runner.agents import Agents
from runner.loop import Loop
from runner.settings import Settings
from runner.store import RunStore
from support.fleet import raw_client
from tasks.accept import accept_goal

SLOW = 0.06
"""Seconds of a model and of a tool after which no hint is taken but by Celery."""

PATIENCE = 2.0
"""Seconds in which a run ends that nobody looks at meanwhile."""


def measure_commands(size: Size, folder: Path) -> Table:
    """Commands and bytes of a step of four calls."""
    short, long = 2, size.of(22, 6)
    rows: list[list[Cell]] = []
    with ours(folder / "ours") as mine, obvious(folder / "obvious") as theirs:
        found = {rig.name: count_step(rig, short, long) for rig in (mine, theirs)}
    for name, (commands, moved) in found.items():
        most = ", ".join(f"{word} {count:.1f}" for word, count in commands.most_common(8) if count)
        rows.append([name, round(commands.total(), 1), round(moved / 1024, 1), most])
    sent = found["celeriac"][0].total()
    return Table(
        title="Commands of a step",
        about="Commands that clients send to Redis for a step of four calls, where a script counts "
        "once, as MONITOR shows them, and kilobytes in and out. It is what a run of "
        f"{long} steps takes beyond one of {short}, over the same time, so submit, end and "
        "heartbeats aren't in.",
        columns=["contestant", "commands", "KB", "the most frequent"],
        rows=rows,
        bars=[Bar("commands for a step of four calls", round(sent, 1), 35)],
    )


def count_step(rig: Rig, short: int, long: int) -> tuple[Counter[str], float]:
    """Commands by name, and bytes, of one step of four calls."""
    wait_for_runs(rig, [rig.submit(Load(steps=2))])
    heard: list[Counter[str]] = []
    moved: list[int] = []
    for steps in (short, long):
        with listening(rig.url) as commands_heard:
            run_id = rig.submit(Load(steps=steps))
            time.sleep(PATIENCE)
        wait_for_runs(rig, [run_id])
        heard.append(commands_heard)
        # Once more for the bytes: MONITOR sends each command on, and that would count too.
        before = count_bytes(rig.url)
        run_id = rig.submit(Load(steps=steps))
        time.sleep(PATIENCE)
        moved.append(count_bytes(rig.url) - before)
        wait_for_runs(rig, [run_id])
    more = long - short
    few, many = heard
    words = {word: (many[word] - few[word]) / more for word in many}
    commands: Counter[str] = Counter()
    for word, count in words.items():
        if round(count, 1) > 0:
            commands[word] = count  # type: ignore[assignment]
    return commands, (moved[1] - moved[0]) / more


def measure_cpu(size: Size, folder: Path) -> Table:
    """CPU time of a step, by the process that spends it."""
    load, count = Load(), size.of(50, 2)
    slow = replace(load, asking=SLOW, working=SLOW)
    with (
        ours(folder / "ours") as mine,
        obvious(folder / "obvious") as theirs,
        ours(folder / "slow", started=False) as wide,
    ):
        wide.start("steps")
        wide.start("tools", concurrency=16)
        wide.workers.wait_until_ready()
        for rig in (mine, theirs, wide):
            time_runs(rig, load, 2)
        quick_ms, their_ms, slow_ms = (
            spend_cpu(rig, each, count)
            for rig, each in ((mine, load), (theirs, load), (wide, slow))
        )
    return Table(
        title="CPU time of a step",
        about=f"{count} runs of 10 steps by 4 calls at once: milliseconds of CPU time for a step. "
        "A steps worker and Redis each use one core at most, a tools worker one for each child. "
        "Where all is quick, a worker that is busy takes its next hint by itself; the last column "
        f"is of runs whose model and tools take {1000 * SLOW:.0f} ms each (with 16 children), so "
        "that each step and each call is a task of its own, brought by Celery.",
        columns=["where", "celeriac, ms", "obvious, ms", "celeriac where all is slow, ms"],
        rows=[
            ["steps worker", *shown(quick_ms, None, slow_ms, name="steps")],
            ["tools worker with its children", *shown(quick_ms, None, slow_ms, name="tools")],
            ["worker with its children", "", round(their_ms["worker"], 2), ""],
            ["Redis", *shown(quick_ms, their_ms, slow_ms, name="redis")],
            ["all", *(round(sum(each.values()), 2) for each in (quick_ms, their_ms, slow_ms))],
        ],
    )


def spend_cpu(rig: Rig, load: Load, count: int) -> dict[str, float]:
    """Milliseconds of CPU time of a step, by process, in so many runs at once."""
    before = cpu_by_process(rig)
    time_runs(rig, load, count)
    after = cpu_by_process(rig)
    return {name: 1000 * (after[name] - before[name]) / count / load.steps for name in after}


def shown(*spent: dict[str, float] | None, name: str) -> list[Cell]:
    """What each has spent there; nothing where there is no such process."""
    return ["" if each is None else round(each[name], 2) for each in spent]


def cpu_by_process(rig: Rig) -> dict[str, float]:
    """CPU seconds so far of each worker with its children, and of the server."""
    found = {name: cpu_seconds(family(each.pid)) for name, each in rig.workers.processes.items()}
    return found | {"redis": cpu_seconds([int(read_info(rig.url, "server")["process_id"])])}


def measure_parked(size: Size, folder: Path) -> Table:
    """Ten thousand runs that wait for an approval."""
    count, seconds = size.of(10_000, 20), size.of(10)
    with ours(folder) as rig:
        idle = share_of_cpu(rig, seconds)
        before = worker_memory(rig.workers)
        empty = used_memory(rig.url)
        run_ids = park_runs(rig.workers.environ, count)
        taken = used_memory(rig.url) - empty
        client = raw_client(rig.url)
        messages = sum(client.memory_usage(keys.messages(each)) for each in run_ids[:20]) / 20
        client.close()
        waiting = share_of_cpu(rig, seconds)
        after = worker_memory(rig.workers)
    each = taken / count - messages
    return Table(
        title="Ten thousand waiting runs",
        about=f"{count} runs with one call that waits for an approval, and no work beside them: "
        f"what they take in Redis, and in {seconds} s the CPU time of the steps worker, the tools "
        "worker with its children, and of Redis, in percent of one core.",
        columns=["what", "without them", "with them"],
        rows=[
            ["Redis, KB for each, beside its messages", "", round(each / 1024, 2)],
            ["its messages, KB", "", round(messages / 1024, 2)],
            ["workers, % of a core", round(100 * idle[0], 2), round(100 * waiting[0], 2)],
            ["Redis, % of a core", round(100 * idle[1], 2), round(100 * waiting[1], 2)],
            ["workers, MB of their own", round(before, 1), round(after, 1)],
        ],
        bars=[
            Bar("a waiting run: KB of Redis beside its messages", round(each / 1024, 2), 8),
            Bar(
                "waiting runs: % of a core of the workers, beyond none",
                round(100 * (waiting[0] - idle[0]), 2),
                1,
            ),
            Bar("waiting runs: MB of the workers", round(after - before, 1), 2),
        ],
    )


def park_runs(environ: dict[str, str], count: int) -> list[str]:
    """Runs that wait for an approval, each taken through its first step in this process."""
    settings = Settings.from_env(environ)
    store = RunStore(settings)
    agents = Agents([bench])
    loop = Loop(store, agents, settings=settings)
    goal = Load(steps=1, calls=1, tool="ask_first").goal
    run_ids = []
    for _ in range(count):
        run_id = accept_goal(store, goal, agent="bench", agents=agents).run_id
        loop.advance(run_id, 0)
        run_ids.append(run_id)
    loop.close()
    store.close()
    return run_ids


def share_of_cpu(rig: Ours, seconds: float) -> tuple[float, float]:
    """CPU time of the workers and of the server, as a share of one core."""
    server = int(read_info(rig.url, "server")["process_id"])
    workers = [pid for each in rig.workers.processes.values() for pid in family(each.pid)]
    before = cpu_seconds(workers), cpu_seconds([server])
    time.sleep(seconds)
    after = cpu_seconds(workers), cpu_seconds([server])
    return (after[0] - before[0]) / seconds, (after[1] - before[1]) / seconds


def worker_memory(workers: Workers) -> float:
    return own_memory(pid for each in workers.processes.values() for pid in family(each.pid))


def measure_memory(size: Size, folder: Path) -> Table:
    """Workers at rest, and two hundred model calls in one of them."""
    count = size.of(200, 10)
    load = Load(steps=0, asking=1.0)
    with ours(folder / "ours", started=False) as rig, obvious(folder / "obvious") as theirs:
        rig.start("steps", concurrency=count)
        rig.start("tools")
        rig.workers.wait_until_ready()
        for each in (rig, theirs):
            wait_for_runs(each, [each.submit(Load()) for _ in range(2)])
        pid = rig.workers.processes["steps"].pid
        tools = family(rig.workers.processes["tools"].pid)
        rest = [shared_memory([pid]), shared_memory(tools[:1]), shared_memory(tools[1:2])]
        stock = shared_memory(family(theirs.workers.processes["worker"].pid))
        before = own_memory([pid])
        seconds = [time_runs(rig, load, count) for _ in range(size.of(5))]
        each_mb = (watch_burst(rig, load, count, pid) - before) / count
    share = statistics.median(seconds) / load.asking
    return Table(
        title="Memory",
        about=f"MB of a worker after a few runs (PSS), and {count} runs whose model takes a "
        f"second, in one steps worker with {count} threads: seconds from the first submit to the "
        "last end, of one second, in several bursts, and the most that each run in flight takes in "
        "one more.",
        columns=["what", "measured"],
        rows=[
            ["a steps worker, MB", round(rest[0], 1)],
            ["a tools worker without its children, MB", round(rest[1], 1)],
            ["each child of it, MB", round(rest[2], 1)],
            ["the obvious design's worker with its children, MB", round(stock, 1)],
            [f"{count} model calls of one second, times ideal", median_and_spread(seconds)],
            ["each of them, MB", round(each_mb, 3)],
        ],
        bars=[
            Bar("200 model calls in one worker: times ideal", round(share, 2), 1.2),
            Bar("each of them: MB", round(each_mb, 3), 0.25),
        ],
    )


def watch_burst(rig: Ours, load: Load, count: int, pid: int) -> float:
    """The most MB that a process takes while so many runs are on their way.

    To look takes time of the process that is looked at, so nobody times this burst.
    """
    run_ids, peak = [rig.submit(load) for _ in range(count)], 0.0
    while not all(rig.ended(run_ids[-1:])):
        peak = max(peak, own_memory([pid]))
        time.sleep(0.02)
    wait_for_runs(rig, run_ids)
    return peak


def measure_watching(size: Size, folder: Path) -> Table:
    """What Flower's events, the runs' events and their traces cost."""
    load, count = Load(steps=10, calls=4), size.of(20, 2)
    names = ["as it is", "with Celery's events", "without the runs' events", "without traces"]
    with ExitStack() as stack:
        rigs: list[Ours] = [
            stack.enter_context(ours(folder / "whole")),
            stack.enter_context(ours(folder / "told", CELERIAC_CELERY_CONFIG="benchmarks.watched")),
        ]
        for what in ("events", "trace"):
            rig = stack.enter_context(ours(folder / what, started=False))
            for queue in ("steps", "tools"):
                command = (sys.executable, "-m", "benchmarks.without", what, queue)
                rig.workers.start(queue, *command)
            rig.workers.wait_until_ready()
            rigs.append(rig)
        times = interleave(
            rigs, size.of(4), lambda rig: 1000 * time_runs(rig, load, count) / count / load.steps
        )
    return Table(
        title="What events and traces cost",
        about=f"{count} runs of 10 steps by 4 calls at once: milliseconds for a step of all of "
        "them together. Events of Celery are for Flower and are off until it asks for them; those "
        "of a run and its trace can't be turned off, and are cut out of the scripts for this.",
        columns=["workers", "ms a step", "of it as it is"],
        rows=[
            [name, median_and_spread(found), round(ratio(found, times[0]), 2)]
            for name, found in zip(names, times, strict=True)
        ],
    )
