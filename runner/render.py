"""Any Python value as JSON and as the text a model reads.

The rule: whatever a tool returns can be shown, since its work is done and must not be lost or done
again for the sake of its shape; and what can't be shown is named by its type, never by its `repr`.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import date, time
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any
from uuid import UUID

from pydantic import JsonValue
from pydantic_core import to_jsonable_python

from runner.models import ToolErrorInfo

MARKUP = re.compile(
    r"</?\s*(?:tool_(?:result|response|call|output)s?|function_(?:call|result)s?)\b"
    r"|<\|[a-z_]{2,32}\|>|<\uff5c[^>\n]{1,40}\uff5c>|\[/?(?:INST|TOOL_RESULTS|TOOL_CALLS)\]|<</?SYS>>"
    r"|<(?:start|end)_of_turn>",
    re.IGNORECASE,
)
"""Words of chat templates. A result that holds one is shown as data, inside of a fence."""

MAX_DEPTH = 100
MAX_INT_BITS = 13_000  # Python writes no int of more than 4,300 digits


@dataclasses.dataclass(frozen=True, slots=True)
class Rendered:
    """`content` is at most the cap; `output_chars` the size before the cut; `data` None if cut.

    `whole` is the text before a cut, None where nothing was cut.
    """

    content: str
    data: JsonValue
    output_chars: int
    truncated: bool
    whole: str | None = None


def render(value: object, *, max_chars: int) -> Rendered:
    """A `str` as it is, everything else as compact JSON; cut, visibly, to `max_chars`."""
    data = to_json(value)
    text = data if isinstance(value, str) and isinstance(data, str) else dump_json(data)
    if len(text) <= max_chars:
        return Rendered(text, data, len(text), truncated=False)
    return Rendered(cut(text, max_chars), None, len(text), truncated=True, whole=text)


def cut(text: str, max_chars: int, *, size: int | None = None) -> str:
    """The head of `text` and a marker with the full size; together at most `max_chars`.

    `size` is the full one, where `text` is itself the head of something longer.
    """
    size = size or len(text)
    if size <= max_chars:
        return text

    def mark(shown: int) -> str:
        return f"\n... [cut: {shown} of {size} characters shown]"

    # The marker for `max_chars` is at least as long as the one for what is really shown.
    shown = min(len(text), max(0, max_chars - len(mark(max_chars))))
    return (text[:shown] + mark(shown))[:max_chars]


def dump_json(data: JsonValue) -> str:
    """Compact, and in the characters themselves rather than escapes."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def fence(text: str) -> str:
    """A result as the model reads it: in a fence where it looks like an attempt to leave its place.

    Whatever would close the fence, or start a turn in a chat template, is broken up inside of it.
    """
    broken = defuse(text)
    return text if broken == text else f"<tool_result>\n{broken}\n</tool_result>"


def defuse(text: str) -> str:
    """`text` with a backslash in each word of a chat template, so that it is none any more."""
    return MARKUP.sub(lambda found: found[0][0] + "\\" + found[0][1:], text)


def render_error(error: ToolErrorInfo) -> str:
    """A refusal or a failure as the model reads it."""
    return dump_json({"ok": False, "error": error.model_dump(mode="json", exclude_none=True)})


def clean(text: str) -> str:
    """`text` with each lone surrogate and NUL as U+FFFD; a pair of surrogates is its character."""
    if not text.isascii():
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text.replace("\0", "\ufffd")


def to_json(value: object) -> JsonValue:
    """`value` as plain JSON data, without loss where JSON has a form for it. Never raises."""
    return _convert(value, ())


def _convert(value: object, path: tuple[int, ...]) -> JsonValue:
    """`path` holds the identities of the containers around `value`, to find a cycle."""
    try:
        if id(value) in path:
            return f"[{_name_type(value)}: contains itself]"
        if len(path) > MAX_DEPTH:
            return f"[{_name_type(value)}: nested too deeply]"
        return _convert_known(value, path)
    except Exception:  # noqa: BLE001 - a value's own methods may raise anything
        return _name_unknown(value)


def _convert_known(value: object, path: tuple[int, ...]) -> JsonValue:
    inner = (*path, id(value))
    match value:
        case Enum():  # before the scalars, since a member may be a str or an int as well
            return _convert(value.value, inner)
        case None | str() | int() | float() | Decimal() | UUID() | PurePath() | date() | time():
            return _convert_scalar(value)
        case bytes() | bytearray() | memoryview():
            return _convert_bytes(bytes(value))
        case Mapping():
            return {_name_key(key, inner): _convert(item, inner) for key, item in value.items()}
        case list() | tuple() | deque():
            return [_convert(item, inner) for item in value]
        case set() | frozenset():
            return _convert_set(value, inner)
        case type() | Iterator():  # to read an iterator could take for ever
            return _name_unknown(value)
        case _:
            return _convert_object(value, inner)


def _convert_scalar(
    value: str | float | Decimal | UUID | PurePath | date | time | None,
) -> JsonValue:
    match value:
        case None | True | False:
            return value
        case str():
            return clean(str.__str__(value))
        case int():
            return int(value) if value.bit_length() <= MAX_INT_BITS else hex(value)
        case float():
            return float(value) if math.isfinite(value) else None
        case Decimal() | UUID() | PurePath():
            return str(value)
        case _:
            return value.isoformat()


def _convert_object(value: object, path: tuple[int, ...]) -> JsonValue:
    if (serializer := getattr(type(value), "__pydantic_serializer__", None)) is not None:
        return _convert_model(value, serializer, path)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: _convert(getattr(value, name), path) for name in names}
    # URLs, addresses, durations and the like; a SecretStr comes out masked; the rest raises.
    return _convert(to_jsonable_python(value), path)


def _convert_model(value: object, serializer: Any, path: tuple[int, ...]) -> JsonValue:
    def convert(inner: object) -> JsonValue:
        return _convert(inner, path)

    # No warnings: they quote the value.
    try:
        data = serializer.to_python(value, mode="json", warnings=False, fallback=convert)
    except Exception:  # noqa: BLE001 - e.g. bytes that aren't UTF-8, which we can show
        data = serializer.to_python(value, mode="python", warnings=False)
    return _convert(data, path)


def _convert_bytes(value: bytes) -> str:
    try:
        return clean(value.decode())
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()


def _convert_set(value: set[Any] | frozenset[Any], path: tuple[int, ...]) -> JsonValue:
    """Sorted, since the order of a set of strings differs from process to process."""
    try:
        return [_convert(item, path) for item in sorted(value)]
    except TypeError:
        return sorted((_convert(item, path) for item in value), key=dump_json)


def _name_key(key: object, path: tuple[int, ...]) -> str:
    name = _convert(key, path)
    return name if isinstance(name, str) else dump_json(name)


def _name_unknown(value: object) -> str:
    return f"[{_name_type(value)}: has no JSON form]"


def _name_type(value: object) -> str:
    kind = type(value)
    return clean(
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
