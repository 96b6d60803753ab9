"""Accepts a goal: everything that can be refused is refused here, before anything is written."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from runner import keys
from runner.agents import Agents
from runner.context import goal_message
from runner.errors import AgentError, InvalidInput
from runner.models import Limits, OnFinish, Principal
from runner.store import RunStore

MAX_METADATA_CHARS = 16_384


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
) -> str:
    """Write the record of a new run and answer its id, or the id that the key already stands for.

    Raises `InvalidInput` or `AgentError`; then nothing was written.
    """
    _check_goal(goal, store.settings.max_goal_chars)
    limits = _limits_of(store, agent, agents)
    if idempotency_key is not None and not idempotency_key:
        raise InvalidInput("idempotency_key is empty; leave it out, or give one for each request")
    _, known_id = store.create_run(
        run_id=keys.check_run_id(run_id) if run_id else new_run_id(),
        agent=agent,
        messages=[goal_message(goal)],
        limits=limits,
        principal=_check_principal(principal),
        metadata=_check_metadata(metadata),
        idempotency_key=idempotency_key,
        on_finish=(task := _check_on_finish(on_finish)),
        promised=task is not None or bool(store.settings.result_backend),
    )
    return known_id


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


def _limits_of(store: RunStore, agent: str, agents: Agents | None) -> Limits | None:
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


def _check_principal(principal: Principal | Mapping[str, Any] | None) -> Principal | None:
    if principal is None or isinstance(principal, Principal):
        return principal
    try:
        return Principal.model_validate(dict(principal))
    except ValidationError:
        raise InvalidInput("principal takes id, tenant and scopes, and nothing else") from None


def _check_on_finish(on_finish: OnFinish | Mapping[str, str] | str | None) -> OnFinish | None:
    if on_finish is None or isinstance(on_finish, OnFinish):
        return on_finish
    given = {"task": on_finish} if isinstance(on_finish, str) else dict(on_finish)
    try:
        return OnFinish.model_validate(given)
    except ValidationError:
        raise InvalidInput("on_finish is a task's name, or takes task and queue") from None


def _check_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    try:
        text = json.dumps(dict(metadata or {}), allow_nan=False, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError):
        raise InvalidInput("metadata must be a dict that JSON can carry") from None
    if len(text) > MAX_METADATA_CHARS:
        raise InvalidInput(f"metadata has {len(text)} characters, at most {MAX_METADATA_CHARS}")
    value: dict[str, Any] = json.loads(text)
    return value
