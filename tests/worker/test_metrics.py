"""The exporter of what the fleet holds, and the library's part of a worker's metrics."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from runner import SettingsError, keys
from runner.settings import Settings
from runner.store import RunStore
from support.fleet import url_of, valkey
from support.metrics import free_address, scrape
from tasks import Client
from worker.metrics import serve_fleet

Spawn = Callable[..., subprocess.Popen[str]]


def test_the_command_serves_until_it_is_told_to_stop(spawn: Spawn, client: Client) -> None:
    address = free_address()
    client.submit("wait", agent="helper")
    exporter = spawn("metrics", "--address", address)
    assert exporter.stdout is not None
    assert address in exporter.stdout.readline()

    told = scrape(address)
    exporter.send_signal(signal.SIGTERM)

    assert exporter.wait(10) == 0
    assert told[("celeriac_redis_up",)] == 1
    assert told[("celeriac_live_runs",)] == 1
    assert told[("celeriac_queue_depth", "celeriac.steps")] == 1
    assert told[("celeriac_queue_depth", "celeriac.tools")] == 0
    assert 0 <= told[("celeriac_queue_wait_seconds", "celeriac.steps")] < 30
    assert told[("celeriac_slots_used", "queue.tools")] == 0
    assert ("celeriac_overdue_seconds",) in told


def test_a_limit_that_was_waited_for_stays_in_sight(client: Client) -> None:
    store = client.store
    now = float(store.redis.time()[0])
    store.redis.sadd(keys.CROWDED, "crm")
    store.redis.zadd(keys.waiting("crm"), {"run-1.0.0": now * 1e6})
    store.redis.zadd(keys.slots("crm"), {"run-2.0.0": (now + 60) * 1000})
    address = free_address()
    end = serve_fleet(address, store, set())

    crowded = scrape(address)
    store.redis.delete(keys.CROWDED, keys.waiting("crm"))
    after = scrape(address)
    end()

    name = "celeriac_slots_waiting", "crm"
    assert (crowded[name], after[name]) == (1, 0)
    assert (crowded[("celeriac_slots_used", "crm")], after[("celeriac_slots_used", "crm")]) == (
        1,
        1,
    )


def test_a_redis_that_is_away_is_told_and_ends_nothing(tmp_path: Path) -> None:
    address = free_address()
    with valkey(tmp_path) as server:
        store = RunStore(Settings(redis_url=url_of(server)))
        end = serve_fleet(address, store, set())
        assert scrape(address)[("celeriac_redis_up",)] == 1

    assert scrape(address) == {("celeriac_redis_up",): 0}
    end()
    store.close()


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "no-such-host.invalid:9101", "taken"])
def test_an_address_that_cant_be_had_is_named(address: str, client: Client) -> None:
    free = free_address()
    end = serve_fleet(free, client.store, set())
    with pytest.raises(SettingsError, match="free host:port"):
        serve_fleet(free if address == "taken" else address, client.store, set())
    end()
