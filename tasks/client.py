"""What an application imports: submit a goal, follow it, read its result, cancel it."""

from __future__ import annotations

import copy
import itertools
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from celery import Celery
from kombu.exceptions import OperationalError
from pydantic import JsonValue

from runner.agents import Agents
from runner.errors import (
    CallNotFound,
    ConversationBusy,
    InvalidInput,
    PermissionDenied,
    RedisUnavailable,
    ResultTimeout,
    RunFinished,
    RunNotFound,
)
from runner.fork import fork_run
from runner.keys import check_run_id
from runner.loop import (
    Wait,
    answer_question,
    approve_call,
    cancel_run,
    deny_call,
)
from runner.models import (
    Approval,
    Event,
    FinalResult,
    Frozen,
    Limits,
    OnFinish,
    Principal,
    RunStatus,
    StopReason,
    ToolDecision,
    ToolResult,
)
from runner.reader import scrub
from runner.record import CallInfo, RunInfo, digest
from runner.recording import read_recording
from runner.render import clean
from runner.settings import LONGEST, STEPS_QUEUE, TOOLS_QUEUE, Settings
from runner.store import Outcome, Place, RunStore, no_such_run
from tasks.accept import (
    accept_goal,
    admit,
    check_agent,
    check_idempotency_key,
    check_principal,
    check_text,
    first_step,
    new_run_id,
)
from tasks.config import publishing_config
from tasks.deliver import check_backend, close_backend, forget, store_started
from tasks.feed import BEGINNING, Feed, may_have_gap
from tasks.hints import PING, let_scripts_send, publish

LOOK_EVERY = 2.0
"""Seconds that a reader waits in one request: well below the client's socket timeout."""

BETWEEN_READS = 0.01
"""Seconds between two reads of who waits for an end and sees other events: a run has many."""

MAX_REASON_CHARS = 1_000

NO_CALL = "of such a call (yet); a call's id is step and index, such as 3.0"

CURSOR = re.compile(r"(inf|[0-9]{1,16})\.(.{8,64})")

EVENT_ID = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")


class _Publisher(Celery):
    """An app that keeps to our settings where `CELERY_BROKER_URL` is set for the caller's own.

    Celery puts its environment variables before any configuration.
    """

    def connection_for_write(self, url: str | None = None, **options: Any) -> Any:
        return super().connection_for_write(url or self.conf["broker_url"], **options)


