"""How a worker shows a task's arguments to those who watch it."""

from __future__ import annotations

from typing import Any

from celery.worker.request import Request

HIDDEN = "{...}"


class HiddenRequest(Request):
    """For `celeriac.start`, the one task with content: events and `inspect` don't show it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._argsrepr = self._kwargsrepr = HIDDEN

    def info(self, safe: bool = False) -> dict[str, Any]:  # noqa: ARG002 - never the real ones
        shown: dict[str, Any] = super().info(safe=True)
        return shown
