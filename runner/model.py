"""The one place that talks to a model server: a strict writer, a deadline, and one table of errors.

What differs between servers is in `runner/profiles.py`, what a stream may look like in
`runner/stream.py`.

No type and no exception of the openai SDK leaves this module, and no error's text carries a key, a
URL or a prompt. One call is one HTTP request: retries belong to the run (`retry_delay`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import os
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import openai
from tenacity import RetryCallState, Retrying, stop_after_attempt, wait_exponential_jitter

from runner.errors import ModelError, SettingsError
from runner.models import (
    Final,
    ModelReply,
    ModelRequest,
    Retry,
    RunErrorType,
    ToolCalls,
    Usage,
)
from runner.profiles import OPENAI, Profile, profile_for, profile_named
from runner.reader import (
    MAX_ID_CHARS,
    NAME_PATTERN,
    ServerError,
    classify_error,
    load_json,
    read_arguments,
    read_error,
    read_reply,
    says_context_overflow,
    scrub,
)
from runner.stream import MAX_BODY_BYTES, MAX_RAW_CHARS, ReplyStream, refuse_size
from runner.tools import running_call

logger = logging.getLogger(__name__)

DEFAULT_BASE_URL = "https://api.openai.com/v1"
CONNECT_TIMEOUT = 10.0
MIN_SECRET_CHARS = 12
"""A shorter key is a word for a server that wants none, and may stand in any sentence."""

MAX_ERROR_BYTES = 64_000
"""How much is read of the body of an error: enough to tell what went wrong."""
LINGER = 2.0
"""Seconds for the usage, once an answer is whole: some servers never close the stream."""

# --- errors: the SDK's and the server's, as what a retry needs to know -------------------------

_CHECK_URL = "check the model's name and OPENAI_BASE_URL"
_STATUS: dict[int, tuple[RunErrorType, bool, str]] = {
    400: (RunErrorType.CONFIG_ERROR, False, "the model server refuses the request"),
    401: (RunErrorType.AUTH_ERROR, False, "the key is not accepted: check OPENAI_API_KEY"),
    402: (RunErrorType.QUOTA_EXHAUSTED, False, "the account's credit is used up"),
    403: (RunErrorType.AUTH_ERROR, False, "the key may not use this model"),
    404: (RunErrorType.CONFIG_ERROR, False, f"no such model or address: {_CHECK_URL}"),
    408: (RunErrorType.MODEL_HTTP_ERROR, True, "the model server gave up waiting"),
    409: (RunErrorType.MODEL_HTTP_ERROR, True, "the model server reports a conflict"),
    413: (RunErrorType.CONTEXT_OVERFLOW, False, "the request is too large for the model server"),
    422: (RunErrorType.CONFIG_ERROR, False, "the model server refuses the request"),
    425: (RunErrorType.MODEL_HTTP_ERROR, True, "the model server is not ready"),
    429: (RunErrorType.RATE_LIMITED, True, "the model server asks for fewer requests"),
}
_SERVER_FAULT = (RunErrorType.MODEL_HTTP_ERROR, True, "the model server failed")
_OTHER_STATUS = (RunErrorType.CONFIG_ERROR, False, f"unexpected answer: {_CHECK_URL}")

_BY_CODE: dict[RunErrorType, str] = {
    RunErrorType.QUOTA_EXHAUSTED: "the account's quota is used up: waiting will not help",
    RunErrorType.CONTEXT_OVERFLOW: "the conversation is longer than the model's context",
    RunErrorType.CONTENT_FILTERED: "the model server's content filter refused the request",
}

# In this order: a subclass comes before its base.
_EXCEPTIONS: tuple[tuple[type[Exception], RunErrorType, bool, str], ...] = (
    (openai.APITimeoutError, RunErrorType.MODEL_TIMEOUT, True, "the model server did not answer"),
    (
        openai.APIConnectionError,
        RunErrorType.MODEL_HTTP_ERROR,
        True,
        "the connection to the model server failed or broke off",
    ),
    (openai.OpenAIError, RunErrorType.CONFIG_ERROR, False, "the model client refuses the request"),
    (TimeoutError, RunErrorType.MODEL_TIMEOUT, True, "the model's answer took too long"),
    (OSError, RunErrorType.MODEL_HTTP_ERROR, True, "the connection to the model server failed"),
)


class _Refusal(Exception):
    """A response without a success status: its status, headers, and the beginning of its text."""


_TRANSPORT = {"httpx2", "httpx", "httpcore2", "httpcore", "h11"}

# The codes that servers report in the midst of a stream, where there is no status any more.
_STATUS_OF_CODE = {
    "rate_limit_exceeded": 429,
    "rate_limit_error": 429,
    "invalid_request_error": 400,
    "authentication_error": 401,
    "invalid_api_key": 401,
}


def read_retry_after(headers: Mapping[str, str], *, now: float) -> float | None:
    """Seconds that the server asks us to wait.

    A date counts from the response's own Date where there is one, so that a wrong clock on either
    side doesn't matter; `now` (seconds since the epoch) is used otherwise.
    """
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            seconds = float(headers[name]) * unit
        except (KeyError, ValueError):
            continue
        if math.isfinite(seconds) and seconds >= 0:
            return seconds
    until = _read_date(headers.get("retry-after"))
    if until is None:
        return None
    since = _read_date(headers.get("date"))
    return max(0.0, until - (now if since is None else since))


def _read_date(text: str | None) -> float | None:
    try:
        return parsedate_to_datetime(text or "").timestamp()
    except (ValueError, OverflowError):
        return None


def describe_status(
    status: int, headers: Mapping[str, str], text: str, *, now: float, secret: str = ""
) -> ModelError:
    """The error for a response without a success status."""
    try:
        error = read_error(load_json(text)) or ServerError()
    except ValueError:
        error = ServerError()
    kind, retryable, message = _STATUS.get(
        status, _SERVER_FAULT if status >= 500 else _OTHER_STATUS
    )
    by_code = classify_error(error)
    if by_code is None and status in (400, 413, 422, 500) and says_context_overflow(error):
        by_code = RunErrorType.CONTEXT_OVERFLOW
    if status == 413 and error.code == "rate_limit_exceeded":
        kind, retryable, message = _STATUS[429]
    elif by_code and (status < 500 or by_code is RunErrorType.CONTEXT_OVERFLOW):
        kind, retryable, message = by_code, False, _BY_CODE[by_code]
    # Only words that look like identifiers: a server's sentence may quote the prompt or the key.
    words = [
        f"{key} {word}"
        for key, word in (("code", error.code or error.type), ("param", error.param))
        if re.fullmatch(r"[A-Za-z][\w.\[\]-]{0,63}", word) and not (secret and secret in word)
    ]
    detail = ", ".join([f"HTTP {status}", *words])
    raw = text[:MAX_RAW_CHARS]
    return ModelError(
        f"{message} ({detail})",
        type=kind,
        retryable=retryable,
        retry_after=read_retry_after(headers, now=now) if retryable else None,
        status=status,
        raw=raw.replace(secret, "***") if len(secret) >= MIN_SECRET_CHARS else raw,
    )


def describe_reported(error: ServerError, text: str, *, now: float, secret: str = "") -> ModelError:
    """The error for an error object in a stream, whose status was a success."""
    status = next(
        (
            int(word) if re.fullmatch(r"[45]\d\d", word) else _STATUS_OF_CODE[word]
            for word in (error.code, error.type)
            if re.fullmatch(r"[45]\d\d", word) or word in _STATUS_OF_CODE
        ),
        400 if classify_error(error) or says_context_overflow(error) else 500,
    )
    return describe_status(status, {}, text, now=now, secret=secret)


def describe_exception(error: Exception, *, now: float, secret: str = "") -> ModelError:
    """The error for whatever the SDK raised. The original is dropped: its request has the key."""
    refusal = error if isinstance(error, _Refusal) else error.__cause__  # wrapped by some SDKs
    if isinstance(refusal, _Refusal):
        status, headers, text = refusal.args
        return describe_status(status, headers, text, now=now, secret=secret)
    for cause, kind, retryable, message in _EXCEPTIONS:
        if isinstance(error, cause):
            return ModelError(message, type=kind, retryable=retryable)
    if error.__class__.__module__.partition(".")[0] in _TRANSPORT:
        # The SDK wraps what goes wrong before the headers, and not what does while a body comes.
        late = "Timeout" in error.__class__.__name__
        _, kind, retryable, message = _EXCEPTIONS[0 if late else 1]
        return ModelError(message, type=kind, retryable=retryable)
    name = error.__class__.__name__
    return ModelError(f"the model client failed with {name}", type=RunErrorType.CONFIG_ERROR)


def retry_delay(retry: Retry, attempt: int, error: ModelError) -> float | None:
    """Seconds to wait before attempt `attempt + 1`, or None to give up. Never sleeps.

    `attempt` counts from 1: the one that failed. The caller parks the run for that long.
    """
    policy = Retrying(
        stop=stop_after_attempt(retry.max_attempts),
        # With as much jitter as delay, the second wait might be no longer than the first.
        wait=wait_exponential_jitter(
            multiplier=retry.initial_delay, max=retry.max_delay, jitter=retry.initial_delay / 2
        ),
    )
    state = RetryCallState(retry_object=policy, fn=None, args=(), kwargs={})
    state.attempt_number = attempt
    asked = error.retry_after or 0.0
    if not error.retryable or asked > retry.max_retry_after or policy.stop(state):
        return None
    return max(float(policy.wait(state)), asked)


# --- the writer --------------------------------------------------------------------------------

_OWN_KEYS = {
    "messages": "the run's history is sent",
    "model": "set Agent(model=...) or OpenAIModel(name=...)",
    "tools": "set Agent(tools=...)",
    "tool_choice": "set Agent(tool_choice=...)",
    "parallel_tool_calls": "set Agent(parallel_tool_calls=...)",
    "stream": "the runtime decides when to stream",
    "stream_options": "set it in a Profile (stream_usage)",
    "functions": "set Agent(tools=...)",
    "function_call": "set Agent(tool_choice=...)",
    "n": "only one answer is read",
}
_OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens")


def check_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The user's own parameters of a request; raises `SettingsError` for one that isn't theirs."""
    for key in extra:
        if key in _OWN_KEYS:
            raise SettingsError(f"extra can't hold {key!r}: {_OWN_KEYS[key]}")
    if all(key in extra for key in _OUTPUT_LIMITS):
        raise SettingsError("extra holds both max_tokens and max_completion_tokens: give one")
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(extra), allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        raise SettingsError("extra must hold JSON only: text, numbers, lists, objects") from None
    return copy


