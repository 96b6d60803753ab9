"""Functions as tools of a model: their definition, one call of one, and its result.

The rule: a call always ends in a `ToolResult`. Only `ToolInterrupted` passes through, and no
message holds an argument, a return value or the text of an exception that wasn't meant for the
model.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import re
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime
from types import FrameType, UnionType
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin, overload

from pydantic import (
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
)
from pydantic.fields import FieldInfo

from runner.errors import ToolDefinitionError, ToolError
from runner.images import Image, take_images
from runner.interrupt import Body, ToolInterrupted
from runner.limits import LIMIT_NAME, tool_limits
from runner.models import Evidence, Frozen, Principal, ToolErrorInfo, ToolErrorType, ToolResult
from runner.render import clean, cut, defuse, dump_json, fence, render, render_error, to_json
from runner.schema import (
    Arguments,
    build_arguments,
    list_faults,
    make_adapter,
    resolve_annotations,
    split_docstring,
)

MAX_TOOLS = 128
MAX_ERROR_CHARS = 4_096
MAX_EVIDENCE_CHARS = 65_536
MAX_EVIDENCE = 100
"""Pieces that are kept of one call's evidence: with the limit of tool calls, a bound for a run."""

MAX_CALL_EVIDENCE_CHARS = 4 * MAX_EVIDENCE_CHARS
"""Characters that are kept of one call's evidence, written as JSON."""

MAX_SOURCE_CHARS = 1_024
MIN_OUTPUT_CHARS = 256
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

running_call: ContextVar[str | None] = ContextVar("running_call", default=None)
"""The call id while a tool body runs here: a tool doesn't call a model (rule 11 of the loop)."""

logger = logging.getLogger(__name__)

T = TypeVar("T")

ApprovalRule = Callable[[dict[str, Any], Principal | None], bool]
"""Of a call's arguments and the run's principal: only where it returns False, the call may run."""


def _is_never_cancelled() -> bool:
    return False


def _drop_report(done: float, total: float | None, note: str) -> None:
    """Nobody listens: a tool that is called outside of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a tool may know of its run; injected by annotation, never shown to the model.

    `call_id` is `<step>.<index>` and `trace_id` is `<run>.<step>.<index>`; `idempotency_key` is the
    same on every attempt of the call; `deadline` is the run's, in UTC. Each has a default, so that
    a unit test may write `Context()`.
    """

    run_id: str = ""
    call_id: str = "0.0"
    trace_id: str = ""
    attempt: int = 1
    idempotency_key: str = ""
    principal: Principal | None = None
    deadline: datetime | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    is_cancelled: Callable[[], bool] = field(default=_is_never_cancelled, repr=False, compare=False)
    report: Callable[[float, float | None, str], None] = field(
        default=_drop_report, repr=False, compare=False
    )

    @property
    def cancelled(self) -> bool:
        """Whether a user asked the run to stop: a long tool looks now and then, and returns."""
        return self.is_cancelled()

    def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """Tell who follows the run how far this call is."""
        self.report(done, total, note)


@dataclass(frozen=True)
class Result(Generic[T]):
    """A return value together with what it rests on. The model reads `value` alone."""

    value: T
    evidence: Sequence[Evidence] = ()


