"""Takes secrets out of what is kept for people: the trace, and whatever is made from it.

The history that a model is sent is not touched, and neither is what a tool is handed.
"""

from __future__ import annotations

import json
import re
from typing import Any

HIDDEN = "***"

ESCAPE = "\\u"
"""JSON may spell any name with it, so a text that holds one has to be read to be known."""

CODE = re.compile(r"\\u([0-9a-fA-F]{4})")


def redact(value: Any, names: frozenset[str]) -> Any:
    """JSON data with the value of every field of these names hidden, at any depth.

    A text that is itself JSON (a response body, the arguments of a call) is looked into as well; if
    it may name such a field and can't be read, it is hidden whole.
    """
    if not names:
        return value
    wanted = frozenset(name.casefold() for name in names)
    return _redact(value, wanted)


def redact_entry(entry: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """An entry of a trace with these fields hidden; it says so in `hidden` where it held any."""
    shown: dict[str, Any] = redact(entry, names)
    return shown if shown == entry else shown | {"hidden": sorted(names)}


def _redact(value: Any, names: frozenset[str]) -> Any:
    match value:
        case dict():
            return {
                key: HIDDEN if str(key).casefold() in names else _redact(each, names)
                for key, each in value.items()
            }
        case list() | tuple():
            return [_redact(each, names) for each in value]
        case str() if ESCAPE in value or any(name in value.casefold() for name in names):
            return _redact_text(value, names)
        case _:
            return value


def _redact_text(text: str, names: frozenset[str]) -> str:
    if not text.lstrip().startswith(("{", "[", '"')):
        # Prose may speak of a field; what holds one (fenced JSON, an event of a stream) may not.
        return HIDDEN if _holds_field(text, names) else text
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return HIDDEN
    hidden = _redact(read, names)
    return text if hidden == read else json.dumps(hidden, ensure_ascii=False)


def _holds_field(text: str, names: frozenset[str]) -> bool:
    plain = CODE.sub(lambda code: chr(int(code[1], 16)), text).casefold()
    named = "|".join(re.escape(name) for name in sorted(names))
    return re.search(rf"""["'](?:{named})\\*["']\s*:""", plain) is not None
