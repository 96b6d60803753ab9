"""Real workers that tell a collector and Prometheus what they do, and log as JSON."""

from __future__ import annotations

import json
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider

from runner import Limits, StopReason
from runner.models import Principal
from support.fleet import wait_for
from support.metrics import free_address, scrape
from support.model_server import calls, error, final
from support.stage import Stage, open_stage
from tasks import Run
from worker.tracing import trace_id_of

PLANTED = "planted-"


class Collector(ThreadingHTTPServer):
    """An OTLP collector that keeps every span, as plain dicts by their trace."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.raw = b""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, body: bytes) -> None:
        self.raw += body
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            attributes = {each.key: each.value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans[span.trace_id.hex()].append(
                        {
                            "name": span.name,
                            "id": span.span_id.hex(),
                            "parent": span.parent_span_id.hex(),
                            "links": [each.trace_id.hex() for each in span.links],
                            "failed": span.status.code == 2,
                            "ns": (span.start_time_unix_nano, span.end_time_unix_nano),
                            "of": attributes["service.name"].string_value,
                            **{each.key: _plain(each.value) for each in span.attributes},
                        }
                    )

    def trace_of(self, run: Run, *, spans: int = 1) -> dict[str, list[dict[str, Any]]]:
        """A run's spans by name, once its root and so many in all are there."""
        trace_id = trace.format_trace_id(trace_id_of(run.id))
        wait_for(lambda: any(not each["parent"] for each in self.spans[trace_id]))
        wait_for(lambda: len(self.spans[trace_id]) >= spans)
        found = defaultdict(list)
        for each in self.spans[trace_id]:
            found[each["name"]].append(each)
        return found


