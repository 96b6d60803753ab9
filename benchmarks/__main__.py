"""`make bench`: measures what is asked for, keeps the figures and writes `docs/benchmarks.md`."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.capacity import write_capacity
from benchmarks.parts import cost, faults, fire, peers, slots, speed
from benchmarks.report import show_table, write_report
from benchmarks.tables import Size, Table, load_results, save_results

PARTS: dict[str, Callable[[Size, Path], Table]] = {
    "overhead": speed.measure_overhead,
    "throughput": speed.measure_throughput,
    "fanout": speed.measure_fanout,
    "history": speed.measure_history,
    "many": speed.measure_many,
    "slots": slots.measure_slots,
    "workers": slots.measure_workers,
    "parked": cost.measure_parked,
    "cancel": faults.measure_cancel,
    "recovery": faults.measure_recovery,
    "cpu": cost.measure_cpu,
    "commands": cost.measure_commands,
    "memory": cost.measure_memory,
    "watching": cost.measure_watching,
    "fire": fire.measure_fire,
    "peers": peers.measure_peers,
}
"""Each part by its name, in the order in which the document has them."""

ON_DEMAND = {"fire", "peers"}
"""Parts that take minutes of their own, and are only measured where they are named."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of: {', '.join(PARTS)}")
    parser.add_argument("--share", type=float, default=1.0, help="of the full size; 1 is all")
    parser.add_argument("--dry", action="store_true", help="show the figures, and keep nothing")
    parser.add_argument(
        "--render", action="store_true", help="write the documents, measure nothing"
    )
    given = parser.parse_args(arguments)
    unknown = set(given.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    results = load_results()
    usual = [] if given.render else [each for each in PARTS if each not in ON_DEMAND]
    for name in given.parts or usual:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="celeriac-bench-") as folder:
            table = PARTS[name](Size(given.share), Path(folder))
        table = replace(table, measured=describe_machine())
        print(f"{show_table(table)}\n({name}: {time.monotonic() - started:.0f} s)\n", flush=True)
        results[name] = table
        if not given.dry:
            save_results(results)
    if not given.dry:
        write_report({name: results[name] for name in PARTS if name in results})
        write_capacity(results)
    return 0


def describe_machine() -> str:
    """Where and when, in one line."""
    day = time.strftime("%Y-%m-%d", time.gmtime())
    python = platform.python_version()
    return (
        f"{day}, {os.cpu_count()} cores, Python {python}, {platform.system()} {platform.machine()}"
    )


if __name__ == "__main__":
    # So that a time limit's signal leaves no worker and no server behind either.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
