"""Following runs over real HTTP: every event once and in order, whoever reads and however badly."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from runner import Settings
from support.fleet import wait_for
from support.http import serving
from tasks import Client, Run
from tasks.feed import KEPT
from web import create_app

MANY = 800


def tell(client: Client, run: Run, first: int, last: int, *, note: str = "") -> None:
    """Write events as a worker does, numbered from `first` up to but without `last`."""
    for number in range(first, last):
        client.store.add_event(
            run.id, "call.progress", step=0, call="0.0", data={"done": number, "note": note}
        )


def read(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The events of a stream, with the id that a browser would say."""
    event_id = ""
    for line in lines:
        name, _, value = line.partition(": ")
        if name == "id":
            event_id = value
        elif name == "data":
            yield json.loads(value) | {"last": event_id}


def follow(http: httpx.Client, run: Run, after: str | None = None) -> Iterator[dict[str, Any]]:
    headers = {} if after is None else {"Last-Event-ID": after}
    with http.stream("GET", f"/runs/{run.id}/events", headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield from read(answer.iter_lines())


def ids_of(run: Run) -> list[str]:
    return [event.id for event in run.events()]


def test_a_run_is_followed_live_until_it_ends(http: httpx.Client, client: Client) -> None:
    run = client.submit("go", agent="helper")
    followed = follow(http, run)
    assert next(followed)["type"] == "run.created"

    tell(client, run, 0, 1)
    assert next(followed)["data"]["done"] == 0
    run.cancel()

    [last] = followed
    assert last["type"] == "run.finished"
    assert last["last"] == last["id"]


def test_a_reader_that_drops_its_connection_a_hundred_times_gets_every_event_once_in_order(
    http: httpx.Client, client: Client
) -> None:
    chance = random.Random(7)
    run = client.submit("go", agent="helper")

    def write() -> None:
        tell(client, run, 0, MANY)
        run.cancel()

    writing = threading.Thread(target=write)
    writing.start()

    seen: list[str] = []
    for _ in range(100):
        after = seen[-1] if seen else None
        for number, event in enumerate(follow(http, run, after)):
            seen.append(event["id"])
            if number >= chance.randrange(16):
                break  # closes the connection
    seen += [event["id"] for event in follow(http, run, seen[-1])]

    writing.join()
    assert seen == ids_of(run)
    assert len(seen) == MANY + 2


def test_a_reader_past_the_end_is_told_not_to_come_again(
    http: httpx.Client, client: Client
) -> None:
    run = client.submit("go", agent="helper")
    run.cancel()
    *_, last = ids_of(run)
    answer = http.get(f"/runs/{run.id}/events", headers={"Last-Event-ID": last})
    assert answer.status_code == 204
    assert http.get(f"/runs/{run.id}/events", params={"after": last}).status_code == 204


def test_what_the_cap_has_dropped_is_a_gap(client: Client) -> None:
    url = client.store.settings.redis_url
    with Client(settings=Settings(redis_url=url, max_events=200)) as few:
        run = few.submit("go", agent="helper")
        [created] = few.store.first_events([run.id])
        assert created is not None
        tell(few, run, 0, 1_000)
        run.cancel()
        with serving(create_app(few)) as url, httpx.Client(base_url=url) as http:
            for after, shown in ((None, "0"), (created.id, created.id)):
                gap, *rest = follow(http, run, after)
                assert (gap["type"], gap["id"], gap["last"]) == ("gap", shown, shown)
                assert [each["id"] for each in rest] == ids_of(run)[1:]


def test_a_quiet_run_is_told_of_by_comments(client: Client) -> None:
    run = client.submit("go", agent="helper")
    with (
        serving(create_app(client, heartbeat=0.05)) as url,
        httpx.Client(base_url=url) as http,
        http.stream("GET", f"/runs/{run.id}/events") as answer,
    ):
        comments = (line for line in answer.iter_lines() if line.startswith(":"))
        assert [next(comments), next(comments)] == [": still here"] * 2


@pytest.mark.parametrize("after", ["", "yesterday", "1-2-3", "99999999999999999999999-0"])
def test_an_id_that_no_event_has_is_refused(http: httpx.Client, client: Client, after: str) -> None:
    run = client.submit("go", agent="helper")
    answer = http.get(f"/runs/{run.id}/events", params={"after": after})
    assert answer.status_code == 422
    assert "after is the id of an event" in answer.json()["error"]["message"]


def test_an_id_of_the_future_keeps_no_other_reader_from_the_present(
    http: httpx.Client, client: Client
) -> None:
    run = client.submit("go", agent="helper")
    future = http.stream("GET", f"/runs/{run.id}/events", params={"after": "99999999999999-0"})
    with future as answer:
        assert next(answer.iter_lines()) == "retry: 1000"
        followed = follow(http, run)
        assert next(followed)["type"] == "run.created"
        tell(client, run, 0, 1)
        assert next(followed)["data"]["done"] == 0
        followed.close()  # type: ignore[attr-defined]
    run.cancel()


def test_a_run_that_is_deleted_under_its_reader_ends_the_stream(client: Client) -> None:
    run = client.submit("go", agent="helper")
    with (
        serving(create_app(client, heartbeat=0.1)) as url,
        httpx.Client(base_url=url) as http,
    ):
        followed = follow(http, run)
        next(followed)
        assert client.delete(run.id, cancel=True)
        assert [each["type"] for each in followed] in ([], ["run.finished"])
        assert http.get(f"/runs/{run.id}/events").status_code == 404


# --- many readers ------------------------------------------------------------------------------


async def read_ids(http: httpx.AsyncClient, run: Run, opened: asyncio.Semaphore) -> list[str]:
    async with http.stream("GET", f"/runs/{run.id}/events") as answer:
        opened.release()
        lines = [line async for line in answer.aiter_lines()]
    return [line.removeprefix("id: ") for line in lines if line.startswith("id: ")]


def blocked_reads(client: Client) -> int:
    """Connections that wait in Redis for events."""
    return sum("b" in each["flags"] for each in client.store.redis.client_list())


def test_a_reader_that_is_slow_loses_nothing_and_nothing_is_kept_for_it(
    http: httpx.Client, client: Client
) -> None:
    run = client.submit("go", agent="helper")
    with http.stream("GET", f"/runs/{run.id}/events") as answer:
        lines = answer.iter_lines()
        assert next(lines) == "retry: 1000"
        wait_for(lambda: blocked_reads(client) == 1)
        for note in ("x" * 5_000, "y"):  # more than the sockets in between hold
            tell(client, run, 0, MANY, note=note)
        wait_for(lambda: client.feed._tails[run.id].position == run.last_event_id())
        assert len(client.feed._tails[run.id].events) == KEPT
        run.cancel()
        assert [each["id"] for each in read(lines)] == ids_of(run)
    wait_for(lambda: not client.feed._tails)


def test_200_readers_of_50_runs_share_one_read_and_lose_nothing(client: Client) -> None:
    runs = [client.submit(f"goal {number}", agent="helper") for number in range(50)]

    async def follow_all(url: str) -> list[list[str]]:
        opened = asyncio.Semaphore(0)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=30) as http:
            reading = [asyncio.create_task(read_ids(http, run, opened)) for run in runs * 4]
            for _ in reading:
                await opened.acquire()
            await asyncio.to_thread(tell_all)
            return await asyncio.gather(*reading)

    def tell_all() -> None:
        wait_for(lambda: blocked_reads(client) == 1)
        threads_before = threading.active_count()
        for run in runs:
            tell(client, run, 0, 40)
        found["reads"] = blocked_reads(client)
        found["threads"] = threading.active_count() - threads_before
        for run in runs:
            run.cancel()

    found: dict[str, int] = {}
    with serving(create_app(client)) as url:
        read = asyncio.run(follow_all(url))

    assert read == [ids_of(run) for run in runs * 4]
    assert all(len(each) == 42 for each in read)
    assert found["reads"] <= 1
    wait_for(lambda: blocked_reads(client) == 0)
