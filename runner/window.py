"""How much of a run's history goes into the next request, and what its steps learn about that.

The rule: an estimate decides when a view gets smaller, and never that a run ends; that is for the
server to say. What one step has left out, no later one brings back, so that what a model knows of
a run doesn't jump to and fro.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from runner.agents import Agent
from runner.context import Message, size_of_request
from runner.errors import ModelError, RedisUnavailable
from runner.models import ModelRequest, RunErrorType, Usage
from runner.record import RunRecord
from runner.store import RunStore
from runner.view import (
    SUMMARY_CHARS,
    View,
    add_to_summary,
    apply_view,
    describe_dropped,
    fit_view,
    note_of_summary,
    read_refusal,
    read_view,
    size_of,
)

logger = logging.getLogger(__name__)

USABLE = 0.85
"""The share of a model's context that a request takes at most: the rest is for the answer, and for
what the estimate gets wrong."""

BYTES_PER_TOKEN = 3.0
"""Until the server has reported what a request of this run took."""

LEAST_BYTES, MOST_BYTES = 1.0, 8.0
"""Bounds of what is believed: a server may report anything."""

Summarize = Callable[[View, int, int], str | None]
"""Asks the model for a summary of what a view leaves out from a position on, in a request of about
so many characters; None where it failed."""


@dataclass(frozen=True, slots=True)
class Learnt:
    """What the steps of a run have learnt of one model: 0 where they haven't.

    `ceiling` is how many tokens a request may have since the server refused one: in tokens, since
    what a byte is worth differs between a few long results and many short ones.
    """

    model: str
    bytes_per_token: float = 0.0
    ceiling: int = 0


class Window:
    """The view of one attempt of a step. For an agent that doesn't compact it is all of the run."""

    def __init__(
        self,
        store: RunStore,
        agent: Agent,
        record: RunRecord,
        history: list[Message],
        *,
        model: str,
        summarize: Summarize,
        goal: int = 0,
    ) -> None:
        self.view = View(goal=goal)
        self._store = store
        self._agent = agent
        self._record = record
        self._history = history
        self._summarize = summarize
        self._learnt = Learnt(model)
        self._refused = False
        if agent.compacts:
            self._recall()

    def fit(self, build: Callable[[View], ModelRequest]) -> ModelRequest:
        """The request to send, in a smaller view than before where it would be too long."""
        request = build(self.view)
        limit = self._limit
        if limit is None or size_of_request(request) <= limit:
            return request
        return build(self.view) if self._shrink(request, limit) else request

    def refuse(self, request: ModelRequest, error: ModelError) -> bool:
        """The server said that it was too long: whether a shorter one is to be sent, once."""
        if not self._agent.compacts or error.type is not RunErrorType.CONTEXT_OVERFLOW:
            return False
        size, refusal = size_of_request(request), read_refusal(error.raw or str(error))
        if refusal.asked is not None and error.status != 413:  # that one may speak of bytes
            self._learn_ratio(size / refusal.asked)
        limit = int(size * refusal.share)
        ceiling = max(1, int(limit / self._ratio))
        ceiling = min(ceiling, self._learnt.ceiling or ceiling)
        self._learnt = replace(self._learnt, ceiling=ceiling)
        again = not self._refused and self._shrink(request, limit)
        if not again:
            self._keep()
        self._refused = True
        return again

    def learn(self, request: ModelRequest, usage: Usage) -> None:
        """What the server counted, for the estimates of later steps."""
        if not self._agent.compacts or not usage.known or usage.prompt_tokens <= 0:
            return
        if self._learn_ratio(size_of_request(request) / usage.prompt_tokens):
            self._keep()

    def _learn_ratio(self, ratio: float) -> bool:
        """Whether it is news."""
        # Rounded, so that it is written when it has changed and not after each step.
        ratio = round(min(MOST_BYTES, max(LEAST_BYTES, ratio)), 1)
        before, self._learnt = self._learnt, replace(self._learnt, bytes_per_token=ratio)
        return self._learnt != before

    @property
    def _ratio(self) -> float:
        return self._learnt.bytes_per_token or BYTES_PER_TOKEN

    @property
    def _limit(self) -> int | None:
        """Bytes that a request may have; None where nothing is known of a limit."""
        tokens = [float(self._learnt.ceiling)] if self._learnt.ceiling else []
        if self._agent.context_tokens is not None:
            tokens.append(self._agent.context_tokens * USABLE)
        return int(min(tokens) * self._ratio) if tokens else None

    def _shrink(self, request: ModelRequest, limit: int) -> bool:
        """Take a smaller view; answers whether it really is shorter than the request's."""
        before = self.view
        size = size_of(apply_view(self._history, before))
        other = size_of_request(request) - size
        after = fit_view(self._history, before, limit=limit, other=other)
        if after.dropped > before.dropped:
            after = replace(after, note=self._describe(after, limit))
        if size_of(apply_view(self._history, after)) >= size:
            return False
        self.view = after
        self._keep()
        return True

    def _describe(self, after: View, limit: int) -> str:
        """What stands in the place of what is newly left out, and of what was before."""
        if self._agent.summarize:
            known = replace(after, note=self.view.note, long=None)
            summary = self._summarize(known, self.view.dropped, min(SUMMARY_CHARS, limit // 2))
            if summary is not None:
                return note_of_summary(summary)
        evidence = self._store.read_evidence(self._record.run_id)
        return add_to_summary(self.view.note, describe_dropped(self._history, after, evidence))

    def _recall(self) -> None:
        state = self._store.read_view(self._record.run_id)
        view = read_view(state.get("view", {}))
        tools = {each.name: each.keep for each in self._agent.toolbox if each.keep}
        # Results that were cut because they were the newest may be shown whole again, or shrink.
        self.view = replace(view, goal=self.view.goal, long=None, keep=tools)
        if state.get("model") == self._learnt.model:
            self._learnt = replace(
                self._learnt,
                bytes_per_token=float(state["bytes_per_token"]),
                ceiling=int(state["ceiling"]),
            )

    def _keep(self) -> None:
        state: dict[str, Any] = {
            "view": self.view.describe(),
            "model": self._learnt.model,
            "bytes_per_token": self._learnt.bytes_per_token,
            "ceiling": self._learnt.ceiling,
        }
        try:
            self._store.keep_view(self._record, state)
        except RedisUnavailable as error:
            # A later step finds out for itself, and what was asked isn't lost for it.
            logger.warning("run=%s can't keep its view: %s", self._record.run_id, error)