def write_request(
    request: ModelRequest,
    *,
    profile: Profile = OPENAI,
    extra: Mapping[str, Any] | None = None,
    stream: bool = False,
) -> dict[str, Any]:
    """The body to send. A history that breaks rule 1 of the loop is refused, never sent.

    A blank assistant turn and keys that a response carried but a request mustn't are left out.
    """
    body: dict[str, Any] = {
        (profile.output_limit if key in _OUTPUT_LIMITS else key): value
        for key, value in (extra or {}).items()
    }
    body["model"] = request.model
    body["messages"] = _write_messages(request.messages, profile)
    if request.tools:
        body["tools"] = [_write_tool(tool, profile) for tool in request.tools]
        choice = request.tool_choice
        if choice is not None and (profile.forces_tools or choice == "none"):
            body["tool_choice"] = choice
        # true is the default, and some models refuse the word
        if not request.parallel_tool_calls and profile.parallel_tool_calls:
            body["parallel_tool_calls"] = False
    if stream:
        body["stream"] = True
        if profile.stream_usage:
            body["stream_options"] = {"include_usage": True}
    return body


def _write_messages(messages: tuple[dict[str, Any], ...], profile: Profile) -> list[dict[str, Any]]:
    written: list[dict[str, Any]] = []
    open_ids: list[str] = []
    for message in messages:
        match message.get("role"):
            case "tool":
                if not open_ids or message.get("tool_call_id") != open_ids[0]:
                    raise _refuse_history("a tool message stands without its call or out of order")
                written.append({**_write_text(message), "tool_call_id": open_ids.pop(0)})
                continue
            case _ if open_ids:
                raise _refuse_history("a tool call has no result")
            case "assistant":
                turn = _write_turn(message, profile)
                if turn is None:
                    continue
                written.append(turn)
                open_ids = [call["id"] for call in turn.get("tool_calls", ())]
            case "system" | "developer" | "user":
                written.append(_write_text(message))
            case _:
                raise _refuse_history("a message has an unknown role")
    if open_ids:
        raise _refuse_history("a tool call has no result")
    if not written:
        raise _refuse_history("there is no message")
    return _adapt_messages(written, profile)


