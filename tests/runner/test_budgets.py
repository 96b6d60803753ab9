"""What a run spends is told at 80 %, once, and it ends where a budget is used up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from runner import Agent, AgentError, Limits, ModelError, Price, Retry, StopReason, tool
from runner.loop import Finish, Wait
from runner.models import RunErrorType, ToolCalls, Usage
from runner.store import Outcome, RunStore
from runner.testing import USAGE, ScriptedModel, calls
from support.loops import RUN, Loops, check_requests, drive, open_loops

PRICES = {"ScriptedModel": Price(prompt=100_000, completion=200_000)}
"""A turn of these tests has 10 and 5 tokens, so it costs 2."""

TURN_COST = 2.0


@tool(idempotent=True)
def look(at: int) -> str:
    """Look somewhere."""
    return f"nothing at {at}"


@tool(idempotent=True, max_calls=2)
def ask(at: int) -> str:
    """Ask somebody."""
    return f"nobody at {at}"


@pytest.fixture
def loops(store: RunStore, no_leaked_keys: None) -> Iterator[Loops]:
    yield from open_loops(store)


def agent_of(model: ScriptedModel, **limits: Any) -> Agent:
    return Agent(name="a", model=model, tools=[look, ask], limits=Limits(**limits), prices=PRICES)


def looks(count: int = 1, start: int = 0) -> ToolCalls:
    return calls(*[("look", {"at": start + n}) for n in range(count)])


def turns(count: int) -> list[ToolCalls]:
    return [looks(start=n) for n in range(count)]


def with_usage(reply: ToolCalls, **usage: Any) -> ToolCalls:
    return replace(reply, usage=Usage(requests=1, **usage))


def warnings(loops: Loops) -> list[dict[str, Any]]:
    return [dict(each.data) for each in loops.events("budget.warning")]


# --- warnings ----------------------------------------------------------------------------------


def test_a_token_budget_is_told_once_at_four_fifths(loops: Loops) -> None:
    loop = loops.start(agent_of(ScriptedModel([*turns(5), "done"]), max_tokens=75))
    assert drive(loop) == Finish(RUN, StopReason.BUDGET_EXHAUSTED)
    [event] = loops.events("budget.warning")
    assert event.step == 3
    assert event.data == {"max_tokens": {"used": 60, "limit": 75}}
    assert loops.result.limit == "max_tokens"


def test_below_four_fifths_nothing_is_told(loops: Loops) -> None:
    drive(loops.start(agent_of(ScriptedModel([*turns(3), "done"]), max_tokens=76)))
    assert warnings(loops) == []


def test_a_money_budget_is_told_once_and_then_ends_the_run(loops: Loops) -> None:
    model = ScriptedModel(turns(9))
    loop = loops.start(agent_of(model, max_cost=5 * TURN_COST))
    assert drive(loop) == Finish(RUN, StopReason.BUDGET_EXHAUSTED)
    assert warnings(loops) == [{"max_cost": {"used": 8.0, "limit": 10.0}}]
    ended = loops.result
    assert (ended.limit, ended.usage.cost, len(model.requests)) == ("max_cost", 10.0, 5)
    assert ended.error is not None
    assert "max_cost=10" in ended.error.message
    check_requests(loops.store, model.requests)


def test_tool_calls_are_told_once_whatever_the_turns_hold(loops: Loops) -> None:
    model = ScriptedModel([looks(3), looks(1, 3), looks(1, 4), "done"])
    drive(loops.start(agent_of(model, max_tool_calls=5)))
    assert warnings(loops) == [{"max_tool_calls": {"used": 4, "limit": 5}}]


def test_calls_that_are_refused_count_as_invalid_and_not_as_calls(loops: Loops) -> None:
    wrong = calls(("nope", {}), ("look", {}))
    model = ScriptedModel([wrong, calls(("nope", {}), ("look", {"at": "x"})), "done"])
    drive(loops.start(agent_of(model, max_tool_calls=4)))
    assert warnings(loops) == [{"max_invalid_calls": {"used": 4, "limit": 5}}]


def test_the_calls_of_one_tool_are_told_by_its_name(loops: Loops) -> None:
    made = [calls(("ask", {"at": n})) for n in range(3)]
    loop = loops.start(agent_of(ScriptedModel([*made, "done"])))
    assert drive(loop) == Finish(RUN, StopReason.COMPLETED)
    assert warnings(loops) == [{"ask.max_calls": {"used": 2, "limit": 2}}]
    assert ["CALL_LIMIT" in each for each in loops.contents()] == [False, False, True]


def test_budgets_that_run_out_together_are_told_together(loops: Loops) -> None:
    model = ScriptedModel([looks(4), "done"])
    drive(loops.start(agent_of(model, max_tokens=18, max_tool_calls=5)))
    assert warnings(loops) == [
        {"max_tokens": {"used": 15, "limit": 18}, "max_tool_calls": {"used": 4, "limit": 5}}
    ]


def test_a_failed_attempt_that_cost_something_is_told_as_well(loops: Loops) -> None:
    cut = ModelError(
        "cut", type=RunErrorType.MODEL_HTTP_ERROR, retryable=True, usage=USAGE, status=500
    )
    agent = replace(
        agent_of(ScriptedModel([cut]), max_tokens=16), model_retry=Retry(initial_delay=0)
    )
    assert drive(loops.start(agent)) == Wait(RUN)
    assert warnings(loops) == [{"max_tokens": {"used": 15, "limit": 16}}]


# --- what is not known -------------------------------------------------------------------------


def test_unknown_usage_is_told_as_unknown_once_and_not_as_zero(loops: Loops) -> None:
    unknown = [with_usage(each, known=False) for each in turns(2)]
    model = ScriptedModel([*unknown, "done"])
    drive(loops.start(agent_of(model, max_tokens=15, max_cost=100)))
    nothing = {"max_tokens": {"used": None, "limit": 15}, "max_cost": {"used": None, "limit": 100}}
    assert warnings(loops) == [nothing]
    assert loops.result.usage.known is False


def test_without_a_budget_unknown_usage_is_no_warning(loops: Loops) -> None:
    drive(loops.start(agent_of(ScriptedModel([with_usage(looks(), known=False), "done"]))))
    assert warnings(loops) == []


def test_a_model_without_a_price_is_told_as_unknown_cost(loops: Loops) -> None:
    agent = replace(
        agent_of(ScriptedModel([*turns(2), "done"]), max_cost=1),
        prices={"another": Price(prompt=1, completion=1)},
    )
    drive(loops.start(agent))
    assert warnings(loops) == [{"max_cost": {"used": None, "limit": 1.0}}]
    assert loops.result.usage.cost is None


def test_a_model_that_costs_nothing_is_not_told_as_unknown(loops: Loops) -> None:
    agent = replace(
        agent_of(ScriptedModel([*turns(2), "done"]), max_cost=1),
        prices={"ScriptedModel": Price(prompt=0, completion=0)},
    )
    drive(loops.start(agent))
    assert warnings(loops) == []
    assert loops.result.usage.cost == 0.0


# --- money -------------------------------------------------------------------------------------


def test_a_price_is_for_a_million_tokens() -> None:
    usage = Usage(requests=1, prompt_tokens=2_000_000, completion_tokens=500_000)
    assert Price(prompt=0.15, completion=0.6).of(usage) == pytest.approx(0.6)
    assert usage.priced(Price(prompt=0.15, completion=0.6)).cost == pytest.approx(0.6)
    assert usage.priced(None).cost is None
    assert Usage(requests=1, known=False).priced(PRICES["ScriptedModel"]).cost is None


def test_costs_add_up_without_an_error_of_rounding(loops: Loops) -> None:
    # 10 * 0.01 + 5 * 0.02 millionths, ten times; as floats 0.2 * 10 isn't 2.
    agent = replace(
        agent_of(ScriptedModel([*turns(9), "done"])),
        prices={"ScriptedModel": Price(prompt=0.01, completion=0.02)},
    )
    drive(loops.start(agent))
    assert loops.result.usage.cost == 2e-06


def test_answers_that_went_back_cost_too(loops: Loops) -> None:
    agent = replace(agent_of(ScriptedModel(["many", "[1]"])), output_type=list[int])
    drive(loops.start(agent))
    assert loops.result.usage.cost == 2 * TURN_COST
    assert [each["usage"]["cost"] for each in loops.exchanges()] == [TURN_COST] * 2


def test_without_prices_there_is_no_cost(loops: Loops) -> None:
    drive(loops.start(replace(agent_of(ScriptedModel(["done"])), prices={})))
    assert loops.result.usage == USAGE
    assert loops.result.usage.cost is None


def test_a_resumed_run_may_spend_as_much_again(loops: Loops) -> None:
    model = ScriptedModel(turns(9))
    loop = loops.start(agent_of(model, max_cost=2 * TURN_COST))
    assert drive(loop) == Finish(RUN, StopReason.BUDGET_EXHAUSTED)
    assert loops.store.resume_run(loops.record, Limits(max_cost=TURN_COST)) is Outcome.OK
    limits = loops.record.limits
    assert limits is not None
    assert limits.max_cost == 3 * TURN_COST
    drive(loop, loop.advance(RUN, loops.record.step))
    assert (loops.result.limit, loops.result.usage.cost) == ("max_cost", 3 * TURN_COST)
    assert len(model.requests) == 3
    check_requests(loops.store, model.requests)


def test_an_answer_counts_even_if_it_costs_more_than_the_budget(loops: Loops) -> None:
    loop = loops.start(agent_of(ScriptedModel(["done"]), max_cost=1))
    assert drive(loop) == Finish(RUN, StopReason.COMPLETED)
    assert loops.result.usage.cost == TURN_COST


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model": "m"}, "m"),
        ({}, "its model"),
        ({"model": "m", "prices": {"other": Price(prompt=1, completion=1)}}, "m"),
        (
            {
                "model": "m",
                "fallback_models": ["spare"],
                "prices": {"m": Price(prompt=1, completion=1)},
            },
            "spare",
        ),
    ],
)
def test_a_money_budget_without_prices_is_refused(options: Any, named: str) -> None:
    with pytest.raises(AgentError, match=f"max_cost needs prices for {named}"):
        Agent(name="a", limits=Limits(max_cost=1), **options)


def test_a_money_budget_with_all_prices_is_taken() -> None:
    price = Price(prompt=1, completion=1)
    limits = Limits(max_cost=1)
    Agent(
        name="a", model="m", fallback_models=["n"], prices={"m": price, "n": price}, limits=limits
    )
