"""The whole distributed control flow: three Celery tasks that enqueue each other.

    start -> step 0 -> call_tool ... call_tool -> step 1 -> ... -> an end

Each task makes one transition of the run and publishes what comes next. A task that is lost is
published again by recovery; one that comes twice is answered `STALE`, `BUSY` or `DUPLICATE`.
"""

from __future__ import annotations

import logging
from typing import Any

from celery import Celery, Task, states

from runner.errors import AgentError, CeleriacError, InvalidInput, RunNotFound
from runner.failpoints import Point, reach
from runner.keys import RUN_ID
from runner.loop import CallTools, Finish, Loop, Next, NextStep, Skip, Wait
from runner.store import RunStore
from tasks.accept import accept_start
from tasks.deliver import store_started
from tasks.hints import CALL_TOOL, PING, START, STEP, publish
from tasks.requests import CallRequest, HiddenRequest, StepRequest, cancel_if_revoked
from tasks.stint import StepStint, Stint

logger = logging.getLogger(__name__)

STRATEGY = "tasks.requests:refuse_unreadable"
"""How a worker makes a request of a message, also for Celery's own tasks; it is had by name."""


def add_tasks(app: Celery, loop: Loop) -> None:
    """Give a worker's app the tasks of the loop."""

    class Step(StepRequest):
        """A step of this worker's loop."""

    class Call(CallRequest):
        """A call of this worker's loop."""

    Step.loop = Call.loop = loop
    app.Task.Strategy = STRATEGY

    @app.task(
        name=START,
        shared=False,
        Request=HiddenRequest,
        throws=(AgentError, InvalidInput),  # refused: no traceback in the log
    )
    def start(*args: Any, **given: Any) -> None:
        """Accept a goal from an app that has no client of ours; the task's id is the run's id."""
        run_id = start.request.id
        try:
            # Any worker of the fleet may take the run: by the catalog, as a client does.
            accepted = accept_start(loop.store, run_id, args, given)
        except (AgentError, InvalidInput) as error:
            logger.warning("run=%s is refused: %s", run_id, error)
            store_refused(app, loop.store, run_id, error)
            raise
        if accepted.created:
            store_started(app, loop.store, run_id)
            revoked = cancel_if_revoked(loop.store, run_id)
            publish(app, loop.store, Wait(run_id) if revoked else accepted.coming)

    @app.task(name=STEP, shared=False, bind=True, Request=Step)
    def step(self: Task, run_id: str, step: int) -> str:
        words = []
        with StepStint(app, loop, self.request) as stint:
            for coming in loop.take_steps(run_id, step, stint):
                publish(app, loop.store, coming)
                reach(Point.STEP_PUBLISHED)
                words.append(_in_words(coming))
        return words[0]

    @app.task(name=CALL_TOOL, shared=False, bind=True, Request=Call)
    def call_tool(self: Task, run_id: str, step: int, index: int) -> str:
        told: list[str] = []
        with Stint(app, loop, self.request) as stint:
            for coming in loop.take_calls(run_id, step, index, stint.goes_on, tell=told.append):
                publish(app, loop.store, coming)
                reach(Point.CALL_PUBLISHED)
        return told[0] if told else ""

    @app.task(name=PING, shared=False)
    def ping(token: str) -> None:
        loop.store.answer_ping(token)


def _in_words(coming: Next) -> str:
    """What Flower and the log show of a step that is done: no content."""
    match coming:
        case CallTools():
            return "calls tools"
        case NextStep(step=step):
            return f"step {step} is next"
        case Finish(stop_reason=stop_reason):
            return str(stop_reason)
        case Skip(outcome=outcome):
            return f"skipped: {outcome}"
        case Wait():
            return "waits"


def store_refused(app: Celery, store: RunStore, run_id: str, error: CeleriacError) -> None:
    """Let `AsyncResult(run_id)` raise the refusal, unless there is a run of that id after all."""
    if not store.settings.result_backend:
        return
    try:
        if not _has_run(store, run_id):
            app.backend.store_result(run_id, error, states.FAILURE)
    except Exception as cause:  # noqa: BLE001 - any backend's any error; the refusal stands
        logger.warning("run=%s can't tell the result backend: %s", run_id, type(cause).__name__)


def _has_run(store: RunStore, run_id: str) -> bool:
    if not RUN_ID.fullmatch(run_id):
        return False
    try:
        store.read_run(run_id)
    except RunNotFound:
        return False
    return True
