"""Tools that take their time: a limit across the fleet, and more workers."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from benchmarks.load import Load
from benchmarks.rigs import ours, wait_for_runs
from benchmarks.tables import Bar, Size, Table, median_and_spread

LIMIT = 5
"""`max_concurrency` of the tool `limited`."""


def measure_slots(size: Size, folder: Path) -> Table:
    """Two hundred calls that wait for five places."""
    calls, working, workers = size.of(200, 20), 0.05, size.of(4, 1)
    ideal = calls * working / LIMIT
    shares = []
    with ours(folder, started=False) as rig:
        rig.start("steps")
        for number in range(workers):
            rig.start("tools", name=f"tools-{number}", concurrency=8)
        rig.workers.wait_until_ready()
        wait_for_runs(rig, [rig.submit(Load(steps=1, calls=8)) for _ in range(workers)])
        load = Load(steps=1, calls=20, tool="limited", working=working)
        for _ in range(size.of(3)):
            started = time.perf_counter()
            wait_for_runs(rig, [rig.submit(load) for _ in range(calls // 20)])
            shares.append(ideal / (time.perf_counter() - started))
    return Table(
        title="Waiting for places",
        about=f"{calls} calls of {1000 * working:g} ms each, in runs of 20, of a tool with "
        f"`max_concurrency={LIMIT}`, on {workers} tools workers with 8 processes each. Ideal is "
        f"{ideal:g} s; the share of it that is reached, from the first submit to the last end.",
        columns=["what", "share of ideal"],
        rows=[["celeriac", median_and_spread(shares)]],
        bars=[
            Bar(
                "200 calls for five places: share of ideal",
                round(statistics.median(shares), 2),
                0.9,
                True,
            )
        ],
    )


def measure_workers(size: Size, folder: Path) -> Table:
    """The same slow calls on one to four tools workers."""
    load = Load(steps=2, calls=16, working=0.1)
    count = size.of(8, 1)
    rates: list[float] = []
    with ours(folder, started=False) as rig:
        rig.start("steps")
        for number in range(size.of(4, 2)):
            rig.start("tools", name=f"tools-{number}", concurrency=4)
            rig.workers.wait_until_ready()
            wait_for_runs(rig, [rig.submit(Load(steps=1, calls=8))])
            started = time.perf_counter()
            wait_for_runs(rig, [rig.submit(load) for _ in range(count)])
            rates.append(count * load.steps * load.calls / (time.perf_counter() - started))
    return Table(
        title="More tools workers",
        about=f"{count} runs of two steps by 16 calls of {1000 * load.working:g} ms, on so many "
        "tools workers of four processes each: calls a second, and how many times those of one.",
        columns=["workers", "calls a second", "times one"],
        rows=[
            [number, round(rate, 1), round(rate / rates[0], 2)]
            for number, rate in enumerate(rates, 1)
        ],
        bars=[
            Bar(
                "a second tools worker: times the calls a second",
                round(rates[1] / rates[0], 2),
                1.9,
                True,
            )
        ],
    )
