"""Accepts a goal: everything that can be refused is refused here, before anything is written."""

from __future__ import annotations

import json
import logging
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from runner import keys
from runner.agents import NAME, Agents
from runner.context import goal_message
from runner.decide import missing_scopes
from runner.earlier import check_messages
from runner.errors import (
    AgentError,
    ConversationBusy,
    InvalidInput,
    KeyReused,
    PermissionDenied,
    RedisUnavailable,
)
from runner.loop import INTERRUPTED, Next, NextStep, Wait, cancel_run
from runner.models import Limits, OnFinish, Principal
from runner.record import digest
from runner.store import Outcome, RunStore

logger = logging.getLogger(__name__)

MAX_METADATA_CHARS = 16_384

MAX_PRINCIPAL_BYTES = 16_384

MAX_CONVERSATION_CHARS = 256

WHEN_BUSY = ("reject", "enqueue", "interrupt")
"""What may become of a goal whose conversation has a live run."""

START_NEEDS = ("goal", "agent")
START_TAKES = (
    *START_NEEDS,
    "principal",
    "metadata",
    "idempotency_key",
    "on_finish",
    "messages",
    "after",
    "conversation",
    "when_busy",
)
"""What `celeriac.start` must be given, and all that it may be."""

MAX_FAULTS = 5
"""Faults of a start's keywords that a refusal names."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The run that a goal got, and whether this made it or it was there already.

    `coming`: what is to be published once its start was told to whoever is told of it.
    """

    run_id: str
    created: bool
    coming: Next


def accept_goal(
    store: RunStore,
    goal: str,
    *,
    agent: str,
    run_id: str | None = None,
    agents: Agents | None = None,
    principal: Principal | Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    idempotency_key: str | None = None,
    on_finish: OnFinish | Mapping[str, str] | str | None = None,
    messages: Sequence[Mapping[str, Any]] | None = None,
    after: str | None = None,
    conversation: str | None = None,
    when_busy: str = "reject",
    same_request: bool = False,
) -> Accepted:
    """Write the record of a new run, or find the one that the key or the id already stands for.

    With `same_request` a key that stands for a run of another request is `KeyReused`. Raises
    `InvalidInput` (`PermissionDenied` where the principal may not use the agent) or `AgentError`;
    then nothing was written.
    """
    check_text("goal", goal, store.settings.max_goal_chars)
    _check_place(after, conversation, when_busy)
    earlier = check_messages(messages, store.settings.max_goal_chars)
    check_agent(agent)
    acting = check_principal(principal)
    limits = admit(store, agent, agents, acting)
    told, task = _check_metadata(metadata), _check_on_finish(on_finish)
    asked = [goal, agent, told, task and task.model_dump(), earlier, after, conversation, when_busy]
    request = digest(json.dumps(asked, sort_keys=True))
    outcome, known_id = store.create_run(
        run_id=(new_id := keys.check_run_id(run_id) if run_id else new_run_id()),
        agent=agent,
        messages=[*earlier, goal_message(goal)],
        limits=limits,
        principal=acting,
        metadata=told,
        idempotency_key=check_idempotency_key(idempotency_key),
        on_finish=task,
        promised=task is not None or bool(store.settings.result_backend),
        after=after,
        conversation=conversation,
        when_busy=when_busy,
        request=request,
        traceparent=_current_traceparent(),
    )
    match outcome:
        case Outcome.EXISTS if same_request and store.read_request(known_id) not in (None, request):
            raise KeyReused(
                f"the idempotency key stands for another request, that of run {known_id}; take a "
                "new key for a new request",
                run_id=known_id,
            )
        case Outcome.STALE:
            raise InvalidInput(f"after: there is no run {after} of this tenant to go on from")
        case Outcome.BUSY if after is not None:
            raise InvalidInput(
                f"after: run {after} hasn't ended; say it to that run with run.send(text), or wait"
            )
        case Outcome.BUSY:
            raise _refuse_busy(known_id, when_busy)
        case Outcome.WAIT:
            if when_busy == "interrupt":
                _interrupt(store, known_id)
            return Accepted(new_id, created=True, coming=Wait(new_id))
    made = outcome is Outcome.CREATED
    return Accepted(known_id, created=made, coming=first_step(store, known_id, 0))


