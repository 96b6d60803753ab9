"""Makes Celery's own verbs end a run: `app.control.revoke(run_id)`, Flower's Revoke and Terminate.

A revoke alone is a broadcast that nobody may hear, and for a task that runs it does nothing. Here
it becomes the run's cancel, which is written down; the interrupt of what runs follows from that.
"""

from __future__ import annotations

import logging
from typing import Any

from celery.worker import state as worker_state
from celery.worker.control import Panel
from celery.worker.control import revoke as celery_revoke

from runner.errors import CeleriacError
from runner.keys import RUN_ID
from runner.loop import cancel_run
from runner.models import StopReason
from runner.store import RunStore

logger = logging.getLogger(__name__)

REASON = "revoked through Celery"


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
        cancelled = [each for each in ids if _cancel(store, str(each))]
        # Hints of theirs that still come need no look at Redis.
        worker_state.revoked.update(cancelled)
        others = [each for each in ids if each not in cancelled]
        if not others:
            return {"ok": f"runs of tasks {cancelled} cancelled"}
        return celery_revoke(state, others, terminate=terminate, signal=signal, **options)


def _cancel(store: RunStore, task_id: str) -> bool:
    """Whether the task belongs to a run of ours that is cancelled now."""
    run_id = task_id.partition(".")[0]
    if not RUN_ID.fullmatch(run_id):
        return False
    try:
        ended = cancel_run(store, run_id, REASON)
    except CeleriacError as error:
        logger.warning("run=%s can't be cancelled by revoke: %s", run_id, error)
        return False
    return ended.stop_reason is StopReason.CANCELLED
