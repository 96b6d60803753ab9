"""One asyncio loop for each process, in a thread of its own, for model calls.

Cancelling the future closes the HTTP request; a thread alone could not be stopped.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}


def submit(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine in this process's loop; the future's `cancel()` cancels its task."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop())


def _loop() -> asyncio.AbstractEventLoop:
    pid = os.getpid()
    loop = _loops.get(pid)
    if loop is None:
        with _lock:
            loop = _loops.get(pid)
            if loop is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(
                    target=loop.run_forever, name="celeriac-model-calls", daemon=True
                )
                thread.start()
                _loops[pid] = loop
    return loop


def _forget_parent() -> None:
    # The lock may have been held and the loop's thread isn't here: a child starts afresh.
    global _lock
    _lock = threading.Lock()
    _loops.clear()


os.register_at_fork(after_in_child=_forget_parent)