class Client:
    """Submits runs and reads them. Safe to share between threads and across forks.

    Settings come from the environment (`CELERIAC_REDIS_URL`) unless given; `SettingsError` says
    which can't be used. `agents` are only needed to check names before any worker has announced
    its own.

    With a `principal` it acts for that one: it submits in its name, and sees the runs of its tenant
    as if there were no others. Without one it is an operator's, and sees all.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        *,
        settings: Settings | None = None,
        agents: Agents | None = None,
        principal: Principal | Mapping[str, Any] | None = None,
    ) -> None:
        self.principal = check_principal(principal)
        if settings is None:
            settings = Settings.from_env({"CELERIAC_REDIS_URL": redis_url} if redis_url else None)
        self.store = RunStore(settings)
        self.feed = Feed(self.store)
        self._agents = agents
        # Never the current app: the caller may well have a Celery app of their own.
        self._app = _Publisher("celeriac-client", set_as_current=False)
        config = publishing_config(settings)
        self._app.conf.update(config)
        self._app.backend_cls = config.get("result_backend")
        if settings.result_backend:
            check_backend(self._app)
        let_scripts_send(self._app, self.store)

    def for_principal(self, principal: Principal | Mapping[str, Any]) -> Client:
        """The same client acting for somebody: one for each request, say. It shares connections.

        Raises `PermissionDenied` where this one acts for somebody else already.
        """
        made = copy.copy(self)
        made.principal = self._acting_for(principal)
        return made

    def _acting_for(self, given: Principal | Mapping[str, Any] | None) -> Principal | None:
        principal = check_principal(given)
        if self.principal is not None and principal not in (None, self.principal):
            raise PermissionDenied(
                "this client acts for another principal; take one that is made for yours"
            )
        return principal or self.principal

    def submit(
        self,
        goal: str,
        *,
        agent: str,
        idempotency_key: str | None = None,
        principal: Principal | Mapping[str, Any] | None = None,
        metadata: Mapping[str, JsonValue] | None = None,
        on_finish: OnFinish | Mapping[str, str] | str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        after: str | None = None,
        conversation: str | None = None,
        when_busy: str = "reject",
        same_request: bool = False,
    ) -> Run:
        """Accept a goal and return at once. From then on the run will end, whatever else fails.

        `on_finish` names a Celery task (on the queue `celery` unless an `OnFinish` says another)
        that is called with `result`, the `FinalResult` as a dict, once the run has ended: at least
        once, each time under a task id that begins with `<run>.finished`.

        What was said before the goal: `messages` are chat-completions dicts of user, assistant and
        tool, and `after` is the id of an ended run of the same tenant, whose history the new one
        goes on from. A `conversation` (a name within the tenant) does that by itself, and has one
        live run: a second submit is `ConversationBusy`, or waits for its turn
        (`when_busy="enqueue"`), or ends the live one and takes over (`"interrupt"`).

        The same `idempotency_key` (within a tenant) gives the same run, whatever else is given;
        with `same_request` it raises `KeyReused` where that was another request. Raises
        `InvalidInput` (`PermissionDenied` where the principal may not use the agent), `AgentError`
        or `RedisUnavailable`; then nothing was written.
        """
        accepted = accept_goal(
            self.store,
            goal,
            agent=agent,
            agents=self._agents,
            principal=self._acting_for(principal),
            metadata=metadata,
            idempotency_key=idempotency_key,
            on_finish=on_finish,
            messages=messages,
            after=after,
            conversation=conversation,
            when_busy=when_busy,
            same_request=same_request,
        )
        if accepted.created:
            store_started(self._app, self.store, accepted.run_id)
            publish(self._app, self.store, accepted.coming)
        return self._handle(accepted.run_id)

    def get(self, run_id: str) -> Run:
        """The run of this id; `RunNotFound` where there is none, or it is another tenant's."""
        record = self.store.read_run(check_run_id(run_id))
        if self.principal is not None and record.tenant != self.principal.tenant:
            raise no_such_run(run_id)
        return self._handle(run_id)

    def _handle(self, run_id: str) -> Run:
        return Run(self.store, run_id, self._app, self.principal)

    def fork(self, run_id: str, *, step: int, agent: str | None = None) -> Run:
        """A new run that begins where `step` of this one began: what came before it is kept.

        The agent is the same unless named. Its limits count from there: so many more steps, and a
        deadline of its own. `metadata["forked_from"]` says where it comes from. Raises
        `RunNotFound`, `AgentError`, or `InvalidInput` where the run has no such step
        (`PermissionDenied` where the run's principal may not use the agent).
        """
        recording = read_recording(self.store, self.get(run_id).id)
        record = recording.run
        name = record.agent if agent is None else check_agent(agent)
        own = record.limits if name == record.agent else None
        known = admit(self.store, name, self._agents, record.principal)
        limits = known or own or Limits()
        new_id = new_run_id()
        fork_run(self.store, recording, step=step, run_id=new_id, agent=name, limits=limits)
        store_started(self._app, self.store, new_id)
        publish(self._app, self.store, first_step(self.store, new_id, step))
        return self._handle(new_id)

    def list(self, status: RunStatus | str | None = None, *, limit: int = 100) -> list[RunInfo]:
        """Runs that haven't ended, then the last that have; at most `limit` are looked at."""
        if status not in (None, *RunStatus):
            raise InvalidInput(f"status is one of {', '.join(RunStatus)}")
        if not 1 <= limit < LONGEST:  # Redis would count from the other end, or not at all
            raise InvalidInput("limit is how many runs are looked at: 1 or more")
        wanted = None if status is None else RunStatus(status)
        tenant = None if self.principal is None else self.principal.tenant
        runs = (RunInfo.of(record) for record in self.store.list_runs(limit, tenant=tenant))
        return [info for info in runs if wanted in (None, info.status)]

    def browse(
        self,
        *,
        status: RunStatus | str | None = None,
        stop_reason: StopReason | str | None = None,
        agent: str | None = None,
        part_of_id: str = "",
        limit: int = 100,
        cursor: str | None = None,
    ) -> RunPage:
        """The next `limit` runs in the order of `list`; `cursor` is that of the page before.

        No run is left out, whatever starts or ends meanwhile; one that ends may come twice.
        """
        if status not in (None, *RunStatus):
            raise InvalidInput(f"status is one of {', '.join(RunStatus)}")
        tenant = None if self.principal is None else self.principal.tenant
        place = None if cursor is None else _read_cursor(cursor)
        found = self.store.browse_runs(
            place,
            tenant=tenant,
            status=status,
            stop_reason=stop_reason,
            agent=agent,
            part_of_id=part_of_id,
        )
        # One more tells whether there are more.
        page = list(itertools.islice(found, limit + 1))
        more = page[limit - 1][0] if len(page) > limit else None
        return RunPage(
            runs=tuple(RunInfo.of(record) for _, record in page[:limit]),
            cursor=None if more is None else f"{more.score:.0f}.{more.run_id}",
        )

    def delete(self, run_id: str, *, cancel: bool = False) -> bool:
        """Remove a run and whatever points to it; False where there was none (any more).

        A run that hasn't ended is refused (`InvalidInput`), or ended first with `cancel`. Runs that
        went on from this one have its history in theirs, and keep it.
        """
        check_run_id(run_id)
        if self.principal is not None:
            try:
                self.get(run_id)
            except RunNotFound:
                return False
        if cancel:
            self._end(run_id, "deleted")
        outcome = self.store.delete_run(run_id)
        if outcome is Outcome.BUSY:
            raise InvalidInput(
                f"run {run_id} hasn't ended; cancel it first, or delete it with cancel=True"
            )
        forget(self._app, run_id)
        return outcome is Outcome.OK

    def _end(self, run_id: str, reason: str) -> None:
        cancel_run(self.store, run_id, reason)
        publish(self._app, self.store, Wait(run_id))

    def prune(
        self,
        *,
        older_than: float = 0.0,
        stop_reason: StopReason | str | None = None,
        dry_run: bool = False,
    ) -> tuple[str, ...]:
        """Delete the runs that ended at least `older_than` seconds ago; answers their ids.

        `stop_reason`: only those that ended so. `dry_run`: nothing is deleted. A run whose end is
        still to be delivered to somebody is left, and so is another tenant's.
        """
        if not 0 <= older_than < LONGEST:
            raise InvalidInput("older_than is a number of seconds, 0 or more")
        if stop_reason is not None and stop_reason not in set(StopReason):
            raise InvalidInput(f"stop_reason is one of {', '.join(StopReason)}")
        wanted = None if stop_reason is None else StopReason(stop_reason)
        tenant = None if self.principal is None else self.principal.tenant
        found = tuple(self.store.ended_before(older_than, wanted, tenant=tenant))
        if dry_run:
            return found
        return tuple(run_id for run_id in found if self._delete_ended(run_id))

    def _delete_ended(self, run_id: str) -> bool:
        if self.store.delete_run(run_id) is not Outcome.OK:
            return False  # taken up again meanwhile, or deleted by somebody else
        forget(self._app, run_id)
        return True

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
        self.feed.close()
        self.store.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RunPage(Frozen):
    """Some runs, and the cursor from which to go on; None where there are no more."""

    runs: tuple[RunInfo, ...]
    cursor: str | None


