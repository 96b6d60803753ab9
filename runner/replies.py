"""What a model answered, for the trace, and back: one exchange is rebuilt as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from runner.errors import ModelError
from runner.models import ModelReply, RunErrorType, Usage
from runner.reader import read_reply

REPLY: TypeAdapter[ModelReply] = TypeAdapter(ModelReply)


def describe_error(error: ModelError) -> dict[str, Any]:
    """All that the loop asks an error; its raw text is the exchange's response."""
    return {
        "type": error.type,
        "message": str(error),
        "status": error.status,
        "retryable": error.retryable,
        "retry_after": error.retry_after,
        "bad_response": error.bad_response,
    }


def describe_reply(reply: ModelReply) -> dict[str, Any] | None:
    """A reply that can't be read again from its raw text (a model of the user's own); else None."""
    try:
        if reply.raw != "" and read_reply(reply.raw) == reply:
            return None
    except ModelError:
        pass
    except Exception:  # noqa: BLE001 - a model of the user's may put anything there
        return None
    try:
        described: dict[str, Any] = REPLY.dump_python(reply, mode="json", warnings=False)
    except Exception:  # noqa: BLE001 - likewise; the step goes on, and can't be replayed
        return None
    return {key: value for key, value in described.items() if key not in ("raw", "usage")}


def rebuild_reply(exchange: Mapping[str, Any]) -> ModelReply | None:
    """What an exchange brought: its reply, or its `ModelError`, raised; None where it broke off."""
    response = exchange.get("response")
    if response is None:
        return None
    usage = Usage.model_validate(exchange["usage"])
    if error := exchange.get("error"):
        raise ModelError(
            error["message"],
            type=RunErrorType(error["type"]),
            retryable=error["retryable"],
            retry_after=error["retry_after"],
            bad_response=error["bad_response"],
            status=error["status"],
            usage=usage,
            raw=response,
        )
    if described := exchange.get("reply"):
        return REPLY.validate_python({**described, "raw": response, "usage": usage})
    return read_reply(response)
