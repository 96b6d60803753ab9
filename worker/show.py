"""Runs, events, results and traces as text for a person, and a trace as data for a script.

What a model or a tool said is shown without its control characters: it can't move the cursor.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from runner.context import rebuild_request
from runner.models import Approval, Event, FinalResult, Usage
from runner.record import RunInfo

if TYPE_CHECKING:
    from runner.replay import Replayed
    from worker.doctor import Finding

MAX_DIFFERENCES = 20

SHORT = 160
"""Characters of a text that a trace shows of it."""


@dataclass(frozen=True, slots=True)
class Style:
    """Colours for a terminal, or none."""

    colour: bool = False

    def good(self, text: str) -> str:
        return self._paint("32", text)

    def bad(self, text: str) -> str:
        return self._paint("31", text)

    def dim(self, text: str) -> str:
        return self._paint("2", text)

    def bold(self, text: str) -> str:
        return self._paint("1", text)

    def _paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour else text


PLAIN = Style()


# --- events ------------------------------------------------------------------------------------


@dataclass(slots=True)
class EventView:
    """One line for each event of a run. It remembers which tool a call is of."""

    created: float
    style: Style = PLAIN
    _tools: dict[str, str] = field(default_factory=dict)

    def line(self, event: Event) -> str:
        at = self.style.dim(f"{max(0.0, event.at - self.created):7.2f} s")
        if event.call is None:
            return f"{at}  {_describe_run_event(event, self.style)}"
        name = event.data.get("tool")
        if isinstance(name, str):
            self._tools[event.call] = name
        told = _describe_call_event(event, self.style)
        return f"{at}    call {event.call} {self.tool_of(event)} {told}"

    def tool_of(self, event: Event) -> str:
        """The tool of an event's call, as far as the events so far have told it."""
        return _one_line(self._tools.get(event.call or "", "?"))


def _describe_run_event(event: Event, style: Style) -> str:
    data = event.data
    match event.type:
        case "run.created":
            return f"run {event.run} created, agent {_one_line(data.get('agent'))}"
        case "step.started":
            return f"step {event.step} started{_attempt(data)}"
        case "model.answered":
            return f"step {event.step} model answered: {_answered(data)}"
        case "run.message":
            return f"message of {data.get('chars')} chars, for the next step"
        case "run.waiting":
            return _waits(event)
        case "run.recovered":
            return f"step {event.step} recovered: its worker is gone"
        case "run.resumed":
            return f"run resumed at step {event.step}"
        case "run.finished":
            paint = style.good if data.get("ok") else style.bad
            limit = f" ({data['limit']})" if data.get("limit") else ""
            return paint(f"run finished: {data.get('stop_reason')}{limit}")
        case "gap":
            return "gap: older events are no longer kept"
    return _describe_other(event)


def _waits(event: Event) -> str:
    if event.step is None:
        return "run waits for the one before it in its conversation"
    if event.data.get("reason") == "LIMIT":
        return f"step {event.step} waits for a place under {_one_line(event.data.get('limit'))}"
    return f"step {event.step} waits {event.data.get('delay')} s: {event.data.get('reason')}"


def _describe_call_event(event: Event, style: Style) -> str:
    data = event.data
    match event.type:
        case "call.queued":
            return "queued"
        case "call.started":
            return f"started{_attempt(data)}"
        case "approval.requested":
            return "waits for an approval"
        case "approval.decided":
            return _decided(data, style)
        case "call.progress":
            return _progress(data)
        case "run.waiting":
            return f"asks: {_one_line(data.get('question'))}  (celeriac reply {event.run} TEXT)"
        case "call.waiting":
            if data.get("reason") == "LIMIT":
                return f"waits for a place under {_one_line(data.get('limit'))}"
            return f"{_one_line(data.get('error'))}, again in {data.get('delay')} s"
        case "call.finished":
            error = _one_line(data.get("error"))
            word = style.good("ok") if data.get("ok") else style.bad(error)
            took = "" if data.get("duration_ms") is None else f", {data['duration_ms']} ms"
            size = "" if data.get("chars") is None else f", {data['chars']} chars"
            return f"{word}{took}{size}"
    return _describe_other(event)


def _decided(data: Mapping[str, Any], style: Style) -> str:
    word = style.good("approved") if data.get("approved") else style.bad("denied")
    by = f" by {_one_line(data['by'])}" if data.get("by") else ""
    return f"{word}{by}" if data.get("reason") is None else f"{word}: nobody decided in time"


