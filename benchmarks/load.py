"""One load for all: a goal says how many steps and calls there are, and the model obeys at once.

The model is a function inside of the worker's process, so no HTTP is measured. Everybody asks this
one and runs these tools.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Load:
    """`steps` turns with `calls` calls of `tool` each, and then an answer.

    Each model call takes `asking` seconds, each tool call `working`; a result has `chars` more
    characters than it needs.
    """

    steps: int = 10
    calls: int = 4
    tool: str = "echo"
    asking: float = 0.0
    working: float = 0.0
    chars: int = 0
    first: int = 0
    """The number of the first call; the others count on from it."""

    @property
    def goal(self) -> str:
        return json.dumps(asdict(self))


def read_load(messages: Sequence[Message]) -> tuple[Load, int]:
    """What the last goal of a history asks for, and how many turns there were since."""
    turns = 0
    for message in reversed(messages):
        if message["role"] == "user":
            return Load(**json.loads(message["content"])), turns
        turns += message["role"] == "assistant"
    raise ValueError("the history holds no goal")


def plan_calls(load: Load, turn: int) -> list[tuple[str, dict[str, Any]]]:
    """The calls of a turn, as (tool, arguments); none after the last step: that is the answer."""
    if turn >= load.steps:
        return []
    given = {"seconds": load.working, "chars": load.chars}
    # No two are alike, or a guard against loops would see one.
    return [
        (load.tool, {"n": load.first + turn * load.calls + index, **given})
        for index in range(load.calls)
    ]


def answer(messages: Sequence[Message]) -> Message:
    """The next assistant message, as a chat-completions server would word it."""
    load, turn = read_load(messages)
    calls = [
        {
            "id": f"c{index}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for index, (name, arguments) in enumerate(plan_calls(load, turn))
    ]
    if not calls:
        return {"role": "assistant", "content": "done"}
    return {"role": "assistant", "content": None, "tool_calls": calls}


def make_history(count: int) -> list[Message]:
    """`count` messages of an earlier talk, of about two hundred characters each."""
    text = "An earlier message of this talk, of a length that is usual. " * 3
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": f"{n}: {text}"} for n in range(count - count % 2)]
