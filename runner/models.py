"""The nouns: every value that crosses a process, a thread or the queue is one of these.

Models are frozen and refuse unknown keys, so that a typo or a record of a newer schema is an error
at the border and never a silent default further in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, JsonValue

SCHEMA_VERSION = 1
"""Version of the run's record in Redis; a worker ends a run whose record is newer than its own."""


class RunStatus(StrEnum):
    """Where a run is in its life. Only `FINISHED` is terminal."""

    QUEUED = "queued"
    RUNNING = "running"
    WAITING = "waiting"
    FINISHED = "finished"


class StopReason(StrEnum):
    """Why a run ended. Exactly one is written, once."""

    COMPLETED = "COMPLETED"
    MAX_STEPS = "MAX_STEPS"
    TIMEOUT = "TIMEOUT"
    CANCELLED = "CANCELLED"
    ERROR = "ERROR"
    BUDGET_EXHAUSTED = "BUDGET_EXHAUSTED"
    REPEATED_ERROR = "REPEATED_ERROR"
    PERMISSION_DENIED = "PERMISSION_DENIED"


class ToolErrorType(StrEnum):
    """What went wrong with one tool call; a user's own `ToolError` may carry another word."""

    UNKNOWN_TOOL = "UNKNOWN_TOOL"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    DENIED = "DENIED"
    CALL_LIMIT = "CALL_LIMIT"
    DUPLICATE_CALL = "DUPLICATE_CALL"
    TIMEOUT = "TIMEOUT"
    CANCELLED = "CANCELLED"
    TOOL_ERROR = "TOOL_ERROR"
    INVALID_RESULT = "INVALID_RESULT"
    OUTPUT_TRUNCATED = "OUTPUT_TRUNCATED"
    OUTCOME_UNKNOWN = "OUTCOME_UNKNOWN"
    POISONED = "POISONED"


class RunErrorType(StrEnum):
    """What went wrong with a run that ended `ERROR`."""

    MODEL_BAD_RESPONSE = "MODEL_BAD_RESPONSE"
    EMPTY_RESPONSE = "EMPTY_RESPONSE"
    OUTPUT_TRUNCATED = "OUTPUT_TRUNCATED"
    REFUSED = "REFUSED"
    CONTENT_FILTERED = "CONTENT_FILTERED"
    QUOTA_EXHAUSTED = "QUOTA_EXHAUSTED"
    RATE_LIMITED = "RATE_LIMITED"
    AUTH_ERROR = "AUTH_ERROR"
    MODEL_TIMEOUT = "MODEL_TIMEOUT"
    MODEL_HTTP_ERROR = "MODEL_HTTP_ERROR"
    CONTEXT_OVERFLOW = "CONTEXT_OVERFLOW"
    CONFIG_ERROR = "CONFIG_ERROR"
    INVALID_FINAL = "INVALID_FINAL"
    POISONED = "POISONED"
    TOOL_ERROR = "TOOL_ERROR"


class Frozen(BaseModel):
    """A value: immutable, and closed against keys that it doesn't know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Limits(Frozen):
    """What the runtime enforces, whatever a model sends.

    `timeout` is in seconds from submit; the record holds the absolute deadline. `max_tokens` counts
    what the server reports, over all steps, and `max_cost` what that costs by the agent's `prices`;
    None is no limit. `max_repeats` is how often the same calls may come with the same results, or
    the same error, before the model is told; one more ends the run.
    """

    max_steps: int = Field(20, ge=1)
    timeout: float = Field(600.0, gt=0, lt=10.0**9)
    max_tokens: int | None = Field(None, ge=1)
    max_tool_calls: int = Field(100, ge=0)
    max_parallel_calls: int = Field(16, ge=1)
    max_calls_per_turn: int = Field(64, ge=1)
    max_invalid_calls: int = Field(5, ge=1)
    max_cost: float | None = Field(None, gt=0, allow_inf_nan=False)
    max_repeats: int = Field(3, ge=1)


class Retry(Frozen):
    """How often, and after which waits in seconds, a model attempt is made again."""

    max_attempts: int = Field(5, ge=1)
    initial_delay: float = Field(0.5, ge=0)
    max_delay: float = Field(60.0, ge=0)
    max_retry_after: float = Field(300.0, ge=0)


class Principal(Frozen):
    """On whose behalf a run acts. It reaches tools through `Context`, never through the model."""

    id: str
    tenant: str = ""
    scopes: frozenset[str] = frozenset()


class Approval(Frozen):
    """A call that waits until somebody approves or denies it.

    `digest` stands for the tool and these exact arguments; `decide_by` is when it is denied for
    want of a decision, in seconds since the epoch by Redis' clock (None: by the run's deadline).
    """

    call_id: str
    tool: str
    arguments: dict[str, JsonValue]
    digest: str
    decide_by: float | None = None


class Decided(Frozen):
    """What was decided on a call; `by` is the principal's id. `reason` TIMEOUT: nobody decided."""

    approved: bool
    by: str | None = None
    reason: str | None = None


class OnFinish(Frozen):
    """The Celery task that is handed a run's `FinalResult`, and the queue that it is read from."""

    task: str = Field(min_length=1, max_length=256)
    queue: str = Field("celery", min_length=1, max_length=256)


class Evidence(Frozen):
    """Something an answer rests on; the runner fills in `call_id`, the call that found it."""

    source: str
    text: str = ""
    data: JsonValue = None
    call_id: str | None = None


