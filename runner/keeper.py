"""Holds a running call: renews its lease, and ends its body at its timeout or its run's end.

A thread that runs tools has one keeper beside it for all of them. It sleeps until one of these
moments comes, so that a call which is over before doesn't wake it: a thread for each call would
cost more than all else that a quick call does.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runner.interrupt import Body
from runner.store import Outcome

logger = logging.getLogger(__name__)

KILL_GRACE = 2.0
"""Seconds that an interrupted tool has to let go before its process is ended."""

INTERRUPT_EVERY = 0.05
"""Seconds between two interrupts of a body that doesn't let go: one may come too early."""


class HeldCall:
    """A call while its body runs. `reason` is why this attempt has no say any more."""

    def __init__(
        self,
        *,
        renew: Callable[[], Outcome],
        renew_every: float,
        timeout: float,
        remaining: float,
        body: Body,
        give_up: Callable[[Outcome | None], None],
    ) -> None:
        now = time.monotonic()
        self.reason: Outcome | None = None
        self.body = body
        self.give_up = give_up
        self._renew = renew
        self._renew_every = renew_every
        self._times_out_at = now + timeout
        self._renew_at = now + min(renew_every, remaining)

    @property
    def look_at(self) -> float:
        """When it has to be looked at, if nothing happens before."""
        return min(self._renew_at, self._times_out_at)

    def may_go_on(self) -> bool:
        """Whether the body runs on, with its lease renewed."""
        now = time.monotonic()
        if now >= self._times_out_at:
            return False
        self._renew_at = now + self._renew_every
        outcome = self._renew_once()
        if outcome is not Outcome.OK:
            self.reason = outcome
        return outcome is Outcome.OK

    def _renew_once(self) -> Outcome:
        try:
            return self._renew()
        except Exception as error:  # noqa: BLE001 - a Redis that is away: the lease decides
            logger.warning("can't renew a call's lease: %s", type(error).__name__)
            return Outcome.OK


class Keeper:
    """The thread beside one that runs calls, which holds at most one of them at a time."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._changed = threading.Condition()
        self._call: HeldCall | None = None
        self._nudged = False
        self._sleeps_until = math.inf
        threading.Thread(target=self._keep, name="celeriac-lease", daemon=True).start()

    def expect(self) -> None:
        """A call is about to begin: what was said before is not of it."""
        self._nudged = False

    def nudge(self) -> None:
        """The run may have been ended from outside: look at once, or as soon as there is a body."""
        with self._changed:
            self._nudged = True
            self._changed.notify()

    @contextmanager
    def hold(self, call: HeldCall) -> Iterator[None]:
        """Hold this call while its body runs."""
        with self._changed:
            self._call = call
            if self._nudged or call.look_at < self._sleeps_until:
                self._sleeps_until = call.look_at
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._call = None

    def _keep(self) -> None:
        while True:
            call = self._wait()
            try:
                if not call.may_go_on():
                    self._end(call)
            except Exception:
                # Without this thread no later call would be held: it must survive anything.
                logger.exception("a call could not be ended")

    def _wait(self) -> HeldCall:
        """The call that has to be looked at now."""
        with self._changed:
            while True:
                now = time.monotonic()
                call = self._call
                if call is not None and (self._nudged or now >= call.look_at):
                    self._nudged = False
                    return call
                if call is not None:
                    self._sleeps_until = call.look_at
                elif now >= self._sleeps_until:
                    self._sleeps_until = math.inf
                # Without a call it sleeps on as planned: the next quick one needn't wake it.
                planned = self._sleeps_until
                self._changed.wait(None if planned == math.inf else planned - now)

    def _end(self, call: HeldCall) -> None:
        """Interrupt the body until it lets go; one that doesn't within its grace is given up."""
        patience = time.monotonic() + KILL_GRACE
        with self._changed:
            while self._call is call:
                call.body.interrupt()
                self._changed.wait(INTERRUPT_EVERY)
                if self._call is call and time.monotonic() > patience:
                    call.give_up(call.reason)
                    return


_beside = threading.local()


def keeper_of_this_thread() -> Keeper:
    """The keeper beside the calling thread; a forked child has its own."""
    keeper: Keeper | None = getattr(_beside, "keeper", None)
    if keeper is None or keeper.pid != os.getpid():
        keeper = _beside.keeper = Keeper()
    return keeper