def first_step(store: RunStore, run_id: str, step: int) -> Next:
    """What is to be published of a run that was created: its hint, where a start is told before."""
    return NextStep(run_id, step) if store.settings.result_backend else Wait(run_id)


def _interrupt(store: RunStore, live: str) -> None:
    """End the live run of a conversation, so that the next one begins."""
    try:
        cancel_run(store, live, INTERRUPTED)
    except RedisUnavailable as error:
        # The new run is accepted, and its record says whom it interrupts: recovery makes it good.
        logger.warning("run=%s can't be interrupted yet: %s", live, error)


def _refuse_busy(live: str, when_busy: str) -> ConversationBusy:
    if when_busy == "reject":
        cure = "wait for its end, send it a message, or say when_busy: enqueue or interrupt"
    else:
        cure = "and too many wait behind it; wait until some have ended"
    return ConversationBusy(f"the conversation has a live run, {live}; {cure}", run_id=live)


def _check_place(after: object, conversation: object, when_busy: object) -> None:
    """What a run goes on from, and where."""
    if after is not None:
        if conversation is not None:
            raise InvalidInput(
                "give after or conversation: a conversation goes on from its own last run"
            )
        if not isinstance(after, str):
            raise InvalidInput("after is the id of a run that has ended")
        keys.check_run_id(after)
    if conversation is not None:
        check_text("conversation", conversation, MAX_CONVERSATION_CHARS)
    if when_busy not in WHEN_BUSY:
        raise InvalidInput(f"when_busy is one of {', '.join(WHEN_BUSY)}")


def accept_start(
    store: RunStore, run_id: str, args: Sequence[Any], given: Mapping[str, Any]
) -> Accepted:
    """`accept_goal` with what a `celeriac.start` was sent; the run has this id, or is refused."""
    # A message may come without an id; a run of another one would be nobody's.
    keys.check_run_id(run_id or "")
    accepted = accept_goal(store, run_id=run_id, **_read_options(args, given))
    if accepted.run_id != run_id:
        raise InvalidInput(
            f"the idempotency_key already stands for run {accepted.run_id}; follow that one"
        )
    return accepted