class ToolErrorInfo(Frozen):
    """An error as the model reads it. `type` is a `ToolErrorType` or a user's own word."""

    type: str
    message: str
    retryable: bool = False
    fields: dict[str, str] | None = None


class ToolDecision(Frozen):
    """What the model proposes: one call. Its identity is (run, step, index), not the provider's id.

    `arguments` is JSON text of an object. `error` is set where the runtime refused the call before
    it could run; such a call never reaches a handler.
    """

    call_id: str
    name: str
    arguments: str
    error: ToolErrorInfo | None = None


class ToolResult(Frozen):
    """What happened: exactly one for each decision, errors included.

    `content` is the text the model reads; `data` the same as JSON. `output_chars` is the size
    before anything was cut.
    """

    call_id: str
    name: str
    ok: bool
    content: str
    data: JsonValue = None
    evidence: tuple[Evidence, ...] = ()
    error: ToolErrorInfo | None = None
    duration_ms: int = 0
    output_chars: int = 0
    truncated: bool = False
    retryable: bool = False
    attempt: int = 1


class Usage(Frozen):
    """Tokens as the server reported them. `known` is false once any response came without usage.

    `cost` is what they cost by the prices that the agent has, in the currency of those; None where
    it has none. What is unknown is in neither.
    """

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    known: bool = True
    cost: float | None = None

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            requests=self.requests + other.requests,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            total_tokens=self.total_tokens + other.total_tokens,
            known=self.known and other.known,
            cost=_add_costs(self.cost, other.cost),
        )

    def priced(self, price: Price | None) -> Usage:
        """The same with its cost; without one where the price or what it is for isn't known."""
        counted = self.prompt_tokens or self.completion_tokens
        if price is None or not self.known or not counted:
            return self
        return self.model_copy(update={"cost": price.of(self)})


class Price(Frozen):
    """What a model costs for a million tokens, in any one currency."""

    prompt: float = Field(ge=0, allow_inf_nan=False)
    completion: float = Field(ge=0, allow_inf_nan=False)

    def of(self, usage: Usage) -> float:
        """The cost of this usage."""
        tokens = usage.prompt_tokens * self.prompt + usage.completion_tokens * self.completion
        return tokens / 1_000_000


def _add_costs(one: float | None, other: float | None) -> float | None:
    return one if other is None else (one or 0.0) + other


class RunError(Frozen):
    """Why a run isn't `COMPLETED`: a `RunErrorType`, or the stop reason where a limit did it."""

    type: str
    message: str


class FinalResult(Frozen):
    """The outside contract of a finished run.

    `answer` is the model's text, or the validated object where the agent has an `output_type`.
    `limit` names the limit that stopped the run (`max_steps`, `timeout`, `max_tool_calls`, ...).
    """

    run_id: str
    ok: bool
    stop_reason: StopReason
    answer: JsonValue = None
    evidence: tuple[Evidence, ...] = ()
    usage: Usage = Usage()
    error: RunError | None = None
    limit: str | None = None
    steps: int = 0


class Event(Frozen):
    """One entry of a run's append-only stream. `at` is seconds since the epoch, by Redis' clock."""

    id: str
    at: float
    type: str
    run: str
    step: int | None = None
    call: str | None = None
    data: dict[str, JsonValue] = Field(default_factory=dict)


# --- between the loop and a model: in-process values, so plain dataclasses ---------------------


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """Everything that one model call is made from; the trace can rebuild it.

    `messages` and `tools` are chat-completions dicts (role/content/tool_calls; type/function).
    `timeout` is the total time for the attempt in seconds.
    """

    model: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    timeout: float = 120.0


@dataclass(frozen=True, slots=True)
class ProposedCall:
    """One tool call as read from a response, made safe to store and to send back.

    `provider_id` is non-empty, at most 40 characters and unique in its turn; `name` is a valid
    function name; `arguments` is JSON text of an object. What could not be read is an `error`, with
    the text as it came in `raw_name` and `raw_arguments`. `extra` is the call's `extra_content`,
    which some servers want back (Gemini: its thought signature); None where there was none.
    """

    provider_id: str
    name: str
    arguments: str
    error: ToolErrorInfo | None = None
    raw_name: str | None = None
    raw_arguments: str | None = None
    extra: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Final:
    """The model answered with text. `raw` is the response body as it came."""

    text: str
    usage: Usage
    raw: str
    reasoning: str | None = None
    kind: Literal["final"] = "final"


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """The model asked for tool calls, perhaps with some text and reasoning beside them."""

    calls: tuple[ProposedCall, ...]
    text: str | None
    usage: Usage
    raw: str
    reasoning: str | None = None
    kind: Literal["tool_calls"] = "tool_calls"


ModelReply = Final | ToolCalls


class Model(Protocol):
    """Anything that can answer a request. Errors are `ModelError`: what a retry needs to know."""

    async def respond(self, request: ModelRequest) -> ModelReply: ...


@runtime_checkable
class StreamingModel(Model, Protocol):
    """A model that also tells its answer while it comes.

    `on_text` is handed each new piece of the answer's text, in order, and never reasoning or calls;
    it runs on the event loop of the attempt, so it must not block. An attempt that fails after some
    pieces makes all of them void. The reply is the whole one, as from `respond`.
    """

    async def stream(self, request: ModelRequest, on_text: Callable[[str], None]) -> ModelReply: ...
