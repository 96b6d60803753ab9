"""How soon a place is free after a cancel, and a run goes on after a death."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from benchmarks.gauges import family
from benchmarks.load import Load
from benchmarks.rigs import Ours, ours, wait_for_runs
from benchmarks.tables import Bar, Size, Table, median_and_spread
from runner import keys
from support.fleet import raw_client, wait_for

LEASE = 3.0
"""Seconds; the default of 15 would only make the measuring longer."""


def measure_cancel(size: Size, folder: Path) -> Table:
    """From a cancel until the next run has been served by the same place."""
    model, tool = Load(steps=0, asking=60), Load(steps=1, calls=1, working=60)
    nothing, instant = Load(steps=0), Load(steps=1, calls=1)
    with ours(folder, started=False) as rig:
        for queue in ("steps", "tools"):
            rig.start(queue, concurrency=1)
        rig.workers.wait_until_ready()
        wait_for_runs(rig, [rig.submit(instant)])
        rounds = range(size.of(20, 2))
        models = [1000 * time_cancel(rig, model, "step.started", nothing) for _ in rounds]
        tools = [1000 * time_cancel(rig, tool, "call.started", instant) for _ in rounds]
    return Table(
        title="Cancel",
        about="One place for model calls and one for tools. A run holds it with a model call, or a "
        "tool, of a minute, and another run waits behind it. From the cancel of the first to the "
        "end of the second, in milliseconds.",
        columns=["what is cancelled", "ms until its place has served the next run"],
        rows=[
            ["a model call", median_and_spread(models, 0)],
            ["a tool", median_and_spread(tools, 0)],
        ],
        bars=[Bar("a cancel, the slowest: ms", round(max([*models, *tools])), 1000)],
    )


def time_cancel(rig: Ours, load: Load, started: str, following: Load) -> float:
    run_id = rig.submit(load)
    run = rig.client.get(run_id)
    wait_for(
        lambda: any(each.type == started for each in rig.client.store.read_events(run.id, "0"))
    )
    behind = rig.submit(following)
    begun = time.perf_counter()
    run.cancel()
    wait_for_runs(rig, [behind], every=0.001)
    return time.perf_counter() - begun


def measure_recovery(size: Size, folder: Path) -> Table:
    """From a kill until somebody else has what was held."""
    environ = {"CELERIAC_LEASE": f"{LEASE:g}", "CELERIAC_RENEW_EVERY": "1"}
    count = size.of(8, 2)
    delays: dict[str, list[float]] = {"model calls": [], "tools": []}
    with ours(folder, started=False, **environ) as rig:
        for name in ("a", "b"):
            rig.start("steps", name=f"steps-{name}", concurrency=count)
            rig.start("tools", name=f"tools-{name}", concurrency=count)
        rig.workers.wait_until_ready()
        wait_for_runs(rig, [rig.submit(Load()) for _ in range(4)])
        for number in range(size.of(2)):
            for what, queue in (("model calls", "steps"), ("tools", "tools")):
                found = time_recovery(rig, queue, f"{queue}-a", count)
                delays[what] += found
                rig.start(queue, name=f"{queue}-a", concurrency=count)
                log = rig.workers.log
                wait_for(lambda: log(f"{queue}-a").count(" ready") > number + 1, timeout=60)  # noqa: B023
        child = time_child(rig)
    slowest = max(delay for found in delays.values() for delay in found)
    return Table(
        title="Recovery",
        about=f"A worker that holds some of {count} model calls, or of as many tools, is killed "
        "with its children (SIGKILL); another of its kind is up. Seconds from the kill to the next "
        f"attempt, with a lease of {LEASE:g} s instead of 15. A child that is killed alone is "
        "answered for by its parent: seconds to the run's end.",
        columns=["killed", "attempts", "seconds"],
        rows=[
            *[
                (f"a worker with {what}", len(found), median_and_spread(found))
                for what, found in delays.items()
            ],
            ("a child in a tool", 1, f"{child:.2f}"),
        ],
        bars=[Bar("recovery, the slowest: seconds beyond the lease", round(slowest - LEASE, 2), 2)],
    )


def time_recovery(rig: Ours, queue: str, victim: str, count: int) -> list[float]:
    """Kill a worker; answers the delay of each run that it held."""
    started = "step.started" if queue == "steps" else "call.started"
    load = (
        Load(steps=0, asking=2.0)
        if queue == "steps"
        else Load(steps=1, calls=1, working=2.0, tool="again")
    )
    store = rig.client.store
    run_ids = [rig.submit(load) for _ in range(count)]

    def all_begun() -> bool:
        return all(
            any(each.type == started for each in store.read_events(run_id, "0"))
            for run_id in run_ids
        )

    wait_for(all_begun)
    held = held_by(rig, queue, victim, run_ids)
    killed = time.time()
    rig.workers.kill(victim)
    wait_for_runs(rig, run_ids, timeout=60)
    begins = [
        [each.at for each in store.read_events(run_id, "0") if each.type == started]
        for run_id in held
    ]
    return [times[1] - killed for times in begins if len(times) > 1]


def held_by(rig: Ours, queue: str, name: str, run_ids: list[str]) -> list[str]:
    """The runs whose holder is this worker, or a child of it."""
    pids = {str(pid) for pid in family(rig.workers.processes[name].pid)}
    client = raw_client(rig.url)
    found = []
    for run_id in run_ids:
        key, field = (
            (keys.run(run_id), "attempt") if queue == "steps" else (keys.calls(run_id), "0.attempt")
        )
        if (client.hget(key, field) or "//").split("/")[1] in pids:
            found.append(run_id)
    client.close()
    return found


def time_child(rig: Ours) -> float:
    """Kill the process that is in a tool; answers the seconds until its run has ended."""
    run_id = rig.submit(Load(steps=1, calls=1, working=30))
    client = raw_client(rig.url)
    attempt = wait_for(lambda: client.hget(keys.calls(run_id), "0.attempt"))
    client.close()
    started = time.perf_counter()
    os.kill(int(attempt.split("/")[1]), signal.SIGKILL)
    wait_for_runs(rig, [run_id], every=0.002)
    return time.perf_counter() - started
