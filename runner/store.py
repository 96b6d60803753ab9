"""The run's record in Redis. It changes only through the Lua transitions, one method for each.

Hints on the queue may be lost or doubled; what these methods answer is the truth. Every method is
safe to call twice, since the client sends a script again when a reply is lost.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict, Unpack

import redis
from pydantic import JsonValue, TypeAdapter
from redis.exceptions import NoScriptError

from runner import keys
from runner.connection import connect, reporting_redis_errors, sender_of
from runner.errors import RunNotFound, SchemaError
from runner.history import Histories
from runner.limits import QUEUE_LIMIT, write_limits
from runner.models import (
    SCHEMA_VERSION,
    Approval,
    Decided,
    Event,
    Evidence,
    FinalResult,
    Limits,
    OnFinish,
    Principal,
    RunError,
    StopReason,
    ToolDecision,
    ToolResult,
    Usage,
)
from runner.record import (
    RunOfCall,
    RunRecord,
    call_digest,
    call_summary,
    digest,
    dump,
    flat,
    limit_fields,
    ms,
    pairs,
    parse_entries,
    parse_event,
    parse_record,
    parse_run_of_call,
    result_trace,
    usage_args,
)
from runner.redact import redact
from runner.render import cut
from runner.scripts import Envelope, Envelopes, load_script, script_names
from runner.settings import STEPS_QUEUE, TOOLS_QUEUE, Settings

MAX_DEATHS = 3
"""Attempts of one step that may die before the run is given up as poisoned."""

MAX_RELEASES = 10
"""Graceful stops of one step or call that cost it no attempt."""

HOST = socket.gethostname()

MAX_INBOX = 100
"""Messages to one run that may wait for its next step."""

MAX_QUEUED_RUNS = 100
"""Runs of one conversation that may wait behind the live one."""

MAX_BLOCK = 4.0
"""Seconds that a read waits in Redis at most."""

TAKEN_FOR = 3600.0
"""Seconds for which it is known which hint a process has taken by itself."""

CLAIM = 2.0
"""Seconds for which a worker that recovers a run keeps others from doing the same."""

MAX_LOOK_WAIT = 60.0
"""Seconds at most between two looks at a run that isn't finished."""

PAGE = 500
"""Runs whose tenant is looked up in one request."""

OVERLAP = 50
"""Places in the index of runs by which a look begins before the place where it would go on."""

MAX_CROWDED = 50
"""Limits that one look for free places takes in at most, drawn at random."""

LIMIT_KEYS = [keys.slots(""), keys.waiting(""), keys.CROWDED]
"""Where the places of limits are; a script puts a limit's name behind the first two."""

ANNOUNCED_FOR = 300
"""Seconds for which an agent is known after a worker has announced it, as it does each minute."""

EVIDENCE = TypeAdapter(tuple[Evidence, ...])


class Outcome(StrEnum):
    """Every word that a transition can answer."""

    ALREADY = "ALREADY"
    ANSWERED = "ANSWERED"
    BUSY = "BUSY"
    CALLS = "CALLS"
    CANCELLED = "CANCELLED"
    CAPPED = "CAPPED"
    CREATED = "CREATED"
    DECIDED = "DECIDED"
    DELIVER = "DELIVER"
    DUPLICATE = "DUPLICATE"
    EXHAUSTED = "EXHAUSTED"
    EXISTS = "EXISTS"
    EXPIRED = "EXPIRED"
    FAILED = "FAILED"
    FENCED = "FENCED"
    LAST = "LAST"
    LOST = "LOST"
    NEWER = "NEWER"
    OK = "OK"
    PARKED = "PARKED"
    POISONED = "POISONED"
    STALE = "STALE"
    STEP = "STEP"
    UNDECIDED = "UNDECIDED"
    WAIT = "WAIT"


class Place(NamedTuple):
    """Where a run stands in the index: those that haven't ended first, then the last ended.

    `score` is when its record expires, in ms; infinite until it ends.
    """

    score: float
    run_id: str


@dataclass(frozen=True, slots=True)
class EndedRun:
    """Whether this end was the first, the stop reason that stands, and whether somebody waits.

    `following` is the run that begins because of it. `STEP`: it was no end, since the user had said
    something meanwhile; `step` is to be taken.
    """

    outcome: Outcome
    stop_reason: StopReason | None
    promised: bool
    following: str | None = None
    step: int = 0


