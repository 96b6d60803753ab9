"""Puts a streamed answer together as servers really send it; pure, so that each oddity has a test.

Bytes go in, pieces of the answer's text come out, and at the end there is one body in the shape of
an answer that wasn't streamed, which the same reader reads. Nothing is an answer that isn't whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from runner.errors import ModelError
from runner.models import ModelReply, RunErrorType, Usage
from runner.reader import (
    ServerError,
    iterate_parts,
    load_json,
    read_body,
    read_error,
    read_reply,
    read_usage,
    scrub,
)

MAX_BODY_BYTES = 20_000_000
"""No answer is as large: a body that is has no end, or isn't one."""
ENTRY_BYTES = 10_000
"""What one more call or choice counts for: thousands of them are no answer either."""
MAX_RAW_CHARS = 64_000

_FIELDS = ("", "data", "event", "id", "retry")  # a comment has no name
_LINE_END = re.compile(rb"\r\n|\n|\r")
_BLANK = b" \t\r\n\xef\xbb\xbf"  # with the bytes of a byte order mark
_KEEP_ALIVE = re.compile(r"[A-Za-z][\w .-]{0,40}")
_HIGH_SURROGATE = re.compile("[\ud800-\udbff]\\Z")
_SURROGATE = re.compile("[\ud800-\udfff]")
_THINK_TAGS = ("<think>", "<thinking>")
_THINK_END = re.compile(r"</think(?:ing)?>")


def refuse_size() -> ModelError:
    """The error for a body that has grown beyond the limit; what was read of it is let go."""
    return ModelError(
        f"the model server's answer is larger than {MAX_BODY_BYTES:,} bytes",
        type=RunErrorType.MODEL_BAD_RESPONSE,
        retryable=True,
        bad_response=True,
        usage=Usage(requests=1, known=False),
    )


# --- lines -------------------------------------------------------------------------------------


class EventDecoder:
    """Server-sent events from bytes that are cut anywhere: (event name, lines of data) each."""

    def __init__(self) -> None:
        self.has_fields = False  # whether there was any line that only a stream has
        self._line: list[bytes] = []
        self._line_size = 0
        self._name = ""
        self._data: list[str] = []
        self._data_size = 0
        self._after_cr = False

    @property
    def pending(self) -> int:
        """How much is held back because its line or its event isn't whole."""
        return self._line_size + self._data_size

    def feed(self, piece: bytes) -> Iterator[tuple[str, list[str]]]:
        if not piece:
            return
        # A CR at the end of a piece may have been the first half of a line's end.
        whole = piece[1:] if self._after_cr and piece.startswith(b"\n") else piece
        self._after_cr = piece.endswith(b"\r")
        *lines, rest = _LINE_END.split(whole)
        for line in lines:
            yield from self._take_line(b"".join((*self._line, line)))
            self._line, self._line_size = [], 0
        self._line.append(rest)
        self._line_size += len(rest)

    def end(self) -> Iterator[tuple[str, list[str]]]:
        """What a server that closes without a last empty line has left over."""
        yield from self._take_line(b"".join(self._line))
        self._line, self._line_size = [], 0
        yield from self._take_line(b"")

    def _take_line(self, line: bytes) -> Iterator[tuple[str, list[str]]]:
        if not line.strip():
            if self._data:
                yield self._name, self._data
            self._name, self._data, self._data_size = "", [], 0
            return
        text = line.decode("utf-8", "replace").lstrip("\ufeff")
        # Some report an error as a bare object in the midst of events.
        name, _, value = ("data", "", text) if text.startswith("{") else text.partition(":")
        self.has_fields = self.has_fields or name in _FIELDS
        if name == "data":
            self._data.append(value.removeprefix(" "))
            self._data_size += len(line)
        elif name == "event":
            self._name = value.strip()


# --- one tool call -----------------------------------------------------------------------------