@dataclass(frozen=True, slots=True)
class Executed:
    """How a call went. `fatal`: the tool asked for the run to end. `images` follow its block.

    `whole` is the text of a result that was cut for the model.
    """

    result: ToolResult
    fatal: bool = False
    images: tuple[Image, ...] = ()
    whole: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tool:
    """A function that a model may call. Made by `@tool`; still called like the function itself.

    `timeout` is in seconds, for one attempt. `attempts` is how often the body may be started, which
    counts only where the tool is `idempotent`: any other is started once. `parameters` is the JSON
    Schema of the arguments; `injected` are the parameters that receive the `Context`.

    `max_calls` is how often a run may call it. After it failed `fallback_after` times in a run,
    `fallback`, a function of the same parameters, answers in its place. What a `final` tool returns
    is the run's answer. The values of fields called as in `redact` are hidden in the trace. `keep`
    are the fields of its result that stay when an old result shrinks, for agents with `compaction`.

    `requires` are the scopes that the run's principal needs. `approval`: somebody has to approve a
    call before it runs, or those calls for which this function of the arguments (as the tool gets
    them) and the principal doesn't return False; where nobody does within `approval_timeout`
    seconds, it is denied.

    `max_concurrency` is how many calls of it run at once in the whole fleet, and `rate` how many
    start in a time, such as `10/s`; tools with the same `limit` share both.
    """

    name: str
    description: str
    function: Callable[..., Any]
    arguments: Arguments
    returns: TypeAdapter[Any]
    injected: tuple[str, ...] = ()
    timeout: float
    idempotent: bool
    attempts: int
    strict: bool
    max_output_chars: int
    max_calls: int | None = None
    fallback: Callable[..., Any] | None = None
    fallback_after: int = 3
    final: bool = False
    redact: frozenset[str] = frozenset()
    requires: frozenset[str] = frozenset()
    approval: bool | ApprovalRule = False
    approval_timeout: float | None = None
    keep: tuple[str, ...] = ()
    max_concurrency: int | None = None
    limit: str | None = None
    rate: str | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def parameters(self) -> dict[str, Any]:
        return deepcopy(self.arguments.schema)

    @property
    def limits(self) -> dict[str, str]:
        """The limits across the fleet that a call of it needs a place of, by name."""
        return tool_limits(self.limit or self.name, self.max_concurrency, self.rate)

    def definition(self) -> dict[str, Any]:
        """The tool as the `tools` of a chat-completions request list it."""
        function: dict[str, Any] = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        if self.strict:  # some servers refuse the key, so it is there only where it says something
            function["strict"] = True
        return {"type": "function", "function": function}

    def parse(self, arguments: str) -> dict[str, Any] | ToolErrorInfo:
        """Argument text as keyword arguments, or the `INVALID_ARGUMENT` that the model reads."""
        return self.arguments.parse(arguments)

    def needs_approval(self, arguments: str, principal: Principal | None) -> bool:
        """Whether somebody has to approve this call first; in doubt, somebody has to."""
        if isinstance(self.approval, bool):
            return self.approval
        given = self.parse(arguments)
        if isinstance(given, ToolErrorInfo):
            return True
        defaults = {
            name: deepcopy(each.default)
            for name, each in inspect.signature(self.function).parameters.items()
            if each.default is not each.empty and name not in self.injected
        }
        try:
            return self.approval({**defaults, **given}, principal) is not False
        except Exception as error:  # noqa: BLE001 - a rule that can't tell lets nothing pass
            logger.warning("tool %s: its approval rule raised %s", self.name, type(error).__name__)
            return True


class Toolbox:
    """The tools of an agent, by name and in the order given. Immutable.

    Raises `ToolDefinitionError`: `duplicate_tool`, `too_many_tools`, or an entry isn't a `Tool`.
    """

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        self._tools: dict[str, Tool] = {}
        for entry in tools:
            if not isinstance(entry, Tool):
                name = getattr(entry, "__name__", type(entry).__name__)
                raise ToolDefinitionError(f"{name} isn't a tool: decorate it with @tool")
            if entry.name in self._tools:
                raise ToolDefinitionError(
                    f"two tools are called {entry.name}: give one another name with @tool(name=)",
                    code="duplicate_tool",
                )
            self._tools[entry.name] = entry
        if len(self._tools) > MAX_TOOLS:
            raise ToolDefinitionError(
                f"{len(self._tools)} tools are more than the {MAX_TOOLS} that a request may list:"
                " split them over several agents",
                code="too_many_tools",
            )
        self._definitions = json.dumps([each.definition() for each in self])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    def get(self, name: str) -> Tool | None:
        return self._tools.get(name)

    def definitions(self) -> tuple[dict[str, Any], ...]:
        """Those of all tools: the caller's own, whatever becomes of them."""
        return tuple(json.loads(self._definitions))

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)


