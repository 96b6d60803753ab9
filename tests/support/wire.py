"""A store whose requests can be sent again as they were: what a client does after a lost reply."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from runner.store import HOST, RunStore

TIME = re.compile(r"\b1\d{12}(?:\d{3})?\b")

LOOKS = {"recover_run", "claim_due", "grant_slots", "sweep_runs"}
"""Not an act of one holder: who looks again sees what has changed since, be it by the look."""

TAKEN = {"OK", "CREATED", "WAIT", "LAST", "STEP", "PARKED"}
"""The answers of a transition that did what it was asked."""

AGAIN = {
    "create_run": {"CREATED": "EXISTS", "WAIT": "EXISTS"},
    "send_message": {"OK": "DUPLICATE"},
    "lose_call": {"OK": "FENCED"},
    "delete_run": {"OK": "STALE"},
}
"""What a request that was taken is answered when it comes again: `ALREADY` where nothing is said,
or the same word.
"""


@dataclass(frozen=True)
class Request:
    """A script as it was sent, and the word that it was answered."""

    name: str
    keys: Sequence[str]
    args: Sequence[Any]
    word: str


class Wire(RunStore):
    """Knows what was sent last (`sent`), and sends it again, or each request twice.

    A request that was taken and comes again at once must change nothing any more, and be answered
    as before, or that this was done.
    """

    sent: Request
    attempts = 0
    _again: Request | None = None
    _twice = False

    @contextlib.contextmanager
    def twice(self) -> Iterator[None]:
        """Each request comes twice. Whoever calls is told the first answer."""
        self._twice = True
        try:
            yield
        finally:
            self._twice = False

    @contextlib.contextmanager
    def repeating(self, request: Request) -> Iterator[None]:
        """Whatever is called sends this request; it must be of the same method."""
        self._again = request
        try:
            yield
        finally:
            self._again = None

    def _attempt_id(self) -> str:
        # Each attempt in a process of its own, of which somebody may say that it is gone.
        self.attempts += 1
        return f"{HOST}/{self.attempts}/attempt"

    def _run(self, name: str, key_names: Sequence[str], args: Sequence[Any]) -> list[Any]:
        if self._again is not None:
            assert name == self._again.name
            key_names, args = self._again.keys, self._again.args
        reply = super()._run(name, key_names, args)
        self.sent = Request(name, key_names, args, reply[0])
        if self._twice and name not in LOOKS:
            self._check_again(self.sent)
        return reply

    def _check_again(self, request: Request) -> None:
        name, word = request.name, request.word
        before = self.snapshot()
        again = super()._run(name, request.keys, request.args)[0]
        if was_taken(request):
            assert before == self.snapshot(), f"{name} did something the second time"
            known = AGAIN.get(name, {}).get(word, "ALREADY")
            assert again in (word, known), f"{name} answered {word}, and then {again}"
        else:
            assert again == word, f"{name} answered {word}, and then {again}"

    def snapshot(self) -> dict[str, str]:
        """All that the store holds, but for times, and results that came too late to count."""
        raw: Any = self.redis
        found: dict[str, str] = {}
        for key in sorted(raw.keys("celeriac:*")):
            value: Any
            match raw.type(key):
                case "hash":
                    value = sorted(raw.hgetall(key).items())
                case "list":
                    value = [each for each in raw.lrange(key, 0, -1) if '"late":true' not in each]
                case "set":
                    value = sorted(raw.smembers(key))
                case "zset":
                    value = raw.zrange(key, 0, -1, withscores=True)
                case "stream":
                    value = [fields for _, fields in raw.xrange(key)]
                case _:
                    value = raw.get(key)
            found[key] = TIME.sub("T", str(value)) + (" for ever" if raw.pttl(key) == -1 else "")
        return found


def was_taken(request: Request) -> bool:
    return request.word in TAKEN
