"""Sees in the history that a run gets nowhere: the same calls, or the same errors, again and again.

First the model is told; if that changes nothing, the run ends `REPEATED_ERROR`. Pure functions of
the history: nothing else is stored for them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runner.context import Message
from runner.models import ProposedCall

Calls = frozenset[tuple[str, str]]
"""The (name, canonical arguments) of a turn's calls."""

ERROR_START = '{"ok":false,"error":{"type":'
"""How the text of every refusal and failure starts; a tool's own `{"ok": false}` is a result."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One block of the history: what was called, and what came of it in call order."""

    called: tuple[tuple[str, str], ...]
    contents: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.called)

    @property
    def results(self) -> tuple[str, ...]:
        """What came of it, in whatever order."""
        return tuple(sorted(self.contents))

    @property
    def failed(self) -> bool:
        """Whether every call of the turn ended in an error."""
        return all(content.startswith(ERROR_START) for content in self.contents)

    @property
    def outcome(self) -> tuple[Calls, tuple[str, ...]]:
        """What was called with what results, in whatever order."""
        return _calls(self.called), self.results


@dataclass(frozen=True, slots=True)
class Progress:
    """How often the last turn was made before in just that way. 1: it is new.

    `worn` are the calls of all turns that came too often, the last or one that alternates with it.
    """

    same_calls: int = 0
    same_errors: int = 0
    worn: frozenset[Calls] = frozenset()

    def notice(self, most: int) -> str | None:
        """What the model is told before it is asked, where it has reached the limit."""
        if self.same_calls >= most:
            return (
                f"You have made the same calls {self.same_calls} times with the same results. "
                "Don't make them again: use what you have, try something else, or answer now."
            )
        if self.same_errors >= most:
            return (
                f"Your last {self.same_errors} turns ended in the same error. Change your "
                "approach, or answer now with what you know."
            )
        return None

    def repeats(self, calls: Sequence[ProposedCall], most: int) -> bool:
        """Whether these calls are what the model was told not to make again."""
        if self.same_calls < most:
            return False
        return _calls((call.name, call.arguments) for call in calls) in self.worn


def look_at_progress(history: Sequence[Message], most: int) -> Progress:
    """Judge the last turns; `most` is how often the same may come before the model is told.

    Turns needn't follow each other directly: two that alternate get nowhere as well.
    """
    turns = _last_turns(history, 3 * most)
    if not turns:
        return Progress()
    last = turns[0]
    errors = 0
    for turn in turns:
        if not turn.failed or (turn.names, turn.contents) != (last.names, last.contents):
            break
        errors += 1
    # Only turns with the same results can be the same: of the others nobody reads the arguments.
    results = [turn.results for turn in turns]
    alike = Counter(results)
    made = Counter(
        turn.outcome
        for turn, result in zip(turns, results, strict=True)
        if alike[result] >= min(most, 2)
    )
    worn = frozenset(calls for (calls, _), times in made.items() if times >= most)
    same = made[last.outcome] if made else 0
    return Progress(max(1, same), errors, worn)


def _last_turns(history: Sequence[Message], most: int) -> list[Turn]:
    """The last blocks since somebody last said something, the newest first."""
    turns: list[Turn] = []
    contents: list[str] = []
    for message in reversed(history):
        if message["role"] == "tool":
            contents.append(message["content"])
        elif message["role"] == "user" and isinstance(message["content"], str):
            break
        elif entries := message.get("tool_calls"):
            functions = [entry["function"] for entry in entries]
            called = [(each["name"], each["arguments"]) for each in functions]
            turns.append(Turn(tuple(called), tuple(reversed(contents))))
            contents = []
            if len(turns) == most:
                break
    return turns


def _calls(called: Iterable[tuple[str, str]]) -> Calls:
    return frozenset((name, _canonical(text)) for name, text in called)


def _canonical(arguments: str) -> str:
    """The same text for the same arguments; a user's own model may send what is no JSON at all."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
