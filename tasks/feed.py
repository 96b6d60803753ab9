"""Follows the events of many runs with one blocking read in each process, for all its readers.

What was read lately is kept once for each run, and each reader takes from it what it hasn't seen.
One that begins further back, or is too slow, reads the rest from Redis by itself. So nothing is
lost to a reader, and nothing grows with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import uuid
import weakref
from collections import deque
from collections.abc import AsyncIterator

from runner import keys
from runner.errors import CeleriacError, RedisUnavailable
from runner.models import Event
from runner.record import parse_event
from runner.store import MAX_BLOCK, RunStore

KEPT = 256
"""Events of a followed run that are kept for its readers."""

BEGINNING = "0"
"""Stands for the id of an event before the first."""


class Tail:
    """The newest events of one run: all behind `floor`, up to `position`."""

    def __init__(self, run_id: str, position: str) -> None:
        self.run_id = run_id
        self.floor = self.position = position
        self.events: deque[Event] = deque()
        self.followers: set[Follower] = set()

    def add(self, events: list[Event], *, gap: bool) -> None:
        if gap:
            # Whoever is before it has to find that out by a read of its own.
            self.events.clear()
            self.floor, events = events[0].id, events[1:]
        self.events.extend(events)
        while len(self.events) > KEPT:
            self.floor = self.events.popleft().id
        self.position = self.events[-1].id if self.events else self.floor


class Follower:
    """One reader of a run's events, in its event loop."""

    def __init__(self, feed: Feed, run_id: str) -> None:
        self.run_id = run_id
        self.tail: Tail | None = None
        self.failed: CeleriacError | None = None
        self.left = False
        self._feed = feed
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()

    def take(self, after: str) -> list[Event] | None:
        """What came behind the event `after`; None where that is too long ago to be kept."""
        self._news.clear()
        with self._feed.lock:
            if self.failed is not None:
                raise self.failed
            if self.tail is None or order(after) < order(self.tail.floor):
                return None
            found: list[Event] = []
            for event in reversed(self.tail.events):
                if order(event.id) <= order(after):
                    break
                found.append(event)
        return found[::-1]

    async def wait(self, seconds: float) -> bool:
        """Whether there is news since the last `take`, or will be within so many seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), seconds)
            return True
        return False

    def wake(self) -> None:
        """From the feed's thread: there is news."""
        with contextlib.suppress(RuntimeError):  # its loop is closed
            self._loop.call_soon_threadsafe(self._news.set)


class Feed:
    """Reads for all followers of this process, in a thread that is there as long as they are."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._forget()
        _feeds.add(self)

    def _forget(self) -> None:
        """Begin anew: after a fork, thread and followers are the parent's."""
        self.lock = threading.Lock()
        self._tails: dict[str, Tail] = {}
        self._thread: threading.Thread | None = None
        self._reading = False
        self._waking = False
        self._key = keys.wake(uuid.uuid4().hex)

    @contextlib.asynccontextmanager
    async def follow(self, run_id: str) -> AsyncIterator[Follower]:
        """A follower of what comes from now on. Raises `RedisUnavailable`, as its `take` does."""
        follower = Follower(self, run_id)
        try:
            await asyncio.to_thread(self._join, follower)
            yield follower
        finally:
            self._leave(follower)

    def _join(self, follower: Follower) -> None:
        run_id = follower.run_id
        # Never what a reader says: an id of the future would keep the others from all before it.
        position = self._store.last_event_id(run_id)
        with self.lock:
            if follower.left:  # cancelled while it came here
                return
            follower.tail = self._tails.get(run_id)
            if follower.tail is None:
                follower.tail = self._tails[run_id] = Tail(run_id, position)
                waking, self._waking = self._waking, True
            else:
                waking = True
            follower.tail.followers.add(follower)
            starting, self._reading = not self._reading, True
        if starting:
            self._thread = threading.Thread(target=self._read, name="celeriac-feed", daemon=True)
            self._thread.start()
        elif not waking:
            self._store.wake(self._key)

    def _leave(self, follower: Follower) -> None:
        with self.lock:
            follower.left = True
            if follower.tail is None:
                return
            follower.tail.followers.discard(follower)
            # Those of a read that failed are forgotten already, and another may stand in the place.
            known = self._tails.get(follower.run_id) is follower.tail
            if known and not follower.tail.followers:
                del self._tails[follower.run_id]

    def _read(self) -> None:
        woken = BEGINNING
        while positions := self._positions():
            streams = {keys.events(run_id): after for run_id, after in positions.items()}
            try:
                found = self._store.read_streams(streams | {self._key: woken}, block=MAX_BLOCK)
                if wakes := found.pop(self._key, None):
                    woken = wakes[-1][0]
                names = {keys.events(run_id): run_id for run_id in positions}
                self._add({names[key]: entries for key, entries in found.items()})
            except Exception as error:  # noqa: BLE001 - a client closed under it raises anything
                self._fail(_reason(error))

    def _positions(self) -> dict[str, str]:
        """How far each followed run has been read; with none this thread is at its end."""
        with self.lock:
            self._waking = False
            self._reading = bool(self._tails)
            return {run_id: tail.position for run_id, tail in self._tails.items()}

    def _add(self, found: dict[str, list[tuple[str, dict[str, str]]]]) -> None:
        # Looked at after the read: an event that is still kept now was kept then.
        firsts = self._store.first_events([*found]) if found else []
        for (run_id, entries), first in zip(found.items(), firsts, strict=True):
            events = [parse_event(run_id, *entry) for entry in entries]
            with self.lock:
                tail = self._tails.get(run_id)
                if tail is None:
                    continue
                # Made anew meanwhile, it may be further on than what was read.
                events = [each for each in events if order(each.id) > order(tail.position)]
                if not events:
                    continue
                tail.add(events, gap=may_have_gap(first, tail.position))
                followers = list(tail.followers)
            for follower in followers:
                follower.wake()

    def close(self) -> None:
        """Let go of all followers; whoever comes next is read for anew."""
        self._fail(RedisUnavailable("the client was closed; make a new one to follow runs"))
        if self._thread is not None and self._thread.is_alive():
            with contextlib.suppress(RedisUnavailable):  # then it ends by that, too
                self._store.wake(self._key)
            self._thread.join(1.0)

    def _fail(self, error: CeleriacError) -> None:
        with self.lock:
            followers = [each for tail in self._tails.values() for each in tail.followers]
            self._tails.clear()
            for follower in followers:
                follower.failed = error
        for follower in followers:
            follower.wake()


def _reason(error: Exception) -> CeleriacError:
    if isinstance(error, CeleriacError):
        return error
    return RedisUnavailable(f"the events of runs can't be read ({type(error).__name__})")


def may_have_gap(first: Event | None, after: str) -> bool:
    """Whether the event `after` has been dropped, and so perhaps some behind it.

    `first` is the oldest event that is kept.
    """
    if first is None:
        return False
    if after == BEGINNING:
        return first.type != "run.created"
    return order(first.id) > order(after)


def order(event_id: str) -> tuple[int, int]:
    """What ids are compared by."""
    ms, _, number = event_id.partition("-")
    return int(ms), int(number or 0)


_feeds: weakref.WeakSet[Feed] = weakref.WeakSet()


def _forget_parents() -> None:
    for feed in _feeds:
        feed._forget()


os.register_at_fork(after_in_child=_forget_parents)
