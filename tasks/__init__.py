"""The Celery tasks of the loop, recovery, and the client that an application imports."""

from runner import Approval, Event, FinalResult, Principal, RunStatus, StopReason
from runner.record import RunInfo
from tasks.client import Client, Run

__all__ = [
    "Approval",
    "Client",
    "Event",
    "FinalResult",
    "Principal",
    "Run",
    "RunInfo",
    "RunStatus",
    "StopReason",
]
