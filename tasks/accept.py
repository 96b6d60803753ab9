"""Accepts a goal: everything that can be refused is refused here, before anything is written."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from runner import keys
from runner.agents import NAME, Agents
from runner.context import goal_message
from runner.errors import AgentError, InvalidInput
from runner.models import Limits, OnFinish, Principal
from runner.store import Outcome, RunStore

MAX_METADATA_CHARS = 16_384

START_NEEDS = ("goal", "agent")
START_TAKES = (*START_NEEDS, "principal", "metadata", "idempotency_key", "on_finish")
"""What `celeriac.start` must be given, and all that it may be."""

MAX_FAULTS = 5
"""Faults of a start's keywords that a refusal names."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The run that a goal got, and whether this made it or it was there already."""

    run_id: str
    created: bool


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
) -> Accepted:
    """Write the record of a new run, or find the one that the key or the id already stands for.

    Raises `InvalidInput` or `AgentError`; then nothing was written.
    """
    _check_goal(goal, store.settings.max_goal_chars)
    limits = limits_of(store, check_agent(agent), agents)
    outcome, known_id = store.create_run(
        run_id=keys.check_run_id(run_id) if run_id else new_run_id(),
        agent=agent,
        messages=[goal_message(goal)],
        limits=limits,
        principal=_check_principal(principal),
        metadata=_check_metadata(metadata),
        idempotency_key=_check_idempotency_key(idempotency_key),
        on_finish=(task := _check_on_finish(on_finish)),
        promised=task is not None or bool(store.settings.result_backend),
    )
    return Accepted(known_id, created=outcome is Outcome.CREATED)


def accept_start(
    store: RunStore, run_id: str, args: Sequence[Any], given: Mapping[str, Any]
) -> Accepted:
    """`accept_goal` with what a `celeriac.start` was sent; the run has this id, or is refused."""
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


def new_run_id(now: float | None = None, random_bits: int | None = None) -> str:
    """A UUIDv7: ids sort by the time of submit."""
    ms = int((time.time() if now is None else now) * 1000)
    bits = secrets.randbits(74) if random_bits is None else random_bits
    number = (ms << 80) | (0x7 << 76) | ((bits >> 62) << 64) | (0b10 << 62) | (bits & (2**62 - 1))
    text = f"{number:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _check_goal(goal: object, most: int) -> None:
    if not isinstance(goal, str) or not goal.strip():
        raise InvalidInput("the goal is empty; say in words what the agent is to do")
    if len(goal) > most:
        raise InvalidInput(
            f"the goal has {len(goal)} characters, at most {most} are accepted; put long material "
            "where a tool can read it, or raise CELERIAC_MAX_GOAL_CHARS"
        )
    try:
        goal.encode()
    except UnicodeEncodeError:
        raise InvalidInput("the goal holds half a surrogate pair, which isn't text") from None


def limits_of(store: RunStore, agent: str, agents: Agents | None) -> Limits | None:
    """The agent's limits; None where no worker has told yet which agents there are."""
    if agents is not None:
        return agents[agent].limits
    catalog = store.read_agents()
    if catalog and agent not in catalog:
        known = ", ".join(sorted(catalog))
        raise AgentError(
            f"no agent named {agent!r}; the workers know: {known}. Start a worker that has it, or "
            "correct the name"
        )
    return catalog.get(agent)


def check_agent(agent: object) -> str:
    if not isinstance(agent, str):
        raise InvalidInput('agent is the name of an agent, such as "support", and not the agent')
    if not NAME.fullmatch(agent):
        raise InvalidInput("an agent's name has 1 to 64 letters, digits, _ or -; correct the name")
    return agent


def _check_idempotency_key(key: object) -> str | None:
    if key is None or (isinstance(key, str) and key):
        return key
    if key == "":
        raise InvalidInput("idempotency_key is empty; leave it out, or give one for each request")
    raise InvalidInput("idempotency_key must be a str; leave it out, or give one for each request")


def _check_principal(given: object) -> Principal | None:
    if given is None:
        return None
    try:
        principal = Principal.model_validate(_as_dict(given))
        principal.model_dump_json().encode()
    except ValueError:  # not of this shape, or with half a surrogate pair
        raise InvalidInput(
            "principal takes id and tenant (text) and scopes (a list of texts), and nothing else"
        ) from None
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
