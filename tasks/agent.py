"""The whole distributed control flow: three Celery tasks that enqueue each other.

    start -> step 0 -> call_tool ... call_tool -> step 1 -> ... -> an end

Each task makes one transition of the run and publishes what comes next. A task that is lost is
published again by recovery; one that comes twice is answered `STALE`, `BUSY` or `DUPLICATE`.
"""

from __future__ import annotations

from typing import Any

from celery import Celery, Task

from runner.errors import AgentError, InvalidInput
from runner.failpoints import Point, reach
from runner.loop import Loop, NextStep
from tasks.accept import accept_goal
from tasks.deliver import store_started
from tasks.hints import CALL_TOOL, PING, START, STEP, publish
from tasks.requests import CallRequest, HiddenRequest, StepRequest


def add_tasks(app: Celery, loop: Loop) -> None:
    """Give a worker's app the tasks of the loop."""

    class Step(StepRequest):
        """A step of this worker's loop."""

    class Call(CallRequest):
        """A call of this worker's loop."""

    Step.loop = Call.loop = loop

    @app.task(
        name=START,
        bind=True,
        shared=False,
        Request=HiddenRequest,
        throws=(AgentError, InvalidInput),  # refused: one line in the log, and no traceback
    )
    def start(self: Task, goal: str, agent: str, **options: Any) -> None:
        """Accept a goal from an app that has no client of ours; the task's id is the run's id."""
        run_id = self.request.id
        # Any worker of the fleet may take the run: by the catalog, as a client does.
        accept_goal(loop.store, goal, agent=agent, run_id=run_id, **options)
        store_started(app, run_id)
        publish(app, loop.store, NextStep(run_id, 0))

    @app.task(name=STEP, shared=False, Request=Step)
    def step(run_id: str, step: int) -> None:
        publish(app, loop.store, loop.advance(run_id, step))
        reach(Point.STEP_PUBLISHED)

    @app.task(name=CALL_TOOL, shared=False, Request=Call)
    def call_tool(run_id: str, step: int, index: int) -> None:
        publish(app, loop.store, loop.call_tool(run_id, step, index))
        reach(Point.CALL_PUBLISHED)

    @app.task(name=PING, shared=False)
    def ping(token: str) -> None:
        loop.store.answer_ping(token)
