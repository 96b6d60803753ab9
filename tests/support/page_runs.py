"""Runs for the run page without workers: made by the loop here and now, or event by event."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from runner import keys
from runner.context import goal_message
from runner.loop import NextStep
from runner.store import RunStore
from runner.testing import Reply, ScriptedModel
from support.loops import drive, loop_of_worker
from support.page_agents import clerk

Told = tuple[float, str, int | None, str | None, dict[str, Any]]
"""Seconds since the run was created, type, step, call, data."""


def start_run(
    store: RunStore, run_id: str, replies: Sequence[Reply] = (), *, goal: str = "go", **given: Any
) -> None:
    """Make a run and do all of it that needs nobody; `given` are fields of its agent."""
    model = ScriptedModel(replies)
    model.name = "fake-1"
    agent = replace(clerk, model=model, **given)
    store.create_run(
        run_id=run_id, agent=agent.name, messages=[goal_message(goal)], limits=agent.limits
    )
    if not replies:
        return
    with loop_of_worker(store, agent) as loop:
        drive(loop, NextStep(run_id, 0))


def tell_events(store: RunStore, run_id: str, told: Sequence[Told]) -> None:
    """Put these in the place of the run's events: real ones would all be of one moment."""
    created = store.read_run(run_id).created
    client: Any = store.redis
    client.delete(keys.events(run_id))
    for number, (at, kind, step, call, data) in enumerate(told, 1):
        fields = {
            "at": created + round(at * 1000),
            "type": kind,
            "step": "" if step is None else step,
            "call": call or "",
            "data": json.dumps(data),
        }
        client.xadd(keys.events(run_id), fields, id=f"{created}-{number}")


def move_back(store: RunStore, run_id: str, seconds: float) -> None:
    """Let a run have been created so much earlier."""
    client: Any = store.redis
    record = store.read_run(run_id)
    for name, at in (("created", record.created), ("deadline", record.deadline)):
        client.hset(keys.run(run_id), name, at - round(seconds * 1000))
