"""What looks on in a worker: traces where OpenTelemetry is set up, metrics where it has an address.

Neither library is imported unless it is asked for, and no failure of theirs is a run's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from celery.signals import worker_process_shutdown

from runner import keys
from runner.agents import Agents
from runner.connection import reporting_redis_errors
from runner.errors import CeleriacError
from runner.models import Model, ModelReply, ModelRequest
from runner.observe import Observer
from runner.record import RunRecord
from runner.settings import Settings
from runner.store import BegunCall, Outcome, RunStore
from runner.tools import Executed

T = TypeVar("T")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

TOLD_FOR = 3600
"""Seconds for which is remembered that an end was told."""


class Witness(Observer):
    """An observer that is also told of each end of a run once in the whole fleet."""

    def finished(self, record: RunRecord) -> None:
        """The run has ended, as its record says."""

    def flush(self) -> None:
        """Send what was collected: this process is about to end."""


class Witnesses(Observer):
    """Several witnesses of the same work. One process among those that know of an end tells them.

    So they are to be the same in all workers.
    """

    def __init__(self, store: RunStore, members: Sequence[Witness]) -> None:
        self._store = store
        self._members = members

    def step(self, record: RunRecord, take: Callable[[], T]) -> T:
        for each in self._members:
            take = partial(each.step, record, take)
        return take()

    def exchange(
        self,
        record: RunRecord,
        request: ModelRequest,
        model: Model,
        ask: Callable[[], ModelReply],
    ) -> ModelReply:
        for each in self._members:
            ask = partial(each.exchange, record, request, model, ask)
        return ask()

    def call(self, call: BegunCall, run: Callable[[], Executed | Outcome]) -> Executed | Outcome:
        for each in self._members:
            run = partial(each.call, call, run)
        return run()

    def ended(self, run_id: str) -> None:
        # A run that was deleted meanwhile isn't told, nor one while Redis is away.
        with contextlib.suppress(CeleriacError):
            record = self._store.read_run(run_id)
            if record.stop_reason is not None and self._is_first(record):
                for each in self._members:
                    each.finished(record)

    def recovered(self, what: str) -> None:
        for each in self._members:
            each.recovered(what)

    def flush(self, **_: object) -> None:
        for each in self._members:
            each.flush()

    def _is_first(self, record: RunRecord) -> bool:
        key = keys.told(record.run_id, record.resumed)
        with reporting_redis_errors():
            return bool(self._store.redis.set(key, 1, nx=True, ex=TOLD_FOR))


def make_observer(
    settings: Settings, store: RunStore, agents: Agents, parts: contextlib.ExitStack
) -> Observer | None:
    """Whoever is to look on in this worker, until `parts` are closed; None where nobody is.

    Raises `SettingsError` where what is asked for isn't installed, or its address is taken.
    """
    members: list[Witness] = []
    if is_traced():
        from worker.tracing import Tracing, tracer_provider

        members.append(Tracing(settings, agents, tracer_provider()))
    if settings.metrics_address:
        from worker.metrics import Metrics, keep_metrics, serve_worker

        parts.enter_context(keep_metrics())
        members.append(Metrics())
        parts.callback(serve_worker(settings.metrics_address))
    if not members:
        return None
    made = Witnesses(store, members)
    # A child of the pool ends without what Python does at its exit.
    worker_process_shutdown.connect(made.flush, weak=False)
    return made


def is_traced() -> bool:
    """Whether OpenTelemetry's own variables say where spans go."""
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return not disabled and any(os.environ.get(name) for name in ENDPOINTS)
