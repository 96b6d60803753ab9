"""A tool's body is interrupted inside the body only: not before it, not after it, and once."""

from __future__ import annotations

import asyncio
import functools
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from runner.interrupt import SIGNAL, Body, ToolInterrupted

PROMPT = 0.5
"""Seconds within which a body has to be gone: far more than it takes, far less than it sleeps."""


@contextmanager
def interrupting(body: Body, started: threading.Event) -> Iterator[None]:
    """Interrupt a body from beside it, from its start to its end, as its holder does.

    Once isn't enough: a signal that comes just before a system call doesn't end that call.
    """
    ended = threading.Event()

    def act() -> None:
        assert started.wait(5)
        while not ended.is_set():
            body.interrupt()
            ended.wait(0.01)

    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def interrupted(function: Callable[[threading.Event], Any]) -> float:
    """Run a body that has to be interrupted; seconds from its start to its end."""
    body, started = Body(), threading.Event()
    begun = time.monotonic()
    with interrupting(body, started), pytest.raises(ToolInterrupted):
        body.run(function, {"started": started})
    return time.monotonic() - begun


# --- it stops ----------------------------------------------------------------------------------


def test_a_sleeping_body_is_interrupted_at_once() -> None:
    def sleep(started: threading.Event) -> None:
        started.set()
        time.sleep(30)

    assert interrupted(sleep) < PROMPT


def test_a_computing_body_is_interrupted_at_once() -> None:
    def compute(started: threading.Event) -> None:
        started.set()
        while True:
            pass

    assert interrupted(compute) < PROMPT


def test_a_body_that_waits_for_a_lock_is_interrupted_at_once() -> None:
    def wait(started: threading.Event) -> None:
        started.set()
        threading.Event().wait(30)

    assert interrupted(wait) < PROMPT


def test_a_body_that_waits_for_a_child_process_is_interrupted_at_once() -> None:
    def wait(started: threading.Event) -> None:
        started.set()
        subprocess.run([sys.executable, "-c", "import time; time.sleep(30)"], check=False)

    assert interrupted(wait) < PROMPT * 2


def test_code_that_the_body_calls_is_interrupted_too() -> None:
    def deeper(started: threading.Event) -> None:
        started.set()
        time.sleep(30)

    def body(started: threading.Event) -> None:
        deeper(started)

    assert interrupted(body) < PROMPT


def test_a_body_behind_a_decorator_is_interrupted() -> None:
    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def inner(**kwargs: Any) -> None:
            function(**kwargs)

        return inner

    @decorate
    def sleep(started: threading.Event) -> None:
        started.set()
        time.sleep(30)

    assert interrupted(sleep) < PROMPT


def test_an_async_body_is_interrupted_while_it_awaits() -> None:
    async def wait(started: threading.Event) -> None:
        started.set()
        await asyncio.sleep(30)

    assert interrupted(wait) < PROMPT


def test_an_async_body_is_interrupted_while_it_computes() -> None:
    async def compute(started: threading.Event) -> None:
        started.set()
        while True:
            pass

    assert interrupted(compute) < PROMPT


def test_a_plain_body_that_hands_on_a_coroutine_is_interrupted() -> None:
    async def wait(started: threading.Event) -> None:
        started.set()
        await asyncio.sleep(30)

    def hand_on(started: threading.Event) -> Any:
        return wait(started)

    assert interrupted(hand_on) < PROMPT


def test_an_async_body_in_another_thread_is_interrupted() -> None:
    async def wait(started: threading.Event) -> None:
        started.set()
        await asyncio.sleep(30)

    spent: list[float] = []
    thread = threading.Thread(target=lambda: spent.append(interrupted(wait)))
    thread.start()
    thread.join(10)
    assert [each < PROMPT for each in spent] == [True]


def test_a_body_that_was_interrupted_before_it_began_does_not_begin() -> None:
    body, ran = Body(), []
    body.interrupt()
    with pytest.raises(ToolInterrupted):
        body.run(lambda: ran.append(1), {})
    assert ran == []


def test_a_tool_that_catches_exceptions_does_not_catch_the_interrupt() -> None:
    def stubborn(started: threading.Event) -> str:
        try:
            started.set()
            time.sleep(30)
        except Exception:  # noqa: BLE001 - what many tools do
            return "caught"
        return "slept"

    assert interrupted(stubborn) < PROMPT


# --- it stops nothing else ---------------------------------------------------------------------