def _describe_other(event: Event) -> str:
    """An event of a kind that this version doesn't know."""
    return f"{event.type} {_one_line(dump(event.data))}" if event.data else event.type


def _answered(data: Mapping[str, Any]) -> str:
    calls, refused = data.get("calls") or 0, data.get("refused") or 0
    if not calls:
        return "no calls"
    noun = "call" if calls == 1 else "calls"
    return f"{calls} {noun}, {refused} refused" if refused else f"{calls} {noun}"


def _attempt(data: Mapping[str, Any]) -> str:
    attempt = data.get("attempt") or 1
    return f", attempt {attempt}" if attempt > 1 else ""


def _progress(data: Mapping[str, Any]) -> str:
    total = "" if data.get("total") is None else f"/{data['total']:g}"
    note = f" {_one_line(data['note'])}" if data.get("note") else ""
    return f"at {data.get('done', 0):g}{total}{note}"


# --- runs and results --------------------------------------------------------------------------


def describe_runs(runs: Sequence[RunInfo]) -> str:
    """A table: id, agent, status, stop reason, step, time of submit."""
    rows = [("RUN", "AGENT", "STATUS", "STOP REASON", "STEP", "CREATED")]
    rows += [
        (run.id, run.agent, run.status, run.stop_reason or "-", str(run.step), _time(run.created))
        for run in runs
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(printable(line, one_line=True).rstrip() for line in lines)


def describe_approvals(waiting: Sequence[Approval]) -> str:
    """One block for each call that waits: its arguments in full, since somebody decides on them."""
    return "\n".join(
        f"{each.call_id}  {each.tool} {_one_line(dump(each.arguments))}\n"
        f"     digest {each.digest}"
        + (f", until {_time(each.decide_by)}" if each.decide_by is not None else "")
        for each in waiting
    )


def describe_run(info: RunInfo, result: FinalResult | None, style: Style = PLAIN) -> str:
    """A run at a glance, with its result where it has ended."""
    lines = [
        f"run:       {info.id}",
        f"agent:     {_one_line(info.agent)}",
        f"status:    {info.status}",
        f"step:      {info.step}",
        f"created:   {_time(info.created)}",
        f"deadline:  {_time(info.deadline)}",
    ]
    if info.ended is not None:
        lines.append(f"ended:     {_time(info.ended)}, after {info.ended - info.created:.2f} s")
    if info.after is not None:
        lines.append(f"after:     {info.after}")
    if info.conversation is not None:
        lines.append(f"talk:      {_one_line(info.conversation)}")
    if info.metadata:
        lines.append(f"metadata:  {_one_line(dump(info.metadata))}")
    if result is None:
        lines.append(f"usage:     {describe_usage(info.usage)}")
    else:
        lines += ["", describe_result(result, style)]
    return "\n".join(lines)


def describe_result(result: FinalResult, style: Style = PLAIN) -> str:
    """The answer with its evidence, or the error; then usage, steps and the stop reason."""
    parts: list[str] = []
    if result.answer is not None:
        text = result.answer if isinstance(result.answer, str) else dump(result.answer, indent=2)
        parts.append(f"{style.bold('answer:')}\n{printable(text)}\n")
    if result.evidence:
        parts.append(style.bold("evidence:"))
        for each in result.evidence:
            call = f"[{each.call_id}] " if each.call_id else ""
            text = f": {shorten(each.text)}" if each.text else ""
            data = "" if each.data is None else f" {shorten(dump(each.data))}"
            parts.append(f"  {call}{_one_line(each.source)}{text}{data}")
        parts.append("")
    if result.error is not None:
        error = f"{_one_line(result.error.type)}: {_one_line(result.error.message)}"
        parts.append(f"error:       {style.bad(error)}")
    paint = style.good if result.ok else style.bad
    limit = f" ({result.limit})" if result.limit else ""
    parts += [
        f"usage:       {describe_usage(result.usage)}",
        f"steps:       {result.steps}",
        f"stop reason: {paint(result.stop_reason)}{limit}",
    ]
    return "\n".join(parts)


def describe_usage(usage: Usage) -> str:
    requests = f"{usage.requests} {'request' if usage.requests == 1 else 'requests'}"
    sure = "" if usage.known else ", and more that the server didn't report"
    return (
        f"{requests}, {usage.prompt_tokens} + {usage.completion_tokens} = {usage.total_tokens} "
        f"tokens{sure}"
    )


def describe_finding(finding: Finding, style: Style = PLAIN) -> str:
    """One line: the verdict, what was looked at, what was found and what to do about it."""
    paint = style.good if finding.verdict == "ok" else style.bad
    todo = f": {finding.todo}" if finding.todo else ""
    text = _one_line(f"{finding.text}{todo}")
    return f"{paint(f'{finding.verdict:<5}')} {_one_line(finding.about):<16} {text}"


# --- traces ------------------------------------------------------------------------------------


def build_trace(
    trace: Sequence[Mapping[str, Any]], history: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The steps of a run in order: `attempts`, `decisions`, `results` and `retried_results`.

    Each attempt has its `exchanges` with the model: the request as it was sent, rebuilt from the
    history, and the raw response or the error, with usage and time.
    """
    steps: dict[int, dict[str, Any]] = {}
    committed: Mapping[str, Any] | None = None
    for entry in trace:
        if entry["kind"] in ("forked", "resumed"):
            continue  # says where the run comes from; no step of its own
        number = entry["step"]
        empty = {"step": number, "attempts": [], "decisions": [], "results": []}
        step = steps.setdefault(number, empty | {"retried_results": []})
        match entry["kind"]:
            case "model":
                # An entry describes its agent unless that is the one of the last committed step.
                agent = entry.get("agent") or committed
                step["attempts"].append(_rebuild_attempt(entry, agent, history))
                step["decisions"] += entry["decisions"]
                step["results"] += entry.get("results", [])
                if entry["decisions"]:
                    committed = agent
            case "result":
                step["results"].append(entry["result"])
            case "retried_result":
                step["retried_results"].append(entry["result"])
    for step in steps.values():
        # Gathered in call order, in whatever order they came.
        step["results"].sort(key=lambda result: int(result["call_id"].rpartition(".")[2]))
    return [steps[number] for number in sorted(steps)]


def _rebuild_attempt(
    entry: Mapping[str, Any], agent: Mapping[str, Any] | None, history: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    exchanges = [
        {
            "request": None if agent is None else rebuild_request(each["request"], agent, history),
            "response": each.get("response"),
            "error": each.get("error"),
            "usage": each.get("usage"),
            "duration_ms": each.get("duration_ms"),
        }
        for each in entry["exchanges"]
    ]
    return {
        "epoch": entry["epoch"],
        "at": entry["at"] / 1000,
        "fingerprint": agent["fingerprint"] if agent else None,
        "exchanges": exchanges,
    }


def describe_trace(
    info: RunInfo,
    steps: Sequence[Mapping[str, Any]],
    result: FinalResult | None,
    style: Style = PLAIN,
) -> str:
    """The same for a person: what repeats is left out, and long texts are cut, with their sizes."""
    lines = [f"run {info.id} agent {_one_line(info.agent)} {info.stop_reason or info.status}"]
    known: list[dict[str, Any]] = []
    for step in steps:
        lines.append(style.bold(f"step {step['step']}"))
        for attempt in step["attempts"]:
            at = max(0.0, attempt["at"] - info.created)
            lines.append(style.dim(f"  attempt epoch={attempt['epoch']} at {at:.2f} s"))
            for exchange in attempt["exchanges"]:
                lines += _describe_exchange(exchange, known, style)
                known = exchange["request"]["messages"] if exchange["request"] else known
        lines += [f"  ToolDecision {_describe_decision(each, style)}" for each in step["decisions"]]
        for each in step["retried_results"]:
            lines.append(f"  retried ToolResult {_describe_tool_result(each, style)}")
        lines += [f"  ToolResult {_describe_tool_result(each, style)}" for each in step["results"]]
    if not steps:
        lines.append("nothing was sent to the model so far")
    if result is not None:
        lines += [style.bold("FinalResult"), describe_result(result, style)]
    return "\n".join(lines)


def _describe_exchange(
    exchange: Mapping[str, Any], known: Sequence[Mapping[str, Any]], style: Style
) -> list[str]:
    lines: list[str] = []
    request = exchange["request"]
    if request is None:
        lines.append("    request: can't be rebuilt, no description of its agent was kept")
    else:
        names = ", ".join(tool["function"]["name"] for tool in request["tools"]) or "none"
        lines.append(
            f"    request model={_one_line(request['model'])} messages={len(request['messages'])} "
            f"tool_choice={_one_line(dump(request['tool_choice']))} tools: {_one_line(names)}"
        )
        same = _same_beginning(known, request["messages"])
        if same:
            lines.append(style.dim(f"      [0..{same - 1}] as before"))
        lines += [
            f"      [{index}] {_describe_message(message)}"
            for index, message in enumerate(request["messages"][same:], same)
        ]
    took = "unfinished" if exchange["duration_ms"] is None else f"{exchange['duration_ms']} ms"
    usage = exchange["usage"]
    cost = f", {describe_usage(Usage.model_validate(usage))}" if usage else ""
    lines.append(f"    response {took}{cost}")
    if exchange["error"]:
        error = exchange["error"]
        status = f" status={error['status']}" if error.get("status") else ""
        text = f"error {_one_line(error['type'])}{status}: {_one_line(error['message'])}"
        lines.append(f"      {style.bad(text)}")
    if exchange["response"]:
        lines.append(f"      raw {shorten(exchange['response'])}")
    return lines


def _same_beginning(left: Sequence[Any], right: Sequence[Any]) -> int:
    pairs = zip(left, right, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _describe_message(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    parts = [_one_line(message["role"])]
    if message.get("tool_call_id"):
        parts.append(_one_line(message["tool_call_id"]))
    if content:
        parts.append(shorten(content if isinstance(content, str) else dump(content)))
    for call in message.get("tool_calls") or ():
        function = call["function"]
        parts.append(f"{_one_line(function['name'])}({shorten(function['arguments'])})")
    return " ".join(parts)


def _describe_decision(decision: Mapping[str, Any], style: Style) -> str:
    text = f"{decision['call_id']} {_one_line(decision['name'])} {shorten(decision['arguments'])}"
    error = decision["error"]
    return text if error is None else f"{text} {style.bad('refused: ' + _one_line(error['type']))}"


def _describe_tool_result(result: Mapping[str, Any], style: Style) -> str:
    error = result["error"]
    word = style.good("ok") if error is None else style.bad(_one_line(error["type"]))
    cut = ", truncated" if result["truncated"] else ""
    return (
        f"{result['call_id']} {_one_line(result['name'])} {word} attempt={result['attempt']} "
        f"{result['duration_ms']} ms{cut}: {shorten(result['content'])}"
    )


# --- replays -----------------------------------------------------------------------------------


def describe_replay(found: Replayed, *, show: bool = False, style: Style = PLAIN) -> str:
    """Whether a run came out the same, and where it didn't: sizes alone, unless told to show."""
    lines: list[str] = []
    if found.changed:
        lines.append("the agent has changed: its instructions, tools or output type differ")
    lines += [
        f"step {step} can't be compared in full: redact hides some of it" for step in found.hidden
    ]
    if found.blind_from is not None:
        lines.append(f"from step {found.blind_from} on nothing can be compared: it is hidden")
    lines += [
        style.bad(_one_line(each.describe(show=show)))
        for each in found.differences[:MAX_DIFFERENCES]
    ]
    if (more := len(found.differences) - MAX_DIFFERENCES) > 0:
        lines.append(f"and {more} more")
    if found.same:
        lines.append(style.good(f"same: {found.run_id}, steps {found.steps}"))
    return "\n".join(lines)


# --- text --------------------------------------------------------------------------------------


def dump(value: Any, *, indent: int | None = None, ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ascii, indent=indent)


def shorten(text: str, most: int = SHORT) -> str:
    """The beginning of a text on one line, with its whole size where that isn't all."""
    line = _one_line(text)
    return line if len(line) <= most else f"{line[:most]}... ({len(text)} chars)"


def printable(text: str, *, one_line: bool = False) -> str:
    """`text` with control characters spelled out, so that a terminal only shows it."""
    keep = "" if one_line else "\n\t"
    return "".join(
        each if each in keep or unicodedata.category(each) not in _HIDDEN else _spell(each)
        for each in text
    )


_HIDDEN = frozenset({"Cc", "Cs", "Zl", "Zp"})


def _spell(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def _one_line(value: object) -> str:
    return printable(" ".join(str(value).split()), one_line=True)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(sep=" ", timespec="seconds")
