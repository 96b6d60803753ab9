"""Tells the holders of an attempt at once that their run was ended from outside.

Only a hurry-up: a nudge may be lost, and the next renewal says the same.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator

from runner import keys
from runner.store import RunStore

logger = logging.getLogger(__name__)

RECONNECT_AFTER = 1.0

LISTEN_WITHIN = 1.0


class Nudges:
    """One listener for each process, started with the first attempt that it watches."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._pid = 0
        self._closed = threading.Event()
        self._listening = threading.Event()
        self._lock = threading.Lock()
        self._watchers: dict[str, set[Callable[[], object]]] = defaultdict(set)
        self._hearers: list[Callable[[str], object]] = []
        self._overhearing: list[set[str]] = []

    def hear(self, callback: Callable[[str], object]) -> None:
        """Call `callback` (from the listener's thread) with the id of each run that is so ended.

        In this process alone: a child that is forked later doesn't hear.
        """
        self._start()
        self._hearers.append(callback)

    @contextlib.contextmanager
    def watch(self, run_id: str, callback: Callable[[], object]) -> Iterator[None]:
        """Call `callback` (from the listener's thread) when the run is ended from outside."""
        self._start()
        with self._lock:
            self._watchers[run_id].add(callback)
        try:
            yield
        finally:
            with self._lock:
                self._watchers[run_id].discard(callback)
                if not self._watchers[run_id]:
                    del self._watchers[run_id]

    @contextlib.contextmanager
    def overhear(self) -> Iterator[set[str]]:
        """Collect the ids of all runs that are so ended meanwhile."""
        self._start()
        ended: set[str] = set()
        with self._lock:
            self._overhearing.append(ended)
        try:
            yield ended
        finally:
            with self._lock, contextlib.suppress(ValueError):  # it may be of a parent
                self._overhearing.remove(ended)

    def close(self) -> None:
        """Let the listener end, at once where Redis answers."""
        self._closed.set()
        if self._pid == os.getpid():
            with contextlib.suppress(Exception):  # it ends within a second anyway
                self._store.redis.publish(keys.NUDGE, "")

    def _start(self) -> None:
        if self._pid == os.getpid():
            return
        with _starting:
            self._start_once()

    def _start_once(self) -> None:
        if self._pid == os.getpid():
            return
        # After a fork the parent's listener isn't here, its watchers are the parent's attempts, and
        # its lock may have been held.
        self._lock = threading.Lock()
        self._watchers = defaultdict(set)
        self._hearers = []
        self._overhearing = []
        self._listening = threading.Event()
        self._pid = os.getpid()
        threading.Thread(target=self._listen, name="celeriac-nudges", daemon=True).start()
        # The first attempt of a process would be the one to miss a nudge.
        self._listening.wait(LISTEN_WITHIN)

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                channel = self._store.redis.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
                with channel:
                    channel.subscribe(keys.NUDGE)
                    self._listening.set()
                    while not self._closed.is_set():
                        message = channel.get_message(timeout=1.0)
                        if message is not None:
                            self._wake(message["data"])
            except Exception as error:  # noqa: BLE001 - a client closed under it raises anything
                logger.debug("nudges: %s; renewals go on without", type(error).__name__)
                self._closed.wait(RECONNECT_AFTER)

    def _wake(self, run_id: str) -> None:
        with self._lock:
            for ended in self._overhearing:
                ended.add(run_id)
            callbacks = tuple(self._watchers.get(run_id, ()))
        for callback in callbacks:
            callback()
        for hear in tuple(self._hearers):
            hear(run_id)


_starting = threading.Lock()


def _forget_parent() -> None:
    # A fork may have copied the lock while it was held.
    global _starting
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_forget_parent)