class Options(Frozen):
    """What `@tool` takes besides a name, checked."""

    model_config = ConfigDict(strict=True)

    timeout: float = Field(gt=0, allow_inf_nan=False)
    idempotent: bool
    attempts: int = Field(ge=1)
    strict: bool
    max_output_chars: int = Field(ge=MIN_OUTPUT_CHARS)
    max_calls: int | None = Field(ge=1)
    fallback: Callable[..., Any] | None
    fallback_after: int = Field(ge=1)
    final: bool
    redact: frozenset[str]
    requires: frozenset[str]
    approval: bool | Callable[..., Any]
    approval_timeout: float | None = Field(gt=0, allow_inf_nan=False)
    keep: tuple[str, ...]
    max_concurrency: int | None = Field(ge=1)
    limit: str | None = Field(pattern=rf"^{LIMIT_NAME.pattern}$")
    rate: str | None

    @field_validator("redact", "requires", mode="before")
    @classmethod
    def _read_names(cls, given: object) -> object:
        if isinstance(given, str):
            raise ValueError("it is a set of names, such as {'token'}")  # noqa: TRY004 - pydantic's
        return frozenset(given) if isinstance(given, Iterable) else given

    @field_validator("keep", mode="before")
    @classmethod
    def _read_fields(cls, given: object) -> object:
        if isinstance(given, str):
            raise ValueError("it is a list of field names, such as ('id', 'status')")  # noqa: TRY004 - pydantic's
        return tuple(given) if isinstance(given, Iterable) else given


