"""Our side of the comparison: an agent with the scripted model and its tools."""

from __future__ import annotations

import asyncio
import time

from benchmarks.load import plan_calls, read_load
from runner import Agent, Limits, ModelRequest, tool
from runner.models import Final, ModelReply, ProposedCall, ToolCalls, Usage
from runner.record import dump

USAGE = Usage(requests=1, prompt_tokens=10, completion_tokens=5, total_tokens=15)


class Scripted:
    """The model of `benchmarks.load` behind our interface."""

    async def respond(self, request: ModelRequest) -> ModelReply:
        load, turn = read_load(request.messages)
        if load.asking:
            await asyncio.sleep(load.asking)
        calls = tuple(
            ProposedCall(provider_id=f"c{index}", name=name, arguments=dump(arguments))
            for index, (name, arguments) in enumerate(plan_calls(load, turn))
        )
        if not calls:
            return Final(text="done", usage=USAGE, raw="")
        return ToolCalls(calls=calls, text=None, usage=USAGE, raw="")


def work(n: int, seconds: float, chars: int) -> str:
    if seconds:
        time.sleep(seconds)
    return f"{n}{'x' * chars}"


@tool
def echo(n: int, seconds: float = 0.0, chars: int = 0) -> str:
    """Give the number back."""
    return work(n, seconds, chars)


@tool(max_concurrency=5)
def limited(n: int, seconds: float = 0.0, chars: int = 0) -> str:
    """Give the number back; five at once in the whole fleet."""
    return work(n, seconds, chars)


@tool(idempotent=True)
def again(n: int, seconds: float = 0.0, chars: int = 0) -> str:
    """Give the number back; safe to start again."""
    return work(n, seconds, chars)


@tool(approval=True)
def ask_first(n: int, seconds: float = 0.0, chars: int = 0) -> str:
    """Give the number back, once somebody has approved it."""
    return work(n, seconds, chars)


bench = Agent(
    name="bench",
    model=Scripted(),
    tools=[echo, limited, again, ask_first],
    limits=Limits(
        max_steps=10_000,
        timeout=86_400,
        max_tool_calls=1_000_000,
        max_parallel_calls=256,
        max_calls_per_turn=256,
    ),
)
