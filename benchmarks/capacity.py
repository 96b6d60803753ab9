"""Works out how many workers a load needs, in `docs/capacity.md`, from what was measured alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import DOCS, fill_in, show_rows
from benchmarks.tables import Cell, Table

ASKING, WORKING = 5.0, 0.5
"""Seconds of a model call and of a tool in the worked examples."""

CALLS = 4

SPARE = 0.6
"""How much of a core is planned for; the rest is for peaks and for recovery."""

THREADS = 32
"""Model calls at once in a steps worker, unless `--concurrency` says otherwise."""

NEEDED = ("cpu", "commands", "memory", "parked")


@dataclass(frozen=True)
class Costs:
    """What one step of four calls costs, and what one run holds."""

    steps_ms: float
    tools_ms: float
    redis_ms: float
    step_kb: float
    flight_mb: float
    steps_mb: float
    tools_mb: float
    child_mb: float
    parked_kb: float

    @classmethod
    def of(cls, results: Mapping[str, Table]) -> Costs:
        cpu, memory, parked = (by_name(results[name]) for name in ("cpu", "memory", "parked"))
        beside = parked["Redis, KB for each, beside its messages"][-1]
        return cls(
            steps_ms=float(cpu["steps worker"][3]),
            tools_ms=float(cpu["tools worker with its children"][3]),
            redis_ms=float(cpu["Redis"][3]),
            step_kb=float(by_name(results["commands"])["celeriac"][2]),
            flight_mb=float(memory["each of them, MB"][1]),
            steps_mb=float(memory["a steps worker, MB"][1]),
            tools_mb=float(memory["a tools worker without its children, MB"][1]),
            child_mb=float(memory["each child of it, MB"][1]),
            parked_kb=float(beside) + float(parked["its messages, KB"][-1]),
        )

    def plan(self, runs: int) -> list[Cell]:
        """What so many runs at work at once need."""
        rate = runs / (ASKING + WORKING)  # steps a second
        asking = math.ceil(rate * ASKING)
        workers = max(math.ceil(asking / THREADS), math.ceil(rate * self.steps_ms / 1000 / SPARE))
        tools_cores = rate * self.tools_ms / 1000 / SPARE
        children = math.ceil(max(rate * CALLS * WORKING / 0.8, tools_cores))
        memory = (
            workers * self.steps_mb
            + asking * self.flight_mb
            + math.ceil(children / 8) * self.tools_mb
            + children * self.child_mb
        )
        return [
            runs,
            round(rate, 1),
            workers,
            children,
            round(rate * (self.steps_ms + self.tools_ms) / 1000 / SPARE, 1),
            round(memory / 1024, 1),
            f"{rate * self.redis_ms / 10:.0f} %",
            round(rate * self.step_kb / 1024, 1),
        ]


def write_capacity(results: Mapping[str, Table], docs: Path = DOCS) -> None:
    """Fill in the page; nothing happens before all that it rests on was measured."""
    if set(NEEDED) <= set(results):
        fill_in(docs / "capacity.md", show_capacity(Costs.of(results)))


def show_capacity(costs: Costs) -> str:
    most = 1000 * SPARE / costs.redis_ms
    given = show_rows(
        ["figure", "measured", "table of benchmarks.md"],
        [
            ["CPU of a steps worker for a step, ms", costs.steps_ms, "CPU time of a step"],
            ["CPU of a tools worker for its four calls, ms", costs.tools_ms, "CPU time of a step"],
            ["CPU of Redis for a step, ms", costs.redis_ms, "CPU time of a step"],
            ["to and from Redis for a step, KB", costs.step_kb, "Commands of a step"],
            ["a steps worker, MB", costs.steps_mb, "Memory"],
            ["each model call in it, MB", costs.flight_mb, "Memory"],
            ["a tools worker without its children, MB", costs.tools_mb, "Memory"],
            ["each child of it, MB", costs.child_mb, "Memory"],
            ["a waiting run, KB", round(costs.parked_kb, 2), "Ten thousand waiting runs"],
        ],
    )
    plans = show_rows(
        [
            "runs at work",
            "steps a second",
            "steps workers",
            "tools processes",
            "cores of workers",
            "GB of workers",
            "Redis, of a core",
            "Redis, MB a second",
        ],
        [costs.plan(runs) for runs in (10, 100, 500, 2_000, 5_000)],
    )
    return (
        f"{given}\n\nOne Redis carries about {most:,.0f} steps of four calls a second at "
        f"{SPARE:.0%} of its core.\n\n{plans}"
    )


def by_name(table: Table) -> dict[str, list[Cell]]:
    return {str(row[0]): list(row) for row in table.rows}
