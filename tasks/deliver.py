"""Delivers the end of a run to who asked for it: a task of the user's, and `AsyncResult(run_id)`.

At least once: a run stays in `due` until this has gone through, so a repeat has the same task id.
"""

from __future__ import annotations

import contextlib
import logging

from celery import Celery, states
from kombu.exceptions import DecodeError

from runner import keys
from runner.errors import CeleriacError, RunNotFound, SettingsError
from runner.models import FinalResult, StopReason
from runner.store import Outcome, RunStore

logger = logging.getLogger(__name__)


class RunFailed(CeleriacError):
    """What `AsyncResult(run_id).get()` raises for a run that didn't complete."""


def deliver(app: Celery, store: RunStore, run_id: str) -> None:
    """Hand over the result of a finished run, and settle what it promised."""
    try:
        record = store.read_run(run_id)
    except RunNotFound:
        return  # deleted, and what it promised with it
    result = store.result_of(record)
    if result is None:
        return
    if record.to_backend and not store.settings.result_backend:
        logger.warning("run=%s is left to a worker that has CELERIAC_RESULT_BACKEND", run_id)
        return
    if store.settings.result_backend:
        try:
            store_ended(app, result)
        except (DecodeError, TypeError, LookupError):
            # Celery reads before it writes, and what stands in the run's place isn't Celery's.
            forget(app, run_id)
            store_ended(app, result)
    on_finish = record.on_finish
    if on_finish is not None:
        app.send_task(
            on_finish.task,
            kwargs={"result": result.model_dump(mode="json")},
            kwargsrepr="{...}",  # an answer is content: neither logs nor Flower show it
            task_id=keys.finish_id(run_id, record.resumed),
            root_id=run_id,
            queue=on_finish.queue,
        )
    if store.settle_run(record) is Outcome.STALE and not _is_there(store, run_id):
        forget(app, run_id)  # deleted meanwhile: what was stored above is nobody's


def _is_there(store: RunStore, run_id: str) -> bool:
    try:
        store.read_run(run_id)
    except RunNotFound:
        return False
    return True


def store_started(app: Celery, store: RunStore, run_id: str) -> None:
    """Let `AsyncResult(run_id)` say `STARTED`, where a result backend is set."""
    if not store.settings.result_backend:
        return
    try:
        app.backend.store_result(run_id, None, states.STARTED)
    except Exception as error:  # noqa: BLE001 - any backend's any error; the run is accepted
        logger.warning("run=%s can't tell the result backend: %s", run_id, type(error).__name__)


def store_ended(app: Celery, result: FinalResult) -> None:
    match result.stop_reason:
        case StopReason.COMPLETED:
            app.backend.store_result(result.run_id, result.model_dump(mode="json"), states.SUCCESS)
        case StopReason.CANCELLED:
            app.backend.mark_as_revoked(result.run_id, reason=_reason(result))
        case _:
            app.backend.store_result(result.run_id, RunFailed(_reason(result)), states.FAILURE)


def forget(app: Celery, run_id: str) -> None:
    """Remove what `AsyncResult(run_id)` knows of a run, where a result backend is set."""
    if app.conf.result_backend:
        app.backend.forget(run_id)


def check_backend(app: Celery) -> None:
    """Raise `SettingsError` where the result backend can't be used; nothing is connected."""
    try:
        _ = app.backend
    except Exception as error:
        name = type(error).__name__
        raise SettingsError(
            f"CELERIAC_RESULT_BACKEND can't be used ({name}); check its URL, and that what it "
            "needs is installed"
        ) from error


def close_backend(app: Celery) -> None:
    """Close the result backend's connections, which `app.close()` leaves open."""
    if app.conf.result_backend:
        # Not every kind of backend has these.
        with contextlib.suppress(AttributeError):
            app.backend.result_consumer.stop()
        with contextlib.suppress(AttributeError):
            app.backend.client.close()


def _reason(result: FinalResult) -> str:
    message = result.error.message if result.error else ""
    return f"{result.stop_reason}: {message}"
