"""Others that keep an agent's run, each as its own documents would write it, with the same load."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from benchmarks.load import Load
from benchmarks.parts.speed import IN_A_ROW, time_runs, time_single_runs
from benchmarks.peers.servers import Missing, free_port, postgres, restate
from benchmarks.rigs import ROOT, Rig, obvious, ours
from benchmarks.tables import Bar, Cell, Size, Table, median_and_spread, ratio

PYTHON = ROOT / ".venv-bench" / "bin" / "python"

HELD_TO = "LangGraph on Postgres"

SLOW = {"DBOS, tools through its queue", "DBOS, its queue at fifty looks a second"}
"""They take half a minute: once is enough."""


class Runs(Protocol):
    """Whoever runs loads."""

    def single(self, count: int) -> float:
        """The median seconds of so many, one after the other."""

    def at_once(self, count: int) -> float:
        """Seconds of so many at once."""


@dataclass
class OnCelery:
    """One of ours, that runs loads in its workers."""

    rig: Rig

    def single(self, count: int) -> float:
        return time_single_runs(self.rig, Load(), count)

    def at_once(self, count: int) -> float:
        return time_runs(self.rig, Load(), count)


@dataclass
class Peer:
    """A process that runs as many loads as it is told to."""

    process: subprocess.Popen[str]

    def single(self, count: int) -> float:
        return statistics.median(self.at_once(1) for _ in range(count))

    def at_once(self, count: int) -> float:
        assert self.process.stdin
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        return float(self.read())

    def read(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline().strip()
        if not line:
            raise Missing(f"its process ended with {self.process.wait(10)}")
        return line


@dataclass
class Times:
    """What was measured of one: milliseconds a step of one run, and runs a second of many."""

    one: list[float] = field(default_factory=list)
    many: list[float] = field(default_factory=list)

    def measure(self, runs: Runs, count: int, *, in_a_row: int) -> None:
        """So many single runs, of which the median counts, and so many at once."""
        self.one.append(1000 * runs.single(in_a_row) / Load().steps)
        self.many.append(count / runs.at_once(count))


@dataclass(frozen=True)
class Contestant:
    """How one is started, with the server that it needs; `start` raises Missing where it can't."""

    name: str
    start: Callable[[ExitStack, Path], Runs]
    caveat: str


def measure_peers(size: Size, folder: Path) -> Table:
    """Ours beside the obvious design, LangGraph, DBOS and Restate, one after the other."""
    count = size.of(50, 2)
    rows: list[list[Cell]] = []
    bars: list[Bar] = []
    with ours(folder / "ours") as rig:
        mine = OnCelery(rig)
        for each in CONTESTANTS:
            try:
                with ExitStack() as alone:
                    theirs = each.start(alone, folder)
                    found = measure_beside(mine, theirs, count, size, slow=each.name in SLOW)
            except Missing as reason:
                rows.append([each.name, "", "", "", "", f"skipped: {reason}"])
                continue
            beside, own = found
            rows.append(
                [
                    each.name,
                    median_and_spread(own.one),
                    median_and_spread(beside.one),
                    median_and_spread(own.many),
                    median_and_spread(beside.many),
                    each.caveat,
                ]
            )
            print("  " + "; ".join(map(str, rows[-1][:5])), flush=True)
            if each.name == HELD_TO:
                bars = _bars(beside, own)
    return Table(
        title="Others",
        about="10 steps by 4 calls with the same instant model: milliseconds a step of one run, of "
        f"which each time the median of {IN_A_ROW} in a row counts, and runs a second of {count} "
        "at once. Each is up alone beside ours and measured in turn with it, as an idle one may "
        "take of the cores too; those that take half a minute are measured once. Bars are medians "
        "of the ratios of what was measured right after each other. Most run their tools in the "
        "process that orchestrates, so a step is no message at all; ours and the obvious design "
        "send five. What differs is said with each.",
        columns=[
            "what",
            "ms a step",
            "ours beside it",
            f"runs a second, {count} at once",
            "ours beside it",
            "how",
        ],
        rows=rows,
        bars=bars,
    )


