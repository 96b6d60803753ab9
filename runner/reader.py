"""Reads a chat-completions response as servers really send it, and never as they should have.

Whatever the text is, what comes out is a `ModelReply` that is safe to store and to send back, or a
`ModelError`. What is refused or repaired is decided on the message; of finish reasons only those
count that say the message isn't whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from runner.errors import ModelError
from runner.models import (
    Final,
    ModelReply,
    ProposedCall,
    RunErrorType,
    ToolCalls,
    ToolErrorInfo,
    ToolErrorType,
    Usage,
)

MAX_ARGUMENT_BYTES = 1_000_000
MAX_ARGUMENT_DEPTH = 64
MAX_DIGITS = 1_000
MAX_ID_CHARS = 40
MAX_TOKENS_REPORTED = 10**10
NAME_PATTERN = re.compile(r"[a-zA-Z0-9_-]{1,64}")
PLACEHOLDER_NAME = "unnamed_tool"

_CUT_OFF = {"length", "max_tokens", "max_output_tokens", "model_length"}
_FILTERED = {"content_filter", "safety", "recitation", "blocklist", "prohibited_content"}

_PART_KINDS = {"refusal": "refusal", "thinking": "reasoning", "reasoning": "reasoning"}

_QUOTA_CODES = {"insufficient_quota", "billing_hard_limit_reached", "billing_not_active"}
_CONTEXT_CODES = {"context_length_exceeded", "context_window_exceeded", "string_above_max_length"}
_FILTER_CODES = {"content_filter", "content_policy_violation", "responsibleaipolicyviolation"}
# Most compatible servers have no code for it and say so in a sentence only.
_CONTEXT_MESSAGE = re.compile(
    r"context[ _](?:length|window|size)|maximum context|(?:prompt|input|request) is too long"
    r"|reduce the length of the (?:messages|prompt|input)|too many (?:input )?tokens",
    re.IGNORECASE,
)

_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile(r"[\x00-\x1f]")
_SAFE_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_ID_CHARS}}}")
_NAME_PREFIX = re.compile(
    r"(?:[\s`\"']|<[^<>]*>|\[/?[A-Z_]+\]|(?:functions?|tools?|default_api)[.:/])+"
)
_THINK = re.compile(r"\s*<think(?:ing)?>(.*?)(?:</think(?:ing)?>|\Z)\s*", re.DOTALL)

# Tool markup that a server's parser should have read and sent as `tool_calls`.
_TAG = r"<(?:[a-z_]+:)?(?:tool_calls?|tool_use|function_calls?|invoke|tool_code)\b[^>\n]*>"
_BODY = r"\s*(?:[{\[<]|[\w.-]+\s*(?:[\n<({:]|\Z))"
_MARKUP = re.compile(
    rf"(?:```\w*\s*)?(?:{_TAG}{_BODY}|<function=[\w.-]+>|\[TOOL_CALLS\]{_BODY}"
    r"|<[|｜][^<>\n]{0,40}?(?:tool|function|python_tag|action)[^<>\n]{0,40}?[|｜]>"
    r"|<\|(?:start|channel)\|>[^\n]{0,80}?to=functions\.)",
    re.IGNORECASE,
)
_LAST_BLOCK = re.compile(
    r"^[ \t]*(?:<tool_calls?>\s*\{\s*\"name\"|<function=[\w.-]+>|<invoke name=|<[|｜]tool[^a-z])",
    re.MULTILINE,
)


def scrub(text: str) -> str:
    """Replace lone surrogates: neither Redis nor the next request could encode them."""
    return _SURROGATE.sub("\ufffd", text)


class _Repeated(dict[str, Any]):
    """A JSON object in which a key came twice, so that what was meant can't be known."""


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else _Repeated(found)


def _build_int(digits: str) -> int | float:
    return int(digits) if len(digits) <= MAX_DIGITS else math.inf


