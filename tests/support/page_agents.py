"""Agents for the run page: a shop's, with a tool for each way in which a call can wait."""

from __future__ import annotations

import os
import time
from pathlib import Path

from runner import Agent, Context, Evidence, Limits, Result, ToolError, tool
from runner.models import Price
from support.agents import note


@tool(idempotent=True)
def get_order(order_id: str) -> Result[dict[str, object]]:
    """Look up an order."""
    if order_id == "A009":
        raise ToolError("there is no order with that number", type="NOT_FOUND")
    order: dict[str, object] = {"order_id": order_id, "item": "desk lamp", "cents": 4900}
    return Result(order, [Evidence(source=f"order {order_id}", text="desk lamp, delivered")])


@tool(idempotent=True, timeout=30, max_concurrency=1)
def count_shelf(ctx: Context, shelf: int) -> int:
    """Count a shelf, one at a time; the ledger says when it is done."""
    note(f"count_shelf {ctx.trace_id}")
    ctx.progress(1, 4, f"shelf {shelf}")
    path = Path(os.environ["CELERIAC_TEST_LEDGER"])
    while f"told {ctx.run_id}\n" not in path.read_text(encoding="utf-8"):
        time.sleep(0.02)
    return 4


@tool(approval=True, approval_timeout=3600)
def refund(order_id: str, cents: int) -> str:
    """Pay money back."""
    return f"{cents} paid back for {order_id}"


@tool(idempotent=True)
def echo(text: str) -> str:
    """Say it again."""
    return text


TOOLS = [get_order, count_shelf, refund, echo]

clerk = Agent(
    name="clerk",
    instructions="Help the customers of a shop.",
    tools=TOOLS,
    clarify=True,
    limits=Limits(max_steps=8, timeout=120, max_tokens=50_000, max_tool_calls=40, max_cost=0.5),
    model="fake-1",
    prices={"fake-1": Price(prompt=3, completion=15)},
)
"""Asks the model server of a stage."""

narrator = Agent(name="narrator", model="fake-1", stream=True)
"""Tells its answer while it comes."""
