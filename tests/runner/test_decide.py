"""Which of the proposed calls run, and which are refused before a handler sees them."""

from __future__ import annotations

from typing import Any

import pytest

from runner import Agent, Limits, ProposedCall, tool
from runner.decide import count_invalid, decide_calls
from runner.models import ToolErrorInfo
from runner.store import OpenCall


@tool(idempotent=True, attempts=4)
def look(place: str) -> str:
    """Look somewhere."""
    raise AssertionError("deciding runs nothing")


@tool
def pay(cents: int) -> str:
    """Pay somebody."""
    raise AssertionError("deciding runs nothing")


AGENT = Agent(name="a", tools=[look, pay])
LOOK = ("look", '{"place":"here"}')
PAY = ("pay", '{"cents":1}')


def decide(*calls: tuple[str, str], used: int = 0, **limits: Any) -> list[OpenCall]:
    proposed = tuple(ProposedCall(f"c{n}", *call) for n, call in enumerate(calls))
    return decide_calls(AGENT, proposed, step=3, limits=Limits(**limits), used=used)


def errors(calls: list[OpenCall]) -> list[str | None]:
    return [call.decision.error.type if call.decision.error else None for call in calls]


def test_a_good_call_runs_under_its_own_id_with_its_tools_starts() -> None:
    calls = decide(LOOK, PAY)
    assert [call.decision.call_id for call in calls] == ["3.0", "3.1"]
    assert [call.provider_id for call in calls] == ["c0", "c1"]
    assert [call.starts for call in calls] == [4, 1]
    assert [call.result for call in calls] == [None, None]


def test_a_refused_call_has_its_error_as_its_result_and_its_siblings_run() -> None:
    calls = decide(("nope", "{}"), LOOK, ("look", '{"place":7,"more":1}'))
    assert errors(calls) == ["UNKNOWN_TOOL", None, "INVALID_ARGUMENT"]
    for call in (calls[0], calls[2]):
        assert call.result is not None
        assert (call.result.ok, call.result.error) == (False, call.decision.error)
        assert call.result.call_id == call.decision.call_id
    unknown, _, invalid = (call.decision.error for call in calls)
    assert unknown is not None
    assert "look, pay" in unknown.message
    assert invalid is not None
    assert invalid.fields is not None
    assert count_invalid(calls) == 2


def test_an_error_from_reading_the_response_stands() -> None:
    broken = ToolErrorInfo(type="INVALID_ARGUMENT", message="not JSON", retryable=True)
    call = ProposedCall("c0", "look", "{}", error=broken)
    [opened] = decide_calls(AGENT, (call,), step=0, limits=Limits(), used=0)
    assert opened.decision.error == broken


def test_the_name_comes_before_the_arguments_and_these_before_the_limits() -> None:
    calls = decide(("nope", "[]"), ("look", "{}"), LOOK, max_tool_calls=0)
    assert errors(calls) == ["UNKNOWN_TOOL", "INVALID_ARGUMENT", "CALL_LIMIT"]


@pytest.mark.parametrize(("used", "runs"), [(0, 3), (1, 2), (2, 1), (3, 0), (9, 0)])
def test_only_as_many_calls_run_as_the_run_may_still_make(used: int, runs: int) -> None:
    calls = decide(LOOK, LOOK, LOOK, LOOK, used=used, max_tool_calls=3)
    assert errors(calls) == [None] * runs + ["CALL_LIMIT"] * (4 - runs)


def test_a_refused_call_uses_up_no_limit() -> None:
    calls = decide(("nope", "{}"), LOOK, max_tool_calls=1)
    assert errors(calls) == ["UNKNOWN_TOOL", None]


def test_more_calls_than_a_turn_may_hold_are_all_refused() -> None:
    assert errors(decide(LOOK, LOOK, max_calls_per_turn=2)) == [None, None]
    flood = decide(LOOK, PAY, ("nope", "{}"), max_calls_per_turn=2)
    assert errors(flood) == ["CALL_LIMIT"] * 3
    assert count_invalid(flood) == 0


@pytest.mark.parametrize(
    ("second", "error"),
    [
        ('{"cents":1}', "DUPLICATE_CALL"),
        (' { "cents" : 1 } ', "DUPLICATE_CALL"),
        ('{"cents":2}', None),
    ],
)
def test_the_same_side_effect_twice_in_one_turn_runs_once(second: str, error: str | None) -> None:
    assert errors(decide(PAY, ("pay", second))) == [None, error]


def test_the_same_look_twice_in_one_turn_runs_twice() -> None:
    assert errors(decide(LOOK, LOOK)) == [None, None]


def test_the_repeat_of_a_side_effect_that_never_ran_is_not_told_that_it_ran() -> None:
    assert errors(decide(PAY, PAY, max_tool_calls=0)) == ["CALL_LIMIT", "CALL_LIMIT"]
