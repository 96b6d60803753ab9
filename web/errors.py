"""Errors have one shape: a type to branch on and a line that names the cure."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from enum import StrEnum
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import Field
from starlette.exceptions import HTTPException

from runner import errors
from runner.models import Frozen

RETRY_AFTER = 1
"""Seconds after which something that is full or away is worth another try."""


class ErrorType(StrEnum):
    """What went wrong with a request."""

    ALREADY_DECIDED = "ALREADY_DECIDED"
    CALL_NOT_FOUND = "CALL_NOT_FOUND"
    CONVERSATION_BUSY = "CONVERSATION_BUSY"
    INVALID_INPUT = "INVALID_INPUT"
    KEY_REUSED = "KEY_REUSED"
    NOT_FOUND = "NOT_FOUND"
    NOT_JSON = "NOT_JSON"
    NOT_LOCAL = "NOT_LOCAL"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    QUEUE_FULL = "QUEUE_FULL"
    REDIS_UNAVAILABLE = "REDIS_UNAVAILABLE"
    RUN_FINISHED = "RUN_FINISHED"
    RUN_NOT_FOUND = "RUN_NOT_FOUND"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    UNKNOWN_AGENT = "UNKNOWN_AGENT"
    UNREADABLE = "UNREADABLE"


class ErrorInfo(Frozen):
    """`fields` says what is wrong with which part of a request; `run_id` is the run in the way."""

    type: ErrorType
    message: str = Field(examples=["no run 0197: it was never submitted here"])
    fields: dict[str, str] | None = None
    run_id: str | None = None


class ErrorBody(Frozen):
    """The body of each answer that isn't a success."""

    error: ErrorInfo


class Refused(errors.CeleriacError):
    """A request that is refused here, with the answer that it gets."""

    def __init__(
        self, status: int, type: ErrorType, message: str, *, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.retry_after = retry_after


KNOWN: tuple[tuple[type[Exception], int, ErrorType], ...] = (
    (errors.RunNotFound, 404, ErrorType.RUN_NOT_FOUND),
    (errors.CallNotFound, 404, ErrorType.CALL_NOT_FOUND),
    (errors.PermissionDenied, 403, ErrorType.PERMISSION_DENIED),
    (errors.ConversationBusy, 409, ErrorType.CONVERSATION_BUSY),
    (errors.KeyReused, 409, ErrorType.KEY_REUSED),
    (errors.InvalidInput, 422, ErrorType.INVALID_INPUT),
    (errors.AgentError, 422, ErrorType.UNKNOWN_AGENT),
    (errors.AlreadyDecided, 409, ErrorType.ALREADY_DECIDED),
    (errors.RunFinished, 409, ErrorType.RUN_FINISHED),
    (errors.RedisUnavailable, 503, ErrorType.REDIS_UNAVAILABLE),
    (errors.SchemaError, 500, ErrorType.UNREADABLE),
)
"""Status and type of what a client raises; the first that fits."""


class Route(APIRoute):
    """A route that answers every error of ours in the one shape, in whosever application it is."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                response = await handle(request)
            except (errors.CeleriacError, RequestValidationError) as error:
                known = _describe(error)
                if known is None:
                    raise
                response = known
            response.headers.setdefault("Cache-Control", "no-store")
            response.headers.setdefault("X-Content-Type-Options", "nosniff")
            return response

        return answer


def answer_http_error(error: HTTPException) -> Response:
    """For an application that is ours alone: no such route or method, or a stranger."""
    word = {401: ErrorType.UNAUTHENTICATED, 403: ErrorType.PERMISSION_DENIED}.get(error.status_code)
    if word is None:
        info = ErrorInfo(type=ErrorType.NOT_FOUND, message=f"{error.detail}; see /openapi.json")
    else:
        info = ErrorInfo(type=word, message=error.detail)
    return _answer(error.status_code, info, dict(error.headers or {}))


def _describe(error: Exception) -> Response | None:
    if isinstance(error, RequestValidationError):
        return _answer(422, _describe_faults(error))
    if isinstance(error, Refused):
        return _answer(
            error.status,
            ErrorInfo(type=error.type, message=str(error)),
            {} if error.retry_after is None else {"Retry-After": str(error.retry_after)},
        )
    for kind, status, word in KNOWN:
        if isinstance(error, kind):
            run_id = getattr(error, "run_id", "") or None
            headers = {"Retry-After": str(RETRY_AFTER)} if status == 503 else {}
            return _answer(status, ErrorInfo(type=word, message=str(error), run_id=run_id), headers)
    return None


def _describe_faults(error: RequestValidationError) -> ErrorInfo:
    """Which part of the request is wrong, and never what was in it."""
    fields = {".".join(map(str, each["loc"])): str(each["msg"]) for each in error.errors()}
    told = "; ".join(f"{name}: {text}" for name, text in list(fields.items())[:5])
    return ErrorInfo(
        type=ErrorType.INVALID_INPUT, message=f"the request can't be read: {told}", fields=fields
    )


def _answer(status: int, info: ErrorInfo, headers: dict[str, str] | None = None) -> Response:
    body = ErrorBody(error=info).model_dump(mode="json", exclude_none=True)
    return JSONResponse(body, status, headers)