def _adapt_messages(messages: list[dict[str, Any]], profile: Profile) -> list[dict[str, Any]]:
    """The same history in the shape that this server takes."""
    if profile.id_length is not None:
        _replace_ids(messages, profile.id_length)
    adapted: list[dict[str, Any]] = []
    for message in messages:
        follows_result = bool(adapted) and adapted[-1]["role"] == "tool"
        if profile.bridge and follows_result and message["role"] not in ("assistant", "tool"):
            adapted.append({"role": "assistant", "content": profile.bridge})
        if message["role"] == "developer" and not profile.developer_role:
            message = {**message, "role": "system"}
        adapted.append(message)
    return adapted


def _write_text(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": message["role"], "content": _write_content(message.get("content")) or ""}


def _replace_ids(messages: list[dict[str, Any]], length: int) -> None:
    """Give calls and results ids of the one shape that the server takes: always the same ones."""
    holders = [(call, "id") for turn in messages for call in turn.get("tool_calls", ())]
    holders += [(message, "tool_call_id") for message in messages if message["role"] == "tool"]
    fitting = re.compile(rf"[A-Za-z0-9]{{{length}}}")
    given = {holder[key] for holder, key in holders}
    new = {call_id: call_id for call_id in given if fitting.fullmatch(call_id)}
    for call_id in sorted(given - new.keys()):
        digest = call_id
        while digest == call_id or digest[:length] in new.values():
            digest = hashlib.shake_256(digest.encode()).hexdigest(length)
        new[call_id] = digest[:length]
    for holder, key in holders:
        holder[key] = new[holder[key]]


def _write_turn(message: Mapping[str, Any], profile: Profile) -> dict[str, Any] | None:
    content = _write_content(message.get("content"))
    calls = [_write_call(call, profile) for call in message.get("tool_calls") or ()]
    if not calls:
        return {"role": "assistant", "content": content} if content else None
    if len({call["id"] for call in calls}) < len(calls):
        raise _refuse_history("two calls of one turn have the same id")
    turn = {
        "role": "assistant",
        "content": content or profile.empty_content,
        "tool_calls": calls,
    }
    if profile.sends_reasoning:
        turn["reasoning_content"] = scrub(str(message.get("reasoning_content") or ""))
    return turn


def _write_call(call: Mapping[str, Any], profile: Profile) -> dict[str, Any]:
    function = call.get("function") or {}
    call_id, name, arguments = call.get("id"), function.get("name"), function.get("arguments")
    if not isinstance(call_id, str) or not 0 < len(call_id) <= MAX_ID_CHARS:
        raise _refuse_history("a tool call has no usable id")
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise _refuse_history("a tool call has an invalid name")
    text, fault = read_arguments(arguments)
    if fault or not isinstance(arguments, str):
        raise _refuse_history("the arguments of a tool call are not the text of a JSON object")
    written = {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}
    if profile.call_extra is not None:
        extra = call.get("extra_content") or dict(profile.call_extra)
        written |= {"extra_content": extra} if extra else {}
    return written


def _write_tool(tool: Mapping[str, Any], profile: Profile) -> dict[str, Any]:
    known = ["name", "description", "parameters"]
    known += ["strict"] if profile.strict_tools else []
    function = {key: value for key, value in tool["function"].items() if key in known}
    return {"type": "function", "function": function}


def _write_content(content: object) -> Any:
    """Text or a list of parts, without the lone surrogates that no request can carry."""
    match content:
        case str():
            return scrub(content)
        case list() | tuple():
            return [_write_content(part) for part in content]
        case dict():
            return {key: _write_content(value) for key, value in content.items()}
        case _:
            return content


REFUSED_HISTORY = "the history can't be sent (rule 1): "


def _refuse_history(fault: str) -> ModelError:
    return ModelError(f"{REFUSED_HISTORY}{fault}", type=RunErrorType.CONFIG_ERROR)


def find_history_fault(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Why no request could carry these messages, in words without their content; None: it could."""
    try:
        _write_messages(tuple(dict(each) for each in messages), OPENAI)
    except ModelError as error:
        return str(error).removeprefix(REFUSED_HISTORY)
    return None


# --- the client --------------------------------------------------------------------------------


class OpenAIModel:
    """A `StreamingModel` on any server that speaks chat completions.

    `base_url` and `api_key` default to OPENAI_BASE_URL and OPENAI_API_KEY, read at the first call.
    `name` is the model's name, for an agent that holds this object. `profile`, a `Profile` or the
    name of one, says what the server wants differently; by default the address tells. `extra` goes
    into each request, such as `{"temperature": 0}`; `max_tokens` is sent under the server's own
    name for it. `now` is a clock in seconds since the epoch. Raises `SettingsError`.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        name: str | None = None,
        profile: Profile | str | None = None,
        extra: Mapping[str, Any] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self._base_url = base_url
        self._api_key = api_key
        self._profile = profile_named(profile) if isinstance(profile, str) else profile
        self._extra = check_extra(extra or {})
        self._now = now
        # A client that was inherited across a fork returned answers that belonged to other
        # processes, and one bound to another event loop hangs: hence both are in the key.
        self._clients: dict[tuple[int, asyncio.AbstractEventLoop], openai.AsyncOpenAI] = {}

    @property
    def profile(self) -> Profile:
        """What this model's server wants differently."""
        return self._profile or profile_for(self._read_url())

    @property
    def address(self) -> str:
        """Host and port of the server, without credentials: what its limits are called after."""
        return urlsplit(self._read_url()).netloc.rpartition("@")[2]

    async def respond(self, request: ModelRequest) -> ModelReply:
        """Make one attempt, `request.timeout` seconds in all. Cancelling it closes the request."""
        body = self._write(request, stream=False)
        client = self._get_client()
        raw = bytearray()
        try:
            # The SDK's timeouts are per operation: a body that drips outlives them.
            async with asyncio.timeout(request.timeout), aclosing(_post(client, body)) as pieces:
                async for piece in pieces:
                    raw += piece
                    if len(raw) > MAX_BODY_BYTES:
                        break
        except Exception as error:  # noqa: BLE001 - the border: the table names what is known
            failure = describe_exception(error, now=self._now(), secret=client.api_key)
        else:
            if len(raw) > MAX_BODY_BYTES:
                raise refuse_size()
            return read_reply(raw.decode("utf-8", "replace"))
        # Raised outside of `except`, so that no SDK exception hangs on to it as its context.
        raise failure

    async def stream(self, request: ModelRequest, on_text: Callable[[str], None]) -> ModelReply:
        """Make one attempt as `respond` does, and tell the answer's text while it comes.

        `on_text` must not block; if it raises, it is not called again, and the attempt goes on.
        """
        body = self._write(request, stream=True)
        client = self._get_client()
        incoming, listener = ReplyStream(), _Listener(on_text)
        failure: ModelError | None = None
        try:
            async with asyncio.timeout(request.timeout) as limit:
                async with aclosing(_post(client, body)) as pieces:
                    await _take_pieces(pieces, incoming, listener, limit)
        except Exception as error:  # noqa: BLE001 - the border: the table names what is known
            # What goes wrong after an answer is whole takes nothing from it.
            if not incoming.is_whole:
                failure = describe_exception(error, now=self._now(), secret=client.api_key)
        if incoming.reported is not None:
            failure = describe_reported(
                incoming.reported, incoming.reported_text, now=self._now(), secret=client.api_key
            )
        if failure is not None:
            if incoming.has_begun:
                failure.usage = Usage(requests=1, known=False)
                failure.raw = failure.raw or incoming.as_raw()
            raise failure
        reply = incoming.read()
        listener.finish(incoming.rest(), reply)
        return reply

    def _write(self, request: ModelRequest, *, stream: bool) -> dict[str, Any]:
        if running_call.get() is not None:
            raise ModelError(
                "a tool may not call the agent's model (rule 11): return what it needs to know, "
                "and let the next step ask",
                type=RunErrorType.CONFIG_ERROR,
            )
        body = write_request(request, profile=self.profile, extra=self._extra, stream=stream)
        timeout = openai.Timeout(request.timeout, connect=min(CONNECT_TIMEOUT, request.timeout))
        # The user's own parameters may be unknown to the SDK.
        extra = {key: body.pop(key) for key in list(body) if key not in _OWN_KEYS}
        return {**body, "extra_body": extra or None, "timeout": timeout}

    def _read_url(self) -> str:
        given = (self._base_url or os.environ.get("OPENAI_BASE_URL") or "").strip()
        return given or DEFAULT_BASE_URL

    async def aclose(self) -> None:
        """Close the client of this process and event loop; the next call makes a new one."""
        client = self._clients.pop((os.getpid(), asyncio.get_running_loop()), None)
        if client is not None:
            await client.close()

    def _get_client(self) -> openai.AsyncOpenAI:
        here = (os.getpid(), asyncio.get_running_loop())
        client = self._clients.get(here)
        if client is None:
            for pid, loop in list(self._clients):
                # Another process' clients stay: letting go of one would touch shared sockets.
                if pid == here[0] and loop.is_closed():
                    del self._clients[pid, loop]
            client = self._clients[here] = self._make_client()
        return client

    def _make_client(self) -> openai.AsyncOpenAI:
        # Keys come from files, with the newline at their end.
        key = (self._api_key or os.environ.get("OPENAI_API_KEY") or "").strip()
        url = self._read_url()
        if not key:
            raise ModelError(
                "there is no key for the model server: set OPENAI_API_KEY "
                "(any word will do for a server that wants none)",
                type=RunErrorType.CONFIG_ERROR,
            )
        if not (key.isascii() and key.isprintable()):
            raise ModelError(
                "OPENAI_API_KEY holds characters that no header can carry",
                type=RunErrorType.CONFIG_ERROR,
            )
        if not re.match(r"https?://[^/]", url):
            raise ModelError(
                "OPENAI_BASE_URL must start with http:// or https://",
                type=RunErrorType.CONFIG_ERROR,
            )
        profile = self.profile
        if not url.rstrip("/").endswith(profile.base_path):
            raise ModelError(
                f"OPENAI_BASE_URL must end in {profile.base_path} for a server with the profile "
                f"{profile.name}",
                type=RunErrorType.CONFIG_ERROR,
            )
        # Any Exception, since httpx2's InvalidURL is nothing more special; and suppressed, not
        # caught, so that it isn't the context of ours: its text quotes the URL.
        with suppress(Exception):
            return openai.AsyncOpenAI(
                api_key=key,
                base_url=url,
                max_retries=0,
                # Not the SDK's default client: that one closes itself as a stray task on whatever
                # loop runs when it is collected. A redirected POST would arrive as a GET.
                http_client=openai.DefaultAsyncHttpxClient(
                    follow_redirects=False, event_hooks={"response": [_refuse_status]}
                ),
            )
        raise ModelError(
            "the model client can't be made: is OPENAI_BASE_URL a URL?",
            type=RunErrorType.CONFIG_ERROR,
        )


async def _post(
    client: openai.AsyncOpenAI, parameters: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    """Send one request, and yield the body of a success as it comes; closing this closes it."""
    # Not the SDK's own parser of streams: that one raises at the first event it can't read.
    send: Any = client.chat.completions.with_streaming_response.create
    async with send(**parameters) as response, aclosing(response.iter_bytes()) as pieces:
        async for piece in pieces:
            yield piece


async def _refuse_status(response: Any) -> None:
    """Raise for a status that is no success, before the SDK reads the body: it would read all."""
    if response.is_success:
        return
    body = bytearray()
    async with aclosing(response.aiter_bytes()) as pieces:
        async for piece in pieces:
            body += piece[: MAX_ERROR_BYTES - len(body)]
            if len(body) >= MAX_ERROR_BYTES:
                break
    raise _Refusal(response.status_code, response.headers, body.decode("utf-8", "replace"))


async def _take_pieces(
    pieces: AsyncIterator[bytes], incoming: ReplyStream, listener: _Listener, limit: asyncio.Timeout
) -> None:
    until, lingers = limit.when(), False
    async for piece in pieces:
        listener.tell(incoming.feed(piece))
        if incoming.has_failed:
            return
        if incoming.is_whole is not lingers and until is not None:
            lingers = incoming.is_whole
            soon = asyncio.get_running_loop().time() + LINGER
            limit.reschedule(min(until, soon) if lingers else until)
    listener.tell(incoming.end())


class _Listener:
    """Hands text to the one who follows, whose faults are no concern of the attempt."""

    def __init__(self, on_text: Callable[[str], None]) -> None:
        self._on_text: Callable[[str], None] | None = on_text
        self._has_told = False

    def tell(self, text: str) -> None:
        if not text or self._on_text is None:
            return
        self._has_told = True
        try:
            self._on_text(text)
        except Exception as error:  # noqa: BLE001 - it is the caller's code
            self._on_text = None
            logger.warning("on_text failed with %s: not called again", error.__class__.__name__)

    def finish(self, rest: str, reply: ModelReply) -> None:
        self.tell(rest)
        if not self._has_told:  # a server that didn't stream, or sent its message at the end
            match reply:
                case Final(text=text) | ToolCalls(text=text):
                    self.tell(text or "")
