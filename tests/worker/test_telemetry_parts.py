"""Telemetry beside a loop that is driven by hand: what is told, of which run, and what isn't."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import fakeredis
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

from runner import Agent, SettingsError, tool
from runner.agents import Agents
from runner.loop import CallTools, Loop, Next, NextStep, cancel_run
from runner.settings import Settings
from runner.store import RunStore
from runner.testing import ScriptedModel, calls
from support.fleet import ROOT, wait_for
from tasks.accept import accept_goal
from worker.logs import JsonFormatter
from worker.telemetry import Witnesses, make_observer
from worker.tracing import Tracing, root_id_of, trace_id_of


@tool(redact=("token",))
def log_in(token: str) -> str:
    """Log in."""
    return f"planted-in-result {len(token)}"


AGENT = Agent(name="helper", instructions="planted-in-instructions", tools=[log_in])


class Traced:
    """A loop whose spans are kept, on a store that is empty."""

    def __init__(self, *, ratio: float = 1.0, **settings: Any) -> None:
        self.kept = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=TraceIdRatioBased(ratio))
        self.provider.add_span_processor(SimpleSpanProcessor(self.kept))
        self.settings = Settings(**settings)
        self.agents = Agents([AGENT])
        self.store = RunStore(self.settings, fakeredis.FakeRedis(decode_responses=True))
        self.observers = [self.observer(), self.observer()]
        self.loop = self.make_loop(0)

    def observer(self) -> Witnesses:
        return Witnesses(self.store, [Tracing(self.settings, self.agents, self.provider)])

    def make_loop(self, number: int) -> Loop:
        return Loop(
            self.store,
            self.agents,
            settings=self.settings,
            model=ScriptedModel([calls(("log_in", {"token": "planted-secret"})), "done"] * 20),
            observer=self.observers[number],
        )

    def run(self) -> str:
        run_id = accept_goal(
            self.store, "planted-in-goal", agent="helper", agents=self.agents
        ).run_id
        coming: Next = NextStep(run_id, 0)
        while isinstance(coming, NextStep | CallTools):
            match coming:
                case NextStep(step=step):
                    coming = self.loop.advance(run_id, step)
                case CallTools(step=step):
                    coming = self.loop.call_tool(run_id, step, 0)
        return run_id

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {each.name: each for each in self.kept.get_finished_spans()}

    def close(self) -> None:
        self.loop.close()
        self.provider.shutdown()


@pytest.fixture
def traced() -> Iterator[Traced]:
    made = Traced()
    yield made
    made.close()


def test_the_ids_of_a_trace_follow_from_the_runs(traced: Traced) -> None:
    run_id = traced.run()

    assert set(traced.spans) == {"chat gpt-4o-mini", "execute_tool log_in", "invoke_agent helper"}
    root = traced.spans["invoke_agent helper"]
    assert root.context is not None
    assert root.context.span_id == root_id_of(run_id, 0)
    assert root.parent is None
    for name, span in traced.spans.items():
        assert span.context is not None
        assert span.context.trace_id == trace_id_of(run_id)
        assert name == root.name or (span.parent and span.parent.span_id == root.context.span_id)


def test_a_run_that_is_resumed_has_another_root() -> None:
    assert root_id_of("a-run-of-its-own", 0) != root_id_of("a-run-of-its-own", 1)


def test_the_submitting_span_is_linked(traced: Traced) -> None:
    with traced.provider.get_tracer("web").start_as_current_span("POST /ask") as request:
        traced.run()

    [link] = traced.spans["invoke_agent helper"].links
    assert link.context.span_id == request.get_span_context().span_id
    parents = {name: span.parent for name, span in traced.spans.items()}
    assert parents["invoke_agent helper"] is None


def test_an_end_that_several_are_told_of_has_one_root(traced: Traced) -> None:
    run_id = traced.run()
    for observer in traced.observers * 2:
        observer.ended(run_id)
    traced.observers[0].ended("no-such-run")

    names = Counter(each.name for each in traced.kept.get_finished_spans())
    assert names["invoke_agent helper"] == 1


def test_a_cancel_from_elsewhere_is_heard(traced: Traced) -> None:
    traced.loop.hear_ends()
    run_id = accept_goal(traced.store, "stop", agent="helper", agents=traced.agents).run_id

    cancel_run(traced.store, run_id, "planted-in-reason")

    wait_for(lambda: traced.spans)
    span = traced.spans["invoke_agent helper"]
    assert (span.attributes or {})["celeriac.stop_reason"] == "CANCELLED"
    assert "planted" not in span.to_json()


def test_nothing_that_was_said_is_told(traced: Traced) -> None:
    traced.run()
    assert "planted" not in "".join(each.to_json() for each in traced.spans.values())


def test_what_was_said_is_told_where_it_is_asked_for_and_not_redacted() -> None:
    traced = Traced(trace_content=True)
    traced.run()

    call = traced.spans["execute_tool log_in"].attributes or {}
    assert json.loads(str(call["gen_ai.tool.call.arguments"])) == {"token": "***"}
    assert call["gen_ai.tool.call.result"] == "planted-in-result 14"
    first, last = (each for each in traced.kept.get_finished_spans() if each.name[:4] == "chat")
    [asked] = json.loads(str((first.attributes or {})["gen_ai.output.messages"]))
    assert [part["type"] for part in asked["parts"]] == ["tool_call"]
    shown = json.loads(str((last.attributes or {})["gen_ai.input.messages"]))
    assert [each["role"] for each in shown] == ["system", "user", "assistant", "tool"]
    assert shown[1]["parts"] == [{"type": "text", "content": "planted-in-goal"}]
    told = "".join(each.to_json() for each in traced.kept.get_finished_spans())
    assert "planted-secret" not in told
    traced.close()


def test_a_sampler_keeps_a_run_whole_or_not_at_all() -> None:
    traced = Traced(ratio=0.5)
    for _ in range(20):
        traced.run()

    sizes = Counter(
        each.context.trace_id for each in traced.kept.get_finished_spans() if each.context
    )
    assert 0 < len(sizes) < 20
    assert set(sizes.values()) == {4}
    traced.close()


def test_no_observer_is_made_and_nothing_imported_unless_it_is_asked_for() -> None:
    code = (
        "import sys, contextlib; from worker.app import make_app; "
        "from worker.telemetry import make_observer; from runner.settings import Settings; "
        "with_parts = contextlib.ExitStack(); "
        "assert make_observer(Settings(), None, None, with_parts) is None; "
        "bad = {'worker.tracing', 'worker.metrics', 'prometheus_client'} & set(sys.modules); "
        "assert not bad, bad"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_what_isnt_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    for name in ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "prometheus_client"):
        monkeypatch.setitem(sys.modules, name, None)
    store = RunStore(Settings(), fakeredis.FakeRedis())
    with contextlib.ExitStack() as parts:
        with pytest.raises(SettingsError, match=r"celeriac\[otel\]"):
            make_observer(Settings(), store, Agents(), parts)
        monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
        with pytest.raises(SettingsError, match=r"celeriac\[prometheus\]"):
            make_observer(Settings(metrics_address="127.0.0.1:1"), store, Agents(), parts)


@pytest.mark.parametrize("address", ["9101", ":9101", "127.0.0.1", "127.0.0.1:http"])
def test_an_address_for_metrics_is_host_and_port(address: str) -> None:
    with pytest.raises(SettingsError, match="CELERIAC_METRICS_ADDRESS"):
        Settings(metrics_address=address)


def test_the_form_of_the_log_is_one_that_there_is() -> None:
    with pytest.raises(SettingsError, match="CELERIAC_LOG_FORMAT"):
        Settings(log_format="xml")


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("run=r-1 step=2 requests=1 errors=none ms=3", {"run": "r-1", "step": 2}),
        (
            "run=r-1 call=2.0 tool=add outcome=OK attempt=3 chars=1",
            {"run": "r-1", "step": 2, "call": "2.0", "index": 0, "attempt": 3},
        ),
        (
            "call=r-1.2.0 can't tell its progress: away",
            {"run": "r-1", "step": 2, "call": "2.0", "index": 0},
        ),
        ("Task celeriac.step[r-1.4] received", {"run": "r-1", "step": 4}),
        (
            "Task celeriac.call_tool[r-1.4.2] succeeded in 0.1s: 'add OK'",
            {"run": "r-1", "step": 4, "index": 2},
        ),
        ("Task celeriac.start[r-1] received", {"run": "r-1"}),
        ("Connected to redis://:**@127.0.0.1:6379/0", {}),
    ],
)
def test_a_line_of_the_log_is_json(message: str, fields: dict[str, Any]) -> None:
    record = logging.LogRecord("ours", logging.INFO, "", 0, "%s", (message,), None)

    line = json.loads(JsonFormatter().format(record))

    assert {line.pop(name) for name in ("level", "logger", "message")} == {"INFO", "ours", message}
    assert line.pop("at").endswith("+00:00")
    assert line.pop("process")
    assert line == fields


def test_a_traceback_stays_on_its_line() -> None:
    try:
        raise ValueError("bad")
    except ValueError:
        record = logging.LogRecord("ours", logging.ERROR, "", 0, "failed", (), sys.exc_info())

    text = JsonFormatter().format(record)

    assert "\n" not in text
    assert json.loads(text)["traceback"].endswith("ValueError: bad")
