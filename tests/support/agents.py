"""Agents for the tests with real workers, with the tools that the handed cases assume."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Literal

from runner import Agent, Context, Evidence, Limits, ModelRequest, Result, Retry, ToolError, tool
from runner.models import ModelReply


def note(line: str) -> None:
    """Write to a ledger outside of Redis: what really happened, whatever the records say."""
    path = os.environ.get("CELERIAC_TEST_LEDGER")
    if path:
        with Path(path).open("a", encoding="utf-8") as ledger:
            ledger.write(line + "\n")


@tool(idempotent=True)
def ping(ctx: Context) -> str:
    """Answer pong."""
    note(f"ping {ctx.trace_id} {ctx.attempt}")
    return "pong"


@tool(idempotent=True)
def add(ctx: Context, a: int, b: int) -> Result[int]:
    """Add two numbers."""
    note(f"add {ctx.trace_id} {ctx.attempt}")
    return Result(a + b, evidence=[Evidence(source="sum", text=f"{a}+{b}")])


@tool(idempotent=True)
def slow(ctx: Context, n: int) -> int:
    """Sleep for half a second."""
    note(f"slow-begin {ctx.trace_id} {ctx.attempt}")
    time.sleep(0.5)
    note(f"slow-end {ctx.trace_id} {ctx.attempt}")
    return n


@tool(idempotent=True)
async def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    if city == "Atlantis":
        raise ToolError("no weather for that city", type="NOT_FOUND", fields={"city": "unknown"})
    return f"sunny in {city}"


@tool(idempotent=True)
def boom() -> None:
    """Fail."""
    raise RuntimeError("postgres://svc:hunter2@db.internal/x")


@tool
def give_up() -> None:
    """End the run."""
    raise ToolError("the account is closed", type="CLOSED", fatal=True)


@tool
def charge(ctx: Context, account_id: int, cents: int) -> str:
    """Charge an account: a side effect."""
    note(f"charge {ctx.trace_id} {ctx.attempt} {account_id} {cents}")
    return f"charged {cents}"


@tool(timeout=0.5)
def hang() -> None:
    """Never return."""
    note("hang-begin")
    time.sleep(3600)


@tool(timeout=0.5, idempotent=True, attempts=2)
def hang_idempotent(ctx: Context) -> None:
    """Never return; safe to try again."""
    note(f"hang_idempotent {ctx.attempt}")
    time.sleep(3600)


def never_return() -> None:
    """Swallow whatever would stop it."""
    note("stubborn-begin")
    while True:
        try:
            time.sleep(3600)
        except BaseException:  # noqa: BLE001 - that is the point
            continue


stubborn = tool(name="stubborn", timeout=0.5)(never_return)
stubborn_for_long = tool(name="stubborn_for_long", timeout=60)(never_return)


@tool(timeout=60)
def wait_for_end() -> None:
    """Sleep for a minute, saying when it is interrupted."""
    note("wait-begin")
    try:
        time.sleep(60)
    finally:
        note(f"wait-end {time.time()}")


@tool
def die() -> None:
    """End the process, as a crash would."""
    note("die")
    os._exit(5)


@tool(idempotent=True, attempts=3)
def die_always(ctx: Context) -> None:
    """End the process on each attempt."""
    note(f"die_always {ctx.attempt}")
    os._exit(5)


@tool(idempotent=True)
def slow_once(ctx: Context) -> str:
    """Sleep for a minute on the first attempt, and not on the second."""
    note(f"slow_once {ctx.attempt}")
    if ctx.attempt == 1:
        time.sleep(50)
    return f"attempt {ctx.attempt}"


@tool(idempotent=True)
def slow_until_second(ctx: Context) -> str:
    """Sleep for a minute, unless the ledger says that it was begun before."""
    path = Path(os.environ["CELERIAC_TEST_LEDGER"])
    line = f"slow_until_second {ctx.trace_id}"
    begun = path.exists() and line in path.read_text(encoding="utf-8")
    note(line)
    if not begun:
        time.sleep(50)
    return "second"


@tool(timeout=30, idempotent=True)
def wait_until_told(ctx: Context, n: int) -> int:
    """Return once the ledger says so."""
    note(f"{ctx.trace_id} enter wait_until_told")
    path = Path(os.environ["CELERIAC_TEST_LEDGER"])
    while f"told {ctx.run_id}\n" not in path.read_text(encoding="utf-8"):
        time.sleep(0.02)
    return n


@tool(idempotent=True)
def whoami(ctx: Context) -> dict[str, str]:
    """Tell what the context says."""
    ctx.progress(1, 2, "half way")
    return {
        "run": ctx.run_id,
        "call": ctx.call_id,
        "trace": ctx.trace_id,
        "key": ctx.idempotency_key,
        "principal": ctx.principal.id if ctx.principal else "",
        "ticket": str(ctx.metadata.get("ticket", "")),
    }


@tool(idempotent=True)
def big() -> str:
    """Return five million characters."""
    return "x" * 5_000_000


@tool(idempotent=True)
def pick(kind: Literal["a", "b"]) -> str:
    """Pick one of two."""
    return kind


@tool(requires={"accounts:write"})
def close_account(ctx: Context, account_id: int) -> str:
    """Close an account."""
    note(f"close_account {ctx.trace_id} {ctx.principal.id if ctx.principal else ''}")
    return "closed"


@tool(name="charge", approval=lambda arguments, _: arguments["cents"] > 100, approval_timeout=60)
def guarded_charge(ctx: Context, account_id: int, cents: int) -> str:
    """Charge an account: somebody has to approve what is large."""
    note(f"charge {ctx.trace_id} {ctx.attempt} {account_id} {cents}")
    return f"charged {cents}"


@tool(approval=True, approval_timeout=0.5)
def urgent(ctx: Context) -> str:
    """Do what somebody has to approve at once."""
    note(f"urgent {ctx.trace_id}")
    return "done in time"


@tool
def count_frozen() -> int:
    """Count the objects that no collection of this process looks at."""
    return gc.get_freeze_count()


TOOLS = [
    ping,
    add,
    slow,
    get_weather,
    boom,
    give_up,
    charge,
    hang,
    hang_idempotent,
    stubborn,
    stubborn_for_long,
    wait_for_end,
    die,
    die_always,
    slow_once,
    slow_until_second,
    whoami,
    big,
    pick,
]


class Lethal:
    """A model that takes its worker with it."""

    async def respond(self, request: ModelRequest) -> ModelReply:
        note("lethal")
        os._exit(9)


quick_retry = Retry(max_attempts=3, initial_delay=0.1, max_delay=0.5)

helper = Agent(name="helper", instructions="Help.", tools=TOOLS, model_retry=quick_retry)
two_steps = Agent(name="two-steps", tools=TOOLS, limits=Limits(max_steps=2))
hasty = Agent(name="hasty", tools=TOOLS, limits=Limits(timeout=2))
frugal = Agent(name="frugal", tools=TOOLS, limits=Limits(max_tool_calls=2))
narrow = Agent(name="narrow", tools=TOOLS, limits=Limits(max_parallel_calls=1))
sparing = Agent(name="sparing", tools=TOOLS, limits=Limits(max_tokens=30))
lethal = Agent(name="lethal", model=Lethal())
typed = Agent(name="typed", tools=TOOLS, output_type=dict[str, int])
curious = Agent(name="curious", tools=TOOLS, clarify=True)
guarded = Agent(name="guarded", tools=[ping, guarded_charge, urgent, close_account])
closed = Agent(name="closed", tools=TOOLS, requires={"admin"})
hasty_guarded = Agent(name="hasty-guarded", tools=guarded.tools, limits=Limits(timeout=2))
frozen = Agent(name="frozen", tools=[count_frozen])
attentive = Agent(name="attentive", tools=[ping, wait_until_told])
chatty = Agent(name="chatty", tools=TOOLS, stream=True)
