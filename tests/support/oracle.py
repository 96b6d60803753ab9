"""What runs must look like, worked out from the answers of the store alone.

A second, plain idea of the state: nothing here reads Redis. Whatever a transition says that it did
is held against what it may do at that moment, and is then part of what must be found.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from runner.loop import CLOSER
from runner.models import StopReason
from runner.record import RunRecord
from runner.store import Outcome

Line = tuple[str, ...]
"""A message of a history: its role, and what tells it from others."""

RESUMABLE = {StopReason.MAX_STEPS, StopReason.TIMEOUT, StopReason.ERROR}


def read_line(message: dict[str, Any]) -> Line:
    match message["role"]:
        case "tool":
            return "tool", message["tool_call_id"], message["content"]
        case "assistant" if message.get("tool_calls"):
            return "turn", *(each["id"] for each in message["tool_calls"])
        case role:
            return role, message["content"]


@dataclass
class Call:
    """An open call: who holds it until when, and the result that came first."""

    id: str
    kind: str
    limits: frozenset[str]
    starts: int
    epoch: int = 0
    attempt: str = ""
    lease_end: float = 0.0
    content: str | None = None
    decided: str = ""


@dataclass
class Told:
    """One run. Times are the test's own, in seconds."""

    id: str
    history: list[Line]
    conversation: str = ""
    parked: bool = False
    step: int = 0
    epoch: int = 0
    attempt: str = ""
    lease_end: float = 0.0
    admitted: bool = False
    calls: list[Call] | None = None
    inbox: list[Line] = field(default_factory=list)
    operations: set[str] = field(default_factory=set)
    decided: dict[tuple[int, int], str] = field(default_factory=dict)
    end: StopReason | None = None
    deleted: bool = False

    @property
    def live(self) -> bool:
        return self.end is None and not self.deleted

    # --- the run ----------------------------------------------------------------------------------

    def end_run(self, reason: StopReason, held: int | None, steps: int, message: str) -> None:
        assert self.live, "ended twice"
        assert held is None or (held == self.epoch and self.calls is None), "ended by a stranger"
        if self.calls is not None:
            self._close(CLOSER)
        self.step += steps
        if message:
            self.history.append(("assistant", message))
        self.history += self.inbox
        self.inbox = []
        self.end = reason
        self.let_go()

    def go_on(self, message: str) -> None:
        """An answer that was no end: the user had said something meanwhile."""
        assert self.live
        assert self.inbox, "went on for nothing"
        self.step += 1
        self.epoch += 1
        self.attempt = ""
        self.history.append(("assistant", message))
        self.let_go()

    def resume(self) -> None:
        assert self.end in RESUMABLE
        self.end, self.attempt = None, ""
        self.epoch += 1

    # --- its step ---------------------------------------------------------------------------------

    def begin_step(self, step: int, record: RunRecord, attempt: str, now: float) -> None:
        assert self.live
        assert not self.parked
        assert (self.step, self.calls) == (step, None)
        if attempt == self.attempt:
            assert record.epoch == self.epoch, "the same attempt has another epoch"
            return
        assert record.epoch == self.epoch + 1
        assert self.lease_end <= now, "begun while somebody holds it"
        self.epoch, self.attempt, self.admitted = record.epoch, attempt, False
        self.history += self.inbox
        self.inbox = []
        self.lease_end = float("inf")  # the caller says until when

    def commit_step(self, record: RunRecord, calls: list[Call], refused: list[Line]) -> None:
        assert self.live
        assert (record.step, record.epoch) == (self.step, self.epoch), "committed by a stranger"
        assert self.calls is None
        turn = [each.id for each in calls] or [line[1] for line in refused]
        self.history.append(("turn", *turn))
        self.let_go()
        if calls:
            self.calls = calls
        else:
            self.history += refused
            self.step += 1

    def holds_step(self, epoch: int) -> None:
        assert self.live
        assert (epoch, self.calls) == (self.epoch, None), "a stranger holds the step"
        assert self.lease_end > 0, "who has let go holds it again"

    def let_go(self) -> None:
        self.lease_end, self.admitted = 0.0, False

    # --- its calls --------------------------------------------------------------------------------

    def call(self, step: int, index: int) -> Call | None:
        if not self.live or self.calls is None or step != self.step or index >= len(self.calls):
            return None
        return self.calls[index]

    def begin_call(self, step: int, index: int, epoch: int, attempt: str, now: float) -> Call:
        call = self.call(step, index)
        assert call is not None
        assert call.content is None, "begun after its result"
        if attempt == call.attempt:
            assert epoch == call.epoch, "the same attempt has another epoch"
            return call
        assert epoch == call.epoch + 1
        assert call.lease_end <= now, "begun while somebody holds it"
        assert call.kind != "asked", "a question was run"
        assert call.kind != "approval" or call.decided == "approved", "run without an approval"
        call.epoch, call.attempt = epoch, attempt
        return call

    def record_result(self, step: int, index: int, content: str, outcome: Outcome) -> None:
        call = self.call(step, index)
        if outcome is Outcome.DECIDED:
            assert self.decided[step, index] != content
            return
        if call is None:
            # The one request that is answered so after its step: it was taken before.
            assert outcome is Outcome.STALE or ("tool", f"s{step}c{index}", content) in self.history
            return
        if outcome in (Outcome.DUPLICATE, Outcome.FENCED, Outcome.STALE):
            assert outcome is not Outcome.STALE
            assert outcome is not Outcome.DUPLICATE or call.content not in (None, content)
            return
        if call.content is not None:
            assert call.content == content, "a second result was taken"
            return
        call.content, call.lease_end = content, 0.0
        assert self.calls is not None
        last = all(each.content is not None for each in self.calls)
        assert outcome is (Outcome.LAST if last else Outcome.WAIT)
        if last:
            self._close("")

    def decide(self, step: int, index: int, operation: str, *, approved: bool) -> None:
        known = self.decided.setdefault((step, index), operation)
        assert known == operation, "decided twice"
        call = self.call(step, index)
        if call is not None:
            assert call.kind == "approval"
            call.decided = "approved" if approved else "denied"

    def _close(self, closer: str) -> None:
        assert self.calls is not None
        for each in self.calls:
            content = closer if each.content is None else each.content
            self.history.append(("tool", each.id, content))
        self.calls = None
        self.step += 1

    def holders(self, limit: str, now: float) -> set[str]:
        """Who holds a place under this limit."""
        step = f"{self.id}.{self.step}"
        if not self.live:
            return set()
        if self.calls is None:
            return {step} if limit == "model" and self.admitted and self.lease_end > now else set()
        return {
            f"{step}.{index}"
            for index, each in enumerate(self.calls)
            if limit in each.limits and each.content is None and each.lease_end > now
        }
