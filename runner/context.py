"""What a model sees: a view computed from the stored history, which itself never changes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from runner.agents import Agent
from runner.models import Final, ModelRequest, ProposedCall, ToolCalls
from runner.view import View, apply_view, read_view, size_of, size_of_text, summary_messages

Message = dict[str, Any]

WHOLE = View()
"""The view of a run that all fits."""


def goal_message(goal: str) -> Message:
    return {"role": "user", "content": goal}


def answer_message(text: str) -> Message:
    return {"role": "assistant", "content": text}


def assistant_message(reply: ToolCalls) -> Message:
    """The turn that opens a block; its tool messages follow in the order of these calls.

    Reasoning is kept for the servers that want it back; the writer leaves it out for all others.
    """
    thought = {"reasoning_content": reply.reasoning} if reply.reasoning else {}
    return {
        "role": "assistant",
        "content": reply.text,
        "tool_calls": [_call_entry(call) for call in reply.calls],
        **thought,
    }


def tool_message(provider_id: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": provider_id, "content": content}


def correction(final: Final, problem: str) -> list[Message]:
    """Sends an answer back: what the model said and what is wrong with it. Never stored."""
    return [answer_message(final.text), notice(problem)]


def notice(text: str) -> Message:
    """What the runtime tells the model. Never stored: the trace says that it was sent."""
    return {"role": "user", "content": text}


def build_request(
    agent: Agent,
    *,
    model: str,
    history: Sequence[Message],
    corrections: Sequence[Message],
    step: int,
    timeout: float,
    view: View = WHOLE,
) -> ModelRequest:
    """The request of one model call: instructions first, then what the view shows of the history.

    Corrections are of this step and stay as they are.
    """
    return ModelRequest(
        model=model,
        messages=(*_system_message(agent), *apply_view(history, view), *corrections),
        tools=tuple(agent.toolbox.definitions()),
        tool_choice=_tool_choice(agent, step),
        parallel_tool_calls=agent.parallel_tool_calls,
        timeout=timeout,
    )


def build_summary(
    history: Sequence[Message], view: View, *, start: int, most: int, model: str, timeout: float
) -> ModelRequest:
    """The request for a summary of what `view` leaves out, from the position `start` on.

    The view's note is what was known before that; of the transcript `most` characters are sent.
    """
    messages = tuple(summary_messages(history, view, start=start, most=most))
    return ModelRequest(model=model, messages=messages, timeout=timeout)


def size_of_request(request: ModelRequest) -> int:
    """The bytes of text that a server is sent, tools included."""
    tools = size_of_text(json.dumps(request.tools, ensure_ascii=False)) if request.tools else 0
    return size_of(request.messages) + tools


def describe_agent(agent: Agent) -> dict[str, Any]:
    """What a request is made of beside the history; in a trace once for each version."""
    return {
        "fingerprint": agent.fingerprint,
        "system": list(_system_message(agent)),
        "tools": list(agent.toolbox.definitions()),
    }


def describe_request(
    request: ModelRequest, *, history: int, corrections: int, view: View = WHOLE
) -> dict[str, Any]:
    """The view that was sent, in terms of the stored history, which a trace doesn't repeat."""
    return {
        "model": request.model,
        "history": history,
        "corrections": list(request.messages[len(request.messages) - corrections :]),
        "tool_choice": request.tool_choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        **({} if view.is_whole else {"view": view.describe()}),
    }


def describe_summary(
    request: ModelRequest, *, history: int, view: View, start: int, most: int
) -> dict[str, Any]:
    """The same for a request that `build_summary` made from `start` and `most`."""
    described = describe_request(request, history=history, corrections=0, view=view)
    return described | {"summary": {"start": start, "most": most}}


def rebuild_request(
    described: Mapping[str, Any], agent: Mapping[str, Any], history: Sequence[Message]
) -> dict[str, Any]:
    """The inverse of the `describe_` functions: messages, tools and options as sent."""
    known = history[: described["history"]]
    view = read_view(described.get("view", {}))
    if "summary" in described:
        messages, tools = summary_messages(known, view, **described["summary"]), []
    else:
        shown = apply_view(known, view)
        messages = [*agent["system"], *shown, *described["corrections"]]
        tools = agent["tools"]
    return {
        "model": described["model"],
        "messages": messages,
        "tools": tools,
        "tool_choice": described["tool_choice"],
        "parallel_tool_calls": described["parallel_tool_calls"],
    }


def _system_message(agent: Agent) -> list[Message]:
    parts = [agent.instructions] if agent.instructions else []
    if agent.output_schema is not None:
        schema = json.dumps(agent.output_schema, ensure_ascii=False)
        parts.append(f"Give your final answer as JSON alone, matching this schema:\n{schema}")
    return [{"role": "system", "content": "\n\n".join(parts)}] if parts else []


def _tool_choice(agent: Agent, step: int) -> str | dict[str, Any]:
    # A forced choice holds for the first step alone: forced for ever, no run could end.
    forced = agent.tool_choice not in ("auto", "none")
    return "auto" if forced and step > 0 else agent.tool_choice


def _call_entry(call: ProposedCall) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": call.provider_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
    if call.extra:
        entry["extra_content"] = call.extra  # the writer sends it to the servers that want it back
    return entry
