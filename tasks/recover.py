"""Brings back runs that nobody moves. Runs inside every worker; any number of them at once."""

from __future__ import annotations

import logging
import threading
import time

from celery import Celery

from runner.errors import CeleriacError, SchemaError
from runner.loop import Loop, Skip
from tasks.hints import publish, publish_granted

logger = logging.getLogger(__name__)


SWEEP_EVERY = 60.0
"""Seconds between two looks at whether every unfinished run is in `due`, as it should be."""


SHORTEST = 0.02
"""Seconds between two looks at least."""


class Recoverer:
    """Looks every half second at what is due: lost hints, dead holders, waits that are over."""

    def __init__(self, app: Celery, loop: Loop, *, every: float) -> None:
        self._app = app
        self._loop = loop
        self._every = every
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="celeriac-recovery", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def recover_due(self) -> int:
        """Look once; answers how many runs were due."""
        run_ids = self._loop.store.claim_due()
        for run_id in run_ids:
            try:
                found = self._loop.recover(run_id)
                if not isinstance(found, Skip):
                    logger.info("run=%s recovered: %s", run_id, type(found).__name__)
                    self._loop.observer.recovered(type(found).__name__)
                publish(self._app, self._loop.store, found)
            except SchemaError as error:
                logger.debug("run=%s is left to others: %s", run_id, error)
            except Exception as error:  # noqa: BLE001 - one run's trouble delays no other
                logger.warning("run=%s can't be recovered: %s", run_id, type(error).__name__)
        return len(run_ids)

    def grant_slots(self) -> float:
        """Give free places to what waits for them; answers in how many seconds to look again."""
        wait = self._loop.store.grant_slots(self._every)
        publish_granted(self._app, self._loop.store)
        return wait

    def _sweep(self) -> None:
        """Announce the agents (again: Redis may have lost them), and care for what nobody does."""
        store, agents = self._loop.store, self._loop.agents
        store.publish_agents(
            {name: agent.limits for name, agent in agents.items()},
            {name: agent.requires for name, agent in agents.items()},
        )
        if swept := store.sweep_runs():
            logger.error("%d runs were in nobody's care; they are due again", swept)

    def _run(self) -> None:
        sweep_at = 0.0
        while not self._stopped.is_set():
            wait = self._every
            try:
                if time.monotonic() >= sweep_at:
                    self._sweep()
                    sweep_at = time.monotonic() + SWEEP_EVERY
                while self.recover_due() and not self._stopped.is_set():
                    pass
                # Not later than a place gets free: nobody tells of one whose holder died.
                wait = max(SHORTEST, self.grant_slots())
            except CeleriacError as error:
                logger.warning("recovery: %s", error)
            except Exception:
                # Without this thread a lost hint is lost for good: it must survive anything.
                logger.exception("recovery failed; next look in %s s", self._every)
            self._stopped.wait(wait)
