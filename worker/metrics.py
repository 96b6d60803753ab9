"""Prometheus metrics: a worker shows what it did itself, and one exporter what the fleet holds.

    a worker, at CELERIAC_METRICS_ADDRESS   latencies, errors, ends and recoveries of its own
    `celeriac metrics`                      queues, places of limits, what is due: read from Redis

A worker's children write into a folder that its main process reads (the library's own way).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from runner.errors import CeleriacError, ModelError, SettingsError
from runner.models import Model, ModelReply, ModelRequest
from runner.record import RunRecord
from runner.store import BegunCall, Outcome, RunStore
from runner.tools import Executed
from worker.survey import Survey, survey
from worker.telemetry import Witness

T = TypeVar("T")

FOLDER = "PROMETHEUS_MULTIPROC_DIR"

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@contextmanager
def keep_metrics() -> Iterator[None]:
    """A folder for the numbers of this process and its children. The library looks once for it."""
    with tempfile.TemporaryDirectory(prefix="celeriac-metrics-") as folder:
        os.environ[FOLDER] = folder
        yield


class Metrics(Witness):
    """Counts and measures what this process does. To be made before the pool's children are."""

    def __init__(self) -> None:
        library = _library()

        def histogram(name: str, told: str, *labels: str) -> Any:
            return library.Histogram(f"celeriac_{name}_seconds", told, labels, buckets=SECONDS)

        def counter(name: str, told: str, *labels: str) -> Any:
            return library.Counter(f"celeriac_{name}", told, labels)

        self._step = histogram("step", "A step, from its begin to its decision", "agent")
        self._model = histogram("model", "A request to a model", "model")
        self._call = histogram("call", "An attempt of a tool call", "tool", "outcome")
        self._model_errors = counter("model_errors", "Failed requests", "model", "type")
        self._runs = counter("runs", "Ends of runs", "agent", "stop_reason")
        self._recoveries = counter("recoveries", "Runs that recovery has moved", "what")

    def step(self, record: RunRecord, take: Callable[[], T]) -> T:
        with self._step.labels(record.agent).time():
            return take()

    def exchange(
        self,
        record: RunRecord,  # noqa: ARG002
        request: ModelRequest,
        model: Model,  # noqa: ARG002
        ask: Callable[[], ModelReply],
    ) -> ModelReply:
        try:
            with self._model.labels(request.model).time():
                return ask()
        except ModelError as error:
            self._model_errors.labels(request.model, str(error.type)).inc()
            raise

    def call(self, call: BegunCall, run: Callable[[], Executed | Outcome]) -> Executed | Outcome:
        started = time.monotonic()
        found = run()
        if isinstance(found, Outcome):
            outcome = str(found)
        else:
            outcome = found.result.error.type if found.result.error else Outcome.OK
        seconds = time.monotonic() - started
        self._call.labels(_name_of(call, outcome), outcome).observe(seconds)
        return found

    def finished(self, record: RunRecord) -> None:
        self._runs.labels(record.agent, str(record.stop_reason)).inc()

    def recovered(self, what: str) -> None:
        self._recoveries.labels(what).inc()


def _name_of(call: BegunCall, outcome: str) -> str:
    """The tool, unless it is one that a model has made up: there is no end of these."""
    return "" if outcome == "UNKNOWN_TOOL" else call.decision.name


def serve_worker(address: str) -> Callable[[], None]:
    """Show the metrics of this process and its children; answers what ends that."""
    library = _library()
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = library.CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return _serve(address, registry)


def serve_fleet(address: str, store: RunStore, limits: set[str]) -> Callable[[], None]:
    """Show what Redis says at each look; answers what ends that."""
    registry = _library().CollectorRegistry()
    registry.register(FleetCollector(store, limits))
    return _serve(address, registry)


class FleetCollector:
    """Looks at Redis whenever somebody looks at the metrics."""

    def __init__(self, store: RunStore, limits: set[str]) -> None:
        self._store = store
        self._limits = limits

    def describe(self) -> list[Any]:
        return []  # not looked at before somebody asks

    def collect(self) -> Iterator[Any]:
        from prometheus_client.metrics_core import GaugeMetricFamily

        def gauge(name: str, told: str, label: str, values: dict[str, float]) -> Any:
            family = GaugeMetricFamily(f"celeriac_{name}", told, labels=[label] if label else [])
            for each, value in values.items():
                family.add_metric([each] if label else [], value)
            return family

        try:
            seen: Survey | None = survey(self._store, self._limits)
        except CeleriacError:
            seen = None
        yield gauge("redis_up", "Whether Redis answers", "", {"": float(seen is not None)})
        if seen is None:
            return
        queues, limits = seen.queues, seen.limits
        # A limit stays in sight once something has waited for it.
        self._limits |= {each.name for each in limits}
        for name, told, label, values in (
            ("queue_depth", "Hints that wait", "queue", {e.name: e.depth for e in queues}),
            ("queue_wait_seconds", "Age of the oldest", "queue", {e.name: e.wait for e in queues}),
            ("slots_used", "Places taken", "limit", {e.name: e.used for e in limits}),
            ("slots_waiting", "Waits for a place", "limit", {e.name: e.waiting for e in limits}),
            ("live_runs", "Runs that haven't ended", "", {"": seen.live_runs}),
            ("overdue_seconds", "For how long nobody looked", "", {"": seen.overdue}),
        ):
            yield gauge(name, told, label, {each: float(value) for each, value in values.items()})


def _serve(address: str, registry: Any) -> Callable[[], None]:
    host, _, port = address.rpartition(":")
    try:
        server, thread = _library().start_http_server(int(port), host, registry=registry)
    except (OSError, ValueError, OverflowError) as error:
        raise SettingsError(
            f"metrics can't be shown at {address!r} ({error}); CELERIAC_METRICS_ADDRESS is a free "
            "host:port, and each worker of a machine needs one of its own"
        ) from error

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return end


def _library() -> Any:
    try:
        import prometheus_client
    except ImportError:
        raise SettingsError(
            "metrics need prometheus_client; pip install 'celeriac[prometheus]', or leave "
            "CELERIAC_METRICS_ADDRESS out"
        ) from None
    return prometheus_client