def measure_beside(
    mine: Runs, theirs: Runs, count: int, size: Size, *, slow: bool
) -> tuple[Times, Times]:
    """Ours and theirs in turn, once both are warm."""
    for each in (mine, theirs):
        Times().measure(each, 1 if slow else count, in_a_row=1)
    beside, own = Times(), Times()
    for _ in range(1 if slow else size.of(5)):
        beside.measure(mine, count, in_a_row=IN_A_ROW)
        own.measure(theirs, count, in_a_row=1 if slow else IN_A_ROW)
    return beside, own


def _bars(ours: Times, theirs: Times) -> list[Bar]:
    share, times = ratio(ours.one, theirs.one), ratio(ours.many, theirs.many)
    return [
        Bar(f"one run: milliseconds a step, of those of {HELD_TO}", round(share, 2), 1.0),
        Bar(f"fifty at once: runs a second, of those of {HELD_TO}", round(times, 2), 2.0, True),
    ]


def _obvious(alone: ExitStack, folder: Path) -> Runs:
    return OnCelery(alone.enter_context(obvious(folder / "obvious")))


def _on_postgres(module: str, *how: str) -> Callable[[ExitStack, Path], Runs]:
    def start(alone: ExitStack, folder: Path) -> Runs:
        command = [module, alone.enter_context(postgres()), *how]
        return alone.enter_context(talking(command, folder))

    return start


def _on_sqlite(alone: ExitStack, folder: Path) -> Runs:
    command = ["benchmarks.peers.langgraph_agent", f"sqlite:{folder / 'langgraph.sqlite'}"]
    return alone.enter_context(talking(command, folder))


def _on_restate(how: str) -> Callable[[ExitStack, Path], Runs]:
    def start(alone: ExitStack, folder: Path) -> Runs:
        ports = alone.enter_context(restate())
        module = "benchmarks.peers.restate_agent"
        command = [module, str(free_port()), *map(str, ports), how]
        return alone.enter_context(talking(command, folder))

    return start


CONTESTANTS = [
    Contestant("obvious", _obvious, "one worker with stock settings"),
    Contestant(
        "LangGraph on Postgres",
        _on_postgres("benchmarks.peers.langgraph_agent"),
        "tools in its own process, one after the other, as its quickstart has them; a checkpoint "
        "after each node, written beside the next",
    ),
    Contestant("LangGraph on SQLite", _on_sqlite, "the same, on one file without a server"),
    Contestant(
        "DBOS, tools as steps",
        _on_postgres("benchmarks.peers.dbos_agent", "inside"),
        "tools in the workflow's process, one after the other; a transaction each, written through",
    ),
    Contestant(
        "DBOS, tools through its queue",
        _on_postgres("benchmarks.peers.dbos_agent", "queue"),
        "a workflow for each tool; the queue, and who waits for a result, look once a second by "
        "default",
    ),
    Contestant(
        "DBOS, its queue at fifty looks a second",
        _on_postgres("benchmarks.peers.dbos_agent", "eager"),
        "the same, with both set to that",
    ),
    Contestant(
        "Restate, tools in the handler",
        _on_restate("inside"),
        "a server beside one handler process",
    ),
    Contestant(
        "Restate, tools as calls",
        _on_restate("calls"),
        "each tool an invocation of its own: nearest to our shape",
    ),
]


@contextlib.contextmanager
def talking(command: list[str], folder: Path) -> Iterator[Peer]:
    """A peer's process, once it says that it is ready."""
    if not PYTHON.exists():
        raise Missing("there is no .venv-bench; make bench-peers makes it")
    with (folder / "peer.log").open("ab") as log:
        process = subprocess.Popen(
            [PYTHON, "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    try:
        peer = Peer(process)
        while peer.read() != "ready":
            pass
        yield peer
    finally:
        process.kill()
        process.communicate()