@dataclass(frozen=True, slots=True)
class BegunStep:
    """An attempt of a step (`OK`) with the history, or the record of a run that has to stop."""

    outcome: Outcome
    record: RunRecord
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BegunCall:
    """An attempt of a call (`OK`), or one that may not be made and why. `attempt` counts starts."""

    outcome: Outcome
    record: RunOfCall
    decision: ToolDecision
    index: int
    attempt: int
    epoch: int


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call as `commit_step` stores it: `result` is there only where the runtime refused it.

    `question`: it is for the user, whose reply is its result; no worker runs it.
    `needs_approval`: none does before somebody has approved it, within `approval_timeout` seconds.
    `limits` are those that it needs a place of, by name: how many at once, or for a rate
    `<starts>/<ms>`.
    """

    provider_id: str
    decision: ToolDecision
    starts: int
    result: ToolResult | None = None
    question: str | None = None
    needs_approval: bool = False
    approval_timeout: float | None = None
    limits: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return call_digest(self.decision.name, self.decision.arguments)


class Hint(NamedTuple):
    """What a message on a queue is of: a step, or a call of it by its index."""

    run_id: str
    step: int
    call: int = 0

    @classmethod
    def read(cls, trace_id: str) -> Hint:
        run_id, *numbers = trace_id.split(".")
        return cls(run_id, *map(int, numbers))


@dataclass(frozen=True, slots=True)
class Taken:
    """A hint that was taken with its call: begun, or why there is nothing to do."""

    run_id: str
    begun: BegunCall | Outcome


class Turn(TypedDict):
    """What a step commits: the model's turn, and the calls that it asks for.

    At most `parallel` of these are in flight; `invalid` counts those that are refused.
    `fingerprint` is the agent's; `warning` is of budgets; fields called as in `hidden` are hidden
    in the trace.
    """

    messages: Sequence[dict[str, Any]]
    calls: Sequence[OpenCall]
    parallel: int
    invalid: int
    usage: Usage
    trace: dict[str, Any]
    event: dict[str, Any]
    fingerprint: str
    warning: NotRequired[Mapping[str, Any] | None]
    hidden: NotRequired[frozenset[str]]


class WithResult(TypedDict, total=False):
    """What may come with a call's result.

    `operation`: the same for each time that this is tried. `final`: its data is the run's answer.
    `parts` follow the block as a user message. A result that no attempt brings is taken only from a
    call that `waits` in that state, and with these arguments (`digest`); `decided`: it is a denial,
    of which the first stands. `whole` is the text of a result that was cut for the model; of that,
    the setting `max_result_chars` is kept for the user. Fields called as in `hidden` are hidden in
    that and in the trace. `fatal` ends the run.
    """

    fatal: RunError | None
    final: bool
    parts: Sequence[dict[str, Any]]
    hidden: frozenset[str]
    operation: str | None
    waits: str | None
    decided: Decided | None
    digest: str | None
    whole: str | None


@dataclass(frozen=True, slots=True)
class Lost:
    """What `recover_run` found: the hints to publish again, or the record past its deadline.

    `UNDECIDED`: the calls whose time to be approved is over. `BUSY`: the run waits for `live` to
    end, which it was to interrupt.
    """

    outcome: Outcome
    step: int = 0
    calls: tuple[int, ...] = ()
    record: RunRecord | None = None
    live: str = ""


class RunStore:
    """Reads and moves runs. One client for each process id, made on first use, never forked.

    `client` hands in one made elsewhere (tests on fakeredis). `granted` are the holders (step or
    call, as in `keys.trace_id`) that a transition has given their turn, and whose hints whoever
    made the transition is to publish. `envelopes` answers how the scripts send the hints of what
    they open by themselves; where it answers None, whoever calls them publishes these.
    """

    def __init__(self, settings: Settings, client: redis.Redis | None = None) -> None:
        self.settings = settings
        self._given = client
        self._clients: dict[tuple[int, str], redis.Redis] = {}
        self._scripts: dict[tuple[int, Envelopes | None], dict[str, Any]] = {}
        self.envelopes: Callable[[], Envelopes | None] = lambda: None
        self.granted: deque[str] = deque()
        self._histories = Histories()

    def _client(self, url: str) -> redis.Redis:
        key = os.getpid(), url
        client = self._clients.get(key)
        if client is None:
            client = self._clients[key] = connect(url)
        return client

    @property
    def redis(self) -> redis.Redis:
        return self._given or self._client(self.settings.redis_url)

    def close(self) -> None:
        for url in (self.settings.redis_url, self.settings.queue_url):
            client = self._clients.pop((os.getpid(), url), None)
            if client is not None:
                client.close()

    def connect_ahead(self, count: int) -> None:
        """Make so many connections now: a burst of threads would make them all at once.

        Raises `RedisUnavailable`.
        """
        pool = self.redis.connection_pool
        with reporting_redis_errors():
            made = [pool.get_connection() for _ in range(count)]
        for each in made:
            pool.release(each)

    def check(self) -> None:
        """Raise `RedisUnavailable` unless a Redis server answers at the configured address."""
        with reporting_redis_errors():
            self.redis.ping()

    def eviction_policy(self) -> str:
        """What the server does when its memory is full."""
        policy: str = self._ask("info", "memory")["maxmemory_policy"]
        return policy

    # --- the run as a whole -----------------------------------------------------------------------

    def create_run(
        self,
        *,
        run_id: str,
        agent: str,
        messages: Sequence[dict[str, Any]],
        limits: Limits | None = None,
        principal: Principal | None = None,
        metadata: Mapping[str, JsonValue] | None = None,
        idempotency_key: str | None = None,
        on_finish: OnFinish | None = None,
        promised: bool = False,
        after: str | None = None,
        conversation: str | None = None,
        when_busy: str = "reject",
        request: str = "",
        traceparent: str = "",
    ) -> tuple[Outcome, str]:
        """Write the record of a run. `limits` None: the first worker adopts the agent's own.

        `request` stands for what was asked for, to be compared where the key comes again.

        `promised`: the run stays due after its end until `settle_run`. `after` is the ended run
        whose history it goes on from; where that isn't there (`STALE`) or hasn't ended (`BUSY`),
        nothing is written. In a `conversation` that has a live run it is refused (`BUSY`), or waits
        for its turn (`WAIT`); then the id is that of the live one. The last of `messages` is the
        goal. `traceparent` is the W3C trace context of whoever submits.
        """
        tenant = principal.tenant if principal else ""
        record: dict[str, str | int] = {
            "schema": SCHEMA_VERSION,
            "agent": agent,
            "tenant": tenant,
            "principal": principal.model_dump_json() if principal else "",
            "metadata": dump(dict(metadata or {})),
            "on_finish": on_finish.model_dump_json() if on_finish else "",
            "promised": int(promised),
            "to_backend": int(bool(self.settings.result_backend)),
        }
        if conversation is not None:
            record["conversation"] = conversation
        if idempotency_key is not None:
            record["request"] = request
        if traceparent:
            record["traceparent"] = traceparent
        if limits:
            record |= limit_fields(limits)
        timeout = ms((limits or Limits()).timeout)
        ttl = timeout + 2 * ms(self.settings.retention) if idempotency_key else 0
        outcome, *known_ids = self._run(
            "create_run",
            [
                keys.run(run_id),
                keys.messages(run_id),
                keys.events(run_id),
                keys.DUE,
                keys.RUNS,
                keys.idempotency(tenant, digest(idempotency_key or "")),
                keys.conversation(tenant, digest(conversation or "")),
            ],
            [
                run_id,
                ttl,
                timeout,
                ms(self.settings.hint_grace),
                self.settings.max_events,
                dump({"agent": agent}),
                len(messages),
                tenant,
                after or "",
                "" if conversation is None else when_busy,
                MAX_QUEUED_RUNS,
                dump({"reason": "CONVERSATION"}),
                *map(dump, messages),
                *flat(record),
            ],
        )
        return outcome, str(known_ids[-1])

    def end_run(
        self,
        run_id: str,
        stop_reason: StopReason,
        *,
        epoch: int | None = None,
        held: bool = False,
        answer: JsonValue = None,
        error: RunError | None = None,
        limit: str | None = None,
        message: dict[str, Any] | None = None,
        closer: str,
        usage: Usage | None = None,
        steps: int = 0,
        trace: dict[str, Any] | None = None,
        answered: dict[str, Any] | None = None,
    ) -> EndedRun:
        """End a run once: as the holder of its step, or from outside.

        With an `epoch` only as long as it is the run's: an end that comes late doesn't hit a run
        that was taken up again meanwhile. A cancel has none.
        """
        data = {"stop_reason": stop_reason, "ok": stop_reason is StopReason.COMPLETED}
        reply = self._run(
            "end_run",
            [
                keys.run(run_id),
                keys.messages(run_id),
                keys.calls(run_id),
                keys.results(run_id),
                keys.evidence(run_id),
                keys.events(run_id),
                keys.trace(run_id),
                keys.DUE,
                keys.RUNS,
                keys.view(run_id),
                keys.whole(run_id),
                keys.inbox(run_id),
                keys.sent(run_id),
                *LIMIT_KEYS,
            ],
            [
                run_id,
                "" if epoch is None else epoch,
                stop_reason,
                "" if answer is None else dump(answer),
                error.model_dump_json() if error else "",
                limit or "",
                dump(message) if message else "",
                dump(closer),
                ms(self.settings.retention_of(stop_reason)),
                self.settings.max_events,
                *usage_args(usage),
                steps,
                dump(trace) if trace else "",
                dump(data if limit is None else data | {"limit": limit}),
                keys.NUDGE,
                ms(self.settings.hint_grace),
                int(held),
                dump(answered) if answered else "",
            ],
        )
        if reply[0] is Outcome.STEP:
            return EndedRun(reply[0], None, promised=False, step=int(reply[1]))
        stands = StopReason(reply[1]) if len(reply) > 1 else None
        promised, following = reply[2:] or ("", "")
        return EndedRun(reply[0], stands, promised == "1", following or None)

    def resume_run(self, record: RunRecord, limits: Limits) -> Outcome:
        """Take an ended run up again; `limits` count from here on."""
        run_id = record.run_id
        tokens, used = record.usage.total_tokens, record.tool_calls
        raised = limits.model_copy(
            update={
                "max_steps": record.step + limits.max_steps,
                "max_tool_calls": used + limits.max_tool_calls,
                "max_tokens": limits.max_tokens and tokens + limits.max_tokens,
                "max_cost": limits.max_cost and (record.usage.cost or 0.0) + limits.max_cost,
            }
        )
        return self._word(
            "resume_run",
            [
                keys.run(run_id),
                keys.messages(run_id),
                keys.evidence(run_id),
                keys.events(run_id),
                keys.trace(run_id),
                keys.DUE,
                keys.RUNS,
                keys.view(run_id),
                keys.whole(run_id),
                keys.sent(run_id),
            ],
            [
                run_id,
                record.resumed,
                ms(limits.timeout),
                ms(self.settings.hint_grace),
                self.settings.max_events,
                ms(self.settings.retention),
                dump(_resumption(record, limits)),
                *flat(limit_fields(raised)),
                "promised",
                int(record.on_finish is not None or bool(self.settings.result_backend)),
                "to_backend",
                int(bool(self.settings.result_backend)),
            ],
        )

    def fork_run(
        self,
        *,
        run_id: str,
        source: str = "",
        agent: str,
        step: int,
        messages: Sequence[dict[str, Any]],
        evidence: Sequence[Evidence],
        trace: dict[str, Any],
        limits: Limits,
        principal: Principal | None,
        metadata: Mapping[str, JsonValue],
        goal: int = 0,
    ) -> Outcome:
        """Write the record of a run that begins at `step`; `trace` says where it comes from.

        It has too what is kept whole of the results of `source` before that step. `goal` is the
        place of the goal among `messages`.
        """
        record: dict[str, str | int] = {
            "schema": SCHEMA_VERSION,
            "agent": agent,
            "tenant": principal.tenant if principal else "",
            "principal": principal.model_dump_json() if principal else "",
            "metadata": dump(dict(metadata)),
            "promised": int(bool(self.settings.result_backend)),
            "to_backend": int(bool(self.settings.result_backend)),
            "goal": goal,
            **limit_fields(limits),
        }
        return self._word(
            "fork_run",
            [
                keys.run(run_id),
                keys.messages(run_id),
                keys.evidence(run_id),
                keys.events(run_id),
                keys.trace(run_id),
                keys.DUE,
                keys.RUNS,
                keys.whole(run_id),
                keys.whole(source),
            ],
            [
                run_id,
                step,
                ms(limits.timeout),
                ms(self.settings.hint_grace),
                self.settings.max_events,
                dump({"agent": agent}),
                dump(trace),
                EVIDENCE.dump_json(tuple(evidence)).decode() if evidence else "",
                len(messages),
                *map(dump, messages),
                *flat(record),
            ],
        )

    def settle_run(self, record: RunRecord) -> Outcome:
        """Say that what the run promised at this end has been delivered."""
        run_id = record.run_id
        return self._word("settle_run", [keys.run(run_id), keys.DUE], [run_id, record.resumed])

    def send_message(self, run_id: str, operation: str, text: str) -> Outcome:
        """Keep what the user says for the run's next step; once for each operation."""
        return self._word(
            "send_message",
            [keys.run(run_id), keys.inbox(run_id), keys.sent(run_id), keys.events(run_id)],
            [
                operation,
                dump({"role": "user", "content": text}),
                MAX_INBOX,
                self.settings.max_events,
                dump({"chars": len(text)}),
            ],
        )

    def delete_run(self, run_id: str) -> Outcome:
        """Remove an ended run and what points to it; `BUSY` while it hasn't ended."""
        return self._word(
            "delete_run",
            [
                keys.run(run_id),
                keys.messages(run_id),
                keys.calls(run_id),
                keys.results(run_id),
                keys.evidence(run_id),
                keys.events(run_id),
                keys.trace(run_id),
                keys.inbox(run_id),
                keys.sent(run_id),
                keys.DUE,
                keys.RUNS,
                keys.view(run_id),
                keys.whole(run_id),
            ],
            [run_id],
        )

    # --- hints ------------------------------------------------------------------------------------

    def wait_for_hint(self, kind: Literal["step", "call"], seconds: float) -> Hint | None:
        """Take the next hint of a kind off its queue, and wait for it if need be; None for none.

        Only where the scripts send hints by themselves: elsewhere the queues are Celery's alone.
        Nothing is written down: that is for who begins it. One that is popped by a process that
        dies is lost like any, and recovery brings it back.
        """
        hints: Envelope = getattr(self._hints(), kind)
        with reporting_redis_errors():
            found = sender_of(self.redis).send("BRPOP", hints.queue, seconds)
        if found is None:
            return None
        holder = hints.holder_in(found[1])
        if holder is None:
            self._ask("rpush", hints.queue, found[1])  # in front again, where Celery takes it
            return None
        return Hint.read(holder)

    def read_taken(self, pid: int) -> Hint | None:
        """What the process `pid` of this host has taken last by itself; None for nothing."""
        found: str | None = self._ask("get", keys.taken(f"{HOST}/{pid}"))
        return Hint.read(found.split(" ")[1]) if found else None

    def _hints(self) -> Envelopes:
        hints = self.envelopes()
        if hints is None:
            raise ValueError("hints can be taken only where the scripts send them")
        return hints

    # --- a step -----------------------------------------------------------------------------------

    def adopt_limits(self, run_id: str, limits: Limits) -> RunRecord | None:
        """Give a run its agent's limits where it has none yet; None where there is no such run."""
        reply = self._run(
            "adopt_limits",
            [keys.run(run_id)],
            [
                run_id,
                ms(self.settings.retention),
                ms(limits.timeout),
                *flat(limit_fields(limits)),
            ],
        )
        return None if len(reply) == 1 else parse_record(run_id, pairs(reply[2]), int(reply[1]))

    def begin_step(self, run_id: str, step: int) -> BegunStep | Outcome:
        """Take a step's next attempt; a bare word where there is nothing to do.

        Of the history, only what this process hasn't read before comes from Redis.
        """
        known = self._histories.take(run_id)
        reply = self._run(
            "begin_step",
            [
                keys.run(run_id),
                keys.events(run_id),
                keys.seen(STEPS_QUEUE),
                keys.suspect(_process()),
                keys.DUE,
                keys.messages(run_id),
                keys.inbox(run_id),
            ],
            [
                step,
                ms(self.settings.lease),
                MAX_DEATHS,
                self.settings.max_events,
                self._attempt_id(),
                SCHEMA_VERSION,
                f"{_process()}/",
                run_id,
                len(known.messages),
                known.created,
            ],
        )
        if len(reply) == 1:
            return Outcome(reply[0])
        record = parse_record(run_id, pairs(reply[2]), int(reply[1]))
        if reply[0] is not Outcome.OK:
            return BegunStep(reply[0], record)
        history = known.go_on(record, reply[3] == "1", reply[4])
        self._histories.keep(history)
        return BegunStep(reply[0], record, list(history.messages))

    def renew_step(self, run_id: str, epoch: int) -> Outcome:
        """The heartbeat of a step's holder."""
        return self._word(
            "renew_step",
            [keys.run(run_id), keys.DUE, *LIMIT_KEYS],
            [epoch, ms(self.settings.lease), run_id],
        )

    def admit_step(
        self, record: RunRecord, *, endpoint: str, limits: Mapping[str, str], tokens_per_minute: int
    ) -> Outcome:
        """Let a step ask its model (`OK`), or park it until the model's limits allow it."""
        run_id = record.run_id
        return self._word(
            "admit_step",
            [
                keys.run(run_id),
                keys.events(run_id),
                keys.DUE,
                keys.pace(endpoint),
                *LIMIT_KEYS,
            ],
            [
                run_id,
                record.step,
                record.epoch,
                write_limits(limits),
                tokens_per_minute,
                self.settings.max_events,
                ms(MAX_LOOK_WAIT),
            ],
        )

    def commit_step(
        self, record: RunRecord, **turn: Unpack[Turn]
    ) -> tuple[Outcome, tuple[int, ...]]:
        """Append a step's turn and open its calls; answers the indexes whose hints go out.

        That is, those which the script hasn't sent by itself.
        """
        reply = self._run("commit_step", *self._committing(record, turn))
        return reply[0], tuple(map(int, reply[1:]))

    def take_step(self, record: RunRecord, **turn: Unpack[Turn]) -> tuple[Outcome, Hint | None]:
        """Commit a step, and take the hint of the step that is next; None where there is none.

        Only where the scripts send hints by themselves: what follows is published by then.
        """
        hints = self._hints().step
        key_names, args = self._committing(record, turn)
        attempt = f"{keys.trace_id(record.run_id, record.step)}/{record.epoch}"
        reply = self._run(
            "take_step",
            [hints.queue, keys.taken(_taker()), *key_names],
            [hints.task, ms(TAKEN_FOR), attempt, *args],
        )
        taken = reply[-1] if isinstance(reply[-1], list) else None
        return reply[0], Hint.read(taken[1]) if taken else None

    def _committing(self, record: RunRecord, turn: Turn) -> tuple[list[str], list[Any]]:
        """The keys and arguments of the script that commits a step."""
        run_id, messages = record.run_id, turn["messages"]
        warning, hidden = turn.get("warning"), turn.get("hidden", frozenset())
        calls: list[Any] = []
        for call in turn["calls"]:
            result = call.result
            calls += [
                dump(call.provider_id),
                call.decision.model_dump_json(),
                dump(_opening(call)),
                call.starts,
                result.model_dump_json() if result else "",
                dump(result.content) if result else "",
                dump(result_trace(record.step, result, hidden)) if result else "",
                call.decision.name,
                _who_acts(call),
                self._limits_of(call),
            ]
        key_names = [
            keys.run(run_id),
            keys.messages(run_id),
            keys.calls(run_id),
            keys.results(run_id),
            keys.events(run_id),
            keys.trace(run_id),
            keys.DUE,
            *LIMIT_KEYS,
        ]
        args = [
            run_id,
            record.step,
            record.epoch,
            ms(self.settings.hint_grace),
            self.settings.max_events,
            turn["parallel"],
            turn["invalid"],
            *usage_args(turn["usage"]),
            dump(turn["trace"]),
            dump(turn["event"]),
            turn["fingerprint"],
            dump(warning) if warning else "",
            len(messages),
            *map(dump, messages),
            *calls,
        ]
        return key_names, args

    def park_step(
        self,
        record: RunRecord,
        *,
        delay: float,
        usage: Usage,
        trace: dict[str, Any] | None,
        event: dict[str, Any],
        attempts: int = 1,
        switch: bool = False,
        warning: Mapping[str, Any] | None = None,
        pause: float = 0.0,
    ) -> Outcome:
        """Let go of a step for `delay` seconds; recovery brings it back.

        `switch`: the agent's next model takes over, with attempts of its own. `pause`: seconds for
        which no step is to ask this model, where its limits are shared (`admit_step`).
        """
        run_id = record.run_id
        return self._word(
            "park_step",
            [keys.run(run_id), keys.events(run_id), keys.trace(run_id), keys.DUE, *LIMIT_KEYS],
            [
                run_id,
                record.step,
                record.epoch,
                ms(delay),
                self.settings.max_events,
                *usage_args(usage),
                dump(trace) if trace else "",
                dump(event),
                attempts,
                int(switch),
                dump(warning) if warning else "",
                ms(pause),
            ],
        )

    def keep_view(self, record: RunRecord, state: Mapping[str, Any]) -> Outcome:
        """Note which part of the history the model is shown, and what is known of its context."""
        run_id = record.run_id
        return self._word(
            "keep_view", [keys.run(run_id), keys.view(run_id)], [record.epoch, dump(state)]
        )

    # --- a call -----------------------------------------------------------------------------------

    def begin_call(
        self, run_id: str, step: int, index: int, *, taken: bool = False
    ) -> BegunCall | Outcome:
        """Take a call's next attempt; a bare word where there is nothing to do.

        `taken`: this process has its hint by itself, and writes that down for its parent.
        """
        reply = self._run(
            "begin_call",
            [
                keys.run(run_id),
                keys.calls(run_id),
                keys.results(run_id),
                keys.events(run_id),
                keys.seen(TOOLS_QUEUE),
                keys.DUE,
                *LIMIT_KEYS,
                keys.taken(_taker()),
            ],
            [
                step,
                index,
                ms(self.settings.lease),
                self.settings.max_events,
                self._attempt_id(),
                SCHEMA_VERSION,
                run_id,
                ms(TAKEN_FOR) if taken else 0,
            ],
        )
        if len(reply) == 1:
            return Outcome(reply[0])
        return _begun_call(run_id, step, index, reply)

    def renew_call(self, call: BegunCall) -> Outcome:
        """The heartbeat of a call's holder."""
        run_id = call.record.run_id
        return self._word(
            "renew_call",
            [keys.run(run_id), keys.calls(run_id), keys.DUE, *LIMIT_KEYS],
            [call.record.step, call.index, call.epoch, ms(self.settings.lease), run_id],
        )

    def retry_call(
        self,
        call: BegunCall,
        *,
        delay: float,
        result: ToolResult,
        passes: int = 0,
        hidden: frozenset[str] = frozenset(),
    ) -> Outcome:
        """Put a call back after a failure that may pass; `result` is kept in the trace alone.

        `LOST`: it was started as often as it may be. `passes`: the tool wasn't started, and may be
        passed on so many times (then `LOST`).
        """
        run_id, step = call.record.run_id, call.record.step
        return self._word(
            "retry_call",
            [
                keys.run(run_id),
                keys.calls(run_id),
                keys.events(run_id),
                keys.trace(run_id),
                keys.DUE,
                *LIMIT_KEYS,
            ],
            [
                run_id,
                step,
                call.index,
                call.epoch,
                ms(delay),
                self.settings.max_events,
                dump(result_trace(step, result, hidden) | {"kind": "retried_result"}),
                dump(call_summary(result) | {"delay": delay}),
                passes,
            ],
        )

    def record_result(
        self, run_id: str, step: int, index: int, result: ToolResult, **with_it: Unpack[WithResult]
    ) -> tuple[Outcome, int | None]:
        """Record a call's result; answers whose hint is to be published, if the script didn't.

        With `WAIT` that is the index of a held call, with `LAST` the number of the next step.
        """
        reply = self._run("record_result", *self._recording(run_id, step, index, result, with_it))
        return reply[0], int(reply[1]) if len(reply) > 1 else None

    def take_call(
        self, run_id: str, step: int, index: int, result: ToolResult, **with_it: Unpack[WithResult]
    ) -> tuple[Outcome, Taken | None]:
        """Record a call's result, and begin the call whose hint is next; None where there is none.

        Only where the scripts send hints by themselves: what follows is published by then.
        """
        hints = self._hints()
        key_names, args = self._recording(run_id, step, index, result, with_it)
        reply = self._run(
            "take_call",
            [
                hints.call.queue,
                keys.taken(_taker()),
                keys.run(""),
                keys.seen(TOOLS_QUEUE),
                keys.DUE,
                *LIMIT_KEYS,
                *key_names,
            ],
            [
                hints.call.task,
                ms(TAKEN_FOR),
                ms(self.settings.lease),
                f"{_process()}/{with_it['operation']}",
                SCHEMA_VERSION,
                self.settings.max_events,
                *args,
            ],
        )
        if not isinstance(reply[-1], list):
            return reply[0], None
        _, holder, begun = reply[-1]
        hint = Hint.read(holder)
        begun[0] = Outcome(begun[0])
        if len(begun) == 1:
            return reply[0], Taken(hint.run_id, begun[0])
        return reply[0], Taken(hint.run_id, _begun_call(*hint, begun))

    def _recording(
        self, run_id: str, step: int, index: int, result: ToolResult, with_it: WithResult
    ) -> tuple[list[str], list[Any]]:
        """The keys and arguments of the script that records a result."""
        fatal, decided = with_it.get("fatal"), with_it.get("decided")
        parts, hidden = with_it.get("parts", ()), with_it.get("hidden", frozenset())
        final = with_it.get("final", False) and result.ok
        key_names = [
            keys.run(run_id),
            keys.messages(run_id),
            keys.calls(run_id),
            keys.results(run_id),
            keys.evidence(run_id),
            keys.events(run_id),
            keys.trace(run_id),
            keys.DUE,
            keys.whole(run_id),
            *LIMIT_KEYS,
        ]
        args = [
            run_id,
            step,
            index,
            ms(self.settings.hint_grace),
            self.settings.max_events,
            result.model_dump_json(),
            dump(result.content),
            EVIDENCE.dump_json(result.evidence).decode() if result.evidence else "",
            fatal.model_dump_json() if fatal else "",
            dump(_recorded(step, result, fatal, parts, decided, hidden)),
            dump(call_summary(result)),
            with_it.get("operation") or self._attempt_id(),
            # A denial is no failure of the tool's.
            "" if result.ok or decided else result.name,
            dump(result.data) if final else "",
            ",".join(map(dump, parts)),
            with_it.get("waits") or "",
            decided.model_dump_json(exclude_none=True) if decided else "",
            with_it.get("digest") or "",
            cut(redact(with_it.get("whole") or "", hidden), self.settings.max_result_chars),
        ]
        return key_names, args

    def decide_call(
        self, run_id: str, step: int, index: int, decided: Decided, *, digest: str
    ) -> tuple[Outcome, int | None]:
        """Let a call run that waits for an approval; answers its index where its hint goes out.

        `digest` is that of the `Approval` that was shown.
        """
        reply = self._run(
            "decide_call",
            [keys.run(run_id), keys.calls(run_id), keys.events(run_id), keys.DUE],
            [
                run_id,
                step,
                index,
                digest,
                ms(self.settings.hint_grace),
                self.settings.max_events,
                self._attempt_id(),
                decided.model_dump_json(exclude_none=True),
            ],
        )
        return reply[0], int(reply[1]) if len(reply) > 1 else None

    def release_step(
        self, record: RunRecord, *, usage: Usage | None = None, trace: dict[str, Any] | None = None
    ) -> Outcome:
        """Let go of a step because this worker stops; another takes it at once.

        `usage` and `trace` are of what was asked and answered before.
        """
        return self._word(
            "release_step",
            [keys.run(record.run_id), keys.DUE, keys.trace(record.run_id), *LIMIT_KEYS],
            [
                record.run_id,
                record.epoch,
                ms(self.settings.hint_grace),
                MAX_RELEASES,
                *usage_args(usage),
                dump(trace) if trace else "",
            ],
        )

    def lose_call(
        self, run_id: str, step: int, index: int, *, pid: int, stopped: bool
    ) -> BegunCall | Outcome:
        """Say that the process `pid` of this host, which held a call, is gone.

        `stopped`: it was ended on purpose, which costs an idempotent call no attempt.
        """
        reply = self._run(
            "lose_call",
            [keys.run(run_id), keys.calls(run_id), keys.DUE, *LIMIT_KEYS],
            [
                run_id,
                step,
                index,
                f"{HOST}/{pid}/",
                ms(self.settings.hint_grace),
                MAX_RELEASES if stopped else 0,
            ],
        )
        return Outcome(reply[0]) if len(reply) == 1 else _begun_call(run_id, step, index, reply)

    def add_event(
        self,
        run_id: str,
        type: str,
        *,
        step: int | None,
        call: str | None,
        data: dict[str, Any],
        epoch: int | None = None,
    ) -> Outcome:
        """Tell followers something that changes no state; with an `epoch` as its holder alone."""
        return self._word(
            "add_event",
            [keys.run(run_id), keys.events(run_id)],
            [
                type,
                "" if step is None else step,
                call or "",
                dump(data),
                self.settings.max_events,
                "" if epoch is None else epoch,
            ],
        )

    # --- recovery ---------------------------------------------------------------------------------

    def claim_due(self, limit: int = 100) -> list[str]:
        """The ids of runs that somebody must look at now, claimed for a few seconds."""
        _, ids = self._run("claim_due", [keys.DUE], [ms(CLAIM), limit])
        return list(ids)

    def sweep_runs(self) -> int:
        """Put every run that hasn't ended and isn't due back into `due`; answers how many."""
        return int(self._run("sweep_runs", [keys.RUNS, keys.DUE], [])[1])

    def grant_slots(self, longest: float = 1.0) -> float:
        """Give places that are free again to what waits for them; the hints are in `granted`.

        Answers in how many seconds to look again: at most `longest`, or when a place gets free.
        """
        reply = self._run(
            "grant_slots",
            [keys.run(""), *LIMIT_KEYS, keys.DUE],
            [MAX_CROWDED, ms(longest)],
        )
        return int(reply[1]) / 1000

    def _limits_of(self, call: OpenCall) -> str:
        """A call's limits as its record has them: those of its tool, and that of the queue."""
        most = self.settings.tools_concurrency
        return write_limits({**call.limits, **({QUEUE_LIMIT: str(most)} if most else {})})

    def recover_run(self, run_id: str) -> Lost:
        """Find a due run's lost hints, and set when it is due again."""
        reply = self._run(
            "recover_run",
            [
                keys.run(run_id),
                keys.calls(run_id),
                keys.DUE,
                keys.seen(STEPS_QUEUE),
                keys.seen(TOOLS_QUEUE),
                STEPS_QUEUE,
                TOOLS_QUEUE,
                keys.RUNS,
                keys.messages(run_id),
                keys.waiting(""),
                keys.CROWDED,
                keys.events(run_id),
            ],
            [
                run_id,
                ms(self.settings.hint_grace),
                ms(MAX_LOOK_WAIT),
                self._waiting_elsewhere(STEPS_QUEUE),
                self._waiting_elsewhere(TOOLS_QUEUE),
            ],
        )
        if len(reply) == 1:
            return Lost(reply[0])
        if reply[0] is Outcome.BUSY:
            return Lost(reply[0], live=str(reply[1]))
        if reply[0] is Outcome.EXPIRED:
            return Lost(reply[0], record=parse_record(run_id, pairs(reply[2]), int(reply[1])))
        return Lost(reply[0], int(reply[1]), tuple(map(int, reply[2:])))

    def count_queued(self, queue: str) -> int:
        """How many hints wait in a queue."""
        with reporting_redis_errors():
            length: int = self._client(self.settings.queue_url).llen(queue)
        return length

    def _waiting_elsewhere(self, queue: str) -> int | str:
        """How many hints wait in a queue that isn't in the runs' own Redis; empty where it is."""
        if self.settings.queue_url == self.settings.redis_url:
            return ""
        try:
            length: int = self._client(self.settings.queue_url).llen(queue)
        except redis.RedisError:
            return 1  # nobody knows, and nothing could be published either
        return length

    # --- reading ----------------------------------------------------------------------------------

    def read_run(self, run_id: str) -> RunRecord:
        """The record, or `RunNotFound`."""
        fields: dict[str, str] = self._ask("hgetall", keys.run(run_id))
        if not fields:
            raise no_such_run(run_id)
        return parse_record(run_id, fields, int(time.time() * 1000))

    def read_messages(self, run_id: str) -> list[dict[str, Any]]:
        """The history: chat-completions messages, the goal first."""
        return [json.loads(text) for text in self._ask("lrange", keys.messages(run_id), 0, -1)]

    def read_goal(self, record: RunRecord) -> str | None:
        """What the run was asked to do; None where its history is gone."""
        text = self._ask("lindex", keys.messages(record.run_id), record.goal)
        return None if text is None else str(json.loads(text)["content"])

    def read_request(self, run_id: str) -> str | None:
        """What stands for the request that a run with an idempotency key was made by."""
        request: str | None = self._ask("hget", keys.run(run_id), "request")
        return request

    def read_view(self, run_id: str) -> dict[str, Any]:
        """What `keep_view` noted last; empty where nothing was."""
        text = self._ask("get", keys.view(run_id))
        found: dict[str, Any] = json.loads(text) if text else {}
        return found

    def read_whole_result(self, run_id: str, call_id: str) -> str | None:
        """The text of a call's result, also where it was cut for the model; None without one.

        One that wasn't cut is told as the trace keeps it.
        """
        whole: str | None = self._ask("hget", keys.whole(run_id), call_id)
        if whole is not None:
            return whole
        for entry in self.read_trace(run_id):
            found = [entry["result"]] if entry["kind"] == "result" else entry.get("results") or []
            for result in found:
                if result["call_id"] == call_id:
                    return str(result["content"])
        self.read_run(run_id)  # raises: there is no such run
        return None

    def read_trace(self, run_id: str) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self._ask("lrange", keys.trace(run_id), 0, -1)]

    def read_result(self, run_id: str) -> FinalResult | None:
        """The outcome of a finished run; None while it runs."""
        return self.result_of(self.read_run(run_id))

    def result_of(self, record: RunRecord) -> FinalResult | None:
        """The outcome that this record tells, with the evidence; None while the run runs."""
        if record.stop_reason is None:
            return None
        return FinalResult(
            run_id=record.run_id,
            ok=record.stop_reason is StopReason.COMPLETED,
            stop_reason=record.stop_reason,
            answer=record.answer,
            evidence=tuple(self.read_evidence(record.run_id)),
            usage=record.usage,
            error=record.error,
            limit=record.limit,
            steps=record.step,
        )

    def read_events(self, run_id: str, after: str, *, block: float | None = None) -> list[Event]:
        """Events past the id `after` ("0" for all), waiting up to `block` seconds for the first."""
        found = self.read_streams({keys.events(run_id): after}, block=block)
        return [parse_event(run_id, *entry) for entries in found.values() for entry in entries]

    def read_streams(
        self, after: Mapping[str, str], *, block: float | None = None
    ) -> dict[str, list[tuple[str, dict[str, str]]]]:
        """What each of several streams has past an id, by its key; those without news are left out.

        Waits up to `block` seconds for the first.
        """
        # Below the socket's own timeout, or a quiet stream would look like a dead server.
        wait = None if block is None else max(1, ms(min(block, MAX_BLOCK)))
        found = self._ask("xread", dict(after), count=500, block=wait) or {}
        streams = found.items() if isinstance(found, dict) else found
        return {str(key): parse_entries(stream) for key, stream in streams}

    def wake(self, key: str) -> None:
        """End the wait of whoever reads this stream besides others."""
        with self.redis.pipeline() as pipe, reporting_redis_errors():
            pipe.xadd(key, {"wake": ""}, maxlen=1)
            pipe.expire(key, 60)
            pipe.execute()

    def last_event_id(self, run_id: str) -> str:
        """The id of the newest event; "0" where there is none."""
        entries = self._ask("xrevrange", keys.events(run_id), count=1)
        return str(entries[0][0]) if entries else "0"

    def first_events(self, run_ids: Sequence[str]) -> list[Event | None]:
        """The oldest event kept of each run, for readers that ask for more than the cap left."""
        with self.redis.pipeline(transaction=False) as pipe, reporting_redis_errors():
            for run_id in run_ids:
                pipe.xrange(keys.events(run_id), count=1)
            found = pipe.execute()
        return [
            parse_event(run_id, *entries[0]) if entries else None
            for run_id, entries in zip(run_ids, found, strict=True)
        ]

    def read_questions(self, run_id: str) -> dict[str, str]:
        """The questions that a run waits for the user to answer: call id -> question."""
        record, calls = self.read_run(run_id), self._ask("hgetall", keys.calls(run_id))
        asked = sorted(
            int(field.partition(".")[0])
            for field, state in calls.items()
            if field.endswith(".state") and state == "asked"
        )
        decisions = [ToolDecision.model_validate_json(calls[f"{n}.decision"]) for n in asked]
        return {
            keys.call_id(record.step, n): str(json.loads(decision.arguments)["question"])
            for n, decision in zip(asked, decisions, strict=True)
        }

    def read_approvals(self, run_id: str) -> list[Approval]:
        """The calls that a run waits for somebody to approve or deny, in call order."""
        self.read_run(run_id)
        calls: dict[str, str] = self._ask("hgetall", keys.calls(run_id))
        waiting = sorted(
            int(field.partition(".")[0])
            for field, state in calls.items()
            if field.endswith(".state") and state == "approval"
        )
        return [_approval(calls, index) for index in waiting]

    def read_decided(self, run_id: str, call_id: str) -> Decided | None:
        """What was decided on a call that needed an approval; None where nothing was."""
        text: str | None = self._ask("hget", keys.run(run_id), f"decided.{call_id}")
        return None if text is None else Decided.model_validate_json(text.partition(" ")[2])

    def read_evidence(self, run_id: str) -> list[Evidence]:
        """What the calls found so far, in call order."""
        lists = self._ask("lrange", keys.evidence(run_id), 0, -1)
        return [found for text in lists for found in EVIDENCE.validate_json(text)]

    def may_restart(self, run_id: str, step: int, index: int, *, pid: int) -> bool:
        """Whether the process `pid` of this host holds this call, and it may be started again."""
        record = self.read_run(run_id)
        fields = [f"{index}.{name}" for name in ("state", "attempt", "starts")]
        state, attempt, starts = self._ask("hmget", keys.calls(run_id), fields)
        held = state == "running" and attempt.startswith(f"{HOST}/{pid}/")
        return held and record.step == step and int(starts) > 1

    def list_runs(self, limit: int, *, tenant: str | None = None) -> Iterator[RunRecord]:
        """Runs, unfinished ones first, then the last finished; at most `limit` are looked at.

        With a `tenant`, its runs alone, and as if there were no others.
        """
        run_ids = (
            self._ask("zrevrange", keys.RUNS, 0, limit - 1)
            if tenant is None
            else itertools.islice(self._runs_of(tenant), limit)
        )
        for run_id in run_ids:
            with contextlib.suppress(RunNotFound, SchemaError):
                yield self.read_run(run_id)

    def browse_runs(
        self,
        place: Place | None = None,
        *,
        tenant: str | None = None,
        status: str | None = None,
        stop_reason: str | None = None,
        agent: str | None = None,
        part_of_id: str = "",
    ) -> Iterator[tuple[Place, RunRecord]]:
        """The runs behind a place, in the order of `list_runs`, each with its own place.

        Given a `tenant`, a `status`, a `stop_reason`, an `agent` or a part of the id, those of it
        alone. None is left out, whatever starts or ends meanwhile; one that ends meanwhile may come
        twice.
        """
        wanted = {"tenant": tenant, "status": status, "stop_reason": stop_reason, "agent": agent}
        sought = {name: value for name, value in wanted.items() if value is not None}
        while found := self._places_behind(place):
            with self.redis.pipeline(transaction=False) as pipe, reporting_redis_errors():
                for each in found:
                    pipe.hmget(keys.run(each.run_id), ["status", *sought])
                fields: list[list[str | None]] = pipe.execute()
            for each, (known, *values) in zip(found, fields, strict=True):
                fits = part_of_id in each.run_id and values == [*sought.values()]
                if known is not None and fits:
                    with contextlib.suppress(RunNotFound, SchemaError):
                        yield each, self.read_run(each.run_id)
            place = found[-1]

    def _places_behind(self, place: Place | None) -> list[Place]:
        """The next page of the index of runs, as it stands now."""
        start = 0
        if place is not None:
            if self._ask("zscore", keys.RUNS, place.run_id) == place.score:
                start = self._ask("zrevrank", keys.RUNS, place.run_id) or 0
            else:  # it has ended meanwhile, or is gone
                start = self._ask("zcount", keys.RUNS, f"({place.score}", "+inf")
        while True:
            # What ends or goes between two looks moves the rest up.
            start = max(0, start - OVERLAP)
            pairs = self._ask("zrevrange", keys.RUNS, start, start + PAGE - 1, withscores=True)
            found = [Place(float(score), str(run_id)) for run_id, score in pairs]
            behind = [each for each in found if place is None or each < place]
            if behind or len(found) < PAGE:
                return behind
            start += PAGE

    def _runs_of(self, tenant: str) -> Iterator[str]:
        seen: set[str] = set()  # the index moves on between two pages
        for start in itertools.count(0, PAGE):
            run_ids: list[str] = self._ask("zrevrange", keys.RUNS, start, start + PAGE - 1)
            pipe: Any = self.redis.pipeline(transaction=False)
            for run_id in run_ids:
                pipe.hget(keys.run(run_id), "tenant")
            with reporting_redis_errors():
                tenants: list[str | None] = pipe.execute()
            for run_id, of in zip(run_ids, tenants, strict=True):
                if of == tenant and run_id not in seen:
                    seen.add(run_id)
                    yield run_id
            if len(run_ids) < PAGE:
                return

    def ended_before(
        self,
        seconds_ago: float,
        stop_reason: StopReason | None = None,
        *,
        tenant: str | None = None,
    ) -> Iterator[str]:
        """The ids of runs that ended so long ago, and so, and whose end was delivered.

        With a `tenant`, of its runs alone.
        """
        clock: tuple[int, int] = self._ask("time")
        latest = clock[0] * 1000 + clock[1] // 1000 - ms(seconds_ago)
        for run_id in self._ask("zrangebyscore", keys.RUNS, "-inf", "(+inf"):
            stop, ended, promised, of = self._ask(
                "hmget", keys.run(run_id), ["stop_reason", "ended", "promised", "tenant"]
            )
            if stop is None or promised == "1" or int(ended) > latest:
                continue
            if stop_reason in (None, stop) and tenant in (None, of):
                yield str(run_id)

    def publish_agents(
        self,
        limits: Mapping[str, Limits],
        requires: Mapping[str, Iterable[str]] = MappingProxyType({}),
    ) -> None:
        """Tell clients that have no agents of their own which there are, and whom they serve.

        To be told again, before they are forgotten.
        """
        if limits:
            catalog = {
                name: dump(value.model_dump(mode="json") | {"requires": [*requires.get(name, ())]})
                for name, value in limits.items()
            }
            self._ask("hset", keys.AGENTS, mapping=catalog)
            self._ask("zadd", keys.AGENTS_SEEN, dict.fromkeys(limits, self._now()))

    def read_agent(self, agent: str) -> tuple[Limits | None, frozenset[str]]:
        """What the workers announce of an agent: its limits, and the scopes that it needs.

        The limits are None where no worker has announced it in the last minutes.
        """
        pipe: Any = self.redis.pipeline(transaction=False)
        pipe.time().zscore(keys.AGENTS_SEEN, agent).hget(keys.AGENTS, agent)
        with reporting_redis_errors():
            clock, seen, text = pipe.execute()
        if text is None:
            return None, frozenset()
        fresh = seen is not None and seen >= clock[0] - ANNOUNCED_FOR
        limits = Limits.model_validate_json(text, extra="ignore") if fresh else None
        return limits, frozenset(json.loads(text).get("requires", ()))

    def read_agents(self) -> dict[str, Limits]:
        """The agents that some worker has announced in the last minutes."""
        since = self._now() - ANNOUNCED_FOR
        seen = set(self._ask("zrangebyscore", keys.AGENTS_SEEN, since, "+inf"))
        catalog: dict[str, str] = self._ask("hgetall", keys.AGENTS) if seen else {}
        # A newer worker may announce limits that this process doesn't know, nor has to.
        return {
            name: Limits.model_validate_json(text, extra="ignore")
            for name, text in catalog.items()
            if name in seen
        }

    def _now(self) -> int:
        """Seconds since the epoch by Redis' clock."""
        seconds: int = self._ask("time")[0]
        return seconds

    def _attempt_id(self) -> str:
        # Host and process stand first: a parent can name the attempts of a child that is gone.
        return f"{_process()}/{unique_id()}"

    def answer_ping(self, token: str) -> None:
        """Leave a sign of life, for a minute."""
        self._ask("lpush", keys.ping(token), "pong")
        self._ask("expire", keys.ping(token), 60)

    def wait_for_ping(self, token: str, timeout: float) -> bool:
        """Whether the sign of life came within `timeout` seconds."""
        ends_at = time.monotonic() + timeout
        while (left := ends_at - time.monotonic()) > 0:
            if self._ask("brpop", [keys.ping(token)], timeout=min(2.0, left)):
                return True
        return False

    # --- how a script is sent ---------------------------------------------------------------------

    def _run(self, name: str, key_names: Sequence[str], args: Sequence[Any]) -> list[Any]:
        client = self.redis
        envelopes = self.envelopes()
        scripts = self._scripts.get((id(client), envelopes))
        if scripts is None:
            scripts = self._scripts[id(client), envelopes] = {
                each: client.register_script(load_script(each).sending(envelopes))
                for each in script_names()
            }
        script = scripts[name]
        with reporting_redis_errors():
            try:
                reply: list[Any] = sender_of(client).send(
                    "EVALSHA", script.sha, len(key_names), *key_names, *args
                )
            except NoScriptError:
                reply = script(keys=key_names, args=args)
        if isinstance(reply[-1], list) and reply[-1][:1] == ["granted"]:
            self.granted.extend(reply.pop()[1:])
        reply[0] = Outcome(reply[0])
        return reply

    def _word(self, name: str, key_names: Sequence[str], args: Sequence[Any]) -> Outcome:
        outcome: Outcome = self._run(name, key_names, args)[0]
        return outcome

    def _ask(self, command: str, *args: Any, **options: Any) -> Any:
        with reporting_redis_errors():
            return getattr(self.redis, command)(*args, **options)


