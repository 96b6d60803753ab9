"""The histories that this process has read: they only grow, so the next step reads the tail alone.

Only a saving: what isn't here, or is of a run of the same id that was deleted, is read in full.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runner.record import RunRecord

MAX_CHARS = 16_000_000
"""Characters of messages that are kept in all, of the runs that took a step last."""


@dataclass(frozen=True, slots=True)
class History:
    """The messages of a run as far as they were read, and their size as text."""

    run_id: str
    created: int = 0
    messages: tuple[dict[str, Any], ...] = ()
    chars: int = 0

    def go_on(self, record: RunRecord, stands: bool, tail: Sequence[str]) -> History:
        """The whole history: this and the `tail`, or that alone where this no longer stands."""
        before = self if stands else History(self.run_id)
        return History(
            self.run_id,
            record.created,
            (*before.messages, *map(json.loads, tail)),
            before.chars + sum(map(len, tail)),
        )


class Histories:
    """Histories by run. Any thread may ask; nobody changes a message."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, History] = OrderedDict()
        self._chars = 0

    def take(self, run_id: str) -> History:
        """What is known of a run's history; it isn't kept any more."""
        with self._lock:
            found = self._kept.pop(run_id, None) or History(run_id)
            self._chars -= found.chars
        return found

    def keep(self, history: History) -> None:
        """Know this for the run's next step; the oldest are dropped where that is too much."""
        with self._lock:
            replaced = self._kept.pop(history.run_id, None)
            self._kept[history.run_id] = history
            self._chars += history.chars - (replaced.chars if replaced else 0)
            while self._chars > MAX_CHARS:
                _, dropped = self._kept.popitem(last=False)
                self._chars -= dropped.chars
