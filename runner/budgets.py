"""What a run may spend, what it has spent, and when somebody should be told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runner.agents import Agent
from runner.models import Limits, Usage
from runner.record import RunRecord

WARN_AT = 0.8
"""The share of a budget from which followers are told that it is running out."""


def warn_of_budgets(
    agent: Agent, record: RunRecord, limits: Limits, usage: Usage, opened: list[str], invalid: int
) -> dict[str, Any]:
    """The budgets that this step carries past `WARN_AT`, with what is used and the limit of each.

    `opened` are the names of the tools that are called now. A budget that can't be watched, because
    the server reports no usage or the model has no price, is told as unknown: that is not zero.
    """
    found: dict[str, Any] = {}
    for name, before, now, limit in _spending(agent, record, limits, usage, opened, invalid):
        if before < WARN_AT * limit <= before + now:
            found[name] = {"used": before + now, "limit": limit}
    if limits.max_tokens and not usage.known and record.usage.known:
        found["max_tokens"] = {"used": None, "limit": limits.max_tokens}
    if limits.max_cost and _costs_unknown(usage) and not _costs_unknown(record.usage):
        found["max_cost"] = {"used": None, "limit": limits.max_cost}
    return found


def _costs_unknown(usage: Usage) -> bool:
    return not usage.known or (usage.requests > 0 and usage.cost is None)


def _spending(
    agent: Agent, record: RunRecord, limits: Limits, usage: Usage, opened: list[str], invalid: int
) -> Iterator[tuple[str, float, float, float]]:
    """For each budget: its name, what was spent before this step and in it, and the limit."""
    if limits.max_tokens:
        yield "max_tokens", record.usage.total_tokens, usage.total_tokens, limits.max_tokens
    if limits.max_cost:
        yield "max_cost", record.usage.cost or 0.0, usage.cost or 0.0, limits.max_cost
    if limits.max_tool_calls:
        yield "max_tool_calls", record.tool_calls, len(opened), limits.max_tool_calls
    yield "max_invalid_calls", record.invalid_calls, invalid, limits.max_invalid_calls
    for name in sorted(set(opened)):
        tool = agent.toolbox.get(name)
        if tool is not None and tool.max_calls:
            yield f"{name}.max_calls", record.used.get(name, 0), opened.count(name), tool.max_calls
