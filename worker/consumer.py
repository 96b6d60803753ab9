"""What a worker's consumer does besides: it leaves the queue to a thread that goes on by itself."""

from __future__ import annotations

from typing import Any

from celery import bootsteps
from celery.worker import state as worker_state

from tasks.stint import is_brisk


def is_stopping() -> bool:
    """Whether this worker was told to stop, warm or cold; what they hold then is an exit code."""
    told = (worker_state.should_stop, worker_state.should_terminate)
    return any(code is not None and code is not False for code in told)


class LeaveQueue(bootsteps.StartStopStep):
    """While a thread goes on with one quick step after the other, the others get none.

    Side by side they would take turns at Python's lock, at a third more CPU time for each step.
    What was asked of Redis before is taken: else it would stand in the socket, popped and unread.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, c: Any) -> None:
        channel = c.task_consumer.channel
        may_consume = channel.qos.can_consume

        def can_consume() -> bool:
            if is_stopping():  # its pool may be gone, which Celery would ask
                return False
            return bool(may_consume()) and (not is_brisk() or bool(channel._in_poll))

        channel.qos.can_consume = can_consume
