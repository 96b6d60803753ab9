"""One OpenTelemetry trace for each run, whichever processes take part in it.

The ids of the trace and of its root are made from the run's id, so that every process knows them
and nothing is handed on. Names and attributes are those of the GenAI conventions; what was said is
in them only where `CELERIAC_TRACE_CONTENT` is set.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from runner.agents import Agents
from runner.errors import ModelError, SettingsError
from runner.model import OpenAIModel
from runner.models import Final, Model, ModelReply, ModelRequest, Usage
from runner.record import RunOfCall, RunRecord
from runner.redact import redact
from runner.settings import Settings
from runner.store import BegunCall, Outcome
from runner.tools import Executed
from worker.telemetry import ENDPOINTS, Witness

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

MS = 1_000_000
"""Nanoseconds."""


def trace_id_of(run_id: str) -> int:
    """The same in every process: a hash of the run's id.

    Not the id itself: samplers go by the lower bits of a trace's, and those of a UUID aren't all
    random, so that half of all runs would be none.
    """
    return int.from_bytes(hashlib.sha256(run_id.encode()).digest()[:16], "big") or 1


def root_id_of(run_id: str, resumed: int) -> int:
    """The id of the span of the whole run, from its submit or its last resume to its end."""
    digest = hashlib.sha256(f"{run_id}.{resumed}".encode()).digest()
    return int.from_bytes(digest[:8], "big") or 1


_next_ids: ContextVar[tuple[int, int] | None] = ContextVar("_next_ids", default=None)


class RunIds:
    """Gives out the ids that a root needs, and those of another generator otherwise."""

    def __init__(self, others: Any) -> None:
        self._others = others

    def generate_trace_id(self) -> int:
        given = _next_ids.get()
        return given[0] if given else int(self._others.generate_trace_id())

    def generate_span_id(self) -> int:
        given = _next_ids.get()
        return given[1] if given else int(self._others.generate_span_id())

    def is_trace_id_random(self) -> bool:
        return False


def tracer_provider() -> Any:
    """The process's tracer provider: one that somebody has set up, or our own."""
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise SettingsError(
            f"{' or '.join(ENDPOINTS)} is set, and OpenTelemetry isn't installed; "
            "pip install 'celeriac[otel]', or set OTEL_SDK_DISABLED=true"
        ) from None
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        # Spans of a tool's own are then children of its call's.
        trace.set_tracer_provider(provider)
    return provider


