"""A run's record: how it is laid out in Redis, and how it is read back. No command is sent here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import JsonValue

from runner.errors import SchemaError
from runner.models import (
    SCHEMA_VERSION,
    Decided,
    Event,
    Frozen,
    Limits,
    OnFinish,
    Principal,
    RunError,
    RunStatus,
    StopReason,
    ToolDecision,
    ToolResult,
    Usage,
)
from runner.redact import redact

BILLION = 1_000_000_000

ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class RunOfCall:
    """What a call is told of its run, as it was at `now`. Times are ms by Redis' clock.

    `failed` counts the failures of tools by their names: for a call, those of its own.
    """

    run_id: str
    step: int
    epoch: int
    agent: str
    deadline: int
    now: int
    principal: Principal | None
    metadata: dict[str, JsonValue]
    resumed: int
    failed: dict[str, int]

    @property
    def remaining(self) -> float:
        """Seconds to the deadline."""
        return (self.deadline - self.now) / 1000


@dataclass(frozen=True, slots=True)
class RunRecord(RunOfCall):
    """A run's whole record.

    `used` counts the calls of tools by their names; `model` is the index of the agent's model that
    is asked; `final` is the answer that a final tool has given. `goal` is the place of the goal in
    the history, behind what was said before; `after` the run that this one goes on from.
    `tool_answers` counts answers of a final tool after which the run went on.
    """

    status: RunStatus
    phase: str
    deaths: int
    model_attempts: int
    tool_calls: int
    used: dict[str, int]
    model: int
    invalid_calls: int
    created: int
    ended: int | None
    limits: Limits | None
    fingerprint: str
    usage: Usage
    stop_reason: StopReason | None
    answer: JsonValue
    error: RunError | None
    fatal: RunError | None
    final: JsonValue
    limit: str | None
    on_finish: OnFinish | None
    promised: bool
    to_backend: bool
    schema: int
    goal: int = 0
    after: str | None = None
    conversation: str | None = None
    tool_answers: int = 0
    traceparent: str = ""

    @property
    def tenant(self) -> str:
        """Whose run it is; empty where nobody said."""
        return self.principal.tenant if self.principal else ""


class RunInfo(Frozen):
    """One look at a run. Times are seconds since the epoch, by Redis' clock."""

    id: str
    agent: str
    status: RunStatus
    stop_reason: StopReason | None
    step: int
    created: float
    deadline: float
    ended: float | None
    usage: Usage
    metadata: dict[str, JsonValue]
    after: str | None = None
    conversation: str | None = None

    @classmethod
    def of(cls, record: RunRecord) -> RunInfo:
        return cls(
            id=record.run_id,
            agent=record.agent,
            status=record.status,
            stop_reason=record.stop_reason,
            step=record.step,
            created=record.created / 1000,
            deadline=record.deadline / 1000,
            ended=record.ended / 1000 if record.ended else None,
            usage=record.usage,
            metadata=record.metadata,
            after=record.after,
            conversation=record.conversation,
        )


class CallInfo(Frozen):
    """One look at a call, as the trace keeps it: without the values of fields that it hides.

    `result` is None while there is none; `decided` where the call needed no approval (yet).
    """

    decision: ToolDecision
    result: ToolResult | None
    decided: Decided | None


def dump(value: Any) -> str:
    return ENCODER.encode(value)


def ms(seconds: float) -> int:
    return int(seconds * 1000)


def call_summary(result: ToolResult) -> dict[str, Any]:
    """What an event says of a result: sizes and outcome, no content."""
    return {
        "tool": result.name,
        "ok": result.ok,
        "error": result.error.type if result.error else None,
        "duration_ms": result.duration_ms,
        "chars": result.output_chars,
        "attempt": result.attempt,
    }


def result_trace(step: int, result: ToolResult, hidden: frozenset[str]) -> dict[str, Any]:
    """What a trace keeps of a result: fields called as in `hidden` without their values.

    The entry says so in `hidden` where the result held any.
    """
    whole = result.model_dump(mode="json")
    shown = whole.copy()
    shown |= {key: redact(shown[key], hidden) for key in ("content", "data")}
    shown["evidence"] = [
        each | {key: redact(each[key], hidden) for key in ("text", "data")}
        for each in shown["evidence"]
    ]
    if error := shown["error"]:
        shown["error"] = error | {key: redact(error[key], hidden) for key in ("message", "fields")}
    entry: dict[str, Any] = {"kind": "result", "step": step, "result": shown}
    return entry if shown == whole else entry | {"hidden": sorted(hidden)}


def digest(text: str) -> str:
    # A caller's key may be of any length and characters; ours isn't.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def call_digest(name: str, arguments: str) -> str:
    """What stands for a call and its exact arguments, as somebody who decides on it is shown."""
    return digest(f"{name} {arguments}")


def flat(fields: Mapping[str, str | int]) -> list[str | int]:
    return [part for pair in fields.items() for part in pair]


