"""The client for an event loop: the same names as `Client` and `Run`, with `await`.

A question to Redis is a short one, so it is asked from a thread of the loop's pool. What waits (a
result, the next event) holds no thread: it is woken by the one `Feed` of the process.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from runner.agents import Agents
from runner.errors import ResultTimeout
from runner.models import Event, FinalResult, Principal
from runner.settings import Settings
from tasks.client import Client, Run, check_event_id
from tasks.feed import Feed

LOOK_EVERY = 15.0
"""Seconds without an event after which a reader looks whether the run is still there."""

P = ParamSpec("P")
T = TypeVar("T")


def _of_run(
    method: Callable[Concatenate[Run, P], T],
) -> Callable[Concatenate[AsyncRun, P], Coroutine[Any, Any, T]]:
    @functools.wraps(method)
    async def ask(self: AsyncRun, /, *args: P.args, **options: P.kwargs) -> T:
        return await asyncio.to_thread(method, self.run, *args, **options)

    return ask


def _of_client(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    @functools.wraps(method)
    async def ask(self: AsyncClient, /, *args: P.args, **options: P.kwargs) -> T:
        return await asyncio.to_thread(method, self.client, *args, **options)

    return ask


def _handle(
    method: Callable[Concatenate[Client, P], Run],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, AsyncRun]]:
    @functools.wraps(method)
    async def ask(self: AsyncClient, /, *args: P.args, **options: P.kwargs) -> AsyncRun:
        run = await asyncio.to_thread(method, self.client, *args, **options)
        return AsyncRun(run, self.client.feed)

    return ask


class AsyncRun:
    """A handle on one run, as `Run` is; `run` is that of the same run."""

    def __init__(self, run: Run, feed: Feed) -> None:
        self.id = run.id
        self.run = run
        self._feed = feed

    def __repr__(self) -> str:
        return f"AsyncRun({self.id!r})"

    info = _of_run(Run.info)
    status = _of_run(Run.status)
    details = _of_run(Run.details)
    cancel = _of_run(Run.cancel)
    send = _of_run(Run.send)
    questions = _of_run(Run.questions)
    reply = _of_run(Run.reply)
    approvals = _of_run(Run.approvals)
    approve = _of_run(Run.approve)
    deny = _of_run(Run.deny)
    limits = _of_run(Run.limits)
    resume = _of_run(Run.resume)
    messages = _of_run(Run.messages)
    call = _of_run(Run.call)
    whole_result = _of_run(Run.whole_result)
    trace = _of_run(Run.trace)
    _read_result = _of_run(Run.read_result)
    _last_event_id = _of_run(Run.last_event_id)
    _page = _of_run(Run.read_page)
    _has_ended = _of_run(Run.has_ended)

    async def result(self, timeout: float | None = None) -> FinalResult:  # noqa: ASYNC109 - as in Run
        """Wait for the end, at most `timeout` seconds (None: as long as it takes).

        Raises `ResultTimeout` (a `TimeoutError`); the run goes on.
        """
        if (result := await self._read_result()) is not None:
            return result  # however little time there is
        try:
            async with asyncio.timeout(timeout):
                return await self._wait_for_result()
        except TimeoutError:
            raise ResultTimeout(
                f"run {self.id} hasn't ended within {timeout:g} s; it goes on"
            ) from None

    async def _wait_for_result(self) -> FinalResult:
        while True:
            # Taken before the look: what comes between the two is what is followed then.
            after = await self._last_event_id()
            result = await self._read_result()
            if result is not None:
                return result
            async for _ in self.events(after):
                pass

    def events(self, after: str | None = None) -> AsyncIterator[Event]:
        """Every event, then those to come as they happen; ends with the run.

        `after` and `gap` are as of `Run.events`.
        """
        return self._only_events(self.follow(after))

    async def _only_events(self, found: AsyncIterator[Event | None]) -> AsyncIterator[Event]:
        async for event in found:
            if event is not None:
                yield event

    def follow(
        self, after: str | None = None, *, every: float = LOOK_EVERY
    ) -> AsyncIterator[Event | None]:
        """`events`, with a None whenever none has come for `every` seconds."""
        return self._follow(check_event_id(after), every)

    async def _follow(self, after: str, every: float) -> AsyncIterator[Event | None]:
        async with self._feed.follow(self.id) as follower:
            look = True
            while True:
                ended = look and await self._has_ended()
                found = follower.take(after)
                if found is None or ended:
                    # Before what is kept, or where nothing may be left behind: Redis itself.
                    found = await self._page(after)
                for event in found:
                    yield event
                    after = event.id
                if ended and not found:
                    return
                look = ended or any(event.type == "run.finished" for event in found)
                if not found and not await follower.wait(every):
                    look = True
                    yield None


class AsyncClient:
    """`Client` for an event loop. Safe to share between loops, threads and across forks.

    Takes what `Client` takes, or is made `of` one, with which it then shares connections.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        *,
        settings: Settings | None = None,
        agents: Agents | None = None,
        principal: Principal | Mapping[str, Any] | None = None,
    ) -> None:
        self.client = Client(redis_url, settings=settings, agents=agents, principal=principal)

    @classmethod
    def of(cls, client: Client) -> AsyncClient:
        """The same client for an event loop."""
        made = cls.__new__(cls)
        made.client = client
        return made

    def for_principal(self, principal: Principal | Mapping[str, Any]) -> AsyncClient:
        """As `Client.for_principal`."""
        return self.of(self.client.for_principal(principal))

    submit = _handle(Client.submit)
    get = _handle(Client.get)
    fork = _handle(Client.fork)
    list = _of_client(Client.list)
    browse = _of_client(Client.browse)
    delete = _of_client(Client.delete)
    prune = _of_client(Client.prune)
    ping = _of_client(Client.ping)
    close = _of_client(Client.close)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