class Tracing(Witness):
    """Makes `invoke_agent`, `chat` and `execute_tool` spans. Flushes when its process ends."""

    def __init__(self, settings: Settings, agents: Agents, provider: Any) -> None:
        self._content = settings.trace_content
        self._redact = frozenset(settings.redact)
        self._agents = agents
        self._traced_by = provider
        # Before the tracer is made, which keeps the generator that it finds.
        provider.id_generator = RunIds(provider.id_generator)
        self._tracer = self._traced_by.get_tracer("celeriac")

    def flush(self) -> None:
        self._traced_by.force_flush(1_000)

    def exchange(
        self,
        record: RunRecord,
        request: ModelRequest,
        model: Model,
        ask: Callable[[], ModelReply],
    ) -> ModelReply:
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": request.model,
            **_server_of(model),
        }
        with self._span("chat", request.model, record, attributes, client=True) as span:
            self._tell(span, record, "gen_ai.input.messages", _messages(request.messages))
            try:
                reply = ask()
            except ModelError as error:
                _fail(span, str(error.type))
                span.set_attributes(_usage(error.usage or Usage()))
                raise
            span.set_attributes(_usage(reply.usage))
            self._tell(span, record, "gen_ai.output.messages", _answer(reply))
            return reply

    def call(self, call: BegunCall, run: Callable[[], Executed | Outcome]) -> Executed | Outcome:
        record, decision = call.record, call.decision
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": decision.name,
            "gen_ai.tool.type": "function",
            "gen_ai.tool.call.id": decision.call_id,
            "celeriac.attempt": call.attempt,
        }
        with self._span("execute_tool", decision.name, record, attributes) as span:
            self._tell(span, record, "gen_ai.tool.call.arguments", decision.arguments)
            found = run()
            if isinstance(found, Outcome):
                _fail(span, str(found))
            else:
                if found.result.error is not None:
                    _fail(span, found.result.error.type)
                self._tell(span, record, "gen_ai.tool.call.result", found.result.content)
            return found

    def finished(self, record: RunRecord) -> None:
        from opentelemetry.trace import Link

        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": record.agent,
            "celeriac.run.id": record.run_id,
            "celeriac.stop_reason": str(record.stop_reason),
            "celeriac.steps": record.step,
            **({"gen_ai.conversation.id": record.conversation} if record.conversation else {}),
            **_usage(record.usage),
        }
        links = [Link(each) for each in _submitter(record)]
        ids = trace_id_of(record.run_id), root_id_of(record.run_id, record.resumed)
        token = _next_ids.set(ids)
        try:
            span = self._tracer.start_span(
                f"invoke_agent {record.agent}",
                context=_nowhere(),
                attributes=attributes,
                links=links,
                start_time=record.created * MS,
            )
        finally:
            _next_ids.reset(token)
        if record.error is not None:
            _fail(span, str(record.error.type))
        span.end((record.ended or record.now) * MS)

    @contextmanager
    def _span(
        self,
        operation: str,
        of: str,
        record: RunOfCall,
        attributes: Mapping[str, Any],
        *,
        client: bool = False,
    ) -> Iterator[Span]:
        from opentelemetry.trace import SpanKind

        with self._tracer.start_as_current_span(
            f"{operation} {of}",
            context=self._inside(record),
            kind=SpanKind.CLIENT if client else SpanKind.INTERNAL,
            attributes={
                **attributes,
                "gen_ai.agent.name": record.agent,
                "celeriac.run.id": record.run_id,
                "celeriac.step": record.step,
            },
            record_exception=False,  # its text may be content
            set_status_on_exception=False,
        ) as span:
            yield span

    def _inside(self, record: RunOfCall) -> Context:
        """The context of the run's root, which is another process's, and not made yet."""
        from opentelemetry.sdk.trace.sampling import Decision
        from opentelemetry.trace import (
            NonRecordingSpan,
            SpanContext,
            TraceFlags,
            set_span_in_context,
        )

        trace_id = trace_id_of(record.run_id)
        # As the root will be: whether a run is traced depends on its id alone.
        sampled = self._traced_by.sampler.should_sample(
            _nowhere(), trace_id, f"invoke_agent {record.agent}"
        )
        flags = TraceFlags.SAMPLED if sampled.decision is Decision.RECORD_AND_SAMPLE else 0
        root = SpanContext(
            trace_id,
            root_id_of(record.run_id, record.resumed),
            is_remote=True,
            trace_flags=TraceFlags(flags),
        )
        return set_span_in_context(NonRecordingSpan(root), _nowhere())

    def _tell(self, span: Span, record: RunOfCall, name: str, content: Any) -> None:
        if not self._content:
            return
        agent = self._agents.get(record.agent)
        hidden = self._redact | (agent.redacted if agent else frozenset())
        shown = redact(content, hidden)
        span.set_attribute(name, shown if isinstance(shown, str) else json.dumps(shown))


def _nowhere() -> Context:
    from opentelemetry.context import Context

    return Context()


def _submitter(record: RunRecord) -> list[Any]:
    """The span in which the run was submitted, if it was in one."""
    from opentelemetry.trace import get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {"traceparent": record.traceparent}
    context = TraceContextTextMapPropagator().extract(carrier, context=_nowhere())
    found = get_current_span(context).get_span_context()
    return [found] if found.is_valid else []


def _server_of(model: Model) -> dict[str, str]:
    """Whose model it is; nobody knows of one that is the user's own."""
    if not isinstance(model, OpenAIModel):
        return {"gen_ai.provider.name": "custom"}
    host = urlsplit(f"//{model.address}").hostname or ""
    return {"gen_ai.provider.name": model.profile.name, "server.address": host}


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
    }


def _fail(span: Span, type: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", type)
    span.set_status(Status(StatusCode.ERROR))


def _messages(messages: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    return [{"role": each["role"], "parts": _parts(each)} for each in messages]


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    if message["role"] == "tool":
        answered = {"id": message.get("tool_call_id"), "response": content}
        return [{"type": "tool_call_response", **answered}]
    parts = [{"type": "text", "content": content}] if content else []
    for call in message.get("tool_calls") or ():
        asked = {"id": call["id"], **call["function"]}
        parts.append({"type": "tool_call", **asked})
    return parts


def _answer(reply: ModelReply) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "content": reply.text}] if reply.text else []
    if not isinstance(reply, Final):
        parts += [
            {
                "type": "tool_call",
                "id": each.provider_id,
                "name": each.name,
                "arguments": each.arguments,
            }
            for each in reply.calls
        ]
    return [{"role": "assistant", "parts": parts}]
