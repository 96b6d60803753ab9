"""The routes. Each asks the client that acts for whoever is asking, so a stranger's run is none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import Response, StreamingResponse
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool

from runner.models import Approval, Event, RunStatus
from runner.settings import STEPS_QUEUE
from tasks import CallInfo, Client, Run, RunDetails, RunInfo, RunPage
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


def create_router(client: Client, *, principal: Callable[..., Any] | None = None) -> APIRouter:
    """The routes of the runs, to be included under any prefix, with the run page at its root.

    `principal` is a FastAPI dependency that answers for whom the request is made: a `Principal`, or
    a dict of one. Whoever it is sees the runs of their tenant alone. It refuses strangers itself
    (`HTTPException`); None is refused here. Without a dependency nobody says who is asking, so only
    this machine is served, and everything is shown.
    """
    router = APIRouter(route_class=Route)
    router.include_router(page, dependencies=[Depends(check_local)] if principal is None else [])
    router.include_router(runs, dependencies=[Depends(_acting(client, principal))])
    return router


def _acting(client: Client, principal: Callable[..., Any] | None) -> Callable[..., Any]:
    """A dependency that notes the client which acts for whoever is asking."""
    if principal is None:

        async def note_operator(request: Request) -> None:
            check_local(request)
            check_json(request)
            request.state.celeriac = client

        return note_operator

    asking = Depends(principal)

    async def note_client(request: Request, given: Any = asking) -> None:
        check_json(request)
        if given is None:
            raise Refused(401, ErrorType.UNAUTHENTICATED, "nobody is signed in")
        request.state.celeriac = client.for_principal(given)

    return note_client


def _client_of(request: Request) -> Client:
    client: Client = request.state.celeriac
    return client


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
    agent: str | None = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: str | None = None,
) -> RunPage:
    """Runs that haven't ended, newest first, then the last that have.

    `cursor` is that of the answer before; where it is null, there are no more.
    """
    return client.browse(status=status, agent=agent, limit=limit, cursor=cursor)


# --- one run -----------------------------------------------------------------------------------


@runs.get("/{run_id}")
def get_run(run: Found) -> RunDetails:
    """How far a run is, what it waits for, and its result once it has ended."""
    return run.details()


@runs.get("/{run_id}/events", response_class=StreamingResponse)
async def follow_run(
    run: Found,
    after: str | None = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Every event as `text/event-stream`, then those to come; ends with the run."""
    follow = await run_in_threadpool(run.events, last_event_id or after)
    return StreamingResponse(
        _write_events(iterate_in_threadpool(follow)), media_type="text/event-stream"
    )


async def _write_events(events: AsyncIterator[Event]) -> AsyncIterator[str]:
    yield "retry: 1000\n\n"
    async for event in events:
        yield f"id: {event.id}\ndata: {event.model_dump_json()}\n\n"


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
