"""The support agent's tools know their orders, and say honestly what they don't know."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from examples.orders import (
    ORDERS,
    POLICY,
    agent,
    get_order,
    get_refund_policy,
    get_weather,
)
from runner import Context, ToolError
from runner.tools import execute


def test_an_order_is_found_by_its_number_however_it_is_written() -> None:
    result = get_order(" a001 ")

    assert result.value.order_id == "A001"
    assert result.value.item == "desk lamp"
    assert result.evidence[0].source == "order A001"


@pytest.mark.parametrize("number", ORDERS)
def test_every_order_fits_its_type_and_has_a_delivery_only_once_delivered(number: str) -> None:
    order = get_order(number).value

    delivered = order.status in ("delivered", "refunded")
    assert (order.delivered_on is not None) == delivered
    assert (order.days_since_delivery is not None) == delivered


def test_the_days_since_delivery_are_those_between_the_date_and_today() -> None:
    before = datetime.now(UTC).date()
    order = get_order("A001").value
    after = datetime.now(UTC).date()

    days = timedelta(days=order.days_since_delivery)
    assert before <= order.delivered_on + days <= after


def test_the_orders_show_both_sides_of_the_policy() -> None:
    days = [
        get_order(number).value.days_since_delivery
        for number in ORDERS
        if get_order(number).value.status in POLICY.statuses
    ]

    assert min(days) <= POLICY.days < max(days)


def test_an_unknown_order_is_an_error_for_the_model() -> None:
    with pytest.raises(ToolError, match="no order with that number") as caught:
        get_order("Z999")
    assert caught.value.type == "NOT_FOUND"


def test_the_policy_says_its_days_in_words_and_as_a_number() -> None:
    result = get_refund_policy()

    assert f"within {result.value.days} days" in result.value.text
    assert result.evidence[0].text == result.value.text


@pytest.mark.parametrize("city", ["Paris", "paris", " PARIS "])
def test_the_weather_of_a_city_is_found_however_it_is_written(city: str) -> None:
    result = get_weather(city)

    assert result.value.city == "Paris"
    assert result.evidence[0].source == "weather in Paris"


def test_a_city_may_be_of_two_words() -> None:
    assert get_weather("new  york").value.city == "New York"


def test_the_weather_of_an_unknown_city_is_an_error_for_the_model() -> None:
    with pytest.raises(ToolError, match=r"^no weather for that city$") as caught:
        get_weather("Atlantis")
    assert caught.value.type == "NOT_FOUND"


def test_as_tools_of_the_agent_they_answer_in_json_with_evidence() -> None:
    assert agent.toolbox.names == ("get_order", "get_refund_policy", "get_weather")

    result = execute(get_order, Context(call_id="2.1"), '{"order_id": "A001"}').result

    assert json.loads(result.content)["status"] == "delivered"
    assert result.evidence[0].call_id == "2.1"


def test_what_the_model_reads_of_an_unknown_city_is_the_error() -> None:
    result = execute(get_weather, Context(), '{"city": "Atlantis"}').result

    assert not result.ok
    assert json.loads(result.content)["error"]["type"] == "NOT_FOUND"
