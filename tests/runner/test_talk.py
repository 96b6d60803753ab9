"""What a user says to a run: it reaches the next step, once, and never stands inside a block."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import MakeStore, check_keys
from runner import Agent, Draft, Limits, RunStatus, StopReason, tool
from runner import keys as redis_keys
from runner.invariants import check_run
from runner.loop import CLOSER, Finish, NextStep, cancel_run
from runner.models import ToolDecision, ToolResult, Usage
from runner.record import RunRecord
from runner.store import MAX_INBOX, BegunStep, OpenCall, Outcome, RunStore
from runner.testing import ScriptedModel, calls
from support.loops import RUN, Loops, check_requests, drive, open_loops

LOOK: tuple[str, dict[str, Any]] = ("look", {})
TYPED = ("answer", {"text": "by tool"})


@tool(idempotent=True)
def look() -> str:
    """Look somewhere."""
    return "seen"


@tool(idempotent=True, final=True)
def answer(text: str) -> str:
    """Give the answer."""
    return text


@pytest.fixture
def loops(store: RunStore, no_leaked_keys: None) -> Iterator[Loops]:
    yield from open_loops(store)


def agent_of(model: ScriptedModel, **options: Any) -> Agent:
    return Agent(name="a", model=model, tools=[look, answer], **options)


def say(store: RunStore, text: str, operation: str | None = None) -> Outcome:
    return store.send_message(RUN, operation or text, text)


def said(loops: Loops) -> list[str]:
    """The history in short: a text of the user's or an answer, `call` and `tool`."""
    return [
        "tool" if each["role"] == "tool" else str(each["content"] or "call")
        for each in loops.store.read_messages(RUN)
    ]


def while_asked(store: RunStore, text: str, then: Any) -> Callable[[Any], Any]:
    """A reply during whose making the user says something."""

    def reply(_: object) -> Any:
        assert say(store, text) is Outcome.OK
        return then

    return reply


# --- where it stands ---------------------------------------------------------------------------


def test_a_message_before_the_first_step_stands_behind_the_goal(loops: Loops) -> None:
    model = ScriptedModel(["done"])
    loop = loops.start(agent_of(model))
    assert say(loops.store, "and A002") is Outcome.OK
    assert said(loops) == ["go"]
    assert drive(loop) == Finish(RUN, StopReason.COMPLETED)
    assert said(loops) == ["go", "and A002", "done"]
    check_requests(loops.store, model.requests)


def test_a_message_while_calls_run_stands_behind_their_results(loops: Loops) -> None:
    model = ScriptedModel([calls(LOOK, LOOK), "done"])
    loop = loops.start(agent_of(model))
    loop.advance(RUN, 0)
    loop.call_tool(RUN, 0, 0)
    say(loops.store, "one")
    loop.call_tool(RUN, 0, 1)
    say(loops.store, "two")
    assert drive(loop, NextStep(RUN, 1)) == Finish(RUN, StopReason.COMPLETED)
    assert said(loops) == ["go", "call", "tool", "tool", "one", "two", "done"]
    check_requests(loops.store, model.requests)


def test_a_message_while_the_model_is_asked_waits_for_the_step_after(loops: Loops) -> None:
    model = ScriptedModel([while_asked(loops.store, "one", calls(LOOK)), "done"])
    loop = loops.start(agent_of(model))
    assert drive(loop) == Finish(RUN, StopReason.COMPLETED)
    assert said(loops) == ["go", "call", "tool", "one", "done"]
    check_requests(loops.store, model.requests)


def test_a_message_while_a_turn_is_made_that_is_refused_whole(loops: Loops) -> None:
    model = ScriptedModel([while_asked(loops.store, "one", calls(("nope", {}))), "done"])
    loop = loops.start(agent_of(model))
    assert drive(loop) == Finish(RUN, StopReason.COMPLETED)
    assert said(loops) == ["go", "call", "tool", "one", "done"]


def test_a_message_to_a_parked_step_is_part_of_its_next_attempt(loops: Loops) -> None:
    loop = loops.start(agent_of(ScriptedModel(["done"])))
    begun = loops.store.begin_step(RUN, 0)
    assert isinstance(begun, BegunStep)
    spent: dict[str, Any] = {"usage": Usage(), "trace": None, "event": {}}
    loops.store.park_step(begun.record, delay=0, **spent)
    say(loops.store, "one")
    assert loops.record.status is RunStatus.WAITING
    loop.advance(RUN, 0)
    assert said(loops) == ["go", "one", "done"]


