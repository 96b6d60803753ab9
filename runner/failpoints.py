"""Named points at which a test may end a process, to see what becomes of the run.

Off unless `CELERIAC_FAILPOINT` is set when this module is imported, as `<point>:<how>:<file>`: the
first process to reach the point and to create the file dies; `how` is `process`, or `group` for a
worker with all its children.
"""

from __future__ import annotations

import os
import signal
from enum import StrEnum


class Point(StrEnum):
    """Every moment between two writes of a run."""

    STEP_BEGUN = "step.begun"
    STEP_ANSWERED = "step.answered"
    STEP_COMMITTED = "step.committed"
    STEP_PUBLISHED = "step.published"
    CALL_BEGUN = "call.begun"
    CALL_RAN = "call.ran"
    CALL_RECORDED = "call.recorded"
    CALL_PUBLISHED = "call.published"


def _die(point: Point) -> None:
    wanted, how, path = _armed.split(":", 2)
    if point != wanted:
        return
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    if how == "group":
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _pass(point: Point) -> None:
    """No failpoint is armed."""


_armed = os.environ.get("CELERIAC_FAILPOINT", "")

reach = _die if _armed else _pass
