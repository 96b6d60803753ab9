"""The routes. Each asks the client that acts for whoever is asking, so a stranger's run is none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import Response, StreamingResponse

from runner.errors import CeleriacError
from runner.models import Approval, Event, RunStatus, StopReason
from runner.settings import STEPS_QUEUE
from tasks import AsyncRun, CallInfo, Client, Run, RunDetails, RunInfo, RunPage
from web.bodies import (
    ApprovalGiven,
    Cancellation,
    Denial,
    Message,
    Reply,
    Resumption,
    Submission,
    Trace,
    WholeResult,
)
from web.errors import RETRY_AFTER, ErrorBody, ErrorType, Refused, Route
from web.guard import check_json, check_local
from web.page_files import read_file

logger = logging.getLogger(__name__)

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in (
        (403, "The principal may not do this, or nobody says who is asking"),
        (404, "There is no such run for whoever is asking"),
        (409, "It is too late for this, or something else is in the way"),
        (415, "Only JSON is read"),
        (422, "The request can't be accepted; nothing was changed"),
        (503, "Redis doesn't answer; try again"),
    )
}

STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The events, as they happen",
        "content": {
            "text/event-stream": {
                "schema": {"type": "string"},
                "example": (
                    "retry: 1000\n\nid: 1764480000000-0\n"
                    'data: {"id":"1764480000000-0","at":1764480000.0,"type":"run.created",'
                    '"run":"0197a1b2","step":null,"call":null,"data":{"agent":"support"}}\n\n'
                ),
            }
        },
    },
    204: {"description": "The run has ended, and has no event behind this id"},
}

RECONNECT_AFTER = 1_000
"""Milliseconds after which a browser that lost the stream comes again."""


def create_router(
    client: Client,
    *,
    principal: Callable[..., Any] | None = None,
    heartbeat: float = 15.0,
) -> APIRouter:
    """The routes of the runs, to be included under any prefix, with the run page at its root.

    `principal` is a FastAPI dependency that answers for whom the request is made: a `Principal`, or
    a dict of one. Whoever it is sees the runs of their tenant alone. It refuses strangers itself
    (`HTTPException`); None is refused here. Without a dependency nobody says who is asking, so only
    this machine is served, and everything is shown.

    A follower of events gets a comment whenever `heartbeat` seconds were quiet, so that no proxy
    takes the connection for a dead one.
    """
    router = APIRouter(route_class=Route)
    router.include_router(page, dependencies=[Depends(check_local)] if principal is None else [])
    noting = _note_caller(client, principal, heartbeat)
    router.include_router(runs, dependencies=[Depends(noting)])
    return router


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is asking: the client that acts for them, and how often they are told of a quiet run."""

    client: Client
    heartbeat: float


def _note_caller(
    client: Client, principal: Callable[..., Any] | None, heartbeat: float
) -> Callable[..., Any]:
    """A dependency that refuses whom it must, and notes the client that acts for who is asking."""
    if principal is None:

        async def note_operator(request: Request) -> None:
            check_local(request)
            check_json(request)
            request.state.celeriac = Caller(client, heartbeat)

        return note_operator

    asking = Depends(principal)

    async def note_principal(request: Request, given: Any = asking) -> None:
        check_json(request)
        if given is None:
            raise Refused(401, ErrorType.UNAUTHENTICATED, "nobody is signed in; sign in first")
        request.state.celeriac = Caller(client.for_principal(given), heartbeat)

    return note_principal


async def _caller_of(request: Request) -> Caller:
    caller: Caller = request.state.celeriac
    return caller


async def _client_of(caller: Annotated[Caller, Depends(_caller_of)]) -> Client:
    return caller.client


Asking = Annotated[Caller, Depends(_caller_of)]
Acting = Annotated[Client, Depends(_client_of)]


def _find_run(run_id: str, client: Acting) -> Run:
    return client.get(run_id)


Found = Annotated[Run, Depends(_find_run)]
Key = Annotated[str | None, Header(alias="Idempotency-Key", max_length=1_000)]

page = APIRouter(route_class=Route)
runs = APIRouter(route_class=Route, prefix="/runs", tags=["runs"], responses=ERRORS)


# --- the page ----------------------------------------------------------------------------------


@page.get("/", include_in_schema=False)
def get_page() -> Response:
    return _file("index.html")


@page.get("/assets/{name}", include_in_schema=False)
def get_asset(name: str) -> Response:
    return _file(name)


def _file(name: str) -> Response:
    found = read_file(name)
    if found is None:
        raise Refused(404, ErrorType.NOT_FOUND, "the run page has no such file")
    return found


# --- all runs ----------------------------------------------------------------------------------


@runs.post(
    "",
    status_code=202,
    responses={429: {"model": ErrorBody, "description": "The queue is full; see Retry-After"}},
)
def submit(
    body: Submission, client: Acting, request: Request, response: Response, key: Key = None
) -> RunInfo:
    """Accept a goal, once its record is written: from then on the run will end.

    The same `Idempotency-Key` with the same body gives the same run; with another body it is a 409.
    """
    most = client.store.settings.max_queued
    if most and client.store.count_queued(STEPS_QUEUE) >= most:
        raise Refused(
            429,
            ErrorType.QUEUE_FULL,
            "too many steps wait for a worker; try again, or start more steps workers",
            retry_after=RETRY_AFTER,
        )
    run = client.submit(**dict(body), idempotency_key=key, same_request=True)
    response.headers["Location"] = str(request.url.replace(query="")).rstrip("/") + f"/{run.id}"
    return run.info()


