"""Limits that hold across the fleet: their names, and how they are written for the transitions.

A limit is a name and its size as text: `5` is so many at once, `10/1000` so many starts within so
many milliseconds. Users' names have no dot, so none of ours can be theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

LIMIT_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

QUEUE_LIMIT = "queue.tools"
"""The limit of all calls together: the setting `CELERIAC_TOOLS_CONCURRENCY`."""

PERIODS = {"s": 1_000, "m": 60_000, "h": 3_600_000}

RATE = re.compile(r"([1-9][0-9]{0,5})/([smh])")


def read_rate(text: str) -> str:
    """A rate such as `10/s`, `100/m` or `5/h` as a limit; raises `ValueError` for other text."""
    found = RATE.fullmatch(text)
    if found is None:
        raise ValueError("a rate is written as 10/s, 100/m or 5/h")
    return f"{found[1]}/{PERIODS[found[2]]}"


def tool_limits(name: str, most: int | None, rate: str | None) -> dict[str, str]:
    """The limits that a call of a tool needs a place of."""
    return ({name: str(most)} if most else {}) | ({f"rate.{name}": read_rate(rate)} if rate else {})


def model_limits(endpoint: str, most: int | None, requests_per_minute: int) -> dict[str, str]:
    """The limits that a step needs a place of while it asks a model."""
    limits = {f"model.{endpoint}": str(most)} if most else {}
    if requests_per_minute:
        limits[f"rate.model.{endpoint}"] = f"{requests_per_minute}/{PERIODS['m']}"
    return limits


def name_endpoint(address: str, model: str) -> str:
    """What the limits of a model are called after: where it is asked, and its name there."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", f"{address}.{model}".strip("."))[:128]


def write_limits(limits: Mapping[str, str]) -> str:
    """Limits as a record holds them: `crm=5,rate.crm=10/1000`."""
    return ",".join(f"{name}={size}" for name, size in limits.items())


def find_quarrel(limits: Iterable[Mapping[str, str]]) -> str | None:
    """The name of a limit for which two sizes are given."""
    known: dict[str, str] = {}
    for each in limits:
        for name, size in each.items():
            if known.setdefault(name, size) != size:
                return name
    return None
