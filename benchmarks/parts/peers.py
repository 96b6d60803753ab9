"""Others that keep an agent's run, each as its own documents would write it, with the same load."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from benchmarks.load import Load
from benchmarks.parts.speed import IN_A_ROW, time_runs, time_single_runs
from benchmarks.peers.servers import Missing, free_port, postgres, restate
from benchmarks.rigs import ROOT, Rig, obvious, ours
from benchmarks.tables import Bar, Cell, Size, Table, median_and_spread

T = TypeVar("T")

PYTHON = ROOT / ".venv-bench" / "bin" / "python"

CAVEATS = {
    "LangGraph on Postgres": "tools in its own process, one after the other, as its quickstart has "
    "them; a checkpoint after each node, written beside the next",
    "LangGraph on SQLite": "the same, on one file without a server",
    "DBOS, tools as steps": "tools in the workflow's process, one after the other; a transaction "
    "each, written through",
    "DBOS, tools through its queue": "a workflow for each tool; the queue, and who waits for a "
    "result, look once a second by default",
    "DBOS, its queue at fifty looks a second": "the same, with both set to that",
    "Restate, tools in the handler": "a server beside one handler process",
    "Restate, tools as calls": "each tool an invocation of its own: nearest to our shape",
}

POLLING = ["DBOS, tools through its queue", "DBOS, its queue at fifty looks a second"]
"""They take half a minute and poll while they are idle: they are measured once, and up alone."""


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


class Board:
    """What was measured of each: milliseconds a step of one run, and runs a second of many."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.one: dict[str, list[float]] = {}
        self.many: dict[str, list[float]] = {}

    def measure(self, name: str, run: Runs, *, in_a_row: int, keep: bool = True) -> None:
        """So many single runs, of which the median counts, and so many at once."""
        taken = run.single(in_a_row)
        at_once = run.at_once(self.count)
        print(f"  {name}: {taken:.3f} s, {self.count} at once {at_once:.2f} s", flush=True)
        if keep:
            self.one.setdefault(name, []).append(1000 * taken / Load().steps)
            self.many.setdefault(name, []).append(self.count / at_once)


def measure_peers(size: Size, folder: Path) -> Table:
    """Ours and the obvious design beside LangGraph, DBOS and Restate."""
    board, rounds, in_a_row = Board(size.of(50, 2)), size.of(5, 1), size.of(IN_A_ROW, 1)
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        commands = peer_commands(stack, folder)

        def start(name: str, until: ExitStack) -> Iterator[tuple[str, Runs]]:
            try:
                yield name, until.enter_context(talking(name, commands[name], folder))
            except Missing as reason:
                missing[name] = str(reason)

        for polling in POLLING:
            with ExitStack() as alone:
                for name, run in start(polling, alone):
                    run.single(1)  # to get warm
                    board.measure(name, run, in_a_row=1)
        contestants: dict[str, Runs] = {
            "celeriac": OnCelery(stack.enter_context(ours(folder / "ours"))),
            "obvious": OnCelery(stack.enter_context(obvious(folder / "obvious"))),
        }
        for other in [name for name in commands if name not in POLLING]:
            contestants.update(start(other, stack))
        for number in range(rounds + 1):
            for name, run in contestants.items():
                board.measure(name, run, in_a_row=in_a_row, keep=number > 0)
    rows: list[list[Cell]] = [
        [
            name,
            median_and_spread(board.one[name]),
            median_and_spread(board.many[name]),
            CAVEATS.get(name, ""),
        ]
        for name in board.one
    ]
    rows += [[name, "", "", f"skipped: {why}"] for name, why in missing.items()]
    return Table(
        title="Others",
        about="10 steps by 4 calls with the same instant model: milliseconds a step of one run, of "
        f"which each time the median of {in_a_row} counts, and runs a second of {board.count} at "
        "once, measured in turn; those that poll while they are idle are up alone, and measured "
        "once. Most run their tools in the process that orchestrates, so a step is no message at "
        "all; ours and the obvious design send five. What differs is said with each.",
        columns=["what", "ms a step", f"runs a second, {board.count} at once", "how"],
        rows=rows,
        bars=list(_bars(board.one, board.many)),
    )


def _bars(one: dict[str, list[float]], many: dict[str, list[float]]) -> Iterator[Bar]:
    peer = "LangGraph on Postgres"
    if peer not in one:
        return
    middle = statistics.median
    share = middle(one["celeriac"]) / middle(one[peer])
    times = middle(many["celeriac"]) / middle(many[peer])
    yield Bar(f"one run: milliseconds a step, of those of {peer}", round(share, 2), 1.0)
    yield Bar(f"fifty at once: runs a second, of those of {peer}", round(times, 2), 2.0, True)


def peer_commands(stack: ExitStack, folder: Path) -> dict[str, Callable[[], list[str]]]:
    """How each is started; asking for it starts the server that it needs, or raises Missing."""
    url = shared(stack, postgres)
    ports = shared(stack, restate)

    def graph(where: Callable[[], str]) -> Callable[[], list[str]]:
        return lambda: ["benchmarks.peers.langgraph_agent", where()]

    def workflow(how: str) -> Callable[[], list[str]]:
        return lambda: ["benchmarks.peers.dbos_agent", url(), how]

    def handler(how: str) -> Callable[[], list[str]]:
        module = "benchmarks.peers.restate_agent"
        return lambda: [module, str(free_port()), *map(str, ports()), how]

    return {
        "LangGraph on Postgres": graph(url),
        "LangGraph on SQLite": graph(lambda: f"sqlite:{folder / 'langgraph.sqlite'}"),
        "DBOS, tools as steps": workflow("inside"),
        "DBOS, tools through its queue": workflow("queue"),
        "DBOS, its queue at fifty looks a second": workflow("eager"),
        "Restate, tools in the handler": handler("inside"),
        "Restate, tools as calls": handler("calls"),
    }


def shared(
    stack: ExitStack, start: Callable[[], contextlib.AbstractContextManager[T]]
) -> Callable[[], T]:
    """A server that is started when it is first asked for."""
    started: list[T] = []

    def get() -> T:
        if not started:
            started.append(stack.enter_context(start()))
        return started[0]

    return get


@contextlib.contextmanager
def talking(name: str, command: Callable[[], list[str]], folder: Path) -> Iterator[Peer]:
    """A peer's process, once it says that it is ready."""
    if not PYTHON.exists():
        raise Missing("there is no .venv-bench; make bench-peers makes it")
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [PYTHON, "-m", *command()],
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