# --- definition --------------------------------------------------------------------------------


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    timeout: float = 60.0,
    idempotent: bool = False,
    attempts: int = 3,
    strict: bool = False,
    max_output_chars: int = 65_536,
    max_calls: int | None = None,
    fallback: Callable[..., Any] | None = None,
    fallback_after: int = 3,
    final: bool = False,
    redact: Iterable[str] = (),
    requires: Iterable[str] = (),
    approval: bool | ApprovalRule = False,
    approval_timeout: float | None = None,
    keep: Iterable[str] = (),
    max_concurrency: int | None = None,
    limit: str | None = None,
    rate: str | None = None,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    timeout: float = 60.0,
    idempotent: bool = False,
    attempts: int = 3,
    strict: bool = False,
    max_output_chars: int = 65_536,
    max_calls: int | None = None,
    fallback: Callable[..., Any] | None = None,
    fallback_after: int = 3,
    final: bool = False,
    redact: Iterable[str] = (),
    requires: Iterable[str] = (),
    approval: bool | ApprovalRule = False,
    approval_timeout: float | None = None,
    keep: Iterable[str] = (),
    max_concurrency: int | None = None,
    limit: str | None = None,
    rate: str | None = None,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a function a tool: `@tool`, or `@tool(timeout=5, idempotent=True)`.

    The docstring is what the model reads of it; parameters and the return value need annotations.
    Raises `ToolDefinitionError` where a model couldn't be told how to call it.
    """

    make = functools.partial(
        _make_tool,
        caller=sys._getframe(1),
        name=name,
        options={
            "timeout": timeout,
            "idempotent": idempotent,
            "attempts": attempts,
            "strict": strict,
            "max_output_chars": max_output_chars,
            "max_calls": max_calls,
            "fallback": fallback,
            "fallback_after": fallback_after,
            "final": final,
            "redact": redact,
            "requires": requires,
            "approval": approval,
            "approval_timeout": approval_timeout,
            "keep": keep,
            "max_concurrency": max_concurrency,
            "limit": limit,
            "rate": rate,
        },
    )
    return make if function is None else make(function)


def _make_tool(
    function: Callable[..., Any], *, caller: FrameType, name: str | None, options: dict[str, Any]
) -> Tool:
    _check_function(function)
    called = function.__name__
    if name is None:
        name = called
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ToolDefinitionError(
            f"tool {called}: the name {name!r} can't be used; give it one of letters, digits, _"
            " and -, at most 64 characters, with @tool(name=)",
            code="invalid_tool_name",
        )
    try:
        checked = Options.model_validate(options)
    except ValidationError as error:
        faults = "; ".join(f"{path}: {reason}" for path, reason in list_faults(error).items())
        raise ToolDefinitionError(f"tool {name}: {faults}", code="invalid_option") from None
    _check_approval(checked, name)
    if checked.fallback is not None:
        _check_fallback(checked.fallback, function, name)
    _check_limit(checked, name)
    description, about = split_docstring(inspect.getdoc(function) or "")
    if not description:
        raise ToolDefinitionError(
            f"tool {name}: write a docstring, it is all that the model knows of what it does",
            code="missing_docstring",
        )
    parameters = _check_parameters(function, name)
    annotations = resolve_annotations(function, name, caller)
    injected = tuple(each for each in parameters if _is_context(annotations[each]))
    return Tool(
        name=name,
        description=description,
        function=function,
        arguments=build_arguments(
            {key: each for key, each in parameters.items() if key not in injected},
            annotations,
            name=name,
            strict=checked.strict,
            about=about,
        ),
        returns=make_adapter(_unwrap_return(annotations["return"]), name, "its return value"),
        injected=injected,
        **dict(checked),
    )


def _check_function(function: object) -> None:
    label = getattr(function, "__qualname__", type(function).__name__)
    reason: str | None = None
    if isinstance(function, str):
        raise ToolDefinitionError(
            "a tool's name is an option: write @tool(name=...)", code="invalid_option"
        )
    if isinstance(function, Tool):
        reason = f"{function.name} is a tool already: put @tool once, above other decorators"
    elif isinstance(function, functools.partial):
        reason = "a functools.partial has no docstring and name of its own: wrap it in a def"
    elif isinstance(function, (staticmethod, classmethod)):
        reason = f"{function.__func__.__qualname__} is a method: move it to the top of a module"
    elif not inspect.isfunction(function) and not inspect.ismethod(function):
        reason = f"{label} isn't a function: a tool is a def or an async def"
    elif function.__name__ == "<lambda>":
        reason = "a lambda has no name, docstring or annotations: write a def"
    elif inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        reason = f"{label} is a generator, and a call has one result: return a list"
    if reason is not None:
        raise ToolDefinitionError(f"tool: {reason}", code="unsupported_signature")


def _check_approval(options: Options, name: str) -> None:
    rule, wrong = options.approval, None
    if rule is False and options.approval_timeout is not None:
        wrong = "approval_timeout says how long a call waits: it needs approval="
    elif inspect.iscoroutinefunction(rule):
        wrong = "approval: a rule is a plain function, not an async one"
    elif not isinstance(rule, bool):
        try:
            inspect.signature(rule).bind({}, None)
        except (TypeError, ValueError):
            wrong = "approval: it is True, or a function of (arguments, principal)"
    if wrong is not None:
        raise ToolDefinitionError(f"tool {name}: {wrong}", code="invalid_option")


def _check_limit(options: Options, name: str) -> None:
    if options.limit and not (options.max_concurrency or options.rate):
        raise ToolDefinitionError(
            f"tool {name}: limit needs max_concurrency= or rate=, the same in all its tools",
            code="invalid_option",
        )
    try:
        tool_limits(name, options.max_concurrency, options.rate)
    except ValueError as error:
        raise ToolDefinitionError(f"tool {name}: {error}", code="invalid_option") from None


def _check_fallback(fallback: Callable[..., Any], function: Callable[..., Any], name: str) -> None:
    if not inspect.isfunction(fallback) and not inspect.ismethod(fallback):
        raise ToolDefinitionError(
            f"tool {name}: its fallback isn't a function: wrap it in a def", code="invalid_option"
        )
    wanted, got = (list(inspect.signature(each).parameters) for each in (function, fallback))
    if wanted != got:
        same = ", ".join(wanted) or "none"
        raise ToolDefinitionError(
            f"tool {name}: its fallback must have the same parameters: {same}",
            code="invalid_option",
        )


def _check_parameters(function: Callable[..., Any], label: str) -> Mapping[str, inspect.Parameter]:
    signature = inspect.signature(function)
    for index, parameter in enumerate(signature.parameters.values()):
        shown = f"tool {label}: parameter {parameter.name}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ToolDefinitionError(
                f"{shown} is open-ended: name each parameter, or take one list or one model",
                code="unsupported_signature",
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ToolDefinitionError(
                f"{shown} is positional-only, and a model names its arguments: leave out the /",
                code="unsupported_signature",
            )
        if isinstance(parameter.default, FieldInfo):
            raise ToolDefinitionError(
                f"{shown} has a Field as its default: write Annotated[type, Field(...)] = default",
                code="unsupported_signature",
            )
        if parameter.annotation is parameter.empty:
            if index == 0 and parameter.name in ("self", "cls"):
                raise ToolDefinitionError(
                    f"tool {label}: it is a method: move it to the top of a module,"
                    " or make a tool of the bound method",
                    code="unsupported_signature",
                )
            raise ToolDefinitionError(f"{shown} needs an annotation", code="missing_annotation")
    if signature.return_annotation is signature.empty:
        raise ToolDefinitionError(
            f"tool {label}: annotate what it returns (-> None where nothing)",
            code="missing_annotation",
        )
    return signature.parameters


def _is_context(annotation: Any) -> bool:
    if get_origin(annotation) in (Annotated, Union, UnionType):
        return any(_is_context(part) for part in get_args(annotation))
    return annotation is Context


def _unwrap_return(annotation: Any) -> Any:
    """The type of the value itself: of `Result[T]`, or of what an awaitable gives, it is `T`."""
    origin = get_origin(annotation)
    if annotation is Result:
        return Any
    if origin in (Result, Awaitable, Coroutine):
        return _unwrap_return(get_args(annotation)[-1])
    if origin in (Union, UnionType):
        parts = [_unwrap_return(part) for part in get_args(annotation)]
        changed = any(new is not old for new, old in zip(parts, get_args(annotation), strict=True))
        return Union[tuple(parts)] if changed else annotation  # noqa: UP007
    return annotation


# --- execution ---------------------------------------------------------------------------------


def execute(
    tool: Tool,
    context: Context,
    arguments: str,
    body: Body | None = None,
    *,
    in_its_place: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Executed:
    """Run one call to its result, in the calling thread, which must have no running event loop.

    Raises nothing but `ToolInterrupted`; the timeout is the caller's to enforce, by `body`.
    `in_its_place`: it has failed so often that its fallback answers.
    """
    started = clock()
    fatal = False
    images: list[Image] = []
    whole: list[str] = []
    function = tool.fallback if in_its_place and tool.fallback else tool.function
    try:
        outcome = _attempt(tool, function, context, arguments, body or Body(), images, whole)
    except ToolInterrupted:
        raise
    except BaseException as error:  # noqa: BLE001 - a SystemExit of the tool's is a result too
        outcome, fatal = _describe_failure(tool, context, error)
    elapsed = max(0, round((clock() - started) * 1000))
    if isinstance(outcome, ToolErrorInfo):
        refused = error_result(
            context.call_id, tool.name, outcome, attempt=context.attempt, duration_ms=elapsed
        )
        return Executed(refused, fatal)
    return Executed(
        outcome.model_copy(update={"duration_ms": elapsed}),
        images=tuple(images),
        whole=whole[0] if whole else None,
    )


def error_result(
    call_id: str, name: str, error: ToolErrorInfo, attempt: int = 1, duration_ms: int = 0
) -> ToolResult:
    """The result of a call that was refused or failed; `content` is what the model reads of it."""
    error = ToolErrorInfo(
        type=defuse(clean(error.type)),
        message=cut(defuse(clean(error.message)), MAX_ERROR_CHARS),
        retryable=error.retryable,
        fields=_clean_fields(error.fields),
    )
    content = render_error(error)
    return ToolResult(
        call_id=call_id,
        name=name,
        ok=False,
        content=content,
        error=error,
        duration_ms=duration_ms,
        output_chars=len(content),
        retryable=error.retryable,
        attempt=attempt,
    )


def _attempt(
    tool: Tool,
    function: Callable[..., Any],
    context: Context,
    arguments: str,
    body: Body,
    images: list[Image],
    whole: list[str],
) -> ToolResult | ToolErrorInfo:
    given = tool.parse(arguments)
    if isinstance(given, ToolErrorInfo):
        return given
    returned = _run_body(tool, function, context, given, body)
    result = _validate_result(tool, returned, context.call_id)
    if isinstance(result, ToolErrorInfo):
        return result
    value = take_images(result.value, images)
    shown = render(value, max_chars=tool.max_output_chars)
    if tool.final and shown.truncated:
        return _invalid_result(
            f"the answer has {shown.output_chars} characters, at most {tool.max_output_chars}", None
        )
    if shown.whole is not None:
        whole.append(shown.whole)
    return ToolResult(
        call_id=context.call_id,
        name=tool.name,
        ok=True,
        content=fence(shown.content),
        data=shown.data,
        evidence=tuple(result.evidence),
        output_chars=shown.output_chars,
        truncated=shown.truncated,
        attempt=context.attempt,
    )


def _run_body(
    tool: Tool,
    function: Callable[..., Any],
    context: Context,
    given: Mapping[str, Any],
    body: Body,
) -> Any:
    token = running_call.set(context.call_id)
    try:
        return body.run(function, {**given, **dict.fromkeys(tool.injected, context)})
    finally:
        running_call.reset(token)


def _validate_result(tool: Tool, returned: Any, call_id: str) -> Result[Any] | ToolErrorInfo:
    """What was returned as its declared type, or `INVALID_RESULT`; the body is not run again."""
    result = returned if isinstance(returned, Result) else Result(returned)
    try:
        evidence = [
            _cut_evidence(Evidence.model_validate(to_json(each)), call_id)
            for each in result.evidence
        ]
    except (ValidationError, TypeError):
        return _invalid_result("its evidence must be a list of Evidence", None)
    try:
        value = _validate_value(tool.returns, result.value)
    except ValidationError as error:
        fields = {path or "value": reason for path, reason in list_faults(error).items()}
        text = "; ".join(f"{path}: {reason}" for path, reason in fields.items())
        return _invalid_result(text, fields)
    return Result(value, _limit_evidence(evidence, call_id))


def _cut_evidence(evidence: Evidence, call_id: str) -> Evidence:
    """What is kept of it: an answer's proof, not a store for documents."""
    size = 0 if evidence.data is None else len(dump_json(evidence.data))
    data = evidence.data if size <= MAX_EVIDENCE_CHARS else f"[cut: {size} characters]"
    kept = {
        "source": cut(evidence.source, MAX_SOURCE_CHARS),
        "text": cut(evidence.text, MAX_EVIDENCE_CHARS),
        "data": data,
    }
    return evidence.model_copy(update={"call_id": call_id, **kept})


