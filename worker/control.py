"""Makes Celery's own verbs end a run: `app.control.revoke(run_id)`, Flower's Revoke and Terminate.

A revoke alone is a broadcast that nobody may hear, and for a task that runs it does nothing. Here
it becomes the run's cancel, which is written down; the interrupt of what runs follows from that.
And the command by which a worker says what it runs.
"""

from __future__ import annotations

import logging
import re
import time
from importlib import metadata
from typing import Any

import celery
from celery.worker import state as worker_state
from celery.worker.control import Panel
from celery.worker.control import revoke as celery_revoke

from runner.agents import Agents
from runner.errors import CeleriacError
from runner.keys import RUN_ID
from runner.loop import Wait, cancel_run
from runner.models import StopReason
from runner.store import Outcome, RunStore
from tasks.hints import publish
from tasks.requests import REVOKED

logger = logging.getLogger(__name__)

OUR_TASK = re.compile(rf"({RUN_ID.pattern})(\.[0-9]+){{0,2}}")
"""A run's start, its steps and its calls. `<run>.finished` is a task of the user's."""


def replace_revoke(store: RunStore) -> None:
    """Put our `revoke` in the place of Celery's, for this process; a later registration wins."""

    @Panel.register(
        name="revoke",
        type="control",
        variadic="task_id",
        signature="[id1 [id2 [... [idN]]]]",
    )
    def revoke(
        state: Any, task_id: Any, terminate: bool = False, signal: Any = None, **options: Any
    ) -> Any:
        """Cancel the runs that these task ids belong to; any other id is left to Celery."""
        ids = list(task_id) if isinstance(task_id, list | tuple | set) else [task_id]
        ended = [each for each in ids if _end_run(state.app, store, str(each))]
        others = [each for each in ids if each not in ended]
        if not others:
            return {"ok": f"runs of tasks {ended} cancelled, or ended before"}
        return celery_revoke(state, others, terminate=terminate, signal=signal, **options)


ABOUT = "celeriac_about"


def answer_about(store: RunStore, agents: Agents) -> None:
    """Have this process say what it runs, when somebody asks (`celeriac doctor`)."""

    @Panel.register(name=ABOUT, type="inspect")
    def about(state: Any) -> dict[str, Any]:
        """Versions, queues, agents with their fingerprints, and this clock beside Redis'."""
        return {
            "celeriac": installed_version(),
            "celery": celery.__version__,
            "queues": sorted(each.name for each in state.consumer.task_consumer.queues),
            "agents": {name: agent.fingerprint for name, agent in agents.items()},
            "clock": clock_difference(store, time.time()),
        }


def installed_version() -> str:
    try:
        return metadata.version("celeriac")
    except metadata.PackageNotFoundError:
        return "not installed"


def clock_difference(store: RunStore, now: float) -> float:
    """Seconds by which `now`, taken just before, is ahead of Redis' clock."""
    seconds, micros = store.redis.time()
    return round(now - float(seconds) - float(micros) / 1e6, 3)


def _end_run(app: Any, store: RunStore, task_id: str) -> bool:
    """Whether the task belongs to a run of ours that has ended, by this or before."""
    found = OUR_TASK.fullmatch(task_id)
    if found is None:
        return False
    run_id = found[1]
    # Noted before the look: a run that gets its record after it finds the note (tasks/requests.py).
    worker_state.revoked.add(run_id)
    try:
        ended = cancel_run(store, run_id, REVOKED)
    except CeleriacError as error:
        logger.warning("run=%s can't be cancelled by revoke yet: %s", run_id, error)
        return False
    if ended.outcome is Outcome.STALE:
        return False
    # Others may have the places that it held, and its conversation goes on.
    publish(app, store, Wait(run_id))
    if ended.stop_reason is not StopReason.CANCELLED:
        worker_state.revoked.discard(run_id)  # it had ended otherwise, and may be resumed
    return True
