"""All errors of the project, in one tree. Each takes one message, so that it survives pickling.

A deadline, a cap and a cancel are stop reasons of a run, not exceptions. A message names the cure
and never a prompt, an argument, a result or a secret.
"""

from __future__ import annotations

from collections.abc import Mapping

from runner.models import RunErrorType, Usage


class CeleriacError(Exception):
    """Anything that this project raises on purpose."""


class SettingsError(CeleriacError):
    """A setting or an environment variable can't be used."""


class AgentError(CeleriacError):
    """An agent is missing, defined twice, or its module can't be imported."""


class UnknownAgent(AgentError, KeyError):
    """This process has no agent of that name."""

    __str__ = Exception.__str__  # a KeyError would show the message's repr


class ToolDefinitionError(CeleriacError):
    """A tool or an agent's list of tools was refused when it was defined.

    `code` is a stable word: `invalid_tool_name`, `duplicate_tool`, `too_many_tools`,
    `unsupported_signature`, `unsupported_schema`, `missing_docstring`, `missing_annotation`,
    `invalid_option`.
    """

    code: str = "invalid_tool"

    def __init__(self, message: str, *, code: str = "invalid_tool") -> None:
        super().__init__(message)
        self.code = code


class InvalidInput(CeleriacError):
    """What the caller gave can't be accepted; nothing was changed."""


class PermissionDenied(InvalidInput):
    """The principal may not do this; nothing was changed."""


class AlreadyDecided(CeleriacError):
    """The call was approved or denied before, or its time to be was over; nothing was changed."""


class ConversationBusy(InvalidInput):
    """The conversation has a live run; `run_id` is its id, or empty where it isn't known."""

    def __init__(self, message: str, *, run_id: str = "") -> None:
        super().__init__(message)
        self.run_id = run_id


class KeyReused(InvalidInput):
    """The idempotency key stands for a run of another request; `run_id` is its id."""

    def __init__(self, message: str, *, run_id: str = "") -> None:
        super().__init__(message)
        self.run_id = run_id


class RunNotFound(CeleriacError):
    """There is no record of such a run: never made, deleted, or past its retention."""


class SchemaError(CeleriacError):
    """The run's record is of a newer version than this process can read."""


class CallNotFound(InvalidInput):
    """The run has no such call, or no result of it yet."""


class RunFinished(CeleriacError):
    """The run has already ended, so what was asked of it can't be done."""


class ResultTimeout(CeleriacError, TimeoutError):
    """The run hasn't ended within the time that the caller was willing to wait."""


class RedisUnavailable(CeleriacError):
    """Redis doesn't answer, or what answers isn't Redis."""


class ModelError(CeleriacError):
    """One model attempt failed. Raised by a `Model`; never leaves the loop.

    `retryable`: the same request may succeed later. `retry_after`: seconds the server asked for.
    `bad_response`: the server did answer, but not usably; the model is asked again at once, a
    bounded number of times. `usage` and `raw` are what such an answer cost and said.
    """

    def __init__(
        self,
        message: str,
        *,
        type: RunErrorType = RunErrorType.MODEL_HTTP_ERROR,
        retryable: bool = False,
        retry_after: float | None = None,
        bad_response: bool = False,
        status: int | None = None,
        usage: Usage | None = None,
        raw: str = "",
    ) -> None:
        super().__init__(message)
        self.type = type
        self.retryable = retryable
        self.retry_after = retry_after
        self.bad_response = bad_response
        self.status = status
        self.usage = usage
        self.raw = raw


class ScriptError(CeleriacError, AssertionError):
    """A test's scripted model was asked what its script doesn't have, or asserted in vain."""


class ToolError(CeleriacError):
    """Raise this inside a tool: its message is for the model to read.

    `type` is a short upper-case word; `fields` says what is wrong with which argument; a `fatal`
    one ends the run.
    """

    def __init__(
        self,
        message: str,
        *,
        type: str = "TOOL_ERROR",
        retryable: bool = False,
        fields: Mapping[str, str] | None = None,
        fatal: bool = False,
    ) -> None:
        super().__init__(message)
        self.type = type
        self.retryable = retryable
        self.fields = dict(fields) if fields else None
        self.fatal = fatal
