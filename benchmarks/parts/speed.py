"""How fast: one run, fifty at once, wide turns, long histories, many runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import runner.earlier
from benchmarks.gauges import count_bytes
from benchmarks.load import Load, make_history
from benchmarks.rigs import Rig, bare_hop, obvious, ours, wait_for_runs
from benchmarks.tables import Bar, Cell, Plot, Size, Table, median_and_spread, ratio

IN_A_ROW = 9
"""Single runs of which the median counts, each time that it is somebody's turn."""

LOOK_AFTER = 0.8
"""Of the quickest so far, what a run is left alone for: looks take a tenth of it otherwise."""


def measure_overhead(size: Size, folder: Path) -> Table:
    """One run of 10 steps by 4 calls at a time."""
    load = Load(steps=10, calls=4)
    with ExitStack() as stack:
        rigs: list[Rig] = [
            stack.enter_context(ours(folder / "ours")),
            stack.enter_context(obvious(folder / "obvious")),
            stack.enter_context(bare_hop(folder / "hop")),
        ]
        found = interleave(
            rigs,
            size.of(7, 2),
            lambda rig: 1000 * time_single_runs(rig, load, IN_A_ROW) / load.steps,
        )
    mine, theirs, hops = found
    share = ratio(mine, theirs)
    return Table(
        title="Overhead of a step",
        about="One run at a time, of 10 steps by 4 calls with an instant model and instant tools, "
        "and an answer after them: milliseconds from submit to end, by the number of steps; the "
        f"median of {IN_A_ROW} runs counts each time. A bare hop is one task that enqueues itself "
        "with stock settings; a step is five messages, two of them in a row.",
        columns=["contestant", "ms a step", "of the obvious design's"],
        rows=[
            [rig.name, median_and_spread(times), round(ratio(times, theirs), 2)]
            for rig, times in zip(rigs, (mine, theirs, hops), strict=True)
        ],
        bars=[Bar("one run: milliseconds a step, of the obvious design's", round(share, 2), 0.4)],
    )


def measure_throughput(size: Size, folder: Path) -> Table:
    """Fifty runs at once."""
    load, count = Load(steps=10, calls=4), size.of(50, 2)
    with ours(folder / "ours") as mine, obvious(folder / "obvious") as theirs:
        rates = interleave(
            [mine, theirs], size.of(3), lambda rig: count / time_runs(rig, load, count)
        )
    share = ratio(*rates)
    return Table(
        title="Fifty runs at once",
        about=f"{count} runs of 10 steps by 4 calls, submitted one after the other: runs a second "
        "from the first submit to the last end.",
        columns=["contestant", "runs a second", "of the obvious design's"],
        rows=[
            ["celeriac", median_and_spread(rates[0]), round(share, 2)],
            ["obvious", median_and_spread(rates[1]), 1],
        ],
        bars=[
            Bar("fifty at once: runs a second, of the obvious design's", round(share, 2), 3.5, True)
        ],
    )


def measure_fanout(size: Size, folder: Path) -> Table:
    """Turns of 1 to 128 calls."""
    rows: list[Sequence[Cell]] = []
    bars = []
    with ours(folder / "ours") as mine, obvious(folder / "obvious") as theirs:
        for calls in size.some([1, 4, 8, 32, 128], 2):
            load = Load(steps=3, calls=calls)
            times = interleave(
                [mine, theirs],
                size.of(7),
                lambda rig, load=load: 1000 * time_single_runs(rig, load, 3) / load.steps,  # type: ignore[misc]
            )
            share = ratio(*times)
            rows.append(
                [
                    calls,
                    round(statistics.median(times[0]), 1),
                    round(statistics.median(times[1]), 1),
                    round(share, 2),
                ]
            )
            if calls >= 32:
                bars.append(
                    Bar(f"a turn of {calls} calls: of a chord's time", round(share, 2), 0.5)
                )
    return Table(
        title="Fan-out",
        about="One run at a time, of three steps with so many calls each: milliseconds a step, "
        "medians.",
        columns=["calls", "celeriac", "obvious", "ratio"],
        rows=rows,
        bars=bars,
        plot=Plot("calls", ["celeriac", "obvious"], "ms a step", logarithmic=True),
    )