@dataclass(slots=True)
class _Call:
    index: int | None
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    value: Any = None  # arguments that came as a value, not as text
    extra: Any = None
    seen: int = 0
    depth: int = 0
    in_text: bool = False
    escaped: bool = False

    @property
    def arguments(self) -> Any:
        """The text where there is some: an empty object before it only said that it will come."""
        return _join_text(self.pieces) if self.pieces or self.value is None else self.value

    @property
    def is_complete(self) -> bool:
        """Whether the arguments are one whole object, so that nothing may follow."""
        if not self.pieces:
            return isinstance(self.value, dict)
        if self._is_open():
            return False
        try:
            return isinstance(load_json(self.arguments), dict)
        except ValueError:
            return False

    def _is_open(self) -> bool:
        """Whether a brace or a text is still open; each piece is looked at once."""
        for piece in self.pieces[self.seen :]:
            for char in piece:
                if self.escaped:
                    self.escaped = False
                elif self.in_text:
                    self.escaped = char == "\\"
                    self.in_text = char != '"'
                elif char == '"':
                    self.in_text = True
                else:
                    self.depth += (char in "{[") - (char in "}]")
        self.seen = len(self.pieces)
        return self.in_text or self.depth > 0

    def add_name(self, name: str) -> None:
        if name.startswith(self.name):
            self.name = name  # the first one, the same once more, or a longer beginning
        else:
            self.name += name

    @property
    def has_arguments(self) -> bool:
        return bool(self.pieces) or self.value is not None

    def add_arguments(self, given: object) -> None:
        if isinstance(given, str):
            if given:
                self.pieces.append(given)
        elif given is not None:
            if self.pieces or self.value:
                self.pieces += [_dump(given)]  # two values are none
                if self.value is not None:
                    self.pieces.insert(0, _dump(self.value))
                self.seen = self.depth = 0
                self.in_text = self.escaped = False
            else:
                self.value = given

    def as_entry(self) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "id": self.id or None,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }
        if self.extra is not None:
            entry["extra_content"] = self.extra
        return entry