def test_a_run_that_waits_for_a_reply_keeps_a_message_until_it_has_it(loops: Loops) -> None:
    model = ScriptedModel([calls(("ask_user", {"question": "Which?"})), "done"])
    loop = loops.start(agent_of(model, clarify=True))
    loop.advance(RUN, 0)
    say(loops.store, "one")
    assert loops.record.status is RunStatus.WAITING
    assert drive(loop, loops.reply("A001")) == Finish(RUN, StopReason.COMPLETED)
    assert said(loops) == ["go", "call", "tool", "one", "done"]
    assert loops.contents() == ["A001"]


def test_another_attempt_of_a_step_finds_what_the_first_has_taken(make_store: MakeStore) -> None:
    store = make_store(lease=0.0005, renew_every=0.0001)
    store.create_run(run_id=RUN, agent="a", messages=[{"role": "user"}], limits=Limits())
    say(store, "one")
    for _ in range(2):
        begun = store.begin_step(RUN, 0)
        assert isinstance(begun, BegunStep)
        assert begun.outcome is Outcome.OK
        assert len(store.read_messages(RUN)) == 2


# --- an answer that isn't the end --------------------------------------------------------------


def test_an_answer_while_a_message_waits_is_a_turn_and_the_run_goes_on(loops: Loops) -> None:
    model = ScriptedModel([while_asked(loops.store, "and A002", "A001 is fine."), "Both are."])
    loop = loops.start(agent_of(model))
    assert loop.advance(RUN, 0) == NextStep(RUN, 1)
    record = loops.record
    assert (record.status, record.step, record.stop_reason) == (RunStatus.QUEUED, 1, None)
    assert record.usage.requests == 1
    assert drive(loop, NextStep(RUN, 1)) == Finish(RUN, StopReason.COMPLETED)
    assert loops.result.answer == "Both are."
    assert said(loops) == ["go", "A001 is fine.", "and A002", "Both are."]
    assert [each.step for each in loops.events("model.answered")] == [0, 1]
    assert check_run(loops.store, RUN) == []
    check_requests(loops.store, model.requests)


def test_an_answer_by_a_tool_is_no_end_either(loops: Loops) -> None:
    model = ScriptedModel([while_asked(loops.store, "one", calls(TYPED)), calls(TYPED)])
    loop = loops.start(agent_of(model))
    assert drive(loop) == Finish(RUN, StopReason.COMPLETED)
    assert said(loops) == ["go", "call", "tool", "by tool", "one", "call", "tool", "by tool"]
    assert check_run(loops.store, RUN) == []
    check_requests(loops.store, model.requests)


def test_the_step_cap_bounds_it_and_a_resume_reads_the_message(loops: Loops) -> None:
    model = ScriptedModel([while_asked(loops.store, "one", "first"), "second"])
    loop = loops.start(agent_of(model, limits=Limits(max_steps=1)))
    assert drive(loop) == Finish(RUN, StopReason.MAX_STEPS)
    assert said(loops) == ["go", "first", "one"]
    assert check_run(loops.store, RUN) == []
    loops.store.resume_run(loops.record, Limits(max_steps=1))
    assert check_run(loops.store, RUN) == []
    assert say(loops.store, "one") is Outcome.DUPLICATE
    assert drive(loop, NextStep(RUN, 1)) == Finish(RUN, StopReason.COMPLETED)
    assert loops.result.answer == "second"
    assert check_run(loops.store, RUN) == []


def end_with(store: RunStore, record: RunRecord, text: str) -> Any:
    return store.end_run(
        RUN,
        StopReason.COMPLETED,
        epoch=record.epoch,
        held=True,
        answer=text,
        message={"role": "assistant", "content": text},
        closer=CLOSER,
        usage=Usage(requests=1),
        steps=1,
    )


