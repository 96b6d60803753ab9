"""What a request may carry and an answer holds, where no noun of `runner/` is that already."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, JsonValue

from runner.models import Frozen, Limits


class Submission(Frozen):
    """A goal for an agent. What was said before it is in `messages`, `after` or `conversation`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "goal": "Can order A001 be refunded?",
                    "agent": "support",
                    "metadata": {"ticket": 77},
                }
            ]
        }
    )

    goal: str
    agent: str
    metadata: dict[str, JsonValue] | None = None
    messages: list[dict[str, Any]] | None = None
    after: str | None = None
    conversation: str | None = None
    when_busy: Literal["reject", "enqueue", "interrupt"] = "reject"


class Trace(Frozen):
    """A run's trace as it is stored, in order; each entry has a `kind`."""

    entries: list[dict[str, Any]]


class WholeResult(Frozen):
    """The text of a call's result, also where it was cut for the model."""

    call_id: str
    text: str


class Cancellation(Frozen):
    reason: str = Field("cancelled over HTTP", examples=["no longer needed"])


class Message(Frozen):
    text: str = Field(examples=["Also check A002."])


class Reply(Frozen):
    """`call` says which question, where several are open."""

    text: str = Field(examples=["Order A001."])
    call: str | None = None


class ApprovalGiven(Frozen):
    """`digest` is that of the approval that was shown: other arguments aren't approved."""

    digest: str | None = None


class Denial(Frozen):
    """`reason` is for the model to read."""

    reason: str = Field(examples=["Too much money."])
    digest: str | None = None


class Resumption(Frozen):
    """`limits` count from here on; those of the agent unless given."""

    limits: Limits | None = None