@runs.get("")
def list_runs(
    client: Acting,
    status: RunStatus | None = None,
    stop_reason: StopReason | None = None,
    agent: str | None = None,
    id: str = "",
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: str | None = None,
) -> RunPage:
    """Runs that haven't ended, newest first, then the last that have.

    `id` is any part of it. `cursor` is that of the answer before; where it is null, there are no
    more.
    """
    return client.browse(
        status=status,
        stop_reason=stop_reason,
        agent=agent,
        part_of_id=id,
        limit=limit,
        cursor=cursor,
    )


# --- one run -----------------------------------------------------------------------------------


@runs.get("/{run_id}")
def get_run(run: Found) -> RunDetails:
    """How far a run is, what it waits for, and its result once it has ended."""
    return run.details()


@runs.get("/{run_id}/events", response_class=StreamingResponse, responses=STREAM)
async def follow_run(
    run: Found,
    caller: Asking,
    after: str | None = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Every event as `text/event-stream`, then those to come as they happen; ends with the run.

    Each `data` is an event as JSON, and its `id` what to go on behind: a browser says it by itself
    (`Last-Event-ID`), and so does `after`. Where the cap may have dropped some, an event of the
    type `gap` comes in their place. 204: the run has ended, and there is none behind that id.
    """
    seen = last_event_id or after
    events = AsyncRun(run, caller.client.feed).follow(seen, every=caller.heartbeat)
    if seen is not None and await asyncio.to_thread(_is_read, run, seen):
        return Response(status_code=204)  # which tells a browser not to come again
    return StreamingResponse(
        _write_events(events),
        media_type="text/event-stream",
        headers={"X-Accel-Buffering": "no"},  # a proxy that collects them would keep them back
    )


def _is_read(run: Run, seen: str) -> bool:
    """Whether a run has ended and has no event behind this one."""
    return run.has_ended() and not run.read_page(seen)


async def _write_events(events: AsyncIterator[Event | None]) -> AsyncIterator[str]:
    yield f"retry: {RECONNECT_AFTER}\n\n"
    try:
        async for event in events:
            if event is None:
                yield ": still here\n\n"
            else:
                yield f"id: {event.id}\ndata: {event.model_dump_json()}\n\n"
    except CeleriacError as error:
        # The answer has begun, so it can only end: whoever follows comes again, and is told then.
        logger.warning("a follower of events is let go: %s", error)


@runs.get("/{run_id}/trace")
def get_trace(run: Found) -> Trace:
    """What was sent to the model and what came back, decisions and results, in order."""
    return Trace(entries=run.trace())


@runs.get("/{run_id}/calls/{call}")
def get_call(run: Found, call: str) -> CallInfo:
    """A call's arguments, what was decided on it, and its result as the trace keeps it."""
    return run.call(call)


@runs.get("/{run_id}/calls/{call}/result")
def get_whole_result(run: Found, call: str) -> WholeResult:
    """The text of a call's result, also where it was cut for the model."""
    return WholeResult(call_id=call, text=run.whole_result(call))


@runs.get("/{run_id}/approvals")
def list_approvals(run: Found) -> list[Approval]:
    """The calls that wait for somebody to approve or deny them."""
    return run.approvals()


@runs.post("/{run_id}/calls/{call}/approve")
def approve(run: Found, call: str, body: ApprovalGiven | None = None) -> RunInfo:
    """Let a call run. The first decision stands; a later one is a 409."""
    run.approve(call, digest=body.digest if body else None)
    return run.info()


@runs.post("/{run_id}/calls/{call}/deny")
def deny(run: Found, call: str, body: Denial) -> RunInfo:
    """Refuse a call: the model reads the reason, and the run goes on."""
    run.deny(call, body.reason, digest=body.digest)
    return run.info()


@runs.post("/{run_id}/cancel")
def cancel(run: Found, body: Cancellation | None = None) -> RunInfo:
    """End a run now. Done twice it is no error; a run that ended otherwise is a 409."""
    run.cancel((body or Cancellation()).reason)
    return run.info()


@runs.post("/{run_id}/send")
def send(run: Found, body: Message, key: Key = None) -> RunInfo:
    """Say something to a run: its next step has it. The same `Idempotency-Key` is one message."""
    run.send(body.text, idempotency_key=key)
    return run.info()


@runs.post("/{run_id}/reply")
def reply(run: Found, body: Reply) -> RunInfo:
    """Answer what the model has asked."""
    run.reply(body.text, call=body.call)
    return run.info()


@runs.post("/{run_id}/resume")
def resume(run: Found, body: Resumption | None = None) -> RunInfo:
    """Take a run up again that a limit or an error has ended; what it did stands."""
    run.resume(body.limits if body else None)
    return run.info()
