"""What the whole fleet holds at one moment, read from Redis: queues, places of limits, what is due.

Nothing is changed, and the cost doesn't grow with the number of runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from runner import keys
from runner.agents import Agents
from runner.connection import connect, reporting_redis_errors
from runner.limits import QUEUE_LIMIT
from runner.settings import STEPS_QUEUE, TOOLS_QUEUE
from runner.store import RunStore


@dataclass(frozen=True, slots=True)
class QueueSeen:
    """`wait`: seconds that the oldest hint in it has waited; 0 where it is empty."""

    name: str
    depth: int
    wait: float


@dataclass(frozen=True, slots=True)
class LimitSeen:
    """Places taken under a limit, who waits for one, and seconds that the first of them has."""

    name: str
    used: int
    waiting: int
    oldest: float


@dataclass(frozen=True, slots=True)
class Survey:
    """`overdue`: seconds for which somebody should have looked at the run `overdue_run`."""

    at: float
    queues: tuple[QueueSeen, ...]
    limits: tuple[LimitSeen, ...]
    live_runs: int
    overdue: float
    overdue_run: str


def survey(store: RunStore, limits: Iterable[str] = ()) -> Survey:
    """Look once. `limits` are looked at beside those that something waits for.

    Raises `RedisUnavailable`.
    """
    with reporting_redis_errors():
        seconds, micros = store.redis.time()
        now = seconds + micros / 1e6
        crowded = {str(name) for name in store.redis.smembers(keys.CROWDED)}
        first: Any = store.redis.zrange(keys.DUE, 0, 0, withscores=True)
        run_id, due_at = first[0] if first else ("", now * 1000)
        overdue = max(0.0, now - due_at / 1000)
        return Survey(
            at=now,
            queues=_queues(store, now),
            limits=tuple(_limit(store, name, now) for name in sorted({*limits, *crowded})),
            live_runs=int(store.redis.zcount(keys.RUNS, "+inf", "+inf")),
            overdue=overdue,
            overdue_run=run_id if overdue else "",
        )


def limits_of(agents: Agents) -> set[str]:
    """The names of the limits that calls of these agents' tools are under."""
    of_tools = {name for agent in agents.values() for tool in agent.toolbox for name in tool.limits}
    return of_tools | {QUEUE_LIMIT}


def _queues(store: RunStore, now: float) -> tuple[QueueSeen, ...]:
    broker = connect(store.settings.queue_url)
    try:
        return tuple(
            QueueSeen(name, int(broker.llen(name)), _waited(store, broker.lindex(name, -1), now))
            for name in (STEPS_QUEUE, TOOLS_QUEUE)
        )
    finally:
        broker.close()


def _waited(store: RunStore, message: object, now: float) -> float:
    """Seconds since a hint was published: its record knows. 0 where it has none, or none waits."""
    try:
        run_id, _, *index = str(json.loads(str(message))["headers"]["id"]).split(".")
    except (ValueError, TypeError, KeyError):
        return 0.0  # no message, or a task with an id of another kind
    if index:
        hinted = store.redis.hget(keys.calls(run_id), f"{index[0]}.hinted")
    else:
        hinted = store.redis.hget(keys.run(run_id), "hinted")
    return max(0.0, now - float(hinted) / 1000) if hinted else 0.0


def _limit(store: RunStore, name: str, now: float) -> LimitSeen:
    waiting = keys.waiting(name)
    first = store.redis.zrange(waiting, 0, 0, withscores=True)
    return LimitSeen(
        name,
        used=int(store.redis.zcount(keys.slots(name), now * 1000, "+inf")),
        waiting=int(store.redis.zcard(waiting)),
        oldest=max(0.0, now - float(first[0][1]) / 1e6) if first else 0.0,
    )
