"""Runs, events, results and traces as text: nothing is lost, and nothing moves the cursor."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner.models import Event, Evidence, FinalResult, RunError, RunStatus, StopReason, Usage
from runner.record import RunInfo
from worker.show import (
    EventView,
    Style,
    build_trace,
    describe_result,
    describe_run,
    describe_runs,
    describe_trace,
    printable,
    shorten,
)

USAGE = {"requests": 1, "prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}

INFO = RunInfo(
    id="0199-run",
    agent="helper",
    status=RunStatus.FINISHED,
    stop_reason=StopReason.COMPLETED,
    step=2,
    created=1000.0,
    deadline=1600.0,
    ended=1002.5,
    usage=Usage(),
    metadata={},
)


def event(type: str, *, call: str | None = None, **data: Any) -> Event:
    return Event(id="1-0", at=1001.5, type=type, run="0199-run", step=1, call=call, data=data)


@pytest.mark.parametrize(
    ("shown", "line"),
    [
        (event("run.created", agent="helper"), "run 0199-run created, agent helper"),
        (event("step.started", attempt=1), "step 1 started"),
        (event("step.started", attempt=2), "step 1 started, attempt 2"),
        (event("model.answered", calls=0), "step 1 model answered: no calls"),
        (event("model.answered", calls=1, refused=0), "step 1 model answered: 1 call"),
        (event("model.answered", calls=3, refused=1), "step 1 model answered: 3 calls, 1 refused"),
        (
            event("run.waiting", delay=1.5, reason="RATE_LIMITED"),
            "step 1 waits 1.5 s: RATE_LIMITED",
        ),
        (event("run.recovered"), "step 1 recovered: its worker is gone"),
        (event("run.finished", ok=True, stop_reason="COMPLETED"), "run finished: COMPLETED"),
        (
            event("run.finished", ok=False, stop_reason="MAX_STEPS", limit="max_steps"),
            "run finished: MAX_STEPS (max_steps)",
        ),
        (event("gap"), "gap: older events are no longer kept"),
        (event("new.kind", a=1), 'new.kind {"a": 1}'),
        (
            event("call.finished", call="1.0", tool="add", ok=True, duration_ms=7, chars=2),
            "  call 1.0 add ok, 7 ms, 2 chars",
        ),
        (
            event("call.finished", call="1.0", ok=False, error="CANCELLED"),
            "  call 1.0 ? CANCELLED",
        ),
        (
            event("call.progress", call="1.0", done=1, total=2, note="half\nway"),
            "  call 1.0 ? at 1/2 half way",
        ),
        (
            event("call.waiting", call="1.0", tool="add", error="TIMEOUT", delay=0.5),
            "  call 1.0 add TIMEOUT, again in 0.5 s",
        ),
    ],
)
def test_each_event_is_one_line_with_its_time_since_submit(shown: Event, line: str) -> None:
    assert EventView(created=1000.0).line(shown) == f"   1.50 s  {line}"


def test_a_call_keeps_the_name_of_its_tool() -> None:
    view = EventView(created=1000.0)
    view.line(event("call.queued", call="1.0", tool="add"))

    assert view.line(event("call.started", call="1.0", attempt=1)).endswith("call 1.0 add started")


def test_colours_are_for_terminals_alone() -> None:
    shown = event("run.finished", ok=True, stop_reason="COMPLETED")

    assert "\x1b" not in EventView(created=1000.0).line(shown)
    assert "\x1b[32m" in EventView(created=1000.0, style=Style(colour=True)).line(shown)


def test_a_result_has_its_answer_evidence_usage_and_stop_reason() -> None:
    text = describe_result(
        FinalResult(
            run_id="0199-run",
            ok=True,
            stop_reason=StopReason.COMPLETED,
            answer="two\nlines",
            evidence=(Evidence(source="README.md", text="# Title", call_id="0.1"),),
            usage=Usage(requests=2, prompt_tokens=9, completion_tokens=3, total_tokens=12),
            steps=2,
        )
    )

    assert "two\nlines" in text
    assert "  [0.1] README.md: # Title" in text
    assert "2 requests, 9 + 3 = 12 tokens" in text
    assert "steps:       2\nstop reason: COMPLETED" in text


def test_a_result_that_is_no_text_is_shown_as_json_and_an_error_with_its_limit() -> None:
    text = describe_result(
        FinalResult(
            run_id="0199-run",
            ok=False,
            stop_reason=StopReason.MAX_STEPS,
            answer={"größe": 9007199254740993},
            error=RunError(type="MAX_STEPS", message="stopped by max_steps=8"),
            limit="max_steps",
            usage=Usage(known=False),
        )
    )

    assert '"größe": 9007199254740993' in text
    assert "error:       MAX_STEPS: stopped by max_steps=8" in text
    assert "stop reason: MAX_STEPS (max_steps)" in text
    assert "didn't report" in text


def test_runs_are_a_table_and_a_run_its_fields() -> None:
    header, row = describe_runs([INFO]).splitlines()

    assert header.split()[0] == "RUN"
    assert row.split()[:4] == ["0199-run", "helper", "finished", "COMPLETED"]
    assert "after 2.50 s" in describe_run(INFO, None)


def test_control_characters_are_spelled_out() -> None:
    assert printable("a\x1b[2Jb\tc\nd\x07") == "a\\x1b[2Jb\tc\nd\\x07"
    assert shorten("a\r\nb\x1b]0;title\x07") == "a b\\x1b]0;title\\x07"
    assert shorten("x" * 200, 10) == "xxxxxxxxxx... (200 chars)"


# --- traces ------------------------------------------------------------------------------------

HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "What is 1+2?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "3"},
    {"role": "assistant", "content": "three"},
]


def agent(version: str) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    return {
        "fingerprint": version,
        "system": [{"role": "system", "content": f"Help, {version}."}],
        "tools": [tool],
    }


def exchange(history: int, **more: Any) -> dict[str, Any]:
    request = {
        "model": "m",
        "history": history,
        "corrections": more.pop("corrections", []),
        "tool_choice": "auto",
        "parallel_tool_calls": True,
    }
    done = {"request": request, "response": "{}", "usage": USAGE, "duration_ms": 5}
    return done | more


def model_entry(step: int, *exchanges: dict[str, Any], **more: Any) -> dict[str, Any]:
    empty = {"kind": "model", "step": step, "epoch": 1, "at": 1_000_500, "decisions": []}
    return empty | {"exchanges": list(exchanges)} | more


def decision(index: int, error: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"call_id": f"0.{index}", "name": "add", "arguments": "{}", "error": error}


def result(index: int) -> dict[str, Any]:
    return {
        "call_id": f"0.{index}",
        "name": "add",
        "content": "3",
        "error": None,
        "attempt": 1,
        "duration_ms": 4,
        "truncated": False,
    }


TRACE = [
    model_entry(0, exchange(1), agent=agent("v1"), decisions=[decision(0), decision(1)]),
    {"kind": "retried_result", "step": 0, "result": result(0)},
    {"kind": "result", "step": 0, "result": result(1)},
    {"kind": "result", "step": 0, "result": result(0)},
    model_entry(1, exchange(3, corrections=[{"role": "user", "content": "again"}]), exchange(3)),
]


def sent(step: dict[str, Any], attempt: int = 0, number: int = 0) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = step["attempts"][attempt]["exchanges"][number]["request"][
        "messages"
    ]
    return messages


def test_each_request_is_rebuilt_as_it_was_sent() -> None:
    first, second = build_trace(TRACE, HISTORY)
    system = agent("v1")["system"]

    assert sent(first) == [*system, *HISTORY[:1]]
    assert sent(second) == [*system, *HISTORY[:3], {"role": "user", "content": "again"}]
    assert sent(second, number=1) == [*system, *HISTORY[:3]]


def test_results_stand_in_call_order_and_retried_ones_apart() -> None:
    first, _ = build_trace(TRACE, HISTORY)

    assert [each["call_id"] for each in first["results"]] == ["0.0", "0.1"]
    assert [each["call_id"] for each in first["retried_results"]] == ["0.0"]


def test_an_attempt_of_another_version_that_came_to_nothing_leaves_the_next_one_its_own() -> None:
    trace = [
        model_entry(0, exchange(1), agent=agent("v1"), decisions=[decision(0)]),
        model_entry(1, exchange(3, error={"type": "RATE_LIMITED"}), agent=agent("v2")),
        model_entry(1, exchange(3)),
    ]

    _, second = build_trace(trace, HISTORY)

    assert [attempt["fingerprint"] for attempt in second["attempts"]] == ["v2", "v1"]
    assert sent(second, attempt=1)[0]["content"] == "Help, v1."


def test_an_exchange_that_was_interrupted_is_shown_as_unfinished() -> None:
    begun = {"request": exchange(1)["request"]}
    steps = build_trace([model_entry(0, begun, agent=agent("v1"))], HISTORY)

    assert steps[0]["attempts"][0]["exchanges"][0]["response"] is None
    assert "response unfinished" in describe_trace(INFO, steps, None)


def test_an_attempt_that_knew_no_agent_has_nothing_to_rebuild() -> None:
    steps = build_trace([model_entry(0)], HISTORY)

    assert steps[0]["attempts"][0]["exchanges"] == []


def test_a_trace_as_text_leaves_out_what_repeats_and_speaks_in_the_names_of_the_code() -> None:
    text = describe_trace(INFO, build_trace(TRACE, HISTORY), None)

    assert "ToolDecision 0.0 add {}" in text
    assert "ToolResult 0.1 add ok attempt=1 4 ms: 3" in text
    assert "retried ToolResult 0.0" in text
    assert "request model=m messages=2" in text
    assert "[0..1] as before" in text
    assert text.count("What is 1+2?") == 1


def test_a_refused_decision_and_a_long_response_are_cut_to_what_matters() -> None:
    error = {"type": "UNKNOWN_TOOL", "message": "no", "retryable": True, "fields": None}
    raw = json.dumps({"text": "x" * 5000})
    trace = [
        model_entry(
            0, exchange(1, response=raw), agent=agent("v1"), decisions=[decision(0, error)]
        ),
    ]

    text = describe_trace(INFO, build_trace(trace, HISTORY), None)

    assert "refused: UNKNOWN_TOOL" in text
    assert f"... ({len(raw)} chars)" in text
    assert max(map(len, text.splitlines())) < 250