def load_json(text: str) -> Any:
    """Parse leniently; what is odd stays visible to `_find_fault`. Raises only ValueError."""
    try:
        return json.loads(text, strict=False, object_pairs_hook=_build_object, parse_int=_build_int)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _find_fault(value: object) -> str | None:
    pending = [(value, 1)]
    while pending:
        item, depth = pending.pop()
        if depth > MAX_ARGUMENT_DEPTH:
            return f"the arguments are nested more than {MAX_ARGUMENT_DEPTH} levels deep"
        match item:
            case _Repeated():
                return "a key comes twice in the same object"
            case dict():
                pending += [(key, depth) for key in item]
                pending += [(member, depth + 1) for member in item.values()]
            case list():
                pending += [(member, depth + 1) for member in item]
            case float() if not math.isfinite(item):
                return "a number is not finite, or too large"
            case str() if _SURROGATE.search(item):
                return "a text is not valid Unicode"
    return None


def read_arguments(given: object, *, outermost: bool = True) -> tuple[str, str | None]:
    """JSON text of one object, and what is wrong with `given`, in which case the text is `{}`.

    Valid text is kept as it came, so that an integer above 2**53 or a long decimal stays exact.
    """
    text = None
    parsed = given
    if given is None or (isinstance(given, str) and given.strip() in ("", "null")):
        return "{}", None
    if isinstance(given, str):
        if len(given.encode("utf-8", "replace")) > MAX_ARGUMENT_BYTES:
            return "{}", f"the arguments are larger than {MAX_ARGUMENT_BYTES:,} bytes"
        try:
            parsed = load_json(given)
        except ValueError:
            return "{}", "the arguments are not JSON: send one JSON object and nothing around it"
        if isinstance(parsed, str) and outermost:
            return read_arguments(parsed, outermost=False)
        text = given.strip()
    if not isinstance(parsed, dict):
        return "{}", "the arguments are not a JSON object: send one object, its keys the parameters"
    if fault := _find_fault(parsed):
        return "{}", fault
    if text is None or not _is_strict_json(text):
        text = json.dumps(parsed, ensure_ascii=False, allow_nan=False)
        if len(text.encode()) > MAX_ARGUMENT_BYTES:
            return "{}", f"the arguments are larger than {MAX_ARGUMENT_BYTES:,} bytes"
    return text, None


def _is_strict_json(text: str) -> bool:
    """Whether raw control characters, if any, are outside of strings, as JSON demands."""
    if not _CONTROL.search(text):
        return True
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def read_name(given: object) -> tuple[str, str | None]:
    """A valid function name, and what is wrong with `given`.

    Decoration (blanks, `functions.`, leaked special tokens) is taken off. A name that still needs
    changed characters is an error, so that `pay.out` can never run a tool called `pay_out`.
    """
    name = given if isinstance(given, str) else ""
    name = name[match.end() :] if (match := _NAME_PREFIX.match(name)) else name
    name = re.sub(r":\d+\Z", "", name.split("<", 1)[0].strip(" \t\r\n`\"'"))
    if not name:
        return PLACEHOLDER_NAME, "the call has no tool name: call one of the tools listed"
    if NAME_PATTERN.fullmatch(name):
        return name, None
    safe = re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:64]
    return safe, "there is no tool of this name: call one of the tools listed"


def _choose_ids(given: Iterable[object], *, seed: str) -> list[str]:
    """Non-empty, short, unique in the turn, and the same whenever this response is read again.

    The response is part of the seed, so that made-up ids of two turns differ as well.
    """
    wanted = [item.strip() if isinstance(item, str) else "" for item in given]
    digest = hashlib.sha256(seed.encode("utf-8", "replace")).hexdigest()[:16]
    taken: set[str] = set()
    chosen: list[str] = []
    for index, name in enumerate(wanted):
        made_up = f"call_{digest}_{index}"
        while made_up in taken or made_up in wanted:
            made_up += "x"
        usable = _SAFE_ID.fullmatch(name) and name not in taken
        chosen.append(name if usable else made_up)
        taken.add(chosen[-1])
    return chosen


