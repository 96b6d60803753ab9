"""What a model says while it answers is told to followers: all of it, in order, by its holder."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from runner import Agent, Final, ModelError, Retry, StopReason, StreamingModel, ask, tool
from runner import keys as redis_keys
from runner.loop import Finish, Loop, Next, NextStep, Skip, Wait, cancel_run
from runner.models import Event, ModelReply, ModelRequest, RunErrorType
from runner.store import Outcome, RunStore
from runner.testing import USAGE, ScriptedModel, calls
from support.loops import RUN, Loops, check_requests, drive, open_loops

Piece = str | Exception | ModelReply
Tell = Callable[[str], None]


class Speaker:
    """Streams each script's texts in turn; whatever else stands last is its reply or its error."""

    def __init__(self, *scripts: Sequence[Piece]) -> None:
        self.scripts = list(scripts)
        self.requests: list[ModelRequest] = []

    async def respond(self, request: ModelRequest) -> ModelReply:
        raise AssertionError("it can stream, and is asked to")

    async def stream(self, request: ModelRequest, on_text: Tell) -> ModelReply:
        self.requests.append(request)
        said = ""
        for piece in self.scripts.pop(0):
            match piece:
                case str():
                    on_text(piece)
                    said += piece
                    await asyncio.sleep(0)
                case Exception():
                    raise piece
                case _:
                    return piece
        return Final(said, USAGE, raw=said)


class Held:
    """Says one piece, and the rest of its answer only when it is let go on."""

    def __init__(self) -> None:
        self.said, self.let_go = threading.Event(), threading.Event()

    async def respond(self, request: ModelRequest) -> ModelReply:
        raise AssertionError("it can stream, and is asked to")

    async def stream(self, request: ModelRequest, on_text: Tell) -> ModelReply:
        self._loop, self._go_on = asyncio.get_running_loop(), asyncio.Event()
        on_text("one ")
        self.said.set()
        try:
            await self._go_on.wait()
        finally:
            self.let_go.set()
        on_text("two")
        return Final("one two", USAGE, raw="")

    def go_on(self) -> None:
        self._loop.call_soon_threadsafe(self._go_on.set)


@tool(idempotent=True)
def look() -> str:
    """Look somewhere."""
    return "seen"


@pytest.fixture
def loops(store: RunStore, no_leaked_keys: None) -> Iterator[Loops]:
    yield from open_loops(store)


@pytest.fixture(autouse=True)
def _tell_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "TELL_EVERY", 0.005)


def agent_of(model: Any, **options: Any) -> Agent:
    options = {"stream": True, "model_retry": Retry(initial_delay=0), **options}
    return Agent(name="a", model=model, tools=[look], **options)


def text_of(events: Sequence[Event]) -> str:
    return "".join(str(each.data["text"]) for each in events)


def by_try(events: Sequence[Event]) -> dict[tuple[Any, ...], str]:
    """What was told, by step, attempt and exchange."""
    tries = [(each.step, each.data["attempt"], each.data["exchange"]) for each in events]
    return {
        made: text_of([each for each, at in zip(events, tries, strict=True) if at == made])
        for made in dict.fromkeys(tries)
    }


def advance_beside(loop: Loop) -> tuple[threading.Thread, list[Next]]:
    got: list[Next] = []
    thread = threading.Thread(target=lambda: got.append(loop.advance(RUN, 0)), daemon=True)
    thread.start()
    return thread, got


def test_what_is_told_is_the_answer_before_the_run_ends(loops: Loops) -> None:
    model = Speaker(["Ro", "", "me ", "is 😀", "\n\nold"])
    assert isinstance(model, StreamingModel)
    assert drive(loops.start(agent_of(model))) == Finish(RUN, StopReason.COMPLETED)
    told = loops.events("model.delta")
    assert text_of(told) == loops.result.answer == "Rome is 😀\n\nold"
    types = [each.type for each in loops.store.read_events(RUN, "0")]
    assert types[-2:] == ["model.answered", "run.finished"]
    assert {(each.step, each.call) for each in told} == {(0, None)}
    check_requests(loops.store, model.requests)


def test_each_step_tells_its_own(loops: Loops) -> None:
    model = Speaker(["I look", calls(("look", {}), text="I look")], ["seen"])
    assert drive(loops.start(agent_of(model))) == Finish(RUN, StopReason.COMPLETED)
    assert by_try(loops.events("model.delta")) == {(0, 1, 1): "I look", (1, 2, 1): "seen"}
    assert loops.contents() == ["seen"]
    check_requests(loops.store, model.requests)


def test_an_answer_that_went_back_is_another_exchange(loops: Loops) -> None:
    model = Speaker(["man", "y"], ["[1, ", "2]"])
    drive(loops.start(agent_of(model, output_type=list[int])))
    assert by_try(loops.events("model.delta")) == {(0, 1, 1): "many", (0, 1, 2): "[1, 2]"}
    assert loops.result.answer == [1, 2]
    check_requests(loops.store, model.requests)


def test_a_stream_that_breaks_is_no_answer_and_the_next_is_another_attempt(loops: Loops) -> None:
    broken = ModelError("cut", type=RunErrorType.MODEL_HTTP_ERROR, retryable=True)
    loop = loops.start(agent_of(Speaker(["half an ans", broken], ["whole"])))
    assert loop.advance(RUN, 0) == Wait(RUN)
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.COMPLETED)
    assert by_try(loops.events("model.delta")) == {(0, 1, 1): "half an ans", (0, 2, 1): "whole"}
    assert loops.result.answer == "whole"