def _limit_evidence(found: list[Evidence], call_id: str) -> list[Evidence]:
    """The first pieces, and how many were left out."""
    size, fits = 0, 0
    for each in found[:MAX_EVIDENCE]:
        size += len(each.model_dump_json())
        if size > MAX_CALL_EVIDENCE_CHARS:
            break
        fits += 1
    if fits == len(found):
        return found
    left = Evidence(source="celeriac", text=f"[{len(found) - fits} left out]", call_id=call_id)
    return [*found[:fits], left]


def _validate_value(adapter: TypeAdapter[Any], value: Any) -> Any:
    try:
        return adapter.validate_python(value, by_alias=True, by_name=True)
    except ValidationError as error:
        if not any(each["type"] == "string_unicode" for each in error.errors()):
            raise
    # Pydantic takes no lone surrogates, which are a fault of the text and not of the tool.
    return adapter.validate_python(to_json(value), by_alias=True, by_name=True)


def _invalid_result(reason: str, fields: dict[str, str] | None) -> ToolErrorInfo:
    return ToolErrorInfo(
        type=ToolErrorType.INVALID_RESULT.value,
        message=f"the tool ran, but what it returned is not of its declared type: {reason}",
        fields=fields,
    )


def _describe_failure(
    tool: Tool, context: Context, error: BaseException
) -> tuple[ToolErrorInfo, bool]:
    """The error and whether it is fatal; re-raises an interrupt that a task group wrapped."""
    if isinstance(error, BaseExceptionGroup) and (held := error.subgroup(ToolInterrupted)):
        raise ToolInterrupted from held
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, ToolError):
        try:
            info = ToolErrorInfo(
                type=clean(str(error.type)),
                message=clean(str(error)),
                retryable=error.retryable,
                fields=_clean_fields(error.fields),
            )
            return info, bool(error.fatal)
        except Exception:  # noqa: BLE001 - a subclass that never called ToolError.__init__
            logger.warning("tool %s raised a ToolError that can't be read", tool.name)
    name = clean(type(error).__name__)
    # Where, but not what: the text of an exception may hold a secret.
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"
    logger.warning(
        "run %s call %s: tool %s raised %s at %s",
        context.run_id,
        context.call_id,
        tool.name,
        name,
        where,
    )
    message = f"the tool failed with {name}"
    return ToolErrorInfo(type=ToolErrorType.TOOL_ERROR.value, message=message), False


def _clean_fields(fields: Mapping[str, str] | None) -> dict[str, str] | None:
    if not fields:
        return None
    return {
        defuse(clean(str(path))): cut(defuse(clean(str(reason))), 256)
        for path, reason in fields.items()
    }
