"""What an application imports: submit a goal, follow it, read its result, cancel it."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from celery import Celery
from kombu.exceptions import OperationalError
from pydantic import JsonValue

from runner.agents import Agents
from runner.errors import InvalidInput, RedisUnavailable, ResultTimeout, RunFinished, RunNotFound
from runner.keys import check_run_id
from runner.loop import NextStep, answer_question, cancel_run
from runner.models import Event, FinalResult, Limits, OnFinish, Principal, RunStatus, StopReason
from runner.reader import scrub
from runner.record import RunInfo
from runner.settings import STEPS_QUEUE, TOOLS_QUEUE, Settings
from runner.store import Outcome, RunStore
from tasks.accept import accept_goal
from tasks.config import publishing_config
from tasks.deliver import close_backend, store_started
from tasks.hints import PING, publish

LOOK_EVERY = 2.0
"""Seconds that a reader waits in one request: well below the client's socket timeout."""

MAX_REASON_CHARS = 1_000

BEGINNING = "0"
"""Stands for the id of an event before the first."""

EVENT_ID = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")


class _Publisher(Celery):
    """An app that keeps to our settings where `CELERY_BROKER_URL` is set for the caller's own.

    Celery puts its environment variables before any configuration.
    """

    def connection_for_write(self, url: str | None = None, **options: Any) -> Any:
        return super().connection_for_write(url or self.conf["broker_url"], **options)