def test_an_answer_whose_reply_was_lost_is_the_same_turn_once(
    store: RunStore, no_leaked_keys: None
) -> None:
    store.create_run(
        run_id=RUN, agent="a", messages=[{"role": "user", "content": "go"}], limits=Limits()
    )
    begun = store.begin_step(RUN, 0)
    assert isinstance(begun, BegunStep)
    say(store, "one")
    first, again = (end_with(store, begun.record, "done") for _ in range(2))
    assert (first.outcome, first.step) == (again.outcome, again.step) == (Outcome.STEP, 1)
    assert [each["content"] for each in store.read_messages(RUN)] == ["go", "done"]
    assert store.renew_step(RUN, begun.record.epoch) is Outcome.FENCED
    error = store.end_run(RUN, StopReason.ERROR, epoch=begun.record.epoch, held=True, closer=CLOSER)
    assert error.outcome is Outcome.FENCED
    late = store.begin_step(RUN, 1)
    assert isinstance(late, BegunStep)
    assert end_with(store, begun.record, "done").outcome is Outcome.STEP
    assert store.read_run(RUN).status is RunStatus.RUNNING


# --- what is refused, and what a repeat is -----------------------------------------------------


def test_the_same_operation_is_one_message_also_when_it_was_read_or_the_run_has_ended(
    loops: Loops,
) -> None:
    loop = loops.start(agent_of(ScriptedModel(["done"])))
    assert say(loops.store, "one", "op") is Outcome.OK
    assert say(loops.store, "one", "op") is Outcome.DUPLICATE
    drive(loop)
    assert say(loops.store, "one", "op") is Outcome.DUPLICATE
    assert said(loops) == ["go", "one", "done"]
    [event] = loops.events("run.message")
    assert event.data == {"chars": 3}


def test_an_ended_run_and_one_that_never_was_take_no_message(loops: Loops) -> None:
    assert say(loops.store, "one") is Outcome.STALE
    loop = loops.start(agent_of(ScriptedModel(["done"])))
    drive(loop)
    assert say(loops.store, "one") is Outcome.STALE
    assert said(loops) == ["go", "done"]
    assert not loops.store.redis.exists(redis_keys.inbox(RUN))


def test_no_more_than_so_many_messages_wait(loops: Loops) -> None:
    loop = loops.start(agent_of(ScriptedModel(["done"])))
    for n in range(MAX_INBOX):
        assert say(loops.store, f"text {n}") is Outcome.OK
    assert say(loops.store, "too many") is Outcome.BUSY
    drive(loop)
    assert said(loops) == ["go", *(f"text {n}" for n in range(MAX_INBOX)), "done"]


def test_a_message_that_waits_when_the_run_is_cancelled_ends_its_history(loops: Loops) -> None:
    loop = loops.start(agent_of(ScriptedModel([calls(LOOK, LOOK)])))
    loop.advance(RUN, 0)
    loop.call_tool(RUN, 0, 1)
    say(loops.store, "stop it")
    cancel_run(loops.store, RUN, "enough")
    assert said(loops) == ["go", "call", "tool", "tool", "stop it"]
    assert check_run(loops.store, RUN) == []


def test_a_validator_is_still_told_the_goal_and_not_what_was_said_since(loops: Loops) -> None:
    goals: list[str] = []

    def remember(draft: Draft) -> None:
        goals.append(draft.goal)

    model = ScriptedModel([while_asked(loops.store, "one", "first"), "second"])
    drive(loops.start(Agent(name="a", model=model, validators=[remember])))
    assert goals == ["go", "go"]


# --- any interleaving --------------------------------------------------------------------------

numbers = itertools.count()
ACTS = ("begin", "begin", "commit", "commit", "record", "record", "record", "say", "say", "park")
LATE = ("answer", "recover", "answer late", "cancel")


