"""Where somebody may look on: what a worker's telemetry is told, and no dependency on any.

Each method is handed what is about to happen and makes it happen, so that an observer sees it begin
and end, in the thread that does it. This one only does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from runner.models import Model, ModelReply, ModelRequest
from runner.record import RunRecord
from runner.store import BegunCall, Outcome
from runner.tools import Executed

T = TypeVar("T")


class Observer:
    """Told of each attempt that this process makes, and of each end that it learns of."""

    def step(self, record: RunRecord, take: Callable[[], T]) -> T:  # noqa: ARG002
        """A step of a run, from its begin to what was decided."""
        return take()

    def exchange(
        self,
        record: RunRecord,  # noqa: ARG002
        request: ModelRequest,  # noqa: ARG002
        model: Model,  # noqa: ARG002
        ask: Callable[[], ModelReply],
    ) -> ModelReply:
        """A request to a model and its answer."""
        return ask()

    def call(
        self,
        call: BegunCall,  # noqa: ARG002
        run: Callable[[], Executed | Outcome],
    ) -> Executed | Outcome:
        """An attempt of a tool call and its result; an `Outcome` where it lost its say."""
        return run()

    def ended(self, run_id: str) -> None:
        """A run has ended, in this process or elsewhere. Several processes may be told of it."""

    def recovered(self, what: str) -> None:
        """Recovery has moved a run: `NextStep`, `CallTools`, `Finish` or `Wait`."""
