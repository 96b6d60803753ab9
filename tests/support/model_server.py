"""A model server on a real socket that answers by a script and refuses what a strict one would.

It speaks chat completions on a free loopback port, in threads of its own, so that what a test sees
is what the SDK, the wire and a broken connection really do.
"""

from __future__ import annotations

import json
import math
import re
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

Reply = dict[str, Any]
"""`status`, `headers`, and `json`, `text` or `stream`; then one of our own options, if any:

`delay`     seconds before the answer
`hold`      a `threading.Event` to wait for before the answer
`drip`      seconds between pieces of 20 bytes of the body
`cut_body`  true: promise more than is sent, then close
`reset`     true: a TCP reset instead of an answer
`plain`     true: never stream, even if asked to

`stream` is a list of what is sent in turn: an object as one event, text or bytes as they
are, a number as seconds to wait, a `threading.Event` to wait for. `end` says how it ends: `done`
(the default) with `[DONE]`, `close` without it, `cut` without the end of the body, `reset`, `hang`.

A completion in `json` is streamed where the request asks for it, as a real server would.
"""

USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}


def respond_with(
    message: dict[str, Any], *, finish_reason: str = "stop", usage: dict[str, Any] | None = USAGE
) -> Reply:
    """A well-formed response around any message; `usage=None` leaves the usage out."""
    body: dict[str, Any] = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "fake-1",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
    }
    if usage is not None:
        body["usage"] = usage
    return {"status": 200, "json": body}


def final(text: str, *, usage: dict[str, Any] | None = USAGE) -> Reply:
    """A final answer."""
    return respond_with({"role": "assistant", "content": text}, usage=usage)


def calls(
    *proposed: tuple[str, dict[str, Any] | str],
    text: str | None = None,
    usage: dict[str, Any] | None = USAGE,
) -> Reply:
    """Tool calls with the ids c0, c1, ...; arguments that are text are sent as they are."""
    message = {
        "role": "assistant",
        "content": text,
        "tool_calls": [
            {
                "id": f"c{index}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": given if isinstance(given, str) else json.dumps(given),
                },
            }
            for index, (name, given) in enumerate(proposed)
        ],
    }
    return respond_with(message, finish_reason="tool_calls", usage=usage)


def error(status: int, code: str | None = None, *, message: str = "no", **headers: str) -> Reply:
    """An error as OpenAI words it; `retry_after="2"` is sent as the header Retry-After."""
    body = {"error": {"message": message, "type": None, "param": None, "code": code}}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return {"status": status, "headers": named, "json": body}


def chunk(
    delta: dict[str, Any] | None = None, *, finish_reason: str | None = None, **body: Any
) -> dict[str, Any]:
    """One event of a stream; further keys go beside `choices`."""
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish_reason}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [choice], **body}


def stream_of(*items: Any, end: str = "done") -> Reply:
    """A streamed answer, item by item; see `Reply`."""
    return {"status": 200, "stream": list(items), "end": end}


def as_stream(completion: dict[str, Any]) -> list[Any]:
    """The events in which a server would stream this completion: text and arguments in halves."""
    events: list[Any] = [chunk({"role": "assistant", "content": ""})]
    [choice] = completion["choices"]
    message = choice["message"]
    for key in ("reasoning_content", "refusal", "content"):
        text = message.get(key) or ""
        events += [chunk({key: half}) for half in _halves(text)]
    for index, call in enumerate(message.get("tool_calls") or ()):
        first, *more = _halves(call["function"]["arguments"]) or [""]
        function = {"name": call["function"]["name"], "arguments": first}
        rest = {key: value for key, value in call.items() if key != "function"}
        events.append(chunk({"tool_calls": [{"index": index, **rest, "function": function}]}))
        for half in more:
            entry = {"index": index, "function": {"arguments": half}}
            events.append(chunk({"tool_calls": [entry]}))
    events.append(chunk(finish_reason=choice["finish_reason"]))
    if completion.get("usage"):
        events.append({**chunk(), "choices": [], "usage": completion["usage"]})
    return events


def _halves(text: str) -> list[str]:
    middle = (len(text) + 1) // 2
    return [half for half in (text[:middle], text[middle:]) if half]


