"""Whatever order hints, deaths and late writes come in, a run's history is the same, and valid."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import fakeredis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import check_keys
from runner import keys
from runner.models import Limits, RunStatus, StopReason, ToolDecision, ToolResult, Usage
from runner.record import RunRecord
from runner.settings import Settings
from runner.store import BegunCall, BegunStep, OpenCall, Outcome, RunStore
from support.fleet import url_of

CLOSER = '{"closed":true}'
GOAL = {"role": "user", "content": "go"}
DEAD: dict[str, Any] = {"lease": 0.0005, "renew_every": 0.0001, "hint_grace": 0.0005}
numbers = itertools.count()


@pytest.fixture(params=["fakeredis", "valkey"])
def store(request: pytest.FixtureRequest) -> Iterator[RunStore]:
    """A store whose attempts die at once: every lease has run out when somebody looks."""
    if request.param == "fakeredis":
        made = RunStore(Settings(**DEAD), fakeredis.FakeRedis(decode_responses=True))
    else:
        url = url_of(request.getfixturevalue("server"))
        made = RunStore(Settings(redis_url=url, **DEAD))
    made.redis.flushdb()
    yield made
    check_keys(made.redis)
    made.close()


def living(store: RunStore) -> RunStore:
    """The same store, whose attempts hold what they take."""
    return RunStore(Settings(), store.redis)


def open_call(step: int, index: int, starts: int = 100) -> OpenCall:
    decision = ToolDecision(call_id=f"{step}.{index}", name="ping", arguments="{}")
    return OpenCall(f"s{step}c{index}", decision, starts=starts)


def commit(store: RunStore, record: RunRecord, count: int, parallel: int = 16) -> Outcome:
    ids = [f"s{record.step}c{index}" for index in range(count)]
    outcome, _ = store.commit_step(
        record,
        messages=[{"role": "assistant", "step": record.step, "calls": ids}],
        calls=[open_call(record.step, index) for index in range(count)],
        parallel=parallel,
        invalid=0,
        usage=Usage(requests=1),
        trace={"kind": "model"},
        event={},
        fingerprint="f",
    )
    return outcome


def result_of(step: int, index: int, content: str) -> ToolResult:
    return ToolResult(call_id=f"{step}.{index}", name="ping", ok=True, content=content)


def check_history(messages: list[dict[str, Any]], *, step: int, open_block: bool) -> None:
    """The goal, then whole blocks for steps 0, 1, 2, ...: a turn and its results in call order."""
    assert messages[0] == GOAL
    turns = [each for each in messages if each["role"] == "assistant"]
    assert [turn["step"] for turn in turns] == list(range(step + open_block))
    rest = messages[1:]
    for number, turn in enumerate(turns):
        block = rest[: 1 + len(turn["calls"])]
        if open_block and number == len(turns) - 1:
            block = rest[:1]
        rest = rest[len(block) :]
        assert block[0] == turn
        said = [each.get("tool_call_id") for each in block[1:]]
        assert said == turn["calls"][: len(said)]
        assert len(said) in (len(turn["calls"]), 0 if open_block else len(turn["calls"]))
    assert rest == []


# --- one step: any order of its calls' completions ---------------------------------------------

Delivery = tuple[str, int]


@st.composite
def delivered(draw: st.DrawFn) -> tuple[int, int, list[Delivery]]:
    """How many calls, how many at once, and hints, results and late writes in any order."""
    count = draw(st.integers(1, 5))
    index = st.integers(0, count - 1)
    kinds = st.sampled_from(["begin", "record", "old epoch", "old step", "recover", "next step"])
    noise = draw(st.lists(st.tuples(kinds, index), max_size=15))
    needed: list[Delivery] = [("record", each) for each in range(count)]
    return count, draw(st.integers(1, 5)), draw(st.permutations([*needed, *noise]))


@given(delivered())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_order_of_completions_leaves_the_same_history(
    store: RunStore, plan: tuple[int, int, list[Delivery]]
) -> None:
    count, parallel, deliveries = plan
    run = f"run-number-{next(numbers)}"
    store.create_run(run_id=run, agent="a", messages=[GOAL], limits=Limits())
    first, second = store.begin_step(run, 0), store.begin_step(run, 0)
    assert isinstance(first, BegunStep)
    assert isinstance(second, BegunStep)
    assert commit(store, second.record, count, parallel) is Outcome.OK

    words: Counter[Outcome] = Counter()
    next_steps: list[Outcome] = []
    for kind, index in deliveries:
        match kind:
            case "begin":
                store.begin_call(run, 0, index)
            case "record":
                result = result_of(0, index, f"result {index}")
                words[store.record_result(run, 0, index, result, fatal=None)[0]] += 1
            case "old epoch":
                assert commit(store, first.record, count) is Outcome.FENCED
            case "old step":
                again = store.record_result(run, 1, index, result_of(1, index, "x"), fatal=None)
                assert again[0] is Outcome.STALE
            case "recover":
                store.recover_run(run)
            case "next step":
                begun = living(store).begin_step(run, 1)
                next_steps.append(begun if isinstance(begun, Outcome) else begun.outcome)
    begun = living(store).begin_step(run, 1)
    next_steps.append(begun if isinstance(begun, Outcome) else begun.outcome)

    assert words[Outcome.LAST] == 1
    assert words[Outcome.WAIT] == count - 1
    assert next_steps.count(Outcome.OK) == 1
    tools = [
        {"role": "tool", "tool_call_id": f"s0c{n}", "content": f"result {n}"} for n in range(count)
    ]
    assert store.read_messages(run)[2:] == tools
    assert store.read_run(run).step == 1
    store.end_run(run, StopReason.CANCELLED, closer=CLOSER)
    assert store.redis.zscore(keys.DUE, run) is None


# --- a whole run: any interleaving of everybody ------------------------------------------------


class Interleaving:
    """One run among workers that begin, hold, die and come back late; others recover and cancel.

    Every act draws who does it from `choose`; whatever it does, `check` must hold after it.
    """

    def __init__(self, store: RunStore) -> None:
        self.store, self.living = store, living(store)
        self.run = f"run-number-{next(numbers)}"
        store.create_run(run_id=self.run, agent="a", messages=[GOAL], limits=Limits())
        self.steps: list[RunRecord] = []
        self.calls: list[BegunCall] = []
        self.committed: list[int] = []
        self.recorded: dict[tuple[int, int], str] = {}
        self.last: Counter[int] = Counter()
        self.ended: Any = None

    def record(self) -> RunRecord:
        return self.store.read_run(self.run)

    def frozen(self) -> Any:
        return replace(self.record(), now=0), self.store.read_messages(self.run)

    def act(self, name: str, choose: random.Random) -> None:
        needs: dict[str, Sequence[object]] = {
            "renew": self.steps,
            "commit": self.steps,
            "let_go": self.steps,
        }
        needs |= {"finish": self.steps, "move_call": self.calls}
        if name not in needs or needs[name]:
            getattr(self, name)(choose)

    def begin_step(self, choose: random.Random) -> None:
        store = self.store if choose.random() < 0.6 else self.living
        before, ahead = self.record(), choose.choice([0, 0, 0, -1, 1])
        begun = store.begin_step(self.run, before.step + ahead)
        if isinstance(begun, Outcome):
            return
        if begun.outcome is Outcome.OK:
            assert ahead == 0
            assert before.status is not RunStatus.FINISHED
            assert (before.phase, begun.record.epoch) == ("model", before.epoch + 1)
            self.steps.append(begun.record)
        elif begun.outcome is Outcome.POISONED:
            assert before.deaths >= 2
            self.end(StopReason.ERROR, None)

    def held(self, choose: random.Random) -> RunRecord:
        """The last attempt most of the time, and now and then one that was thought dead."""
        return self.steps[-1] if choose.random() < 0.6 else choose.choice(self.steps)

    def renew(self, choose: random.Random) -> None:
        # By a store whose leases are over at once: a holder that renews and dies.
        held = self.held(choose)
        if self.store.renew_step(self.run, held.epoch) is Outcome.OK:
            assert held.epoch == self.record().epoch

    def commit(self, choose: random.Random) -> None:
        held, before = self.held(choose), self.record()
        if commit(self.store, held, choose.randint(0, 3), choose.randint(1, 2)) is Outcome.OK:
            assert (held.step, held.epoch) == (before.step, before.epoch)
            self.committed.append(held.step)

    def let_go(self, choose: random.Random) -> None:
        held, before = self.held(choose), self.record()
        if choose.random() < 0.5:
            outcome = self.store.release_step(held)
        else:
            outcome = self.store.park_step(held, delay=0, usage=Usage(), trace={}, event={})
        if outcome is Outcome.OK:
            assert held.epoch == before.epoch

    def begin_call(self, choose: random.Random) -> None:
        store = self.store if choose.random() < 0.7 else self.living
        step, index = self.record().step, choose.randint(0, 2)
        begun = store.begin_call(self.run, step, index)
        if isinstance(begun, BegunCall) and begun.outcome is Outcome.OK:
            assert (step, index) not in self.recorded
            self.calls.append(begun)

    def move_call(self, choose: random.Random) -> None:
        call = choose.choice(self.calls)
        if choose.random() < 0.3:
            self.store.renew_call(call)
        elif choose.random() < 0.5:
            result = result_of(call.record.step, call.index, "failed")
            self.store.retry_call(call, delay=0, result=result)
        else:
            self.write_result(call.record.step, call.index)

    def record_result(self, choose: random.Random) -> None:
        ahead = choose.choice([0, 0, 0, 0, -1, 1])
        self.write_result(self.record().step + ahead, choose.randint(0, 2))

    def write_result(self, step: int, index: int) -> None:
        content = f"result {next(numbers)}"
        result = result_of(step, index, content)
        outcome, _ = self.store.record_result(self.run, step, index, result, fatal=None)
        self.last[step] += outcome is Outcome.LAST
        if outcome in (Outcome.WAIT, Outcome.LAST):
            assert (step, index) not in self.recorded, "recorded twice"
            self.recorded[step, index] = content

    def recover(self, choose: random.Random) -> None:
        self.store.claim_due()
        self.store.recover_run(self.run)

    def finish(self, choose: random.Random) -> None:
        if choose.random() < 0.2:
            self.end(StopReason.COMPLETED, self.held(choose).epoch)

    def cancel(self, choose: random.Random) -> None:
        if choose.random() < 0.1:
            self.end(StopReason.CANCELLED, None)

    def end(self, reason: StopReason, epoch: int | None) -> None:
        before = self.record()
        ended = self.store.end_run(
            self.run, reason, epoch=epoch, held=epoch is not None, closer=CLOSER
        )
        if ended.outcome is Outcome.OK:
            assert self.ended is None, "ended twice"
            assert epoch is None or (epoch, "model") == (before.epoch, before.phase)
            self.ended = self.frozen()

    def check(self) -> None:
        record, messages = self.record(), self.store.read_messages(self.run)
        if self.ended is None:
            assert record.stop_reason is None
        else:
            assert self.frozen() == self.ended, "an ended run has changed"
        due = self.store.redis.zscore(keys.DUE, self.run) is not None
        assert due is (record.status is not RunStatus.FINISHED)
        check_history(messages, step=record.step, open_block=record.phase == "tools")
        said = {
            each["tool_call_id"]: each["content"]
            for each in messages
            if "content" in each and each["role"] == "tool"
        }
        for (step, index), content in self.recorded.items():
            assert said.get(f"s{step}c{index}", content) == content, "not the first result"
        assert self.committed == list(range(len(self.committed)))
        assert all(count <= 1 for count in self.last.values())


ACTS = {
    "begin_step": 6,
    "renew": 1,
    "commit": 4,
    "let_go": 1,
    "begin_call": 4,
    "move_call": 4,
    "record_result": 6,
    "recover": 2,
    "finish": 1,
    "cancel": 1,
}
acts = st.sampled_from([name for name, weight in ACTS.items() for _ in range(weight)])


@given(st.lists(acts, min_size=25, max_size=70), st.integers(0, 2**32))
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_interleaving_keeps_a_run_whole(store: RunStore, names: list[str], seed: int) -> None:
    world, choose = Interleaving(store), random.Random(seed)
    for name in names:
        world.act(name, choose)
        world.check()
    world.end(StopReason.CANCELLED, None)
    world.check()
