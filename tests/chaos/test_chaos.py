"""Everything at once, by a seed: every run ends, once, and nothing is done that mustn't be.

The ordinary tests run a cut of it; `make chaos` all of it. `CELERIAC_CHAOS_SEED` gives a schedule
that was seen before, and `CELERIAC_CHAOS_RUNS` and the like another size.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from support.chaos import Size, make_schedule, unleash
from support.chaos_report import judge

CUT = Size(
    runs=40,
    seconds=22,
    patience=50,
    messages=12,
    doubled=6,
    worker_kills=4,
    child_kills=3,
    redis_kills=2,
    freezes=1,
    restarts=1,
    pubsub_kills=2,
    client_kills=1,
    holes=1,
    deaf=1,
    lost_replies=8,
    said=8,
    floods=1,
    full_for=3.0,
    cancels=5,
)


def run_chaos(folder: Path, size: Size, seed: int) -> None:
    print(f"CELERIAC_CHAOS_SEED={seed}")  # noqa: T201
    with unleash(folder, size, seed) as (story, made, client):
        verdict = judge(story, client.store, made.ledger)
        print(verdict.table())  # noqa: T201
        shown = "\n".join(verdict.faults[:30])
        assert not verdict.faults, f"CELERIAC_CHAOS_SEED={seed}\n{shown}\n{verdict.table()}"


def test_a_seed_gives_the_same_schedule_again() -> None:
    assert make_schedule(CUT, 7) == make_schedule(CUT, 7)
    assert make_schedule(CUT, 7) != make_schedule(CUT, 8)


@pytest.mark.timeout(150)
def test_a_cut_of_the_chaos_breaks_nothing(tmp_path: Path) -> None:
    run_chaos(tmp_path / "chaos", CUT, int(os.environ.get("CELERIAC_CHAOS_SEED", "1")))


@pytest.mark.chaos
@pytest.mark.timeout(1500)
def test_the_chaos_breaks_nothing(tmp_path: Path) -> None:
    seed = int(os.environ.get("CELERIAC_CHAOS_SEED", str(time.time_ns() % 1_000_000)))
    run_chaos(tmp_path / "chaos", Size.from_env(), seed)