def _dump(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class _Calls:
    """The calls of one message, from deltas that say more or less well which one they go on with.

    Two calls run into one could run with arguments nobody proposed, so whatever doesn't clearly go
    on with a call either is another one or makes arguments that the reader refuses.
    """

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def add(self, entry: Mapping[str, Any]) -> None:
        inner = next((entry[key] for key in ("function", "custom") if entry.get(key)), entry)
        function = inner if isinstance(inner, dict) else {}
        given_name = function.get("name")
        name = given_name if isinstance(given_name, str) else ""
        keys = (key for key in ("arguments", "parameters", "input") if key in function)
        arguments = function.get(next(keys, "arguments"))
        index, call_id = _read_index(entry.get("index")), _read_id(entry.get("id"))
        call = self._find(index, call_id, name)
        extra = entry.get("extra_content")
        if call and _is_repeat(call, call_id, name, arguments):
            call.extra = call.extra if extra is None else extra
            return
        if call is None or _is_another(call, name, arguments):
            call = _Call(index=index)
            self._calls.append(call)
        call.id = call.id or call_id
        call.index = index if call.index is None else call.index
        call.add_name(name)
        call.add_arguments(arguments)
        call.extra = call.extra if extra is None else extra

    def _find(self, index: int | None, call_id: str, name: str) -> _Call | None:
        """The call that a delta with this address goes on with."""
        if index is None and not call_id:
            last = self._calls[-1] if self._calls else None
            return None if last and name and last.name not in ("", name) else last
        candidates = self._calls
        if index is not None:
            candidates = [call for call in self._calls if call.index == index] or [
                call for call in self._calls if call.index is None
            ]
        for call in reversed(candidates):
            if not call_id or call.id == call_id or (index is not None and not call.id):
                return call
        return None

    @property
    def are_complete(self) -> bool:
        return all(call.is_complete for call in self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def as_entries(self) -> list[dict[str, Any]]:
        calls = self._calls
        if all(call.index is not None for call in calls):
            calls = sorted(calls, key=lambda call: call.index or 0)
        return [call.as_entry() for call in calls]


def _is_repeat(call: _Call, call_id: str, name: str, arguments: object) -> bool:
    """Whether a delta is the whole call once more, as some servers send it at the end."""
    same = bool(call_id) and call.id == call_id and name in ("", call.name)
    return same and call.is_complete and arguments == call.arguments


def _is_another(call: _Call, name: str, arguments: object) -> bool:
    """Whether a delta with the address of this call begins one of its own."""
    if not name or not call.has_arguments:
        return False
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return name != call.name
    return name != call.name or call.is_complete


def _read_index(given: object) -> int | None:
    if isinstance(given, bool):
        return None
    if isinstance(given, str) and re.fullmatch(r"\d{1,6}", given):
        return int(given)
    return given if isinstance(given, int) else None


def _read_id(given: object) -> str:
    if isinstance(given, int) and not isinstance(given, bool):
        return str(given)
    return given if isinstance(given, str) else ""


# --- one message -------------------------------------------------------------------------------


class _Message:
    """One choice of the answer."""

    def __init__(self) -> None:
        self.finish: str | None = None
        self._content: list[Any] = []
        self._texts: dict[str, list[str]] = {}
        self._calls = _Calls()
        self._legacy: _Call | None = None
        self._unreadable: Any = None
        self._replaced: dict[str, Any] | None = None

    def add(self, choice: Mapping[str, Any]) -> None:
        delta, message = choice.get("delta"), choice.get("message")
        if isinstance(delta, dict):
            self._add_delta(delta)
        elif isinstance(message, dict):
            self._replaced = message
        finish = choice.get("finish_reason")
        if isinstance(finish, str) and finish.strip() not in ("", "null"):
            self.finish = finish
        elif isinstance(delta, dict) and any(
            delta.get(key) for key in ("content", "tool_calls", "function_call", "refusal")
        ):
            self.finish = None  # it goes on after all

    def _add_delta(self, delta: Mapping[str, Any]) -> None:
        if delta.get("content") not in (None, ""):
            self._content.append(delta["content"])
        for key in ("reasoning_content", "reasoning", "refusal"):
            if isinstance(delta.get(key), str):
                self._texts.setdefault(key, []).append(delta[key])
        match delta.get("tool_calls"):
            case list() as entries:
                for entry in filter(None, entries):
                    self._calls.add(entry if isinstance(entry, dict) else {})
            case dict() as entry if entry:
                self._calls.add(entry)
            case given if given:
                self._unreadable = given
        legacy = delta.get("function_call")
        if isinstance(legacy, dict):
            self._legacy = self._legacy or _Call(index=None)
            if isinstance(legacy.get("name"), str):
                self._legacy.add_name(legacy["name"])
            self._legacy.add_arguments(legacy.get("arguments"))

    @property
    def weight(self) -> int:
        """What the message and its calls count for, so that a flood of them has an end."""
        return ENTRY_BYTES * (1 + len(self._calls))

    @property
    def may_end(self) -> bool:
        """Whether an end without a finish reason leaves nothing that could have been cut off."""
        return self._calls.are_complete

    def as_choice(self, index: int) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": _join_content(self._content)}
        message |= {key: _join_text(texts) for key, texts in self._texts.items()}
        if entries := self._calls.as_entries() or self._unreadable:
            message["tool_calls"] = entries
        if self._legacy:
            message["function_call"] = self._legacy.as_entry()["function"]
        if self._replaced is not None:
            message = {"role": "assistant", **self._replaced}
        return {"index": index, "message": message, "finish_reason": self.finish}


def _join_text(texts: list[str]) -> str:
    """One text, in which the halves of a character that two chunks shared are one again."""
    text = "".join(texts)
    if not _SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _join_content(content: list[Any]) -> Any:
    if not content:
        return None
    if all(isinstance(part, str) for part in content):
        return _join_text(content)
    parts: list[Any] = []
    for part in content:
        parts += part if isinstance(part, list) else [part]
    return parts


class _AnswerText:
    """Of the text of a message, what is the answer: without the thoughts at its beginning."""

    def __init__(self) -> None:
        self._held = ""
        self._state = "start"

    def push(self, text: str) -> str:
        text = self._held + text
        self._held = ""
        if self._state == "start":
            begun = text.lstrip()
            if begun.startswith(_THINK_TAGS):
                self._state = "thinking"
            elif any(tag.startswith(begun) for tag in _THINK_TAGS):
                self._held = text
                return ""
            else:
                self._state = "answer"
        if self._state == "thinking":
            end = _THINK_END.search(text)
            if end is None:
                self._held = text[-12:]  # as much as the end of a closing tag could be
                return ""
            self._state, text = "thought", text[end.end() :]
        if self._state == "thought":
            text = text.lstrip()
            if not text:
                return ""
            self._state = "answer"
        if half := _HIGH_SURROGATE.search(text):
            self._held, text = half[0], text[: half.start()]
        return scrub(_join_text([text]))

    def rest(self) -> str:
        text, self._held = self._held, ""
        return "" if self._state == "thinking" else scrub(text)


# --- the whole answer --------------------------------------------------------------------------


class _Garbled(Exception):
    """An event that can't be read: a piece of the answer is missing, and nobody knows which."""


class ReplyStream:
    """One answer of a server that was asked to stream, whatever it then sends.

    Each of `feed` and `end` returns new text of the answer. `fault` or `reported` (an error object
    of the server's, its text in `reported_text`) means that the attempt has failed, and no text
    comes any more. `is_whole`: the server has said that the answer is complete.
    """

    def __init__(self) -> None:
        self.fault: ModelError | None = None
        self.reported: ServerError | None = None
        self.reported_text = ""
        self._decoder = EventDecoder()
        self._plain: bool | None = None  # unknown until the first byte that isn't blank
        self._bytes: list[bytes] = []  # of a plain body, or the beginning of any
        self._kept = 0
        self._head: dict[str, Any] = {}
        self._usage: Any = None
        self._messages: dict[int, _Message] = {}
        self._done = False
        self._has_events = False
        self._text = _AnswerText()

    @property
    def has_failed(self) -> bool:
        return self.fault is not None or self.reported is not None

    @property
    def is_whole(self) -> bool:
        if self.has_failed or not self._messages:
            return False
        return all(one.finish or (self._done and one.may_end) for one in self._messages.values())

    @property
    def has_begun(self) -> bool:
        """Whether some of the answer came, so that there may be something to pay for."""
        return bool(self._messages)

    def feed(self, piece: bytes) -> str:
        if self.has_failed or self._done:
            return ""
        if self._plain is None:
            self._bytes.append(piece)
            piece = b"".join(self._bytes)
            begun = piece.lstrip(_BLANK)
            if not begun:
                self._bytes = [b""]
                return ""
            self._plain = begun.startswith((b"{", b"["))
            self._bytes = []
            piece = begun
        if self._plain or not self._has_events:
            self._bytes.append(piece)
            self._kept += len(piece)
        if self._plain:
            if self._kept > MAX_BODY_BYTES:
                self._fail(refuse_size())
            return ""
        text = self._take_events(self._decoder.feed(piece))
        if self._decoder.pending > MAX_BODY_BYTES or self._kept > MAX_BODY_BYTES:
            self._fail(refuse_size())
        return "" if self.has_failed else text

    def end(self) -> str:
        """The server has closed the connection in good order."""
        if self._plain is not False or self.has_failed or self._done:
            return ""
        text = self._take_events(self._decoder.end(), last=True)
        return "" if self.has_failed else text

    def read(self) -> ModelReply:
        """The reply, once nothing more comes. Raises nothing but ModelError."""
        if self.fault is not None:
            raise self.fault
        text = b"".join(self._bytes).lstrip(_BLANK)
        if text and not self._decoder.has_fields:
            return read_reply(text.decode("utf-8", "replace"))  # asked to stream, and didn't
        raw = self.as_raw()
        if not self.is_whole:
            raise ModelError(
                "the model server's stream ended before the answer was whole",
                type=RunErrorType.MODEL_HTTP_ERROR,
                retryable=True,
                usage=Usage(requests=1, known=False) if self.has_begun else None,
                raw=raw,
            )
        return read_body(self._as_body(), raw)

    def rest(self) -> str:
        """The last text of the answer: what could have been the beginning of something else."""
        return self._text.rest()

    def as_raw(self) -> str:
        """What has come so far, as the text of one body."""
        if not self._has_events:
            return b"".join(self._bytes).decode("utf-8", "replace")[:MAX_RAW_CHARS]
        try:
            return scrub(json.dumps(self._as_body(), ensure_ascii=False))
        except (ValueError, RecursionError):
            return ""

    def _as_body(self) -> dict[str, Any]:
        body = {"object": "chat.completion", **self._head}
        body["choices"] = [one.as_choice(index) for index, one in self._messages.items()]
        if self._usage is not None:
            body["usage"] = self._usage
        return body

    def _fail(self, fault: ModelError) -> None:
        self.fault = fault
        self._bytes, self._messages = [], {}

    def _take_events(self, events: Iterator[tuple[str, list[str]]], *, last: bool = False) -> str:
        texts: list[str] = []
        for name, lines in events:
            if not self._has_events:
                self._has_events, self._bytes, self._kept = True, [], 0
            try:
                texts += [self._take(payload) for payload in _parse_event(name, lines)]
            except _Garbled:
                if last:  # only cut off: it is judged by what came before
                    break
                # Not the model's mistake, but the way's: no reason to tell the model of it.
                self.fault = ModelError(
                    "the model server's stream holds an event that is not JSON",
                    type=RunErrorType.MODEL_BAD_RESPONSE,
                    retryable=True,
                    usage=Usage(requests=1, known=False),
                    raw=self.as_raw(),
                )
            if self.has_failed or self._done:
                break
        return "".join(texts)

    def _take(self, payload: object) -> str:
        if payload == _DONE:
            self._done = True
        if self._done or self.has_failed or not isinstance(payload, dict):
            return ""
        choices = payload.get("choices")
        listed = choices if isinstance(choices, list) else []
        found = [choice for choice in listed if isinstance(choice, dict)]
        for body in (payload, *found):
            if (error := read_error(body)) is not None and (body is payload or body.get("error")):
                self.reported, self.reported_text = error, scrub(_dump_safely(payload))
                return ""
        for key in ("id", "created", "model", "system_fingerprint"):
            if payload.get(key) and isinstance(payload[key], str | int):
                self._head.setdefault(key, payload[key])
        self._take_usage(payload.get("usage"))
        return "".join(self._take_choice(choice) for choice in found)

    def _take_usage(self, given: object) -> None:
        """The last one counts, as it is the sum; but not where it takes back what was known."""
        if isinstance(given, dict) and (self._usage is None or read_usage(given).known):
            self._usage = given

    def _take_choice(self, choice: Mapping[str, Any]) -> str:
        index = _read_index(choice.get("index")) or 0
        before = self._messages[index].weight if index in self._messages else 0
        message = self._messages.setdefault(index, _Message())
        message.add(choice)
        self._take_usage(choice.get("usage"))
        self._kept += message.weight - before + _measure(choice)
        if next(iter(self._messages)) != index:
            return ""  # the reader, too, takes the first one's text
        delta = choice.get("delta")
        content = delta.get("content") if isinstance(delta, dict) else None
        return self._text.push(
            "".join(text for kind, text in iterate_parts(content) if kind == "text")
        )


_DONE = "[DONE]"


def _parse_event(name: str, lines: list[str]) -> list[Any]:
    try:
        payloads = [_parse("\n".join(lines))]
    except _Garbled:
        if len(lines) == 1:
            raise
        payloads = [_parse(line) for line in lines]  # events without an empty line between them
    flat: list[Any] = []
    for payload in payloads:
        flat += payload if isinstance(payload, list) else [payload]
    if name == "error":
        return [one if isinstance(one, dict) and "error" in one else {"error": one} for one in flat]
    return flat


def _parse(data: str) -> Any:
    """What an event carries; None for one that only keeps the connection open."""
    text = data.strip()
    if text.upper() == _DONE:
        return _DONE
    if not text or (_KEEP_ALIVE.fullmatch(text) and text not in ("true", "false")):
        return None
    try:
        return load_json(text)
    except ValueError:
        raise _Garbled from None


def _dump_safely(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)[:MAX_RAW_CHARS]
    except (ValueError, RecursionError):
        return ""


def _measure(value: object) -> int:
    """About how many characters a value holds."""
    total = 0
    pending = [value]
    while pending:
        match pending.pop():
            case str() as text:
                total += len(text)
            case dict() as members:
                pending += members.values()
            case list() as items:
                pending += items
                total += len(items)
    return total