class RunDetails(Frozen):
    """One run in whole: what it was asked, how far it is, what it waits for and how it ended.

    `limits` are None until a worker has taken the run up. `questions` is call id -> question.
    """

    info: RunInfo
    goal: str | None
    limits: Limits | None
    tool_calls: int
    result: FinalResult | None
    approvals: tuple[Approval, ...]
    questions: dict[str, str]


class Run:
    """A handle on one run. It holds nothing but the id: each question is asked of Redis."""

    def __init__(
        self, store: RunStore, run_id: str, app: Celery, principal: Principal | None = None
    ) -> None:
        self.id = run_id
        self._store = store
        self._app = app
        self._principal = principal

    def __repr__(self) -> str:
        return f"Run({self.id!r})"

    def info(self) -> RunInfo:
        """Status, agent, step and times in one look."""
        return RunInfo.of(self._store.read_run(self.id))

    def status(self) -> RunStatus:
        return self.info().status

    def details(self) -> RunDetails:
        """All that there is to say of it beside its history, its trace and its events."""
        record = self._store.read_run(self.id)
        return RunDetails(
            info=RunInfo.of(record),
            goal=self._store.read_goal(record),
            limits=record.limits,
            tool_calls=record.tool_calls,
            result=self._store.result_of(record),
            approvals=tuple(self.approvals()),
            questions=self.questions(),
        )

    def result(self, timeout: float | None = None) -> FinalResult:
        """Wait for the end, at most `timeout` seconds (None: as long as it takes).

        Raises `ResultTimeout` (a `TimeoutError`); the run goes on.
        """
        ends_at = None if timeout is None else time.monotonic() + timeout
        while True:
            # Taken before the look: an end between the two is what the wait then finds at once.
            after = self.last_event_id()
            result = self.read_result()
            if result is not None:
                return result
            left = LOOK_EVERY if ends_at is None else ends_at - time.monotonic()
            if left <= 0:
                raise ResultTimeout(f"run {self.id} hasn't ended within {timeout:g} s; it goes on")
            self._wait_for_end(after, min(left, LOOK_EVERY))

    def _wait_for_end(self, after: str, seconds: float) -> None:
        """Wait until the end is told behind the event `after`, at most so long."""
        ends_at = time.monotonic() + seconds
        while (left := ends_at - time.monotonic()) > 0:
            events = self._store.read_events(self.id, after, block=left)
            if not events or any(each.type == "run.finished" for each in events):
                return
            after = events[-1].id
            # Many events of a busy run come with one read.
            time.sleep(min(left, BETWEEN_READS))

    def read_result(self) -> FinalResult | None:
        """The result as it is now: None while the run runs."""
        return self._store.read_result(self.id)

    def last_event_id(self) -> str:
        """The id of the newest event, from which to follow what is to come."""
        return self._store.last_event_id(self.id)

    def events(self, after: str | None = None) -> Iterator[Event]:
        """Every event, then those to come as they happen; ends with the run.

        `after` is the id of the last event seen ("0", like None, for all); anything else is
        `InvalidInput`. Where the cap may have dropped events in between, at first or while they
        are read, a `gap` comes in their place: its id is that of the last event before it.
        """
        return self._follow(check_event_id(after))

    def _follow(self, after: str) -> Iterator[Event]:
        while True:
            ended = self.has_ended()
            found = self.read_page(after, block=None if ended else LOOK_EVERY)
            for event in found:
                yield event
                after = event.id
            if ended and not found:
                return

    def has_ended(self) -> bool:
        return self.info().stop_reason is not None

    def read_page(self, after: str, *, block: float | None = None) -> list[Event]:
        """The next events behind `after`, with a `gap` first where some may have been dropped."""
        found = self._store.read_events(self.id, after, block=block)
        # Looked at after the read: an event that is still kept now was kept then.
        if found and may_have_gap(self._store.first_events([self.id])[0], after):
            return [Event(id=after, at=time.time(), type="gap", run=self.id), *found]
        return found

    def cancel(self, reason: str = "cancelled by the caller") -> None:
        """End the run now. Can't be lost, needs no worker, and is no error when done twice.

        Of `reason`, the first thousand characters are kept, in the run's `error`. Raises
        `RunFinished` where the run has ended otherwise.
        """
        if not isinstance(reason, str):
            raise InvalidInput("the reason of a cancel is a text")
        ended = cancel_run(self._store, self.id, scrub(reason[:MAX_REASON_CHARS]))
        # Others may have the places that it held, and its conversation goes on.
        publish(self._app, self._store, Wait(self.id))
        if ended.outcome is Outcome.STALE:
            raise RunNotFound(f"no run {self.id}: nothing to cancel")
        if ended.outcome is Outcome.ALREADY and ended.stop_reason is not StopReason.CANCELLED:
            raise RunFinished(
                f"run {self.id} has already ended {ended.stop_reason}; nothing was changed"
            )

    def send(self, text: str, *, idempotency_key: str | None = None) -> None:
        """Say something to a run that hasn't ended: its next step has it, behind whole blocks only.

        A run that would end with an answer goes on instead, within its limits. The same
        `idempotency_key` is one message, however often it is sent. Raises `RunFinished`.
        """
        check_text("message", text, self._store.settings.max_goal_chars)
        key = check_idempotency_key(idempotency_key)
        operation = uuid.uuid4().hex if key is None else digest(key)
        outcome = self._store.send_message(self.id, operation, clean(text))
        if outcome is Outcome.BUSY:
            raise InvalidInput(
                f"run {self.id} has many messages that it hasn't read; wait until its next step"
            )
        if outcome not in (Outcome.OK, Outcome.DUPLICATE):
            info = self.info()  # raises where there is no such run
            raise RunFinished(
                f"run {self.id} has already ended {info.stop_reason}; go on from it: "
                f"submit(goal, agent={info.agent!r}, after={self.id!r})"
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

    def approvals(self) -> list[Approval]:
        """The calls that wait for somebody to approve or deny them, in call order."""
        return self._store.read_approvals(self.id)

    def approve(self, call: str, *, digest: str | None = None, by: str | None = None) -> None:
        """Let a call run that needs an approval. Nobody can take that back.

        `digest` is that of the `Approval` that was shown: a call with other arguments isn't
        approved. Who decided is kept: the client's principal, or `by` where it has none. Raises
        `AlreadyDecided` where somebody was faster or the time for it is over, `RunFinished`, or
        `InvalidInput` where no such call waits; then nothing was changed.
        """
        by = self._decider(by)
        coming = approve_call(self._store, self.id, call, by=by, digest=digest)
        publish(self._app, self._store, coming)

    def deny(
        self, call: str, reason: str, *, digest: str | None = None, by: str | None = None
    ) -> None:
        """Refuse a call that needs an approval: the model reads the reason, and the run goes on.

        Of `reason`, the first thousand characters are kept. Raises as `approve` does.
        """
        if not isinstance(reason, str) or not reason.strip():
            raise InvalidInput("the reason is empty; say in words why the call is denied")
        by, told = self._decider(by), scrub(reason[:MAX_REASON_CHARS])
        coming = deny_call(self._store, self.id, call, told, by=by, digest=digest)
        publish(self._app, self._store, coming)

    def _decider(self, by: str | None) -> str | None:
        if self._principal is None:
            if by is not None and not (isinstance(by, str) and len(by) <= MAX_REASON_CHARS):
                raise InvalidInput(f"by is a text of at most {MAX_REASON_CHARS} characters")
            return by if by is None else scrub(by)
        if by not in (None, self._principal.id):
            raise PermissionDenied("this client acts for its principal, and decides in that name")
        return self._principal.id

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
        if outcome is Outcome.BUSY:
            raise ConversationBusy(
                f"the conversation of run {self.id} has gone on without it; submit to the "
                "conversation, which has its history"
            )
        if outcome is Outcome.FENCED:
            raise RunFinished(
                f"run {self.id} ended {record.stop_reason}, which can't be resumed; submit anew"
            )
        if outcome is Outcome.OK:
            publish(self._app, self._store, Wait(self.id))

    def messages(self) -> list[dict[str, Any]]:
        """The history as it is stored, the goal first."""
        return self._store.read_messages(self.id)

    def whole_result(self, call: str) -> str:
        """The text of a call's result, also where it was cut for the model. `call`: its id, `3.0`.

        Of a text that is longer than the setting `max_result_chars`, the head with a marker. Raises
        `CallNotFound` where there is no result of such a call (yet).
        """
        text = self._store.read_whole_result(self.id, call) if isinstance(call, str) else None
        if text is None:
            raise CallNotFound(f"run {self.id} has no result {NO_CALL}")
        return text

    def call(self, call: str) -> CallInfo:
        """A call's arguments and its result, as the trace keeps them.

        Raises `CallNotFound` where there is no such call.
        """
        decision: ToolDecision | None = None
        result: ToolResult | None = None
        for entry in self.trace():
            for each in entry.get("decisions") or ():
                if each["call_id"] == call:
                    given = {name: each[name] for name in ToolDecision.model_fields}
                    decision, result = ToolDecision.model_validate(given), None
            results = [entry["result"]] if entry["kind"] == "result" else entry.get("results") or ()
            for each in results:
                if each["call_id"] == call:
                    result = result or ToolResult.model_validate(each)
        if decision is None:
            self.info()  # raises: there is no such run
            raise CallNotFound(f"run {self.id} knows nothing {NO_CALL}")
        decided = self._store.read_decided(self.id, call)
        return CallInfo(decision=decision, result=result, decided=decided)

    def trace(self) -> list[dict[str, Any]]:
        """What was sent to the model and what came back, decisions and results, in order."""
        return self._store.read_trace(self.id)


def _read_cursor(cursor: str) -> Place:
    found = CURSOR.fullmatch(cursor) if isinstance(cursor, str) else None
    if found is None:
        raise InvalidInput("cursor is that of the page before; leave it out for the first")
    return Place(float(found[1]), found[2])


def check_event_id(after: object) -> str:
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