def _as_text(value: object) -> str | None:
    """What came, as text for the trace; None where nothing came."""
    if value is None or isinstance(value, str):
        return scrub(value) if value else value
    try:
        return scrub(json.dumps(value, ensure_ascii=False))
    except (ValueError, RecursionError):
        return ""


def _list_entries(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The calls of a message as objects; the legacy `function_call` is one without an id."""
    match message.get("tool_calls"):
        case list() as entries:
            found = [entry for entry in entries if entry]
        case dict() as entry if entry:
            found = [entry]
        case None | {} | "" | False | 0:
            found = []
        case _:
            raise _Unusable("the tool calls in the model server's answer can't be read")
    legacy = message.get("function_call")
    if not found and isinstance(legacy, dict) and legacy:
        found = [{"function": legacy}]
    return [entry if isinstance(entry, dict) else {} for entry in found]


def _read_call(entry: Mapping[str, Any], id: str, *, cut_off: bool) -> ProposedCall:
    inner = next((entry[key] for key in ("function", "custom") if entry.get(key)), entry)
    function = inner if isinstance(inner, dict) else {}
    raw_name = function.get("name")
    # `parameters` and `input`: what some servers call the arguments.
    keys = (key for key in ("arguments", "parameters", "input") if key in function)
    raw_arguments = function.get(next(keys, "arguments"))
    name, name_fault = read_name(raw_name)
    arguments, arguments_fault = read_arguments(raw_arguments)
    error = None
    if cut_off:
        # Even arguments that happen to parse may be cut: nobody knows what would have followed.
        arguments = "{}"
        error = ToolErrorInfo(
            type=ToolErrorType.OUTPUT_TRUNCATED,
            message="the answer was cut off at the token limit, so this call did not run: "
            "make fewer or smaller calls",
            retryable=True,
        )
    elif name_fault:
        error = ToolErrorInfo(type=ToolErrorType.UNKNOWN_TOOL, message=name_fault)
    elif arguments_fault:
        error = ToolErrorInfo(
            type=ToolErrorType.INVALID_ARGUMENT, message=arguments_fault, retryable=True
        )
    return ProposedCall(
        provider_id=id,
        name=name,
        arguments=arguments,
        error=error,
        raw_name=None if raw_name == name else _as_text(raw_name),
        raw_arguments=None if raw_arguments == arguments else _as_text(raw_arguments),
        extra=_read_extra(entry.get("extra_content")),
    )


def _read_extra(given: object) -> dict[str, Any] | None:
    """What a server wants back with a call, as it came; None where it can't be stored and sent."""
    if not isinstance(given, dict) or not given or _find_fault(given):
        return None
    text = json.dumps(given, ensure_ascii=False)
    return json.loads(text) if len(text.encode()) <= MAX_ARGUMENT_BYTES else None


def iterate_parts(content: object, depth: int = 0) -> Iterator[tuple[str, str]]:
    """(kind, text) of each part of a content that is text, one part, or a list of parts."""
    if depth > 4:  # real ones have three levels; a hostile one has as many as it likes
        return
    match content:
        case str():
            yield "text", content
        case list():
            for part in content:
                yield from iterate_parts(part, depth + 1)
        case dict():
            for key in ("refusal", "thinking", "reasoning", "text", "value"):
                if texts := [text for _, text in iterate_parts(content.get(key), depth + 1)]:
                    kind = content.get("type") if key == "text" else key
                    yield (_PART_KINDS.get(str(kind), "text"), "".join(texts))
                    return


def _read_texts(message: Mapping[str, Any]) -> tuple[str, str, str]:
    """Answer, refusal and reasoning of a message, each perhaps empty."""
    found: dict[str, list[str]] = {"text": [], "refusal": [], "reasoning": []}
    for kind, text in iterate_parts(message.get("content")):
        found[kind].append(text)
    for key in ("reasoning_content", "reasoning"):
        if isinstance(message.get(key), str) and message[key]:
            found["reasoning"].append(message[key])
            break
    if isinstance(message.get("refusal"), str):
        found["refusal"].append(message["refusal"])
    text = "".join(found["text"])
    # A reasoning model behind a server without a reasoning parser.
    if thought := _THINK.match(text):
        found["reasoning"].append(thought[1])
        text = text[thought.end() :]
    return scrub(text), scrub("".join(found["refusal"])), scrub("".join(found["reasoning"]))


def is_leaked_markup(text: str) -> bool:
    """Whether this text is a tool call that the server failed to read, and not about one."""
    if _MARKUP.match(text.lstrip()):
        return True
    if not text.rstrip().endswith((">", "}")):
        return False
    # Some words first, and then a block up to the end: a call too, unless a code fence shows it.
    starts = [block.start() for block in _LAST_BLOCK.finditer(text)]
    return bool(starts) and text.count("```", 0, starts[-1]) % 2 == 0


def read_usage(given: object) -> Usage:
    """Tokens of one response; `known` is false where the server reported nothing credible."""
    reported = given if isinstance(given, dict) else {}
    prompt = _read_count(reported, "prompt_tokens", "input_tokens")
    completion = _read_count(reported, "completion_tokens", "output_tokens")
    total = _read_count(reported, "total_tokens")
    parts = (prompt or 0) + (completion or 0)
    complete = total is not None or (prompt is not None and completion is not None)
    total = max(total or 0, parts)
    return Usage(
        requests=1,
        prompt_tokens=prompt or 0,
        completion_tokens=completion or 0,
        total_tokens=total,
        known=complete and total > 0,  # no request is free: zeros are a server that doesn't count
    )


def _read_count(reported: Mapping[str, Any], *keys: str) -> int | None:
    for key in keys:
        value = reported.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if 0 <= value <= MAX_TOKENS_REPORTED and value == int(value):
            return int(value)
    return None


@dataclass(frozen=True, slots=True)
class ServerError:
    """What a server said went wrong. `message` may quote the prompt: it is for matching only."""

    code: str = ""
    type: str = ""
    param: str = ""
    message: str = ""


def read_error(body: object) -> ServerError | None:
    """The error object in a parsed body; None where there is none."""
    if isinstance(body, list) and body:
        body = body[0]
    if not isinstance(body, dict):
        return None
    error = body.get("error")
    if not error and not body.get("choices") and ("code" in body or body.get("object") == "error"):
        error = body
    if isinstance(error, str):
        return ServerError(message=error)
    if not isinstance(error, dict):
        return ServerError() if error else None
    words = {key: error.get(key) for key in ("code", "type", "param", "message")}
    return ServerError(
        **{key: str(word) for key, word in words.items() if isinstance(word, str | int)}
    )


def classify_error(error: ServerError) -> RunErrorType | None:
    """The kinds of error that a code tells, whatever the status; None for all others."""
    codes = {error.code.lower(), error.type.lower()}
    if codes & _QUOTA_CODES:
        return RunErrorType.QUOTA_EXHAUSTED
    if codes & _CONTEXT_CODES:
        return RunErrorType.CONTEXT_OVERFLOW
    if codes & _FILTER_CODES:
        return RunErrorType.CONTENT_FILTERED
    return None


def says_context_overflow(error: ServerError) -> bool:
    """Whether the message says so; not asked for a 429, which talks of tokens for other reasons."""
    return bool(_CONTEXT_MESSAGE.search(error.message))


class _Unusable(Exception):
    """An answer that is neither calls nor a final text; becomes a ModelError with usage and raw."""

    def __init__(
        self,
        message: str,
        kind: RunErrorType = RunErrorType.MODEL_BAD_RESPONSE,
        *,
        ask_again: bool = True,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.ask_again = ask_again


def read_reply(raw: str) -> ModelReply:
    """Read the body of a response with a success status. Raises nothing but ModelError."""
    try:
        body = load_json(raw.removeprefix("\ufeff"))
    except ValueError:
        fault = _Unusable("the model server's answer is not JSON: does the base URL end in /v1?")
    else:
        return read_body(body, raw)
    raise _as_error(fault, Usage(requests=1, known=False), raw)


def read_body(body: object, raw: str) -> ModelReply:
    """Read a parsed body; `raw` is its text. Raises nothing but ModelError."""
    usage = read_usage(body.get("usage") if isinstance(body, dict) else None)
    try:
        _refuse_error(body)
        return _read_choice(_choose_choice(body), usage, raw)
    except _Unusable as unusable:
        fault = unusable
    raise _as_error(fault, usage, raw)


def _as_error(fault: _Unusable, usage: Usage, raw: str) -> ModelError:
    return ModelError(
        str(fault),
        type=fault.kind,
        retryable=fault.ask_again,
        bad_response=fault.ask_again,
        usage=usage,
        raw=raw,
    )


def _refuse_error(body: object) -> None:
    """Servers, and gateways before them, also report errors with a success status."""
    error = read_error(body)
    if error is None:
        return
    kind = classify_error(error)
    if kind is None and says_context_overflow(error):
        kind = RunErrorType.CONTEXT_OVERFLOW
    if kind:
        raise _Unusable(f"the model server reported {kind}", kind, ask_again=False)
    raise _Unusable("the model server sent an error object in a successful response")


def _choose_choice(body: object) -> Mapping[str, Any]:
    """The choice with calls, where a server put them into one of their own, or else the first."""
    choices = body.get("choices") if isinstance(body, dict) else None
    found = (
        [item for item in choices if isinstance(item, dict)] if isinstance(choices, list) else []
    )
    for choice in found:
        message = choice.get("message")
        if isinstance(message, dict) and (
            message.get("tool_calls") or message.get("function_call")
        ):
            return choice
    return found[0] if found else {}


def _read_choice(choice: Mapping[str, Any], usage: Usage, raw: str) -> ModelReply:
    reason = choice.get("finish_reason")
    finish = reason.lower() if isinstance(reason, str) else ""
    if finish in _FILTERED:
        raise _Unusable("the answer was filtered", RunErrorType.CONTENT_FILTERED, ask_again=False)
    message = choice.get("message")
    if not isinstance(message, dict) or finish == "error" or choice.get("error"):
        raise _Unusable("the model server's answer holds no usable message")
    cut_off = finish in _CUT_OFF
    text, refusal, reasoning = _read_texts(message)
    if entries := _list_entries(message):
        ids = _choose_ids((entry.get("id") for entry in entries), seed=raw)
        return ToolCalls(
            calls=tuple(
                _read_call(entry, call_id, cut_off=cut_off)
                for entry, call_id in zip(entries, ids, strict=True)
            ),
            text=text if text.strip() else None,
            usage=usage,
            raw=raw,
            reasoning=reasoning or None,
        )
    if refusal.strip() or finish == "refusal":
        raise _Unusable("the model refused", RunErrorType.REFUSED, ask_again=False)
    _refuse_text(text, cut_off=cut_off)
    return Final(text=text, usage=usage, raw=raw, reasoning=reasoning or None)


def _refuse_text(text: str, *, cut_off: bool) -> None:
    if cut_off:
        raise _Unusable(
            "the answer was cut off at the token limit: raise the model's output limit",
            RunErrorType.OUTPUT_TRUNCATED,
            ask_again=False,
        )
    if not text.strip():
        raise _Unusable("the model answered nothing", RunErrorType.EMPTY_RESPONSE)
    if is_leaked_markup(text):
        raise _Unusable(
            "the answer is tool markup as text: does the model server have its tool parser on?"
        )
