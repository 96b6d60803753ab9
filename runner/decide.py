"""What becomes of the calls that a model proposes, before any of them runs.

The order of checks for a call: name, arguments, limits; then it may run. A call that is refused
gets its error result here and never reaches a handler; its siblings run.
"""

from __future__ import annotations

import json

from runner import keys
from runner.agents import Agent
from runner.models import Limits, ProposedCall, ToolDecision, ToolErrorInfo, ToolErrorType
from runner.store import OpenCall
from runner.tools import error_result

INVALID = (ToolErrorType.UNKNOWN_TOOL, ToolErrorType.INVALID_ARGUMENT)


def decide_calls(
    agent: Agent, calls: tuple[ProposedCall, ...], *, step: int, limits: Limits, used: int
) -> list[OpenCall]:
    """One `OpenCall` for each proposed call, in order. `used`: calls made by the run so far."""
    if len(calls) > limits.max_calls_per_turn:
        flood = _error(
            ToolErrorType.CALL_LIMIT,
            f"{len(calls)} calls in one turn; at most {limits.max_calls_per_turn} are allowed, "
            "so none was run",
            retryable=True,
        )
        return [_open_call(agent, step, index, call, flood) for index, call in enumerate(calls)]
    opened: list[OpenCall] = []
    effects: set[tuple[str, str]] = set()
    for index, call in enumerate(calls):
        error = call.error or _refusal(agent, call)
        effect = None if error else _effect(agent, call)
        if effect in effects:
            error = _error(
                ToolErrorType.DUPLICATE_CALL,
                "the same call stands earlier in this turn and was run once; see its result",
            )
        elif error is None and used >= limits.max_tool_calls:
            error = _error(
                ToolErrorType.CALL_LIMIT,
                f"this run may make {limits.max_tool_calls} tool calls and has made them; "
                "answer with what you know",
            )
        if error is None:
            used += 1
            if effect is not None:
                effects.add(effect)
        opened.append(_open_call(agent, step, index, call, error))
    return opened


def count_invalid(calls: list[OpenCall]) -> int:
    errors = [call.decision.error for call in calls if call.decision.error]
    return sum(error.type in INVALID for error in errors)


def _refusal(agent: Agent, call: ProposedCall) -> ToolErrorInfo | None:
    tool = agent.toolbox.get(call.name)
    if tool is None:
        known = ", ".join(agent.toolbox.names) or "none"
        return _error(
            ToolErrorType.UNKNOWN_TOOL,
            f"there is no tool of that name; available tools: {known}",
            retryable=True,
        )
    parsed = tool.parse(call.arguments)
    return parsed if isinstance(parsed, ToolErrorInfo) else None


def _effect(agent: Agent, call: ProposedCall) -> tuple[str, str] | None:
    """What a call with a side effect does. The same twice in one turn is a stutter."""
    tool = agent.toolbox.get(call.name)
    if tool is None or tool.idempotent:
        return None
    return call.name, json.dumps(json.loads(call.arguments), sort_keys=True)


def _open_call(
    agent: Agent, step: int, index: int, call: ProposedCall, error: ToolErrorInfo | None
) -> OpenCall:
    tool = agent.toolbox.get(call.name)
    call_id = keys.call_id(step, index)
    return OpenCall(
        provider_id=call.provider_id,
        decision=ToolDecision(
            call_id=call_id, name=call.name, arguments=call.arguments, error=error
        ),
        starts=tool.attempts if tool is not None and tool.idempotent else 1,
        result=None if error is None else error_result(call_id, call.name, error),
    )


def _error(type: ToolErrorType, message: str, *, retryable: bool = False) -> ToolErrorInfo:
    return ToolErrorInfo(type=type, message=message, retryable=retryable)