class Client:
    """Submits runs and reads them. Safe to share between threads and across forks.

    Settings come from the environment (`CELERIAC_REDIS_URL`) unless given. `agents` are only needed
    to check names before any worker has announced its own.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        *,
        settings: Settings | None = None,
        agents: Agents | None = None,
    ) -> None:
        if settings is None:
            settings = Settings.from_env({"CELERIAC_REDIS_URL": redis_url} if redis_url else None)
        self.store = RunStore(settings)
        self._agents = agents
        # Never the current app: the caller may well have a Celery app of their own.
        self._app = _Publisher("celeriac-client", set_as_current=False)
        config = publishing_config(settings)
        self._app.conf.update(config)
        self._app.backend_cls = config.get("result_backend")

    def submit(
        self,
        goal: str,
        *,
        agent: str,
        idempotency_key: str | None = None,
        principal: Principal | Mapping[str, Any] | None = None,
        metadata: Mapping[str, JsonValue] | None = None,
        on_finish: OnFinish | Mapping[str, str] | str | None = None,
    ) -> Run:
        """Accept a goal and return at once. From then on the run will end, whatever else fails.

        `on_finish` names a Celery task (on the queue `celery` unless an `OnFinish` says another)
        that is called with `result`, the `FinalResult` as a dict, once the run has ended: at least
        once, each time under a task id that begins with `<run>.finished`.

        The same `idempotency_key` (within a tenant) gives the same run. Raises `InvalidInput`,
        `AgentError` or `RedisUnavailable`; then nothing was written.
        """
        accepted = accept_goal(
            self.store,
            goal,
            agent=agent,
            agents=self._agents,
            principal=principal,
            metadata=metadata,
            idempotency_key=idempotency_key,
            on_finish=on_finish,
        )
        if accepted.created:
            store_started(self._app, self.store, accepted.run_id)
            publish(self._app, self.store, NextStep(accepted.run_id, 0))
        return Run(self.store, accepted.run_id, self._app)

    def get(self, run_id: str) -> Run:
        """The run of this id; `RunNotFound` where there is none."""
        run = Run(self.store, check_run_id(run_id), self._app)
        run.info()
        return run

    def list(self, status: RunStatus | str | None = None, *, limit: int = 100) -> list[RunInfo]:
        """Runs that haven't ended, then the last that have; at most `limit` are looked at."""
        if status not in (None, *RunStatus):
            raise InvalidInput(f"status is one of {', '.join(RunStatus)}")
        wanted = None if status is None else RunStatus(status)
        runs = (RunInfo.of(record) for record in self.store.list_runs(limit))
        return [info for info in runs if wanted in (None, info.status)]

    def ping(self, queue: str, *, timeout: float = 5.0) -> float | None:
        """Send a canary through a queue (`steps` or `tools`): the seconds that it took, or None.

        A worker can be up and deaf; one that answers has taken a task and reached Redis.
        """
        if queue not in ("steps", "tools"):
            raise InvalidInput("queue is steps or tools")
        token = uuid.uuid4().hex
        started = time.monotonic()
        name = {"steps": STEPS_QUEUE, "tools": TOOLS_QUEUE}[queue]
        try:
            self._app.send_task(PING, args=(token,), queue=name, expires=timeout)
        except OperationalError as error:
            raise RedisUnavailable(
                "the broker doesn't answer; check CELERIAC_BROKER_URL"
            ) from error
        if self.store.wait_for_ping(token, timeout):
            return time.monotonic() - started
        return None

    def close(self) -> None:
        """Close connections; the client opens new ones when it is used again."""
        close_backend(self._app)
        self._app.close()
        self.store.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Run:
    """A handle on one run. It holds nothing but the id: each question is asked of Redis."""

    def __init__(self, store: RunStore, run_id: str, app: Celery) -> None:
        self.id = run_id
        self._store = store
        self._app = app

    def __repr__(self) -> str:
        return f"Run({self.id!r})"

    def info(self) -> RunInfo:
        """Status, agent, step and times in one look."""
        return RunInfo.of(self._store.read_run(self.id))

    def status(self) -> RunStatus:
        return self.info().status

    def result(self, timeout: float | None = None) -> FinalResult:
        """Wait for the end, at most `timeout` seconds (None: as long as it takes).

        Raises `ResultTimeout` (a `TimeoutError`); the run goes on.
        """
        ends_at = None if timeout is None else time.monotonic() + timeout
        while True:
            # Taken before the look: an end between the two is what the wait then finds at once.
            after = self._store.last_event_id(self.id)
            result = self._store.read_result(self.id)
            if result is not None:
                return result
            left = LOOK_EVERY if ends_at is None else ends_at - time.monotonic()
            if left <= 0:
                raise ResultTimeout(f"run {self.id} hasn't ended within {timeout:g} s; it goes on")
            self._store.read_events(self.id, after, block=min(left, LOOK_EVERY))

    def events(self, after: str | None = None) -> Iterator[Event]:
        """Every event, then those to come as they happen; ends with the run.

        `after` is the id of the last event seen ("0", like None, for all); anything else is
        `InvalidInput`. Where the cap may have dropped events in between, at first or while they
        are read, a `gap` comes in their place: its id is that of the last event before it.
        """
        return self._follow(_check_event_id(after))

    def _follow(self, after: str) -> Iterator[Event]:
        while True:
            ended = self._store.read_run(self.id).stop_reason is not None
            found = self._store.read_events(self.id, after, block=None if ended else LOOK_EVERY)
            # Looked at after the read: an event that is still kept now was kept then.
            if found and self._may_have_gap(after):
                yield Event(id=after, at=time.time(), type="gap", run=self.id)
            for event in found:
                yield event
                after = event.id
            if ended and not found:
                return

    def _may_have_gap(self, after: str) -> bool:
        """Whether the event `after` has been dropped, and so perhaps some that followed it."""
        first = self._store.first_event(self.id)
        if first is None:
            return False
        if after == BEGINNING:
            return first.type != "run.created"
        return _order(first.id) > _order(after)

    def cancel(self, reason: str = "cancelled by the caller") -> None:
        """End the run now. Can't be lost, needs no worker, and is no error when done twice.

        Of `reason`, the first thousand characters are kept, in the run's `error`. Raises
        `RunFinished` where the run has ended otherwise.
        """
        if not isinstance(reason, str):
            raise InvalidInput("the reason of a cancel is a text")
        ended = cancel_run(self._store, self.id, scrub(reason[:MAX_REASON_CHARS]))
        if ended.outcome is Outcome.STALE:
            raise RunNotFound(f"no run {self.id}: nothing to cancel")
        if ended.outcome is Outcome.ALREADY and ended.stop_reason is not StopReason.CANCELLED:
            raise RunFinished(
                f"run {self.id} has already ended {ended.stop_reason}; nothing was changed"
            )

    def questions(self) -> dict[str, str]:
        """What the model asks the user and waits for: call id -> question."""
        return self._store.read_questions(self.id)

    def reply(self, text: str, *, call: str | None = None) -> None:
        """Answer what the model has asked (an agent with `clarify`); the run then goes on.

        `call` says which question, where several are open. Raises `InvalidInput` where there is no
        such question, or it was answered meanwhile.
        """
        if not isinstance(text, str) or not text.strip():
            raise InvalidInput("the reply is empty; say in words what the model wants to know")
        if len(text) > self._store.settings.max_goal_chars:
            raise InvalidInput(
                f"the reply has {len(text)} characters, at most "
                f"{self._store.settings.max_goal_chars} are accepted"
            )
        if call is not None and not isinstance(call, str):
            raise InvalidInput("call is the id of a question, such as '3.0'")
        publish(self._app, self._store, answer_question(self._store, self.id, text, call))

    def limits(self) -> Limits:
        """The limits of the run's agent, as the workers announce them; else those of the run."""
        record = self._store.read_run(self.id)
        return self._store.read_agents().get(record.agent) or record.limits or Limits()

    def resume(self, limits: Limits | None = None) -> None:
        """Take a run up again that ended `MAX_STEPS`, `TIMEOUT`, `BUDGET_EXHAUSTED` or `ERROR`.

        What it did stands: completed calls don't run again. `limits` (those of the agent unless
        given) count from here on: so many more steps, so much more time. Raises `RunFinished` where
        the run ended otherwise, and does nothing where it runs.
        """
        record = self._store.read_run(self.id)
        outcome = self._store.resume_run(record, limits or self.limits())
        if outcome is Outcome.FENCED:
            raise RunFinished(
                f"run {self.id} ended {record.stop_reason}, which can't be resumed; submit anew"
            )
        if outcome is Outcome.OK:
            publish(self._app, self._store, NextStep(self.id, record.step))

    def messages(self) -> list[dict[str, Any]]:
        """The history as it is stored, the goal first."""
        return self._store.read_messages(self.id)

    def trace(self) -> list[dict[str, Any]]:
        """What was sent to the model and what came back, decisions and results, in order."""
        return self._store.read_trace(self.id)


def _check_event_id(after: object) -> str:
    """The id as Redis writes it; ids that mean the beginning become `BEGINNING`."""
    if after is None or after == BEGINNING:
        return BEGINNING
    found = EVENT_ID.fullmatch(after) if isinstance(after, str) else None
    if found is None or max(map(int, found.groups())) >= 2**64:
        raise InvalidInput(
            "after is the id of an event, such as 1764480000000-0, or 0 for all events"
        )
    ms, number = map(int, found.groups())
    return f"{ms}-{number}" if ms or number else BEGINNING


def _order(event_id: str) -> tuple[int, int]:
    ms, _, number = event_id.partition("-")
    return int(ms), int(number)
