"""What becomes of the calls that a model proposes, before any of them runs.

The order of checks for a call: name, arguments, permission, limits, approval; then it may run. A
call that is refused gets its error result here and never reaches a handler; its siblings run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from runner import keys
from runner.agents import Agent
from runner.clarify import ask_user
from runner.models import (
    Limits,
    Principal,
    ProposedCall,
    ToolDecision,
    ToolErrorInfo,
    ToolErrorType,
)
from runner.store import OpenCall
from runner.tools import error_result

INVALID = (ToolErrorType.UNKNOWN_TOOL, ToolErrorType.INVALID_ARGUMENT)


def decide_calls(
    agent: Agent,
    calls: tuple[ProposedCall, ...],
    *,
    step: int,
    limits: Limits,
    used: int,
    used_by_tool: Mapping[str, int] = MappingProxyType({}),
    principal: Principal | None = None,
) -> list[OpenCall]:
    """One `OpenCall` for each proposed call, in order.

    `used` counts the calls that the run has made so far, `used_by_tool` those of each tool.
    """
    by_tool = Counter(used_by_tool)
    if len(calls) > limits.max_calls_per_turn:
        flood = _error(
            ToolErrorType.CALL_LIMIT,
            f"{len(calls)} calls in one turn; at most {limits.max_calls_per_turn} are allowed, "
            "so none was run",
            retryable=True,
        )
        return [
            _open_call(agent, step, index, call, flood, principal)
            for index, call in enumerate(calls)
        ]
    opened: list[OpenCall] = []
    effects: set[tuple[str, str]] = set()
    for index, call in enumerate(calls):
        error = call.error or _refusal(agent, call, principal)
        effect = None if error else _effect(agent, call)
        if effect in effects:
            error = _error(
                ToolErrorType.DUPLICATE_CALL,
                "the same call stands earlier in this turn and was run once; see its result",
            )
        elif error is None:
            error = _exceeded(agent, call.name, used, by_tool[call.name], limits)
        if error is None and agent.toolbox.get(call.name) is not ask_user:
            used += 1
            by_tool[call.name] += 1
            if effect is not None:
                effects.add(effect)
        opened.append(_open_call(agent, step, index, call, error, principal))
    if not gives_answer(agent, opened):
        return opened
    # An answer doesn't wait for what the user might say.
    moot = _error(ToolErrorType.CANCELLED, "the run ends with your answer, so nobody is asked")
    return [
        each
        if each.question is None
        else _open_call(agent, step, index, calls[index], moot, principal)
        for index, each in enumerate(opened)
    ]


def gives_answer(agent: Agent, calls: list[OpenCall]) -> bool:
    """Whether one of these calls, which may run, ends the run with its result."""
    names = [call.decision.name for call in calls if call.result is None]
    return any((tool := agent.toolbox.get(name)) and tool.final for name in names)


def count_invalid(calls: list[OpenCall]) -> int:
    errors = [call.decision.error for call in calls if call.decision.error]
    return sum(error.type in INVALID for error in errors)


def _exceeded(
    agent: Agent, name: str, used: int, used_here: int, limits: Limits
) -> ToolErrorInfo | None:
    """Why one more call of this tool is too many; a question or an answer never is."""
    tool = agent.toolbox.get(name)
    if tool is None or tool is ask_user or tool.final:
        return None
    if tool.max_calls is not None and used_here >= tool.max_calls:
        return _error(
            ToolErrorType.CALL_LIMIT,
            f"{name} may be called {tool.max_calls} times in a run and has been; go on without it",
        )
    if used >= limits.max_tool_calls:
        return _error(
            ToolErrorType.CALL_LIMIT,
            f"this run may make {limits.max_tool_calls} tool calls and has made them; "
            "answer with what you know",
        )
    return None


def _refusal(agent: Agent, call: ProposedCall, principal: Principal | None) -> ToolErrorInfo | None:
    tool = agent.toolbox.get(call.name)
    if tool is None:
        known = ", ".join(agent.toolbox.names) or "none"
        return _error(
            ToolErrorType.UNKNOWN_TOOL,
            f"there is no tool of that name; available tools: {known}",
            retryable=True,
        )
    parsed = tool.parse(call.arguments)
    if isinstance(parsed, ToolErrorInfo):
        return parsed
    if missing := missing_scopes(tool.requires, principal):
        return _error(
            ToolErrorType.PERMISSION_DENIED,
            f"{call.name} needs the permission {', '.join(missing)}, which the user of this run "
            "doesn't have; go on without it",
        )
    return None


def missing_scopes(required: Iterable[str], principal: Principal | None) -> list[str]:
    """The scopes that a principal lacks, sorted; nobody has none."""
    return sorted(set(required) - (principal.scopes if principal else set()))


def _effect(agent: Agent, call: ProposedCall) -> tuple[str, str] | None:
    """What a call with a side effect does. The same twice in one turn is a stutter."""
    tool = agent.toolbox.get(call.name)
    if tool is None or tool.idempotent:
        return None
    return call.name, json.dumps(json.loads(call.arguments), sort_keys=True)


def _open_call(
    agent: Agent,
    step: int,
    index: int,
    call: ProposedCall,
    error: ToolErrorInfo | None,
    principal: Principal | None,
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
        question=json.loads(call.arguments)["question"]
        if tool is ask_user and error is None
        else None,
        needs_approval=tool is not None
        and error is None
        and tool.needs_approval(call.arguments, principal),
        approval_timeout=tool.approval_timeout if tool is not None else None,
        limits={} if tool is None else tool.limits,
    )


def _error(type: ToolErrorType, message: str, *, retryable: bool = False) -> ToolErrorInfo:
    return ToolErrorInfo(type=type, message=message, retryable=retryable)
