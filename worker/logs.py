"""Log lines as JSON, where `CELERIAC_LOG_FORMAT=json`: one object on each line, with no content.

`run`, `step`, `call`, `index` and `attempt` are fields of their own wherever a line tells them.
"""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime
from typing import Any

from celery.signals import after_setup_logger, after_setup_task_logger

TOLD = re.compile(r"\b(run|step|call|attempt)=([\w.-]+)")

CALL = re.compile(r"(?:([\w-]+)\.)?(\d+)\.(\d+)")
"""A call's public id, or the one that begins with its run's."""

TASK = re.compile(r"\bceleriac\.\w+\[([\w-]+)(?:\.(\d+))?(?:\.(\d+))?\]")
"""How Celery names one of our tasks: its id is that of a run, a step or a call."""


class JsonFormatter(logging.Formatter):
    """One line for each record. A traceback is a field, so that it stays one line."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": message,
            **_fields(message),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _fields(message: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if task := TASK.search(message):
        run_id, step, index = task.groups()
        fields = {"run": run_id, "step": step, "index": index}
    fields |= dict(TOLD.findall(message))
    if call := CALL.fullmatch(str(fields.get("call"))):
        run_id, step, index = call.groups()
        fields |= {"run": run_id or fields.get("run"), "step": step, "index": index}
        fields["call"] = f"{step}.{index}"
    numbers = ("step", "index", "attempt")
    return {
        name: int(value) if name in numbers and str(value).isdigit() else value
        for name, value in fields.items()
        if value is not None
    }


def log_as_json() -> None:
    """Have Celery's handlers of this process and its children write JSON."""

    def change(logger: logging.Logger, **_: Any) -> None:
        for handler in logger.handlers:
            handler.setFormatter(JsonFormatter())

    for signal in (after_setup_logger, after_setup_task_logger):
        signal.connect(change, weak=False)
