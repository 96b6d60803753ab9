"""What many readers cost a process that serves them: no more the longer they read."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from support.command import COMMAND, PYTHONPATH
from support.fleet import wait_for
from tasks import Client, Run
from tasks.feed import KEPT

RUNS, READERS = 50, 4
"""Runs, and readers of each."""

PAGE, WARM, MORE = 50, 6, 12
"""Events of each run that come at once, and how often before the first look and after it.

By the first look the process holds as many events of each run as it keeps for its readers.
"""

assert PAGE * WARM > KEPT


@pytest.fixture
def web(client: Client, tmp_path: Path) -> Iterator[tuple[int, str]]:
    """The process of `celeriac web`, and its address."""
    log = tmp_path / "log"
    with (
        log.open("wb") as out,
        subprocess.Popen(
            [*COMMAND, "web", "--port", "0"],
            env=os.environ
            | {"PYTHONPATH": PYTHONPATH, "CELERIAC_REDIS_URL": client.store.settings.redis_url},
            stdout=out,
            stderr=out,
        ) as process,
    ):
        try:
            yield process.pid, wait_for(lambda: address_in(log.read_text()), timeout=30)
        finally:
            process.terminate()


def address_in(text: str) -> str | None:
    return next((word for word in text.split() if word.startswith("http://")), None)


def resident(pid: int) -> int:
    """MB that the process holds in memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (each for each in status.splitlines() if each.startswith("VmRSS:"))
    return int(line.split()[1]) // 1024


def tell_page(client: Client, runs: list[Run]) -> None:
    for run in runs:
        for number in range(PAGE):
            client.store.add_event(
                run.id, "call.progress", step=0, call="0.0", data={"done": number, "note": "x" * 99}
            )


class Reader:
    """Follows a run, and counts the events."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.count = 0

    async def read(self, http: httpx.AsyncClient) -> None:
        async with http.stream("GET", f"/runs/{self.run.id}/events") as answer:
            async for line in answer.aiter_lines():
                self.count += line.startswith("data:")


def all_have(readers: list[Reader], told: int) -> bool:
    return all(each.count >= told for each in readers)


async def follow(client: Client, runs: list[Run], url: str, pid: int) -> tuple[int, int]:
    """Memory of the process after the first pages, and after all, with every reader kept up."""
    readers = [Reader(run) for run in runs * READERS]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=30) as http:
        reading = [asyncio.create_task(each.read(http)) for each in readers]
        seen = []
        for page in range(1, WARM + MORE + 1):
            await asyncio.to_thread(tell_page, client, runs)
            told = 1 + page * PAGE
            await asyncio.to_thread(wait_for, partial(all_have, readers, told))
            seen.append(resident(pid))
        for run in runs:
            run.cancel()
        await asyncio.gather(*reading)
    assert {each.count for each in readers} == {2 + (WARM + MORE) * PAGE}
    return seen[WARM - 1], seen[-1]


@pytest.mark.soak
def test_200_readers_of_50_runs_take_no_more_memory_the_longer_they_read(
    client: Client, web: tuple[int, str]
) -> None:
    pid, url = web
    runs = [client.submit(f"goal {number}", agent="helper") for number in range(RUNS)]
    before, after = asyncio.run(follow(client, runs, url, pid))
    print(f"{before} MB, and {after} MB after {MORE * PAGE * RUNS} events more")  # noqa: T201
    assert after - before <= 12