def measure_history(size: Size, folder: Path) -> Table:
    """Steps behind 10 to 10,000 messages."""
    rows: list[Sequence[Cell]] = []
    seen: dict[int, tuple[float, float]] = {}
    # What was said elsewhere is bounded; here it stands in for what a run has said itself.
    with (
        mock.patch.object(runner.earlier, "MAX_MESSAGES", 10_000),
        ours(folder / "ours", CELERIAC_MAX_GOAL_CHARS="10000000") as mine,
        obvious(folder / "obvious") as theirs,
    ):
        for count in size.some([10, 100, 1_000, 2_000, 10_000], 2):
            costs = [measure_step_behind(rig, count, size.of(5)) for rig in (mine, theirs)]
            seen[count] = costs[0]
            (ms, moved), (their_ms, their_moved) = costs
            rows.append(
                [
                    count,
                    *(round(each, 1) for each in (ms, their_ms, moved / 1024, their_moved / 1024)),
                ]
            )
    bars = []
    if 2_000 in seen:
        (short_ms, short_bytes), (long_ms, long_bytes) = seen[10], seen[2_000]
        bars = [
            Bar("a step at 2,000 messages, of one at 10", round(long_ms / short_ms, 2), 1.5),
            Bar("its bytes to and from Redis", round(long_bytes / short_bytes, 2), 1.1),
        ]
    return Table(
        title="A long history",
        about="A step by one call in a run with so many earlier messages of two hundred "
        "characters: milliseconds, and kilobytes to and from Redis. It is what a run of twelve "
        "steps takes beyond one of two, so the submit and the first look at the history aren't in.",
        columns=["messages", "celeriac", "obvious", "celeriac, KB", "obvious, KB"],
        rows=rows,
        bars=bars,
        plot=Plot("messages", ["celeriac", "obvious"], "ms a step", logarithmic=True),
    )


def measure_step_behind(rig: Rig, count: int, rounds: int) -> tuple[float, float]:
    """Milliseconds and bytes of one more step behind so many messages: the medians."""
    earlier = make_history(count)
    short, long = Load(steps=2, calls=1), Load(steps=12, calls=1)
    times, moved = [], []
    for _ in range(rounds):
        costs = []
        for load in (short, long):
            before = count_bytes(rig.url)
            started = time.perf_counter()
            wait_for_runs(rig, [rig.submit(load, earlier)], every=0.005)
            costs.append((time.perf_counter() - started, count_bytes(rig.url) - before))
        more = long.steps - short.steps
        times.append(1000 * (costs[1][0] - costs[0][0]) / more)
        moved.append((costs[1][1] - costs[0][1]) / more)
    return statistics.median(times), statistics.median(moved)


def measure_many(size: Size, folder: Path) -> Table:
    """One to five hundred runs at once."""
    load = Load(steps=3, calls=4)
    rows: list[Sequence[Cell]] = []
    with ours(folder / "ours") as mine, obvious(folder / "obvious") as theirs:
        for count in size.some([1, 10, 50, 200, 500], 2):
            rates = interleave(
                [mine, theirs],
                size.of(3 if count < 200 else 1),
                lambda rig, count=count: rate_of(rig, load, count),  # type: ignore[misc]
                warm=count > 1,
            )
            rows.append(
                [
                    count,
                    round(statistics.median(rates[0]), 1),
                    round(statistics.median(rates[1]), 1),
                    round(ratio(*rates), 2),
                ]
            )
    return Table(
        title="One to five hundred runs at once",
        about="Runs of three steps by four calls, on the same two workers: runs a second.",
        columns=["runs", "celeriac", "obvious", "ratio"],
        rows=rows,
        plot=Plot("runs", ["celeriac", "obvious"], "runs a second", logarithmic=True),
    )


def rate_of(rig: Rig, load: Load, count: int) -> float:
    """Runs a second of so many at once."""
    if count == 1:
        return 1 / time_single_runs(rig, load, IN_A_ROW)
    return count / time_runs(rig, load, count)


def interleave(
    rigs: Sequence[Rig], rounds: int, measure: Callable[[Rig], float], *, warm: bool = False
) -> list[list[float]]:
    """Measure each in turn, round after round: what disturbs one disturbs its neighbours too.

    Where they aren't warm yet, a first round isn't counted.
    """
    found: list[list[float]] = [[] for _ in rigs]
    for number in range(rounds if warm else rounds + 1):
        for times, rig in zip(found, rigs, strict=True):
            value = measure(rig)
            if warm or number:
                times.append(value)
    return found


def time_run(rig: Rig, load: Load, *, at_least: float = 0.0) -> float:
    """Seconds of one run, from its submit to its end; nobody looks before `at_least` are over."""
    started = time.perf_counter()
    run_id = rig.submit(load)
    time.sleep(at_least)
    wait_for_runs(rig, [run_id], every=0.0005)
    return time.perf_counter() - started


def time_single_runs(rig: Rig, load: Load, count: int) -> float:
    """The median seconds of so many runs, one after the other, with few looks at each."""
    times: list[float] = []
    for _ in range(count):
        times.append(time_run(rig, load, at_least=LOOK_AFTER * min(times, default=0.0)))
    return statistics.median(times)


def time_runs(rig: Rig, load: Load, count: int) -> float:
    """Seconds of so many runs at once."""
    started = time.perf_counter()
    wait_for_runs(rig, [rig.submit(load) for _ in range(count)])
    return time.perf_counter() - started
