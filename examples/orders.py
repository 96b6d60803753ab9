"""An agent for the support of a shop: orders, the refund policy, and some weather."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Literal

from pydantic import BaseModel

from runner import Agent, Evidence, Limits, Result, ToolError, tool

Status = Literal["processing", "shipped", "delivered", "refunded"]


class Order(BaseModel):
    """`days_since_delivery` is there because a model doesn't know what day it is."""

    order_id: str
    item: str
    total_cents: int
    status: Status
    delivered_on: date | None = None
    days_since_delivery: int | None = None


class RefundPolicy(BaseModel):
    """An order in one of `statuses` can be refunded up to `days` days after its delivery."""

    days: int
    statuses: list[Status]
    text: str


class Weather(BaseModel):
    city: str
    temperature_c: float
    conditions: str


# Item, price in cents, status, and how many days ago it was delivered: dates would go stale.
ORDERS: dict[str, tuple[str, int, Status, int | None]] = {
    "A001": ("desk lamp", 4_900, "delivered", 5),
    "A002": ("office chair", 18_900, "delivered", 45),
    "A003": ("notebook", 650, "shipped", None),
    "A004": ("coffee grinder", 7_900, "refunded", 12),
    "A005": ("headphones", 12_900, "processing", None),
}

POLICY = RefundPolicy(
    days=30,
    statuses=["delivered"],
    text="A delivered order can be refunded within 30 days of its delivery.",
)

WEATHER = {
    each.city.casefold(): each
    for each in (
        Weather(city="Paris", temperature_c=18.5, conditions="light rain"),
        Weather(city="Berlin", temperature_c=14.0, conditions="overcast"),
        Weather(city="Oslo", temperature_c=7.5, conditions="clear"),
        Weather(city="Tokyo", temperature_c=22.0, conditions="sunny"),
        Weather(city="New York", temperature_c=16.0, conditions="windy"),
    )
}


@tool(timeout=5, idempotent=True)
def get_order(order_id: str) -> Result[Order]:
    """Look up an order by its number.

    :param order_id: the number of the order, such as A001
    """
    number = order_id.strip().upper()
    if number not in ORDERS:
        raise ToolError("there is no order with that number", type="NOT_FOUND")
    item, cents, status, days = ORDERS[number]
    order = Order(
        order_id=number,
        item=item,
        total_cents=cents,
        status=status,
        delivered_on=None if days is None else datetime.now(UTC).date() - timedelta(days=days),
        days_since_delivery=days,
    )
    when = "" if order.delivered_on is None else f", delivered on {order.delivered_on}"
    evidence = Evidence(source=f"order {number}", text=f"{item}: {status}{when}")
    return Result(order, [evidence])


@tool(timeout=5, idempotent=True)
def get_refund_policy() -> Result[RefundPolicy]:
    """Say which orders the shop refunds, and for how many days."""
    return Result(POLICY, [Evidence(source="refund policy", text=POLICY.text)])


@tool(timeout=5, idempotent=True)
def get_weather(city: str) -> Result[Weather]:
    """Say what the weather is in a city.

    :param city: the name of the city in English, such as Paris
    """
    weather = WEATHER.get(" ".join(city.split()).casefold())
    if weather is None:
        raise ToolError("no weather for that city", type="NOT_FOUND")
    text = f"{weather.temperature_c} °C, {weather.conditions}"
    return Result(weather, [Evidence(source=f"weather in {weather.city}", text=text)])


agent = Agent(
    name="support",
    instructions=(
        "You help the customers of a shop. Look up each order and the refund policy before you"
        " say whether an order can be refunded, and say so where an order or a city is unknown."
    ),
    tools=[get_order, get_refund_policy, get_weather],
    limits=Limits(max_steps=8, timeout=120),
)
