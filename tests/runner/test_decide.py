"""Which of the proposed calls run, and which are refused before a handler sees them."""

from __future__ import annotations

from typing import Any

import pytest

from runner import Agent, Limits, ProposedCall, tool
from runner.decide import count_invalid, decide_calls, gives_answer
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


# --- calls of one tool, answers and questions --------------------------------------------------


@tool(idempotent=True, max_calls=2)
def ring(who: str) -> str:
    """Ring somebody up."""
    raise AssertionError("deciding runs nothing")


@tool(final=True)
def submit(answer: str) -> str:
    """Give the answer."""
    raise AssertionError("deciding runs nothing")


RING = ("ring", '{"who":"ann"}')
SUBMIT = ("submit", '{"answer":"yes"}')
QUESTION = ("ask_user", '{"question":"who?"}')
ASKING = Agent(name="a", tools=[look, ring, submit], clarify=True)


def decide_for_all(
    *calls: tuple[str, str], used: int = 0, by_tool: dict[str, int] | None = None, **limits: Any
) -> list[OpenCall]:
    proposed = tuple(ProposedCall(f"c{n}", *call) for n, call in enumerate(calls))
    return decide_calls(
        ASKING,
        proposed,
        step=3,
        limits=Limits(**limits),
        used=used,
        used_by_tool=by_tool or {},
    )


@pytest.mark.parametrize(("used", "runs"), [(0, 2), (1, 1), (2, 0), (9, 0)])
def test_a_tool_runs_only_as_often_as_a_run_may_call_it(used: int, runs: int) -> None:
    calls = decide_for_all(RING, LOOK, RING, RING, by_tool={"ring": used})
    rings = [each for at, each in enumerate(errors(calls)) if at != 1]
    assert rings == [None] * runs + ["CALL_LIMIT"] * (3 - runs)
    assert errors(calls)[1] is None
    refused = calls[-1].decision.error
    assert refused is not None
    assert "ring may be called 2 times" in refused.message


def test_a_refused_call_uses_up_no_call_of_its_tool() -> None:
    wrong = ("ring", "{}")
    assert errors(decide_for_all(wrong, wrong, RING, RING)) == [
        "INVALID_ARGUMENT",
        "INVALID_ARGUMENT",
        None,
        None,
    ]


def test_an_answer_or_a_question_is_never_one_call_too_many() -> None:
    asked = decide_for_all(LOOK, QUESTION, used=5, max_tool_calls=5)
    assert errors(asked) == ["CALL_LIMIT", None]
    answered = decide_for_all(LOOK, SUBMIT, used=5, max_tool_calls=5)
    assert errors(answered) == ["CALL_LIMIT", None]
    assert gives_answer(ASKING, answered)


def test_nobody_is_asked_in_a_turn_that_gives_the_answer() -> None:
    calls = decide_for_all(LOOK, SUBMIT, QUESTION)
    assert errors(calls) == [None, None, "CANCELLED"]
    assert gives_answer(ASKING, calls)


def test_only_a_final_call_that_may_run_gives_an_answer() -> None:
    assert not gives_answer(ASKING, decide_for_all(LOOK, QUESTION, ("nope", "{}")))
    assert not gives_answer(ASKING, decide_for_all(LOOK, ("submit", "{}")))
    assert gives_answer(ASKING, decide_for_all(("submit", "{}"), SUBMIT))


def test_only_a_question_that_is_asked_is_for_the_user() -> None:
    calls = decide_for_all(QUESTION, ("ask_user", "{}"), LOOK)
    assert [each.question for each in calls] == ["who?", None, None]
    flood = decide_for_all(QUESTION, QUESTION, max_calls_per_turn=1)
    assert [each.question for each in flood] == [None, None]


def test_questions_take_no_place_of_a_tools_call() -> None:
    assert errors(decide_for_all(QUESTION, LOOK, max_tool_calls=1)) == [None, None]


def test_a_users_own_tool_that_is_called_like_the_question_counts_as_any_other() -> None:
    @tool(idempotent=True, max_calls=1)
    def ask_user(question: str) -> str:
        """Ask by post."""
        raise AssertionError("deciding runs nothing")

    agent = Agent(name="a", tools=[ask_user])
    proposed = tuple(ProposedCall(f"c{n}", *QUESTION) for n in range(2))
    calls = decide_calls(agent, proposed, step=0, limits=Limits(), used=0)
    assert errors(calls) == [None, "CALL_LIMIT"]
    assert [each.question for each in calls] == [None, None]
