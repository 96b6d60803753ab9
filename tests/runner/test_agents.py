"""Agents are checked where they are defined, and found by their modules' names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from runner import Agent, AgentError, Limits, ToolDefinitionError, tool
from runner.agents import Agents, load_agents


@tool
def ping() -> str:
    """Say pong."""
    return "pong"


class Answer(BaseModel):
    text: str


@pytest.mark.parametrize("name", ["", "a b", "a" * 65, "a.b", "ä", "a\n"])
def test_a_name_that_cannot_be_used_is_refused(name: str) -> None:
    with pytest.raises(AgentError, match="letters, digits"):
        Agent(name=name)


def test_negative_response_retries_are_refused() -> None:
    with pytest.raises(AgentError, match="response_retries"):
        Agent(name="a", response_retries=-1)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ToolDefinitionError):
        Agent(name="a", tools=[ping, ping])


@pytest.mark.parametrize(
    "limits",
    [
        {"max_steps": 0},
        {"timeout": 0},
        {"timeout": float("inf")},
        {"max_tokens": 0},
        {"max_tool_calls": -1},
        {"max_parallel_calls": 0},
        {"max_calls_per_turn": 0},
        {"max_stepz": 1},
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(limits: dict[str, float]) -> None:
    [name] = limits
    with pytest.raises(ValidationError, match=name):
        Limits(**limits)


def test_the_fingerprint_changes_with_what_the_model_is_told() -> None:
    first = Agent(name="a", instructions="x", tools=[ping])
    assert Agent(name="b", instructions="x", tools=[ping]).fingerprint == first.fingerprint
    told = [
        Agent(name="a", instructions="y", tools=[ping]),
        Agent(name="a", instructions="x"),
        Agent(name="a", instructions="x", tools=[ping], output_type=Answer),
    ]
    assert len({first.fingerprint, *(each.fingerprint for each in told)}) == 4


def test_an_unknown_agent_is_named_with_those_that_are_known() -> None:
    agents = Agents([Agent(name="b"), Agent(name="a")])
    assert ("a" in agents, "c" in agents, len(agents), sorted(agents)) == (
        True,
        False,
        2,
        ["a", "b"],
    )
    assert agents.get("a") is agents["a"]
    with pytest.raises(AgentError, match="no agent named 'c'; known agents: a, b"):
        agents["c"]


def test_one_agent_may_be_found_twice_but_two_of_one_name_may_not() -> None:
    agent = Agent(name="a")
    assert len(Agents([agent, agent])) == 1
    with pytest.raises(AgentError, match="two agents are called 'a'"):
        Agents([agent, Agent(name="a")])


def test_looking_for_an_agent_that_is_not_there_gives_the_default() -> None:
    assert Agents().get("a") is None


# --- by module ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("shop_agents", "broken_agents"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_agents_are_collected_from_the_top_of_their_modules(folder: Path) -> None:
    (folder / "shop_agents.py").write_text(
        "from runner import Agent\none = Agent(name='one')\nsame = one\ntwo = Agent(name='two')\n"
    )
    assert list(load_agents(["shop_agents"])) == ["one", "two"]


def test_no_modules_is_an_error_that_names_the_variable() -> None:
    with pytest.raises(AgentError, match="set CELERIAC_AGENTS"):
        load_agents([])


def test_a_module_that_is_not_there_is_an_error_that_names_it() -> None:
    with pytest.raises(AgentError, match="can't import 'no_such_module'"):
        load_agents(["no_such_module"])


@pytest.mark.parametrize("line", ["1 / 0", "def f(:", "raise RuntimeError('x')"])
def test_a_module_that_fails_is_one_line_that_names_it(folder: Path, line: str) -> None:
    (folder / "broken_agents.py").write_text(line)
    with pytest.raises(AgentError, match="can't import 'broken_agents'") as caught:
        load_agents(["broken_agents"])
    assert "\n" not in str(caught.value)


def test_a_module_without_agents_is_an_error(folder: Path) -> None:
    (folder / "shop_agents.py").write_text("x = 1\n")
    with pytest.raises(AgentError, match="no Agent at the top level of shop_agents"):
        load_agents(["shop_agents"])