def no_such_run(run_id: str) -> RunNotFound:
    """The one error for a run that isn't there, or isn't there for whoever asks."""
    return RunNotFound(f"no run {run_id}: it was never submitted here, or its retention is over")


def _who_acts(call: OpenCall) -> str:
    """Who is to act on an open call first, as `commit_step` is told."""
    if call.needs_approval:
        patience = 0 if call.approval_timeout is None else max(1, ms(call.approval_timeout))
        return f"approval {call.digest} {patience}"
    return "run" if call.question is None else "asked"


def _approval(calls: Mapping[str, str], index: int) -> Approval:
    decision = ToolDecision.model_validate_json(calls[f"{index}.decision"])
    decide_by = int(calls[f"{index}.decide_by"])
    return Approval(
        call_id=decision.call_id,
        tool=decision.name,
        arguments=json.loads(decision.arguments),
        digest=calls[f"{index}.digest"],
        decide_by=decide_by / 1000 if decide_by else None,
    )


def _recorded(
    step: int,
    result: ToolResult,
    fatal: RunError | None,
    parts: Sequence[dict[str, Any]],
    decided: Decided | None,
    hidden: frozenset[str],
) -> dict[str, Any]:
    """A result for the trace, with what else it did to the run. Images are in the history alone."""
    entry = result_trace(step, result, hidden)
    if decided is not None:
        entry["decided"] = decided.model_dump(mode="json", exclude_none=True)
    if fatal is not None:
        entry["fatal"] = True
    if images := [digest(dump(each)) for each in parts if each.get("type") == "image_url"]:
        entry["images"] = images
    return entry