def _is_streamable(body: Any) -> bool:
    """Whether it is a well-formed completion: what is not, no server would know how to stream."""
    try:
        [choice] = body["choices"]
        message = choice["message"]
        texts = [message.get(key) or "" for key in ("reasoning_content", "refusal", "content")]
        calls = message.get("tool_calls") or []
        texts += [call["function"]["arguments"] for call in calls]
        return (
            all(isinstance(text, str) for text in texts)
            and all(set(call) <= {"id", "type", "function", "extra_content"} for call in calls)
            and set(message) <= {"role", "content", "tool_calls", "reasoning_content", "refusal"}
            and isinstance(choice["finish_reason"], str)
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One request as it arrived. `at` is `time.monotonic()`; the headers are in lower case.

    `port` is the client's: requests over one connection have the same.
    """

    body: dict[str, Any]
    at: float
    headers: dict[str, str]
    port: int


class ModelServer:
    """Use as a context manager. After its last reply it answers a plain "done".

    A request that `check_request` finds fault with is answered 400, uses up no reply, and is
    remembered in `violations`. `allow` names the keys that this server takes beyond OpenAI's own.
    """

    def __init__(
        self,
        replies: Sequence[Reply] | Callable[[dict[str, Any]], Reply] = (),
        *,
        allow: Collection[str] = (),
    ) -> None:
        self._replies = replies
        self._allow = frozenset(allow)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._connections: set[socket.socket] = set()
        self._answered = 0
        self._requests: list[ModelCall] = []
        self._violations: list[str] = []
        self._disconnects = 0
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.owner = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def requests(self) -> list[ModelCall]:
        with self._lock:
            return list(self._requests)

    @property
    def violations(self) -> list[str]:
        with self._lock:
            return list(self._violations)

    @property
    def disconnects(self) -> int:
        """How many clients went away before their reply was through."""
        with self._lock:
            return self._disconnects

    def wait_for(self, condition: Callable[[Self], bool], *, timeout: float = 5.0) -> None:
        """Block until the server has seen something, such as a request or a disconnect."""
        end = time.monotonic() + timeout
        while not condition(self):
            if time.monotonic() > end:
                raise TimeoutError("the model server did not see what the test waits for")
            time.sleep(0.005)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopping.set()
        self._server.shutdown()
        with self._lock:
            open_now = list(self._connections)
        for connection in open_now:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        self._server.server_close()
        self._thread.join()

    def _choose_reply(self, raw: bytes, headers: dict[str, str], port: int) -> Reply:
        try:
            body = json.loads(raw)
            faults = check_request(body, allow=self._allow)
        except ValueError:
            body, faults = {}, ["the body is not JSON"]
        if headers.get("x-stainless-retry-count", "0") != "0":
            faults.append("the SDK retried by itself")
        call = ModelCall(body=body, at=time.monotonic(), headers=headers, port=port)
        with self._lock:
            self._requests.append(call)
            if faults:
                self._violations += faults
                return error(400, "invalid_request", message="; ".join(faults))
            if callable(self._replies):
                replies = self._replies
            else:
                index, self._answered = self._answered, self._answered + 1
                return self._replies[index] if index < len(self._replies) else final("done")
        return replies(body)

    def _count_disconnect(self) -> None:
        if not self._stopping.is_set():
            with self._lock:
                self._disconnects += 1


_RESET = struct.pack("ii", 1, 0)  # a linger time of zero: close() sends a reset


def _is_reset(connection: socket.socket) -> bool:
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, len(_RESET)) == _RESET


class _Server(ThreadingHTTPServer):
    owner: ModelServer
    daemon_threads = False
    block_on_close = True
    request_queue_size = 256

    def process_request(self, request: Any, client_address: Any) -> None:
        # Noted before its thread starts, so that none is missed when the server closes.
        with self.owner._lock:
            self.owner._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self.owner._lock:
            self.owner._connections.discard(request)
        if _is_reset(request):
            self.close_request(request)  # without the orderly end that would come before the reset
        else:
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is what many tests are about: not worth a traceback."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a test's output is for failures."""

    def do_POST(self) -> None:
        owner = self.server.owner
        length = int(self.headers.get("content-length", "0"))
        raw = self.rfile.read(length)
        if len(raw) < length:
            self.close_connection = True  # the client left before it had said all
            owner._count_disconnect()
            return
        headers = {
            name.lower(): value
            for name, value in self.headers.items()
            if name.lower() != "authorization"
        }
        reply = owner._choose_reply(raw, headers, self.client_address[1])
        asked = b'"stream"' in raw and json.loads(raw).get("stream") is True
        if asked and not reply.get("plain") and _is_streamable(reply.get("json")):
            reply = {**reply, "stream": as_stream(reply["json"])}
        try:
            self._answer(reply)
        except OSError:
            self.close_connection = True
            owner._count_disconnect()

    def _answer(self, reply: Reply) -> None:
        self._wait(reply.get("delay", 0.0), until=reply.get("hold"))
        if reply.get("reset"):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.close_connection = True
            return
        if "stream" in reply and not {"drip", "cut_body"} & reply.keys():
            self._answer_stream(reply)
            return
        text = json.dumps(reply["json"]) if "json" in reply else reply.get("text", "")
        body = text.encode("utf-8", "surrogatepass")
        headers = {name.lower(): value for name, value in reply.get("headers", {}).items()}
        headers.setdefault("content-type", "application/json")
        cut = bool(reply.get("cut_body"))
        headers["content-length"] = str(len(body) + (5_000 if cut else 0))
        self.send_response_only(reply.get("status", 200))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if "drip" in reply:
            for start in range(0, len(body), 20):
                self.wfile.write(body[start : start + 20])
                self._wait(reply["drip"])
        else:
            self.wfile.write(body)
        if cut:
            self.close_connection = True

    def _answer_stream(self, reply: Reply) -> None:
        self.send_response_only(reply.get("status", 200))
        for name, value in {
            "content-type": "text/event-stream",
            **reply.get("headers", {}),
            "transfer-encoding": "chunked",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        end = reply.get("end", "done")
        for item in [*reply["stream"], *(["data: [DONE]\n\n"] if end == "done" else [])]:
            match item:
                case threading.Event():
                    self._wait(0.0, until=item)
                case int() | float():
                    self._wait(item)
                case _:
                    self._send_piece(item)
        match end:
            case "hang":
                self._wait(math.inf)
            case "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                self.close_connection = True
            case "cut":
                self.close_connection = True
            case _:
                self.wfile.write(b"0\r\n\r\n")

    def _send_piece(self, item: Any) -> None:
        if isinstance(item, dict | list):
            item = f"data: {json.dumps(item)}\n\n"
        piece = item if isinstance(item, bytes) else item.encode("utf-8", "surrogatepass")
        if piece:  # an empty one would be the end of the body
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def _wait(self, seconds: float, *, until: threading.Event | None = None) -> None:
        """Wait, but not longer than the client does."""
        end = time.monotonic() + seconds
        while not self.server.owner._stopping.is_set():
            if until.is_set() if until else time.monotonic() >= end:
                return
            readable, _, _ = select.select([self.connection], [], [], 0.005)
            # The client has nothing more to say before our answer: readable means that it left.
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError


# --- the strictest endpoint there is -----------------------------------------------------------

_TOP_KEYS = {
    "model",
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "stream",
    "stream_options",
}
_KEYS = {
    "system": {"role", "content"},
    "developer": {"role", "content"},
    "user": {"role", "content"},
    "assistant": {"role", "content", "tool_calls"},
    "tool": {"role", "content", "tool_call_id"},
}
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def check_request(body: Any, *, allow: Collection[str] = ()) -> list[str]:
    """What the strictest chat-completions endpoint would refuse this body for, in words.

    `allow` are further keys that this one takes: of the body, of a turn or of a call.
    """
    if not isinstance(body, dict):
        return ["the body is not an object"]
    faults = [f"unknown key {key}" for key in sorted(body.keys() - _TOP_KEYS - set(allow))]
    faults += _check_streaming(body)
    if not isinstance(body.get("model"), str) or not body["model"]:
        faults.append("model is missing")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return [*faults, "messages are missing"]
    faults += _check_messages(messages, set(allow))
    tools = body.get("tools")
    if tools is None:
        faults += [
            f"{key} without tools" for key in ("tool_choice", "parallel_tool_calls") if key in body
        ]
    else:
        faults += _check_tools(tools)
    if not isinstance(body.get("parallel_tool_calls", True), bool):
        faults.append("parallel_tool_calls is not a boolean")
    if tools and "tool_choice" in body:
        faults += _check_choice(body["tool_choice"], tools)
    return faults


def _check_streaming(body: dict[str, Any]) -> list[str]:
    if not isinstance(body.get("stream", False), bool):
        return ["stream is not a boolean"]
    if "stream_options" not in body:
        return []
    if not body.get("stream"):
        return ["stream_options without stream"]
    known = body["stream_options"] in ({"include_usage": True}, {"include_usage": False})
    return [] if known else ["stream_options holds something else than include_usage"]


def _check_messages(messages: list[Any], allow: set[str]) -> list[str]:
    faults: list[str] = []
    expected: list[str] = []
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _KEYS:
            faults.append(f"message {index}: unknown role")
            continue
        if role != "assistant" and not isinstance(message.get("content"), str | list):
            faults.append(f"message {index}: no content")
        unknown = sorted(message.keys() - _KEYS[role] - (allow if role == "assistant" else set()))
        faults += [f"message {index}: unknown key {key}" for key in unknown]
        if role == "tool":
            call_id = message.get("tool_call_id")
            if not expected or call_id != expected[0]:
                faults.append(f"message {index}: tool message without its call, or out of order")
            if call_id in expected:
                expected.remove(call_id)
            continue
        if expected:
            faults.append(f"message {index}: comes before the results of {', '.join(expected)}")
            expected = []
        if role == "assistant":
            found, expected = _check_turn(message, allow)
            faults += [f"message {index}: {fault}" for fault in found]
    if expected:
        faults.append(f"no results of {', '.join(expected)}")
    return faults


def _check_turn(message: dict[str, Any], allow: set[str]) -> tuple[list[str], list[str]]:
    """Faults of an assistant message, and the ids that tool messages must now answer."""
    faults: list[str] = []
    content = message.get("content")
    if not isinstance(content, str | list | None):
        faults.append("content is neither text nor parts")
    if "tool_calls" not in message:
        return ([*faults, "neither content nor calls"] if not content else faults), []
    given = message["tool_calls"]
    if not isinstance(given, list) or not given:
        return [*faults, "tool_calls is not a filled list"], []
    ids: list[str] = []
    for call in given:
        faults += _check_call(call, allow)
        call_id = call.get("id") if isinstance(call, dict) else None
        if call_id in ids:
            faults.append("a call id is repeated")
        ids.append(str(call_id))
    return faults, ids


def _check_call(call: Any, allow: set[str]) -> list[str]:
    if not isinstance(call, dict) or call.keys() - allow != {"id", "type", "function"}:
        return ["a call has not exactly id, type and function"]
    function = call["function"]
    if call["type"] != "function" or not isinstance(function, dict):
        return ["a call is not a function call"]
    faults: list[str] = []
    if not isinstance(call["id"], str) or not 0 < len(call["id"]) <= 40:
        faults.append("a call id is empty or too long")
    if function.keys() != {"name", "arguments"}:
        faults.append("a function has not exactly name and arguments")
    if not isinstance(function.get("name"), str) or not _NAME.fullmatch(function["name"]):
        faults.append("a function name is invalid")
    if not _is_json_object(function.get("arguments")):
        faults.append("arguments are not the text of a JSON object")
    return faults


def _is_json_object(text: object) -> bool:
    if not isinstance(text, str):
        return False

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict)
    except ValueError:
        return False


def _check_tools(tools: Any) -> list[str]:
    if not isinstance(tools, list) or not 0 < len(tools) <= 128:
        return ["tools is not a list of 1 to 128"]
    faults: list[str] = []
    names: set[str] = set()
    for tool in tools:
        if not isinstance(tool, dict) or tool.keys() != {"type", "function"}:
            faults.append("a tool has not exactly type and function")
            continue
        function = tool["function"]
        if tool["type"] != "function" or not isinstance(function, dict):
            faults.append("a tool is not a function")
            continue
        if function.keys() - {"name", "description", "parameters", "strict"}:
            faults.append("a tool has unknown keys")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in names:
            faults.append("a tool's name is invalid or repeated")
        names.add(str(name))
        faults += [f"{name}: {fault}" for fault in _check_schema(function.get("parameters"))]
    return faults


def _check_schema(schema: Any) -> list[str]:
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return ["parameters are not the schema of an object"]
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return ["the schema has no properties"]
    if not all(isinstance(value, dict) for value in properties.values()):
        return ["a property is not a schema"]
    required = schema.get("required", [])
    if not isinstance(required, list) or set(map(str, required)) - properties.keys():
        return ["required names a key that is no property"]
    return []


def _check_choice(choice: Any, tools: Any) -> list[str]:
    if choice in ("auto", "none", "required"):
        return []
    named = choice.get("function", {}).get("name") if isinstance(choice, dict) else None
    offered = [tool.get("function", {}).get("name") for tool in tools if isinstance(tool, dict)]
    return [] if named in offered else ["tool_choice names no tool"]