class Talk:
    """One run, its holder, and a user who says something at any moment."""

    def __init__(self, store: RunStore, seed: int) -> None:
        self.store, self.choose = store, random.Random(seed)
        self.run = f"run-number-{next(numbers)}"
        store.create_run(
            run_id=self.run,
            agent="a",
            messages=[{"role": "user", "content": "go"}],
            limits=Limits(max_steps=1000),
        )
        self.held: list[RunRecord] = []
        self.said: list[str] = []

    def act(self, name: str) -> None:
        record = self.store.read_run(self.run)
        match name:
            case "begin":
                self.begin(record.step)
            case "commit" if self.held:
                self.commit(self.held[-1], self.choose.randint(0, 3))
            case "record":
                index = self.choose.randint(0, 2)
                call_id = f"{record.step}.{index}"
                result = ToolResult(call_id=call_id, name="ping", ok=True, content="pong")
                self.store.record_result(self.run, record.step, index, result)
            case "say":
                self.say(record)
            case "park" if self.held:
                spent: dict[str, Any] = {"usage": Usage(), "trace": {}, "event": {}}
                self.store.park_step(self.held[-1], delay=0, **spent)
            case "answer" if self.held:
                self.answer(self.held[-1])
            case "answer late" if self.held:
                self.answer(self.choose.choice(self.held))
            case "recover" | "cancel":
                self.store.recover_run(self.run)
                if name == "cancel" and self.choose.random() < 0.1:
                    self.store.end_run(self.run, StopReason.CANCELLED, closer=CLOSER)

    def begin(self, step: int) -> None:
        begun = self.store.begin_step(self.run, step)
        if isinstance(begun, BegunStep) and begun.outcome is Outcome.OK:
            self.held.append(begun.record)

    def say(self, record: RunRecord) -> None:
        text = f"text {len(self.said)}"
        outcomes = {self.store.send_message(self.run, text, text) for _ in range(2)}
        if Outcome.OK in outcomes:
            assert outcomes == {Outcome.OK, Outcome.DUPLICATE}
            self.said.append(text)
        else:
            assert record.stop_reason is not None

    def answer(self, held: RunRecord) -> None:
        waits = self.store.redis.llen(redis_keys.inbox(self.run))
        ended = self.store.end_run(
            self.run,
            StopReason.COMPLETED,
            epoch=held.epoch,
            held=True,
            message={"role": "assistant", "content": f"answer {next(numbers)}"},
            closer=CLOSER,
            steps=1,
        )
        if ended.outcome is Outcome.OK:
            assert waits == 0, "a message was left unread"

    def commit(self, held: RunRecord, count: int) -> None:
        made = [
            {"id": f"s{held.step}c{n}", "type": "function", "function": {"name": "ping"}}
            for n in range(count)
        ]
        refused = {"role": "tool", "tool_call_id": "none", "content": "no"}
        turn = {"role": "assistant", "content": None, "tool_calls": made or [{"id": "none"}]}
        self.store.commit_step(
            held,
            messages=[turn] if made else [turn, refused],
            calls=[_open(held.step, n) for n in range(count)],
            parallel=16,
            invalid=0,
            usage=Usage(),
            trace={"kind": "model"},
            event={},
            fingerprint="f",
        )

    def check(self) -> None:
        record, history = self.store.read_run(self.run), self.store.read_messages(self.run)
        waiting = self.store.redis.lrange(redis_keys.inbox(self.run), 0, -1)
        read = [each["content"] for each in history if each["role"] == "user"]
        assert len(read) - 1 + len(waiting) == len(self.said), "lost or doubled"
        assert read == ["go", *self.said[: len(read) - 1]], "out of order"
        assert record.stop_reason is None or not waiting
        open_ids: list[str] = []
        for message in history:
            if message["role"] == "tool":
                assert open_ids.pop(0) == message["tool_call_id"]
            else:
                assert open_ids == [], "a message stands inside a block"
                open_ids = [call["id"] for call in message.get("tool_calls", ())]
        assert bool(open_ids) is (record.phase == "tools")


def _open(step: int, index: int) -> OpenCall:
    decision = ToolDecision(call_id=f"{step}.{index}", name="ping", arguments="{}")
    return OpenCall(f"s{step}c{index}", decision, starts=100)


@given(st.lists(st.sampled_from([*ACTS, *LATE]), min_size=20, max_size=60), st.integers(0, 2**32))
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_interleaving_keeps_each_message_once_and_outside_of_blocks(
    make_store: MakeStore, names: list[str], seed: int
) -> None:
    talk = Talk(make_store(lease=0.0005, renew_every=0.0001, hint_grace=0.0005), seed)
    for name in names:
        talk.act(name)
        talk.check()
    talk.store.end_run(talk.run, StopReason.CANCELLED, closer=CLOSER)
    talk.check()
    check_keys(talk.store.redis)