def _resumption(record: RunRecord, limits: Limits) -> dict[str, Any]:
    """For the trace: how the run had ended, and what counts from here; the record forgets both."""
    return {
        "kind": "resumed",
        "step": record.step,
        "limits": limits.model_dump(mode="json"),
        "before": {
            "limits": record.limits.model_dump(mode="json") if record.limits else None,
            "stop_reason": record.stop_reason,
            "error": record.error.model_dump(mode="json") if record.error else None,
            "limit": record.limit,
        },
    }


def _opening(call: OpenCall) -> dict[str, Any]:
    """What an event says of a call that a step opens."""
    if call.needs_approval:
        return {"tool": call.decision.name, "digest": call.digest}
    if call.result is not None:
        return call_summary(call.result)
    if call.question is not None:
        return {"reason": "QUESTION", "question": call.question}
    return {"tool": call.decision.name}


_numbers = itertools.count()
_origin = uuid.uuid4().hex
_this_process = f"{HOST}/{os.getpid()}"


def _begin_anew() -> None:
    global _origin, _this_process
    _origin = uuid.uuid4().hex
    _this_process = f"{HOST}/{os.getpid()}"


os.register_at_fork(after_in_child=_begin_anew)


def unique_id() -> str:
    """An id that nobody else ever makes; a random number each time would cost a system call."""
    return f"{_origin}-{next(_numbers)}"


def _process() -> str:
    return _this_process


def _taker() -> str:
    """Who takes a hint: a process, for a thread beside its main one the process and the thread."""
    if threading.current_thread() is threading.main_thread():
        return _process()
    return f"{_process()}/{threading.get_native_id()}"


def _begun_call(run_id: str, step: int, index: int, reply: Sequence[Any]) -> BegunCall:
    outcome, now, text, started, epoch, of_run = reply
    decision = ToolDecision.model_validate_json(text)
    return BegunCall(
        outcome,
        record=parse_run_of_call(run_id, step, decision.name, of_run, int(now)),
        decision=decision,
        index=index,
        attempt=int(started),
        epoch=int(epoch),
    )