def test_an_agent_that_does_not_stream_tells_nothing(loops: Loops) -> None:
    class Whole(Speaker):
        async def respond(self, request: ModelRequest) -> ModelReply:
            return Final("whole", USAGE, raw="")

    drive(loops.start(agent_of(Whole(["whole"]), stream=False)))
    assert (loops.result.answer, loops.events("model.delta")) == ("whole", [])


def test_a_model_that_cannot_stream_answers_all_the_same(loops: Loops) -> None:
    model = ScriptedModel([calls(("look", {})), "done"])
    assert not isinstance(model, StreamingModel)
    assert drive(loops.start(agent_of(model))) == Finish(RUN, StopReason.COMPLETED)
    assert loops.events("model.delta") == []
    check_requests(loops.store, model.requests)


def test_what_comes_just_before_the_end_is_told(
    loops: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Held()
    loop = loops.start(agent_of(model))
    add_event = loops.store.add_event

    def add_as_the_answer_ends(*args: Any, **options: Any) -> Outcome:
        """The rest of the answer comes while the first piece is on its way to Redis."""
        running = tuple(loop._asker._calls)
        model.go_on()
        concurrent.futures.wait(running, timeout=5)
        return add_event(*args, **options)

    monkeypatch.setattr(loops.store, "add_event", add_as_the_answer_ends)
    assert loop.advance(RUN, 0) == Finish(RUN, StopReason.COMPLETED)
    assert text_of(loops.events("model.delta")) == "one two"


@pytest.mark.parametrize("pieces", [["a \ud83d", "\ude00 b"], ["a \ud800 b"]])
def test_pieces_that_hold_half_a_character_do_no_harm(loops: Loops, pieces: list[str]) -> None:
    model = Speaker([*pieces, Final("whole", USAGE, raw="")])
    assert drive(loops.start(agent_of(model))) == Finish(RUN, StopReason.COMPLETED)
    told = text_of(loops.events("model.delta"))
    assert told.startswith("a ")
    assert told.endswith(" b")


# --- attempts that have no say any more --------------------------------------------------------


def test_an_attempt_whose_step_another_took_tells_nothing_more(loops: Loops) -> None:
    model = Held()
    thread, got = advance_beside(loops.start(agent_of(model)))
    assert model.said.wait(5)
    loops.store.redis.hset(redis_keys.run(RUN), "lease", 1)  # its holder is taken for dead
    taken = loops.open(agent_of(Speaker(["an answer"])))
    assert taken.advance(RUN, 0) == Finish(RUN, StopReason.COMPLETED)
    model.go_on()
    thread.join(5)
    [skipped] = got
    assert isinstance(skipped, Skip)
    told = by_try(loops.events("model.delta"))
    assert told.pop((0, 2, 1)) == "an answer"
    assert set(told.values()) <= {"one "}
    assert loops.result.answer == "an answer"


def test_a_cancel_ends_a_stream_and_nothing_is_told_later(loops: Loops) -> None:
    model = Held()
    thread, got = advance_beside(loops.start(agent_of(model)))
    assert model.said.wait(5)
    cancel_run(loops.store, RUN, "enough")
    before = loops.store.read_events(RUN, "0")
    assert before[-1].type == "run.finished"
    thread.join(5)
    assert model.let_go.wait(5)
    assert got == [Skip(RUN, Outcome.CANCELLED)]
    assert loops.store.read_events(RUN, "0") == before


def test_a_process_that_stops_drops_its_stream_and_another_starts_anew(loops: Loops) -> None:
    model = Held()
    loop = loops.start(agent_of(model))
    thread, got = advance_beside(loop)
    assert model.said.wait(5)
    loop.release()
    thread.join(5)
    assert got == [NextStep(RUN, 0)]
    assert loops.open(agent_of(Speaker(["an answer"]))).advance(RUN, 0) == Finish(
        RUN, StopReason.COMPLETED
    )
    told = by_try(loops.events("model.delta"))
    assert told.pop((0, 2, 1)) == "an answer"
    assert set(told.values()) <= {"one "}


def test_a_follower_is_told_nothing_once_the_run_has_ended(loops: Loops) -> None:
    drive(loops.start(agent_of(Speaker(["done"]))))
    late = loops.store.add_event(
        RUN, "model.delta", step=0, call=None, data={"text": "late"}, epoch=loops.record.epoch
    )
    assert late is Outcome.STALE
    assert text_of(loops.events("model.delta")) == "done"


@pytest.mark.parametrize("epoch", [0, 2, 7])
def test_only_the_holder_of_the_step_tells(loops: Loops, epoch: int) -> None:
    model = Held()
    thread, _ = advance_beside(loops.start(agent_of(model)))
    assert model.said.wait(5)
    told = loops.store.add_event(
        RUN, "model.delta", step=0, call=None, data={"text": "forged"}, epoch=epoch
    )
    assert told is Outcome.STALE
    model.go_on()
    thread.join(5)
    assert "forged" not in text_of(loops.events("model.delta"))
