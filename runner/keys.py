"""The only module that spells a Redis key, a channel or an id."""

from __future__ import annotations

import re

from runner.errors import InvalidInput

DUE = "celeriac:due"
"""ZSET run id -> ms at which somebody must look at the run: outbox, watchdog, backoff and timer."""

RUNS = "celeriac:runs"
"""ZSET run id -> ms at which its record expires, +inf until it ends: what `list` reads."""

AGENTS = "celeriac:agents"
"""HASH agent name -> what clients must know of it (limits), written by workers as they start."""

AGENTS_SEEN = "celeriac:agents:seen"
"""ZSET agent name -> seconds at which a worker last announced it: one that left is forgotten."""

CROWDED = "celeriac:crowded"
"""SET of the limits that something waits for."""

NUDGE = "celeriac:nudge"
"""Channel that carries the id of a run that was ended from outside: its holders let go at once."""

RUN_ID = re.compile(r"[A-Za-z0-9_-]{8,64}")


def run(run_id: str) -> str:
    return f"celeriac:{run_id}"


def messages(run_id: str) -> str:
    return f"celeriac:{run_id}:messages"


def calls(run_id: str) -> str:
    return f"celeriac:{run_id}:calls"


def results(run_id: str) -> str:
    return f"celeriac:{run_id}:results"


def evidence(run_id: str) -> str:
    return f"celeriac:{run_id}:evidence"


def inbox(run_id: str) -> str:
    return f"celeriac:{run_id}:inbox"


def sent(run_id: str) -> str:
    return f"celeriac:{run_id}:sent"


def events(run_id: str) -> str:
    return f"celeriac:{run_id}:events"


def trace(run_id: str) -> str:
    return f"celeriac:{run_id}:trace"


def view(run_id: str) -> str:
    """STRING: which part of the history the model is shown, and what is known of its context."""
    return f"celeriac:{run_id}:view"


def whole(run_id: str) -> str:
    """HASH call id -> the text of a result that was cut for the model."""
    return f"celeriac:{run_id}:whole"


def idempotency(tenant: str, key: str) -> str:
    return f"celeriac:idem:{tenant}:{key}"


def conversation(tenant: str, name: str) -> str:
    """LIST: the live run of a conversation, or its last, and those that wait behind it."""
    return f"celeriac:conversation:{tenant}:{name}"


def seen(queue: str) -> str:
    """STRING ms: when the newest hint that a worker of this queue has acted on was published."""
    return f"celeriac:seen:{queue}"


def suspect(process: str) -> str:
    """STRING key of a run: whose step this process tries for the last time before it is poison."""
    return f"celeriac:suspect:{process}"


def taken(process: str) -> str:
    """STRING, for an hour: the attempt in this process that took a hint off a queue, and which."""
    return f"celeriac:taken:{process}"


def slots(limit: str) -> str:
    """ZSET holder -> ms from which its place is free again, for one concurrency limit or rate."""
    return f"celeriac:slots:{limit}"


def waiting(limit: str) -> str:
    """ZSET holder -> microsecond of its arrival: what is parked until a place is free."""
    return f"celeriac:waiting:{limit}"


def pace(endpoint: str) -> str:
    """HASH: until when nobody asks this model, and how far its tokens of a minute are used."""
    return f"celeriac:pace:{endpoint}"


def ping(token: str) -> str:
    """LIST, for a minute: a worker's answer to a liveness probe."""
    return f"celeriac:ping:{token}"


def wake(reader: str) -> str:
    """STREAM, for a minute: tells a reader of many runs' events that there is one more to read."""
    return f"celeriac:wake:{reader}"


def told(run_id: str, resumed: int) -> str:
    """STRING, for an hour: one of the processes that know of this end tells telemetry of it."""
    return f"celeriac:told:{run_id}.{resumed}"


def call_id(step: int, index: int) -> str:
    """The public id of a call, e.g. `3.0`."""
    return f"{step}.{index}"


def trace_id(run_id: str, step: int, index: int | None = None) -> str:
    """The id of a step or a call outside its run: Celery's task id, a call's idempotency key."""
    return f"{run_id}.{step}" if index is None else f"{run_id}.{step}.{index}"


def finish_id(run_id: str, resumed: int) -> str:
    """The id of the task that is told of a run's end: one for each end, if it was resumed."""
    return f"{run_id}.finished" + (f".{resumed}" if resumed else "")


def check_run_id(run_id: str) -> str:
    """Refuse an id that could be mistaken for another key, before it becomes part of one."""
    if not RUN_ID.fullmatch(run_id):
        raise InvalidInput("a run id has 8 to 64 letters, digits, _ or -")
    return run_id
