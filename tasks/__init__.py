"""The Celery tasks of the loop, recovery, and the client that an application imports."""

from runner import Approval, Event, FinalResult, Principal, RunStatus, StopReason
from runner.record import CallInfo, RunInfo
from tasks.async_client import AsyncClient, AsyncRun
from tasks.client import Client, Run, RunDetails, RunPage

__all__ = [
    "Approval",
    "AsyncClient",
    "AsyncRun",
    "CallInfo",
    "Client",
    "Event",
    "FinalResult",
    "Principal",
    "Run",
    "RunDetails",
    "RunInfo",
    "RunPage",
    "RunStatus",
    "StopReason",
]
