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
from typing import TypeVar

from benchmarks.load import Load
from benchmarks.parts.speed import time_run, time_runs
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


@dataclass
class Peer:
    """A process that runs as many loads as it is told to."""

    name: str
    process: subprocess.Popen[str]
    slow: bool = False

    def run(self, count: int) -> float:
        """Seconds of so many loads at once."""
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


def measure_peers(size: Size, folder: Path) -> Table:
    """Ours and the obvious design beside LangGraph, DBOS and Restate."""
    load, count, rounds = Load(), size.of(50, 2), size.of(5, 1)
    with ExitStack() as stack:
        rigs: list[Rig] = [
            stack.enter_context(ours(folder / "ours")),
            stack.enter_context(obvious(folder / "obvious")),
        ]
        peers, missing = start_peers(stack, folder)
        measures: dict[str, Callable[[int], float]] = {
            rig.name: lambda count, rig=rig: (
                time_run(rig, load) if count == 1 else time_runs(rig, load, count)
            )
            for rig in rigs
        } | {peer.name: peer.run for peer in peers}
        slow = {peer.name for peer in peers if peer.slow}
        one: dict[str, list[float]] = {name: [] for name in measures}
        many: dict[str, list[float]] = {name: [] for name in measures}
        for number in range(rounds + 1):
            for name, measure in measures.items():
                if name in slow and number:
                    continue  # half a minute each: once is enough, behind one to get warm
                if name in slow:
                    measure(1)
                taken, at_once = measure(1), measure(count)
                print(f"  {name}: {taken:.2f} s, {count} at once {at_once:.2f} s", flush=True)
                if number or name in slow:
                    one[name].append(1000 * taken / load.steps)
                    many[name].append(count / at_once)
    rows: list[list[Cell]] = [
        [name, median_and_spread(one[name]), median_and_spread(many[name]), CAVEATS.get(name, "")]
        for name in measures
    ]
    rows += [[name, "", "", f"skipped: {why}"] for name, why in missing.items()]
    return Table(
        title="Others",
        about=f"10 steps by 4 calls with the same instant model: milliseconds a step of one run, "
        f"and runs a second of {count} at once, measured in turn. Most run their tools in the "
        "process that orchestrates, so a step is no message at all; ours and the obvious design "
        "send five. What differs is said with each.",
        columns=["what", "ms a step", f"runs a second, {count} at once", "how"],
        rows=rows,
        bars=list(_bars(one, many)),
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


def start_peers(stack: ExitStack, folder: Path) -> tuple[list[Peer], dict[str, str]]:
    """Those that this machine can start, and why it can't start the others."""
    peers: list[Peer] = []
    missing: dict[str, str] = {}

    def attempt(name: str, start: Callable[[], list[str]], *, slow: bool = False) -> None:
        try:
            peers.append(stack.enter_context(talking(name, start(), folder, slow=slow)))
        except Missing as reason:
            missing[name] = str(reason)

    if not PYTHON.exists():
        return [], dict.fromkeys(CAVEATS, "there is no .venv-bench; make bench-peers makes it")
    url = shared(stack, postgres)
    ports = shared(stack, restate)
    graph, workflow = "benchmarks.peers.langgraph_agent", "benchmarks.peers.dbos_agent"
    attempt("LangGraph on Postgres", lambda: [graph, url()])
    attempt("LangGraph on SQLite", lambda: [graph, f"sqlite:{folder / 'langgraph.sqlite'}"])
    attempt("DBOS, tools as steps", lambda: [workflow, url(), "inside"])
    attempt("DBOS, tools through its queue", lambda: [workflow, url(), "queue"], slow=True)
    attempt(
        "DBOS, its queue at fifty looks a second",
        lambda: [workflow, url(), "eager"],
        slow=True,
    )
    for name, how in (("tools in the handler", "inside"), ("tools as calls", "calls")):
        attempt(
            f"Restate, {name}",
            lambda how=how: [  # type: ignore[misc]
                "benchmarks.peers.restate_agent",
                str(free_port()),
                *map(str, ports()),
                how,
            ],
        )
    return peers, missing


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
def talking(name: str, command: list[str], folder: Path, *, slow: bool) -> Iterator[Peer]:
    """A peer's process, once it says that it is ready."""
    with (folder / f"{name}.log").open("wb") as log:
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
        peer = Peer(name, process, slow)
        while peer.read() != "ready":
            pass
        yield peer
    finally:
        process.kill()
        process.communicate()