def pairs(flat: Sequence[str]) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def limit_fields(limits: Limits) -> dict[str, str | int]:
    return {
        "limits": limits.model_dump_json(),
        "max_steps": limits.max_steps,
        "max_tokens": limits.max_tokens or 0,
        "max_cost": _billionths(limits.max_cost),
    }


def usage_args(usage: Usage | None) -> list[int | str]:
    usage = usage or Usage()
    return [
        usage.requests,
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.total_tokens,
        0 if usage.known else 1,
        # Nothing at a price of nothing isn't the same as no price.
        "" if usage.cost is None else _billionths(usage.cost),
    ]


def _billionths(cost: float | None) -> int:
    # Whole numbers, so that Redis adds them up without an error of rounding.
    return round((cost or 0.0) * BILLION)


def _counts(fields: Mapping[str, str], prefix: str) -> dict[str, int]:
    return {
        name.removeprefix(prefix): int(value)
        for name, value in fields.items()
        if name.startswith(prefix)
    }


@lru_cache(256)  # most runs have the limits of a few agents, and nobody changes them
def _read_limits(text: str) -> Limits:
    return Limits.model_validate_json(text)


def _read_principal(text: str | None) -> Principal | None:
    return Principal.model_validate_json(text) if text else None


def _read_metadata(text: str | None) -> dict[str, JsonValue]:
    return json.loads(text) if text else {}


def parse_run_of_call(
    run_id: str, step: int, tool: str, values: Sequence[str | None], now: int
) -> RunOfCall:
    """What `answer_call` of the scripts tells of a run, in its order."""
    epoch, agent, deadline, principal, metadata, resumed, failed = values
    return RunOfCall(
        run_id=run_id,
        step=step,
        epoch=int(epoch or 0),
        agent=agent or "",
        deadline=int(deadline or 0),
        now=now,
        principal=_read_principal(principal),
        metadata=_read_metadata(metadata),
        resumed=int(resumed or 0),
        failed={tool: int(failed)} if failed else {},
    )


def parse_record(run_id: str, fields: Mapping[str, str], now: int) -> RunRecord:
    def number(name: str) -> int:
        return int(fields.get(name) or 0)

    def parsed(name: str) -> Any:
        text = fields.get(name)
        return json.loads(text) if text else None

    def error(name: str) -> RunError | None:
        text = fields.get(name)
        return RunError.model_validate_json(text) if text else None

    if number("schema") > SCHEMA_VERSION:
        raise SchemaError(
            f"run {run_id} was written by a newer version of celeriac; upgrade this one to read it"
        )
    limits, principal, stop, on_finish = (
        fields.get(name) for name in ("limits", "principal", "stop_reason", "on_finish")
    )
    return RunRecord(
        run_id=run_id,
        status=RunStatus(fields["status"]),
        phase=fields["phase"],
        step=number("step"),
        epoch=number("epoch"),
        deaths=number("deaths"),
        resumed=number("resumed"),
        model_attempts=number("model_attempts"),
        tool_calls=number("tool_calls"),
        used=_counts(fields, "used."),
        failed=_counts(fields, "failed."),
        model=number("model"),
        invalid_calls=number("invalid_calls"),
        created=number("created"),
        deadline=number("deadline"),
        ended=number("ended") or None,
        agent=fields.get("agent", ""),
        limits=_read_limits(limits) if limits else None,
        fingerprint=fields.get("fingerprint", ""),
        principal=_read_principal(principal),
        metadata=_read_metadata(fields.get("metadata")),
        usage=Usage(
            requests=number("requests"),
            prompt_tokens=number("prompt_tokens"),
            completion_tokens=number("completion_tokens"),
            total_tokens=number("total_tokens"),
            known=number("unknown_usage") == 0,
            cost=number("cost") / BILLION if "cost" in fields else None,
        ),
        stop_reason=StopReason(stop) if stop else None,
        answer=parsed("answer"),
        error=error("error"),
        fatal=error("fatal"),
        final=parsed("final"),
        limit=fields.get("limit") or None,
        on_finish=OnFinish.model_validate_json(on_finish) if on_finish else None,
        promised=number("promised") == 1,
        to_backend=number("to_backend") == 1,
        schema=number("schema"),
        now=now,
        goal=number("goal"),
        after=fields.get("after") or None,
        conversation=fields.get("conversation") or None,
        tool_answers=number("tool_answers"),
        traceparent=fields.get("traceparent", ""),
    )


def parse_entries(stream: Any) -> list[tuple[str, dict[str, str]]]:
    # RESP3 nests one stream's entries in a list of their own, RESP2 doesn't.
    if (
        stream
        and isinstance(stream[0], list)
        and stream[0]
        and isinstance(stream[0][0], list | tuple)
    ):
        return [entry for part in stream for entry in part]
    return list(stream)


def parse_event(run_id: str, entry_id: str, fields: Mapping[str, str]) -> Event:
    return Event(
        id=entry_id,
        at=int(fields["at"]) / 1000,
        type=fields["type"],
        run=run_id,
        step=int(fields["step"]) if fields["step"] else None,
        call=fields["call"] or None,
        data=json.loads(fields["data"]),
    )
