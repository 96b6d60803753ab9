"""`celeriac web`: for this machine alone, until it is told to stop."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable

import httpx
import pytest

from support.command import Invoke
from tasks import Client


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.org", ""])
def test_an_address_that_others_reach_is_refused(invoke: Invoke, host: str) -> None:
    invoke("web", "--host", host, "--port", "0").refused(2, "this machine alone", "create_router")


def test_a_port_that_is_taken_or_none_is_refused(invoke: Invoke, client: Client) -> None:
    taken = client.store.redis.connection_pool.connection_kwargs["port"]
    invoke("web", "--port", str(taken)).refused(2, f"can't serve at 127.0.0.1:{taken}")
    invoke("web", "--port", "65536").refused(2, "isn't a port")


def test_it_is_refused_where_redis_is_away(invoke: Invoke) -> None:
    away = "redis://127.0.0.1:1/0"
    invoke("web", "--port", "0", CELERIAC_REDIS_URL=away).refused(3, "Redis doesn't answer")


def test_it_serves_runs_and_stops_when_told_though_somebody_follows_one(
    spawn: Callable[..., subprocess.Popen[str]], client: Client
) -> None:
    process = spawn("web", "--port", "0")
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.match(r"(http://127\.0\.0\.1:\d+)/ ", line)
    assert found, (line, process.poll())
    with httpx.Client(base_url=found[1]) as http:
        made = http.post("/runs", json={"goal": "go", "agent": "helper"})
        assert client.get(made.json()["id"]).status() == "queued"
        with http.stream("GET", f"/runs/{made.json()['id']}/events") as followed:
            lines = followed.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 130
    assert client.get(made.json()["id"]).status() == "queued"