def _plain(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.add(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture(scope="module")
def addresses() -> dict[str, str]:
    return {"steps": free_address(), "tools": free_address()}


def answers(address: str) -> bool:
    """Whether this address is taken."""
    host, _, port = address.rpartition(":")
    with socket.socket() as asked:
        return asked.connect_ex((host, int(port))) == 0


@pytest.fixture(scope="module")
def stage(
    collector: Collector, addresses: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("telemetry")
    with open_stage(
        folder,
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
        OTEL_BSP_SCHEDULE_DELAY="100",
        OTEL_SERVICE_NAME="shop",
        CELERIAC_LOG_FORMAT="json",
        PYTHONWARNINGS="ignore",  # of Celery's, where tests run as root
        CELERIAC_LEASE="5",
        CELERIAC_RENEW_EVERY="1.5",
    ) as made:
        # Each worker of a machine has an address of its own.
        for name in ("steps", "tools"):
            made.fleet.stop(name)
            made.fleet.environ["CELERIAC_METRICS_ADDRESS"] = addresses[name]
            made.fleet.start(name, name=name)
            wait_for(lambda name=name: answers(addresses[name]), timeout=30)  # type: ignore[misc]
        made.fleet.start("tools", name="late")
        assert made.fleet.workers.pop("late").wait(20) == 1
        assert "CELERIAC_METRICS_ADDRESS" in made.fleet.log("late")
        yield made


def test_a_run_is_one_trace_across_its_processes(stage: Stage, collector: Collector) -> None:
    provider = TracerProvider()
    with provider.get_tracer("web").start_as_current_span("POST /ask") as request:
        run = stage.submit(
            [calls(("add", {"a": 1, "b": 2}), ("boom", {})), final("planted-in-answer")],
            principal=Principal(id="planted-in-principal"),
        )
    provider.shutdown()
    assert run.result(timeout=20).ok
    found = collector.trace_of(run, spans=5)

    assert {name: len(each) for name, each in found.items()} == {
        "invoke_agent helper": 1,
        "chat gpt-4o-mini": 2,
        "execute_tool add": 1,
        "execute_tool boom": 1,
    }
    [root] = found["invoke_agent helper"]
    others = [each for name in found for each in found[name] if each is not root]
    assert {each["parent"] for each in others} == {root["id"]}
    assert root["ns"][0] <= min(each["ns"][0] for each in others)
    assert root["links"] == [trace.format_trace_id(request.get_span_context().trace_id)]
    assert root["gen_ai.operation.name"] == "invoke_agent"
    assert root["gen_ai.agent.name"] == "helper"
    assert root["celeriac.stop_reason"] == "COMPLETED"
    assert (root["gen_ai.usage.input_tokens"], root["gen_ai.usage.output_tokens"]) == (
        run.info().usage.prompt_tokens,
        run.info().usage.completion_tokens,
    )
    first, second = sorted(found["chat gpt-4o-mini"], key=lambda each: each["celeriac.step"])
    assert (first["celeriac.step"], second["celeriac.step"]) == (0, 1)
    assert first["gen_ai.request.model"] == "gpt-4o-mini"
    assert first["gen_ai.provider.name"] == "openai"
    assert first["server.address"] == "127.0.0.1"
    assert first["gen_ai.usage.input_tokens"] > 0
    [added], [boom] = found["execute_tool add"], found["execute_tool boom"]
    assert (added["gen_ai.tool.name"], added["gen_ai.tool.call.id"]) == ("add", "0.0")
    assert (boom["failed"], boom["error.type"]) == (True, "TOOL_ERROR")
    assert not added["failed"]
    assert {each["of"] for each in [root, *others]} == {"shop"}


def test_failures_are_on_their_spans_and_nothing_that_was_said(
    stage: Stage, collector: Collector
) -> None:
    run = stage.submit([error(429, "slow", message="planted-in-error"), error(401, "planted-")])
    assert run.result(timeout=20).stop_reason is StopReason.ERROR

    found = collector.trace_of(run, spans=3)

    [root] = found["invoke_agent helper"]
    assert (root["failed"], root["error.type"]) == (True, "AUTH_ERROR")
    types = [each["error.type"] for each in found["chat gpt-4o-mini"]]
    assert sorted(types) == ["AUTH_ERROR", "RATE_LIMITED"]
    assert PLANTED.encode() not in collector.raw
    assert b"goal " not in collector.raw  # how the stage's prompts begin


def test_a_cancel_from_outside_and_a_resume_have_their_roots(
    stage: Stage, collector: Collector
) -> None:
    run = stage.submit([calls(("wait_for_end", {}))])
    stage.fleet.wait_for(lambda: "wait-begin" in stage.fleet.ledger)
    run.cancel()
    capped = stage.submit([calls(("ping", {})), calls(("ping", {}))], agent="two-steps")
    assert capped.result(timeout=20).stop_reason is StopReason.MAX_STEPS
    collector.trace_of(capped)
    capped.resume(Limits(max_steps=3))
    stage.fleet.wait_for(lambda: capped.status() == "finished")

    found = collector.trace_of(run)

    [root] = found["invoke_agent helper"]
    assert root["celeriac.stop_reason"] == "CANCELLED"
    wait_for(lambda: collector.trace_of(run)["execute_tool wait_for_end"])
    [call] = collector.trace_of(run)["execute_tool wait_for_end"]
    assert (call["parent"], call["error.type"]) == (root["id"], "CANCELLED")
    wait_for(lambda: len(collector.trace_of(capped)["invoke_agent two-steps"]) == 2)
    spans = collector.trace_of(capped)
    first, second = spans["invoke_agent two-steps"]
    assert first["id"] != second["id"]
    assert {each["parent"] for each in spans["chat gpt-4o-mini"]} == {first["id"], second["id"]}


def test_prometheus_is_told_what_each_worker_did(stage: Stage, addresses: dict[str, str]) -> None:
    before = [scrape(each) for each in addresses.values()]
    run = stage.submit([error(429, "slow"), calls(("add", {"a": 1, "b": 2}), ("nobody", {}))])
    assert run.result(timeout=20).ok
    run = stage.submit([calls(("stubborn", {})), final("done")])
    assert run.result(timeout=20).ok

    def grown(name: str, *labels: str) -> float:
        now = [scrape(each) for each in addresses.values()]
        told = (name, *labels)
        return sum(each.get(told, 0.0) for each in now) - sum(
            each.get(told, 0.0) for each in before
        )

    wait_for(lambda: grown("celeriac_runs_total", "helper", "COMPLETED") == 2)
    assert grown("celeriac_step_seconds_count", "helper") == 5
    assert grown("celeriac_model_seconds_count", "gpt-4o-mini") == 5
    assert grown("celeriac_model_errors_total", "gpt-4o-mini", "RATE_LIMITED") == 1
    assert grown("celeriac_call_seconds_count", "OK", "add") == 1
    assert grown("celeriac_recoveries_total", "NextStep") >= 1  # the wait after the 429


def test_each_line_of_the_log_is_json_with_the_run_in_it(stage: Stage) -> None:
    run = stage.submit([calls(("add", {"a": 1, "b": 2}), text="planted-in-turn")])
    assert run.result(timeout=20).ok
    stage.fleet.wait_for(lambda: f"run={run.id} step=1 " in stage.fleet.log("steps"))

    for name, key in (("steps", "step"), ("tools", "index")):
        text = stage.fleet.log(name)
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        told = [line for line in lines if line.get("run") == run.id]
        assert {line["level"] for line in told} == {"INFO"}
        assert 0 in [line.get(key) for line in told]
        assert PLANTED not in text
    [call] = [line for line in told if line["message"].startswith("run=")]
    assert (call["step"], call["index"], call["call"], call["attempt"]) == (0, 0, "0.0", 1)
    assert call["logger"] == "runner.loop"
