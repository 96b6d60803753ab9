"""The request of a step is a view of the stored history, and the trace can rebuild it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner import Agent, tool
from runner.context import (
    answer_message,
    assistant_message,
    build_request,
    correction,
    describe_agent,
    describe_request,
    goal_message,
    rebuild_request,
    tool_message,
)
from runner.models import Final, ModelRequest, ProposedCall, ToolCalls, Usage


@tool
def ping(host: str) -> str:
    """Ask a host."""
    return host


AGENT = Agent(name="a", instructions="Be brief.", tools=[ping], tool_choice="required")
HISTORY = [
    goal_message("go"),
    assistant_message(
        ToolCalls((ProposedCall("c1", "ping", '{"host":"h"}'),), None, Usage(), "raw")
    ),
    tool_message("c1", "h"),
]
FINAL = Final("nearly", Usage(), "raw")


def request(agent: Agent = AGENT, *, step: int = 0, **options: Any) -> ModelRequest:
    given: dict[str, Any] = {"history": HISTORY, "corrections": [], **options}
    return build_request(agent, model="m", step=step, timeout=9.0, **given)


def test_instructions_come_first_then_the_history_then_the_corrections() -> None:
    made = request(corrections=correction(FINAL, "not JSON"))
    assert made.messages == (
        {"role": "system", "content": "Be brief."},
        *HISTORY,
        {"role": "assistant", "content": "nearly"},
        {"role": "user", "content": "not JSON"},
    )
    assert (made.model, made.timeout) == ("m", 9.0)
    assert [each["function"]["name"] for each in made.tools] == ["ping"]


def test_an_agent_without_instructions_has_no_system_message() -> None:
    assert request(Agent(name="a")).messages == tuple(HISTORY)


def test_an_output_type_puts_its_schema_into_the_system_message() -> None:
    made = request(Agent(name="a", instructions="Hi.", output_type=list[int]))
    text = made.messages[0]["content"]
    assert text.startswith("Hi.\n\n")
    assert json.loads(text.splitlines()[-1]) == {"items": {"type": "integer"}, "type": "array"}


@pytest.mark.parametrize(
    ("choice", "first", "later"),
    [
        ("auto", "auto", "auto"),
        ("none", "none", "none"),
        ("required", "required", "auto"),
        ({"type": "function"}, {"type": "function"}, "auto"),
    ],
)
def test_a_forced_tool_choice_holds_for_the_first_step_alone(
    choice: Any, first: Any, later: Any
) -> None:
    agent = Agent(name="a", tools=[ping], tool_choice=choice)
    assert request(agent, step=0).tool_choice == first
    assert request(agent, step=1).tool_choice == later


def test_a_turn_lists_its_calls_in_order() -> None:
    calls = tuple(ProposedCall(f"c{n}", "ping", "{}") for n in range(3))
    message = assistant_message(ToolCalls(calls, "thinking", Usage(), "raw"))
    assert (message["role"], message["content"]) == ("assistant", "thinking")
    assert [each["id"] for each in message["tool_calls"]] == ["c0", "c1", "c2"]
    assert {each["type"] for each in message["tool_calls"]} == {"function"}
    assert answer_message("x") == {"role": "assistant", "content": "x"}


@pytest.mark.parametrize("corrections", [[], correction(FINAL, "not JSON")])
@pytest.mark.parametrize("step", [0, 1])
def test_a_described_request_is_rebuilt_exactly_also_when_the_history_has_grown(
    corrections: list[dict[str, Any]], step: int
) -> None:
    made = request(corrections=corrections, step=step)
    described = describe_request(made, history=len(HISTORY), corrections=len(corrections))
    told, agent = json.loads(json.dumps([described, describe_agent(AGENT)]))
    rebuilt = rebuild_request(told, agent, [*HISTORY, goal_message("later")])
    assert rebuilt == {
        "model": made.model,
        "messages": list(made.messages),
        "tools": list(made.tools),
        "tool_choice": made.tool_choice,
        "parallel_tool_calls": made.parallel_tool_calls,
    }