def test_what_a_body_returns_or_raises_passes_through() -> None:
    async def double(n: int) -> int:
        return 2 * n

    assert Body().run(lambda n: n + 1, {"n": 1}) == 2
    assert Body().run(double, {"n": 2}) == 4
    with pytest.raises(ZeroDivisionError):
        Body().run(lambda: 1 // 0, {})


def test_an_interrupt_after_the_body_has_returned_hits_nobody() -> None:
    body = Body()
    assert body.run(lambda: "done", {}) == "done"
    body.interrupt()
    for _ in range(1000):
        pass
    assert Body().run(lambda: "next", {}) == "next"


def test_an_interrupt_of_one_body_does_not_hit_the_next() -> None:
    first = Body()
    first.run(lambda: None, {})

    def next_body() -> str:
        thread = threading.Thread(target=first.interrupt)
        thread.start()
        thread.join()
        return "whole"

    assert Body().run(next_body, {}) == "whole"


def test_a_stray_signal_does_nothing_in_a_body_that_nobody_interrupts() -> None:
    def body() -> str:
        signal.raise_signal(SIGNAL)
        return "whole"

    assert Body().run(body, {}) == "whole"


@pytest.mark.parametrize("prepare", ["", "Body().run(lambda: None, {})"])
def test_a_stray_signal_does_nothing_in_an_idle_process(prepare: str) -> None:
    code = (
        "import signal, time\nfrom runner.interrupt import SIGNAL, Body\n"
        f"{prepare}\nsignal.raise_signal(SIGNAL)\nprint('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "alive\n")


def test_code_around_the_body_is_never_interrupted() -> None:
    """200 interrupts at random moments around a body of microseconds.

    The body is `inner`; the line after it stands for all that happens to its value on the way to
    the store. Once that line was reached, the value must arrive.
    """
    rng = random.Random(7)
    hits = 0
    for number in range(200):
        body = Body()
        passed: list[int] = []
        gate = threading.Barrier(2)
        wait = rng.random() * 60e-6

        def inner(number: int = number) -> int:
            return sum(range(300)) * 0 + number

        @functools.wraps(inner)
        def outer(inner: Callable[[], int] = inner, passed: list[int] = passed) -> int:
            value = inner()
            passed.append(value)
            return value

        def fire(body: Body = body, gate: threading.Barrier = gate, wait: float = wait) -> None:
            gate.wait()
            until = time.perf_counter() + wait
            while time.perf_counter() < until:
                pass
            body.interrupt()

        thread = threading.Thread(target=fire)
        thread.start()
        gate.wait()
        try:
            value = body.run(outer, {})
        except ToolInterrupted:
            hits += 1
            assert passed == [], "a value was lost on its way"
        else:
            assert passed == [number]
            assert value == number
        thread.join()
    assert hits < 200


def test_an_interrupt_around_an_async_body_loses_no_value_that_was_returned() -> None:
    rng = random.Random(11)
    for number in range(100):
        body = Body()
        ended: list[int] = []
        started = threading.Event()
        wait = rng.random() * 300e-6

        async def work(
            number: int = number, ended: list[int] = ended, started: threading.Event = started
        ) -> int:
            started.set()
            await asyncio.sleep(0)
            ended.append(number)
            return number

        def fire(body: Body = body, started: threading.Event = started, wait: float = wait) -> None:
            started.wait()
            until = time.perf_counter() + wait
            while time.perf_counter() < until:
                pass
            body.interrupt()

        thread = threading.Thread(target=fire)
        thread.start()
        try:
            assert body.run(work, {}) == number
        except ToolInterrupted:
            # Inside the body only: between its last effect and its end there is one line.
            assert ended in ([], [number])
        thread.join()


# --- it stops once -----------------------------------------------------------------------------


def test_a_second_interrupt_does_not_hit_the_clean_up() -> None:
    body, started, cleaned = Body(), threading.Event(), []

    def work() -> None:
        try:
            started.set()
            time.sleep(30)
        finally:
            for _ in range(5):
                thread = threading.Thread(target=body.interrupt)
                thread.start()
                thread.join()
            cleaned.append(True)

    with interrupting(body, started), pytest.raises(ToolInterrupted):
        body.run(work, {})
    assert cleaned == [True]


def test_a_second_signal_that_was_on_its_way_does_not_hit_the_clean_up() -> None:
    # `interrupt` looks and then sends: between the two, the first signal may have been raised.
    body, started, cleaned = Body(), threading.Event(), []

    def work() -> None:
        try:
            started.set()
            time.sleep(30)
        finally:
            signal.raise_signal(SIGNAL)
            cleaned.append(True)

    with interrupting(body, started), pytest.raises(ToolInterrupted):
        body.run(work, {})
    assert cleaned == [True]


@pytest.mark.parametrize("computes", [True, False])
def test_the_clean_up_of_an_async_body_is_not_interrupted(computes: bool) -> None:
    body, started, cleaned = Body(), threading.Event(), []

    async def work() -> None:
        try:
            started.set()
            if computes:
                while True:
                    pass
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.01)
            body.interrupt()
            await asyncio.sleep(0.01)
            cleaned.append(True)

    with interrupting(body, started), pytest.raises(ToolInterrupted):
        body.run(work, {})
    assert cleaned == [True]
