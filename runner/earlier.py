"""Checks the messages that a submit brings along: whatever is stored, any server must take.

A fault is named with its place, never with what stands there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from runner.context import Message
from runner.errors import InvalidInput
from runner.model import find_history_fault
from runner.reader import load_json
from runner.record import dump
from runner.render import clean

MAX_MESSAGES = 1_000
"""Messages that a submit may bring along."""

KNOWN = {
    "user": ("role", "content"),
    "assistant": ("role", "content", "tool_calls", "reasoning_content"),
    "tool": ("role", "tool_call_id", "content"),
}
"""What is kept of a message. A response carries more, which no request may."""


def check_messages(given: object, most_chars: int) -> list[Message]:
    """The messages as they are stored: chat-completions dicts of a user, an assistant and tools.

    Raises `InvalidInput`. `most_chars` bounds all of them together, as JSON.
    """
    if given is None:
        return []
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise InvalidInput("messages is a list of chat-completions dicts")
    if len(given) > MAX_MESSAGES:
        raise InvalidInput(
            f"messages has {len(given)} entries, at most {MAX_MESSAGES} are accepted; "
            "leave out the oldest"
        )
    messages = [_check_message(at, each) for at, each in enumerate(given)]
    chars = sum(len(dump(each)) for each in messages)
    if chars > most_chars:
        raise InvalidInput(
            f"messages has {chars} characters, at most {most_chars} are accepted; leave out the "
            "oldest, or raise CELERIAC_MAX_GOAL_CHARS"
        )
    for at, block in _blocks(messages):
        if fault := find_history_fault(block):
            raise _refuse(at, fault)
    return messages


def _check_message(at: int, given: object) -> Message:
    if not isinstance(given, Mapping):
        raise _refuse(at, "it isn't a dict")
    role = given.get("role")
    if role in ("system", "developer"):
        raise _refuse(at, "a system message is the agent's own: use Agent(instructions=...)")
    if not isinstance(role, str) or role not in KNOWN:
        raise _refuse(at, "its role is none of user, assistant and tool")
    message = _as_json(at, {key: given[key] for key in KNOWN[role] if given.get(key) is not None})
    _check_content(at, message)
    if role == "assistant":
        _check_turn(at, message)
    return message


def _check_content(at: int, message: Message) -> None:
    content = message.setdefault("content", None if message["role"] == "assistant" else "")
    match content:
        case str() | None:
            empty = not (content or "").strip()
        case list():
            empty = not content
            if not all(isinstance(each, dict) and "type" in each for each in content):
                raise _refuse(at, "its content is a list, but not one of typed parts")
        case _:
            raise _refuse(at, "its content is neither text nor a list of parts")
    if empty and message["role"] == "user":
        raise _refuse(at, "it is empty; leave it out")
    if empty and message["role"] == "assistant" and not message.get("tool_calls"):
        raise _refuse(at, "the turn has neither text nor calls; leave it out")


def _check_turn(at: int, message: Message) -> None:
    calls = message.get("tool_calls", [])
    whole = isinstance(calls, list) and all(
        isinstance(each, dict) and isinstance(each.get("function"), dict) for each in calls
    )
    if not whole:
        raise _refuse(at, "tool_calls isn't a list of function calls")
    if not isinstance(message.get("reasoning_content", ""), str):
        raise _refuse(at, "reasoning_content isn't text")
    if not calls:
        message.pop("tool_calls", None)
        return
    message["tool_calls"] = [
        {
            "id": each.get("id"),
            "type": "function",
            "function": {key: each["function"].get(key) for key in ("name", "arguments")},
        }
        for each in calls
    ]


def _as_json(at: int, message: Message) -> Message:
    """A copy that JSON and Redis can carry."""
    try:
        text = json.dumps(message, ensure_ascii=False, allow_nan=False)
        copy: Message = load_json(text)
        return {key: _clean(value) for key, value in copy.items()}
    except (TypeError, ValueError, RecursionError):
        raise _refuse(at, "JSON can't carry it") from None


def _clean(value: Any) -> Any:
    match value:
        case str():
            return clean(value)
        case list():
            return [_clean(each) for each in value]
        case dict():
            return {clean(key): _clean(each) for key, each in value.items()}
        case _:
            return value


def _blocks(messages: Sequence[Message]) -> list[tuple[int, list[Message]]]:
    """Each message with its place; a turn together with the tool messages that follow it."""
    blocks: list[tuple[int, list[Message]]] = []
    for at, message in enumerate(messages):
        if message["role"] == "tool" and blocks and "tool_calls" in blocks[-1][1][0]:
            blocks[-1][1].append(message)
        else:
            blocks.append((at, [message]))
    return blocks


def _refuse(at: int, fault: str) -> InvalidInput:
    return InvalidInput(f"messages[{at}]: {fault}")
