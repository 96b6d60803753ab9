"""Whatever order everybody comes in, a limit holds, no place leaks, and each call has its turn.

A model in the test knows who holds a place and until when; time is the test's own, since a lease of
`DEAD` is over at once and one of `living` outlasts the test.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import fakeredis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import check_keys
from runner import keys
from runner.models import Limits, StopReason, ToolDecision, ToolResult, Usage
from runner.settings import Settings
from runner.store import BegunCall, BegunStep, OpenCall, Outcome, RunStore
from support.fleet import url_of

CLOSER = '{"closed":true}'
DEAD: dict[str, Any] = {"lease": 0.0005, "renew_every": 0.0001, "hint_grace": 0.0005}
SIZES = {"one": 1, "two": 2, "three": 3}
CALLS = 4
numbers = itertools.count()


@pytest.fixture(params=["fakeredis", "valkey"])
def store(request: pytest.FixtureRequest) -> Iterator[RunStore]:
    if request.param == "fakeredis":
        made = RunStore(Settings(), fakeredis.FakeRedis(decode_responses=True))
    else:
        made = RunStore(Settings(redis_url=url_of(request.getfixturevalue("server"))))
    made.redis.flushdb()
    yield made
    check_keys(made.redis)
    made.close()


class Fleet:
    """Some runs whose calls share limits, and workers that hold, finish, die and come back late.

    `alive` are the calls that hold places by a lease that isn't over; `wanted` the hints that were
    handed out and not acted on yet.
    """

    def __init__(self, store: RunStore, choose: random.Random) -> None:
        self.store, self.choose = store, choose
        self.dead = RunStore(Settings(**DEAD), store.redis)
        self.limits: dict[str, frozenset[str]] = {}
        self.alive: dict[str, BegunCall] = {}
        self.zombies: list[tuple[str, BegunCall]] = []
        self.open: set[str] = set()
        self.wanted: set[str] = set()
        self.arrived: dict[str, dict[str, int]] = {name: {} for name in SIZES}
        self.runs = [self.open_run() for _ in range(3)]

    def open_run(self) -> str:
        run = f"run-number-{next(numbers)}"
        self.store.create_run(run_id=run, agent="a", messages=[{}], limits=Limits())
        assert self.store.granted.pop() == f"{run}.0"
        begun = self.store.begin_step(run, 0)
        assert isinstance(begun, BegunStep)
        calls = []
        for index in range(CALLS):
            names = frozenset(self.choose.sample(list(SIZES), self.choose.randint(1, 2)))
            holder = f"{run}.0.{index}"
            self.limits[holder] = names
            self.open.add(holder)
            decision = ToolDecision(call_id=f"0.{index}", name="ping", arguments="{}")
            sizes = {name: str(SIZES[name]) for name in sorted(names)}
            calls.append(OpenCall(f"c{index}", decision, starts=100, limits=sizes))
        self.store.commit_step(
            begun.record,
            messages=[{}],
            calls=calls,
            parallel=16,
            invalid=0,
            usage=Usage(),
            trace={},
            event={},
            fingerprint="f",
        )
        self.wanted |= {f"{run}.0.{index}" for index in range(CALLS)}
        return run

    def hear(self, *stores: RunStore) -> None:
        """Whoever made a transition publishes the hints that it answered."""
        for each in stores or (self.store, self.dead):
            while each.granted:
                self.wanted.add(each.granted.popleft())

    def act(self, name: str) -> None:
        getattr(self, name)()
        self.hear()

    # --- what workers do ---

    def begin(self) -> None:
        if self.wanted:
            self.deliver(self.choose.choice(sorted(self.wanted)))

    def begin_anything(self) -> None:
        """A hint that came twice, or was late."""
        self.deliver(self.choose.choice(sorted(self.limits)))

    def deliver(self, holder: str) -> None:
        self.wanted.discard(holder)
        run, step, index = holder.split(".")
        dies = self.choose.random() < 0.2
        begun = (self.dead if dies else self.store).begin_call(run, int(step), int(index))
        if isinstance(begun, BegunCall) and begun.outcome is Outcome.OK:
            assert holder in self.open
            assert holder not in self.alive, "begun twice"
            if dies:
                self.zombies.append((holder, begun))
            else:
                self.alive[holder] = begun

    def renew(self) -> None:
        if self.alive:
            holder = self.choose.choice(sorted(self.alive))
            assert self.store.renew_call(self.alive[holder]) is Outcome.OK

    def renew_late(self) -> None:
        """A holder that froze past its lease comes back; it goes on only if it may."""
        if self.zombies:
            at = self.choose.randrange(len(self.zombies))
            holder, begun = self.zombies[at]
            if self.store.renew_call(begun) is Outcome.OK:
                assert holder in self.open
                assert holder not in self.alive
                self.alive[holder] = begun
                del self.zombies[at]

    def die(self) -> None:
        """A living holder's lease runs out."""
        if self.alive:
            holder = self.choose.choice(sorted(self.alive))
            begun = self.alive.pop(holder)
            self.zombies.append((holder, begun))
            assert self.dead.renew_call(begun) is Outcome.OK

    def record(self) -> None:
        held = [*sorted(self.alive), *(holder for holder, _ in self.zombies)]
        if not held:
            return
        holder = self.choose.choice(held)
        run, step, index = holder.split(".")
        result = ToolResult(call_id=f"0.{index}", name="ping", ok=True, content="x")
        for _ in range(self.choose.randint(1, 2)):
            self.store.record_result(run, int(step), int(index), result)
        self.close(holder)

    def retry(self) -> None:
        if self.alive:
            holder = self.choose.choice(sorted(self.alive))
            result = ToolResult(call_id="0.0", name="ping", ok=False, content="x")
            assert self.store.retry_call(self.alive.pop(holder), delay=0, result=result) == "OK"
            self.wanted.add(holder)

    def sweep(self) -> None:
        self.store.grant_slots()

    def recover(self) -> None:
        lost = self.dead.recover_run(run := self.choose.choice(self.runs))
        self.wanted |= {f"{run}.0.{index}" for index in lost.calls}

    def cancel(self) -> None:
        if self.choose.random() < 0.1:
            self.end(self.choose.choice(self.runs))

    def end(self, run: str) -> None:
        self.store.end_run(run, StopReason.CANCELLED, closer=CLOSER)
        for holder in [each for each in self.open if each.startswith(run)]:
            self.close(holder)

    def close(self, holder: str) -> None:
        self.open.discard(holder)
        self.alive.pop(holder, None)
        self.zombies = [each for each in self.zombies if each[0] != holder]

    # --- what must hold ---

    def check(self) -> None:
        redis: Any = self.store.redis
        for name, size in SIZES.items():
            held = {holder for holder in self.alive if name in self.limits[holder]}
            taken = set(redis.zrange(keys.slots(name), 0, -1))
            assert len(held) <= size, f"{len(held)} hold {name}"
            assert held <= taken, "a holder without its place"
            zombies = {holder for holder, _ in self.zombies}
            assert taken <= held | zombies, "a place that nobody holds"
            queue = redis.zrange(keys.waiting(name), 0, -1)
            assert set(queue) <= self.open, "a queue with a call that is over"
            assert not set(queue) & held, "waits and holds"

    def check_end(self) -> None:
        """With nobody dying any more, each call gets its turn, in order of arrival."""
        self.dead = self.store
        for _ in range(400):
            if not self.open:
                break
            self.store.grant_slots()
            self.hear()
            for run in self.runs:
                lost = RunStore(Settings(**DEAD), self.store.redis).recover_run(run)
                self.wanted |= {f"{run}.0.{index}" for index in lost.calls}
            while self.wanted:
                self.begin_in_turn()
                self.check()
            for holder in sorted(self.alive):
                run, step, index = holder.split(".")
                result = ToolResult(call_id=f"0.{index}", name="ping", ok=True, content="x")
                self.store.record_result(run, int(step), int(index), result)
                self.close(holder)
                self.hear()
                self.check()
        assert not self.open, "calls that never had their turn"
        for name in SIZES:
            assert self.store.redis.exists(keys.slots(name), keys.waiting(name)) == 0

    def begin_in_turn(self) -> None:
        """Deliver a hint; one that starts had nobody in front of it but those with a place too."""
        holder = self.choose.choice(sorted(self.wanted))
        self.wanted.discard(holder)
        raw: Any = self.store.redis
        fronts = {
            name: [
                each
                for each in raw.zrange(keys.waiting(name), 0, -1)
                if each != holder and self.came_before(name, each, holder)
            ]
            for name in self.limits[holder]
        }
        held = {
            name: sum(name in self.limits[each] for each in self.alive)
            for name in self.limits[holder]
        }
        run, step, index = holder.split(".")
        begun = self.store.begin_call(run, int(step), int(index))
        self.hear()
        if isinstance(begun, BegunCall) and begun.outcome is Outcome.OK:
            for name, front in fronts.items():
                assert held[name] + len(front) < SIZES[name], f"{holder} overtook {front}"
            self.zombies = [each for each in self.zombies if each[0] != holder]
            self.alive[holder] = begun

    def came_before(self, name: str, one: str, other: str) -> bool:
        """Whether one has an older place in a queue than the other has, or would have."""
        mine = self.store.redis.zscore(keys.waiting(name), other)
        run, _, index = other.split(".")
        order = self.store.redis.hget(keys.calls(run), f"{index}.order")
        mine = mine if mine is not None else float(order) if order else float("inf")
        theirs = self.store.redis.zscore(keys.waiting(name), one)
        return theirs is not None and theirs < mine


ACTS = {
    "begin": 8,
    "begin_anything": 2,
    "renew": 1,
    "renew_late": 2,
    "die": 2,
    "record": 4,
    "retry": 1,
    "sweep": 2,
    "recover": 1,
    "cancel": 1,
}
acts = st.sampled_from([name for name, weight in ACTS.items() for _ in range(weight)])


@given(st.lists(acts, min_size=20, max_size=60), st.integers(0, 2**32))
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_interleaving_keeps_to_the_limits_and_leaks_no_place(
    store: RunStore, names: list[str], seed: int
) -> None:
    store.redis.flushdb()
    world = Fleet(store, random.Random(seed))
    for name in names:
        world.act(name)
        world.check()
    world.check_end()
    for run in world.runs:
        world.end(run)