def _read_options(args: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What a start was given, by name; raises `InvalidInput` with names alone, never a value."""
    options = dict(zip(START_NEEDS, args, strict=False))
    faults = [
        *(["too many positional arguments"] if len(args) > len(START_NEEDS) else []),
        *(f"unknown keyword {name!r:.60}" for name in given if name not in START_TAKES),
        *(f"{name} is given twice" for name in given if name in options),
        *(f"{name} is missing" for name in START_NEEDS if name not in {*options, *given}),
    ]
    if faults:
        raise InvalidInput(
            f"celeriac.start: {', '.join(faults[:MAX_FAULTS])}; it takes {', '.join(START_TAKES)}"
        )
    return options | dict(given)


def _current_traceparent() -> str:
    """The trace context of whoever submits, if it traces at all; the run's trace links to it."""
    if "opentelemetry.trace" not in sys.modules:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent", "")


def new_run_id(now: float | None = None, random_bits: int | None = None) -> str:
    """A UUIDv7: ids sort by the time of submit."""
    ms = int((time.time() if now is None else now) * 1000)
    bits = secrets.randbits(74) if random_bits is None else random_bits
    number = (ms << 80) | (0x7 << 76) | ((bits >> 62) << 64) | (0b10 << 62) | (bits & (2**62 - 1))
    text = f"{number:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


EMPTY = {
    "goal": "say in words what the agent is to do",
    "message": "say in words what the run is to know",
    "conversation": "leave it out, or give the conversation a name",
}
"""What to do about a text that is empty."""

TOO_LONG = {"conversation": "give it a shorter name"}
LONG_MATERIAL = "put long material where a tool can read it, or raise CELERIAC_MAX_GOAL_CHARS"


def check_text(name: str, text: object, most: int) -> None:
    """Refuse what isn't a text to work with."""
    if not isinstance(text, str) or not text.strip():
        raise InvalidInput(f"the {name} is empty; {EMPTY[name]}")
    if len(text) > most:
        raise InvalidInput(
            f"the {name} has {len(text)} characters, at most {most} are accepted; "
            f"{TOO_LONG.get(name, LONG_MATERIAL)}"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"the {name} holds half a surrogate pair, which isn't text") from None


def admit(
    store: RunStore, agent: str, agents: Agents | None, principal: Principal | None
) -> Limits | None:
    """The agent's limits; None where no worker has told yet which agents there are.

    Refuses what the first step would refuse, as far as the agent's requirements are known by now.
    """
    if agents is not None:
        limits: Limits | None = agents[agent].limits
        required = agents[agent].requires
    else:
        limits, required = store.read_agent(agent)
        if limits is None and (catalog := store.read_agents()):
            known = ", ".join(sorted(catalog))
            raise AgentError(
                f"no agent named {agent!r}; the workers know: {known}. Start a worker that has it, "
                "or correct the name"
            )
    if missing := missing_scopes(required, principal):
        raise PermissionDenied(
            f"agent {agent} needs the permission {', '.join(missing)}, which the principal doesn't "
            "have; submit with a principal that has it"
        )
    return limits


def check_agent(agent: object) -> str:
    if not isinstance(agent, str):
        raise InvalidInput('agent is the name of an agent, such as "support", and not the agent')
    if not NAME.fullmatch(agent):
        raise InvalidInput("an agent's name has 1 to 64 letters, digits, _ or -; correct the name")
    return agent


def check_idempotency_key(key: object) -> str | None:
    if key is None or (isinstance(key, str) and key):
        return key
    if key == "":
        raise InvalidInput("idempotency_key is empty; leave it out, or give one for each request")
    raise InvalidInput("idempotency_key must be a str; leave it out, or give one for each request")


def check_principal(given: object) -> Principal | None:
    """The principal as it was given, or as a dict; `InvalidInput` for anything else."""
    if given is None:
        return None
    try:
        principal = Principal.model_validate(_as_dict(given))
        size = len(principal.model_dump_json().encode())
    except ValueError:  # not of this shape, or with half a surrogate pair
        raise InvalidInput(
            "principal takes id and tenant (text) and scopes (a list of texts), and nothing else"
        ) from None
    if size > MAX_PRINCIPAL_BYTES:
        raise InvalidInput(f"principal has {size} bytes, at most {MAX_PRINCIPAL_BYTES}")
    return principal


def _check_on_finish(given: object) -> OnFinish | None:
    if given is None:
        return None
    try:
        on_finish = OnFinish.model_validate(
            {"task": given} if isinstance(given, str) else _as_dict(given)
        )
    except ValidationError:
        raise InvalidInput("on_finish is a task's name, or takes task and queue") from None
    for name in (on_finish.task, on_finish.queue):
        if " " in name or not name.isprintable():
            raise InvalidInput(
                "on_finish: the names of a task and of a queue hold no blanks or control characters"
            )
    return on_finish


def _as_dict(given: object) -> object:
    return dict(given) if isinstance(given, Mapping) else given


def _check_metadata(metadata: object) -> dict[str, Any]:
    if metadata is not None and not isinstance(metadata, Mapping):
        raise InvalidInput("metadata must be a dict that JSON can carry")
    try:
        text = json.dumps(dict(metadata or {}), allow_nan=False, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError):
        raise InvalidInput("metadata must be a dict that JSON can carry") from None
    if len(text) > MAX_METADATA_CHARS:
        raise InvalidInput(f"metadata has {len(text)} characters, at most {MAX_METADATA_CHARS}")
    value: dict[str, Any] = json.loads(text)
    return value
