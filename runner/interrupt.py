"""Stops a running tool's body: inside the body only, never in the code around it.

A signal raises `ToolInterrupted` in the main thread, and only while a frame of the tool's own
function is on the stack. So an interrupt that comes a moment late can't lose a finished side effect
on its way into the store, and one that comes between two calls hits nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from types import CodeType, FrameType
from typing import Any

SIGNAL = signal.SIGURG
"""Ignored by default, so that a stray one can't end a process that holds no tool."""


class ToolInterrupted(BaseException):
    """Raised inside a tool's body to stop it. Not an `Exception`: tools may catch those."""


class Body:
    """One run of one tool's function, which another thread may interrupt.

    `ends_with_process`: a SIGTERM ends the process at once, as in a pool's child, whose parent then
    answers for it.

    In the main thread it is interrupted by signal: where it runs, by an exception; where it waits
    in its event loop, by cancelling its task. In another thread only the latter is possible.
    """

    _running: Body | None = None

    def __init__(self, *, ends_with_process: bool = False) -> None:
        self._ends_with_process = ends_with_process
        self._code: CodeType | None = None
        self._fired = False
        self._raised = False
        self._thread: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    def run(self, function: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Call `function(**kwargs)` and return what it returns, awaited if need be."""
        self._code = inspect.unwrap(function).__code__
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread:
            signal.signal(SIGNAL, _raise_in_body)
            if self._ends_with_process:
                previous = signal.signal(signal.SIGTERM, _end_process)
            Body._running = self
            self._thread = threading.get_ident()
        try:
            if self._fired:
                raise ToolInterrupted
            value = function(**kwargs)
            # Whether it is `async def` or hands on a coroutine is all the same.
            return self._run_awaitable(value) if inspect.isawaitable(value) else value
        finally:
            if in_main_thread:
                Body._running = None
                if self._ends_with_process:
                    signal.signal(signal.SIGTERM, previous)

    def interrupt(self) -> None:
        """Stop the body, from another thread. Does nothing once it has returned.

        May be called again until the body has ended: a signal that comes before the body's first
        line is dropped. The body is interrupted once, so that its own clean-up can finish.
        """
        self._fired = True
        if self._raised:
            return
        if self._thread is not None:
            signal.pthread_kill(self._thread, SIGNAL)
        else:
            self._cancel_task()

    def _cancel_task(self) -> None:
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            self._raised = True
            with contextlib.suppress(RuntimeError):  # a closed loop: the body has just returned
                loop.call_soon_threadsafe(task.cancel)

    def _run_awaitable(self, awaitable: Awaitable[Any]) -> Any:
        async def main() -> Any:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            if self._fired:
                raise ToolInterrupted
            return await awaitable

        try:
            return asyncio.run(main())
        except asyncio.CancelledError:
            if self._fired:
                raise ToolInterrupted from None
            raise
        finally:
            self._loop = self._task = None


def _end_process(_signal: int, _frame: FrameType | None) -> None:
    # A SystemExit raised here would pass for the tool's own, and be recorded as its result.
    os._exit(128 + signal.SIGTERM)


def _raise_in_body(_signal: int, frame: FrameType | None) -> None:
    body = Body._running
    if body is None or not body._fired or body._raised:
        return
    while frame is not None:
        if frame.f_code is body._code:
            body._raised = True
            raise ToolInterrupted
        frame = frame.f_back
    # Not on the stack: it waits in its event loop, or it isn't running.
    body._cancel_task()
