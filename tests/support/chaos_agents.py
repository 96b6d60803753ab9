"""The agent of the chaos: tools that write down each start and end outside of Redis."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

from runner import Agent, Context, Limits, Retry, tool


def note(what: str, name: str, ctx: Context) -> None:
    """One line of the ledger. Appended in one write, so that a kill leaves no half of it."""
    line = {
        "what": what,
        "tool": name,
        "key": ctx.idempotency_key,
        "attempt": ctx.attempt,
        "pid": os.getpid(),
        "at": time.clock_gettime(time.CLOCK_REALTIME),  # some workers' clocks are an hour off
    }
    with Path(os.environ["CELERIAC_TEST_LEDGER"]).open("ab", buffering=0) as ledger:
        ledger.write(json.dumps(line).encode() + b"\n")


FETCHES = 3
"""How many may fetch at once, across all workers."""


def work(name: str, ctx: Context) -> str:
    """Take a while, the same on each attempt, and say whose result this is."""
    note("begin", name, ctx)
    chance = random.Random(ctx.idempotency_key)
    seconds = chance.uniform(0.6, 1.5) if chance.random() < 0.06 else chance.uniform(0.01, 0.15)
    # What mustn't be done twice takes longer, so that it is hit more often.
    time.sleep(seconds + (0.2 if name == "charge" else 0.0))
    note("end", name, ctx)
    return f"{name} {ctx.idempotency_key}"


@tool(idempotent=True, attempts=5)
def look(ctx: Context, n: int) -> str:
    """Look something up."""
    return work("look", ctx)


@tool(approval=lambda arguments, _: arguments["guarded"], approval_timeout=800)
def charge(ctx: Context, n: int, guarded: bool) -> str:
    """Charge an account: a side effect, not to be had twice, and now and then to be approved."""
    return work("charge", ctx)


@tool(idempotent=True, attempts=5, max_concurrency=FETCHES)
def fetch(ctx: Context, n: int) -> str:
    """Fetch something."""
    return work("fetch", ctx)


victim = Agent(
    name="victim",
    tools=[look, charge, fetch],
    limits=Limits(timeout=900),
    model_retry=Retry(max_attempts=5, initial_delay=0.1, max_delay=1.0),
)
