"""The one place that talks to a model server: a strict writer, a deadline, and one table of errors.

No type and no exception of the openai SDK leaves this module, and no error's text carries a key, a
URL or a prompt. One call is one HTTP request: retries belong to the run (`retry_delay`).
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any

import openai
from tenacity import RetryCallState, Retrying, stop_after_attempt, wait_exponential_jitter

from runner.errors import ModelError
from runner.models import ModelReply, ModelRequest, Retry, RunErrorType
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
from runner.tools import running_call

DEFAULT_BASE_URL = "https://api.openai.com/v1"
CONNECT_TIMEOUT = 10.0
MAX_RAW_ERROR_CHARS = 64_000

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
    raw = text[:MAX_RAW_ERROR_CHARS]
    return ModelError(
        f"{message} ({detail})",
        type=kind,
        retryable=retryable,
        retry_after=read_retry_after(headers, now=now) if retryable else None,
        status=status,
        raw=raw.replace(secret, "***") if secret else raw,
    )


def describe_exception(error: Exception, *, now: float, secret: str = "") -> ModelError:
    """The error for whatever the SDK raised. The original is dropped: its request has the key."""
    if isinstance(error, openai.APIStatusError):
        response = error.response
        text = response.content.decode("utf-8", "replace")
        return describe_status(response.status_code, response.headers, text, now=now, secret=secret)
    for cause, kind, retryable, message in _EXCEPTIONS:
        if isinstance(error, cause):
            return ModelError(message, type=kind, retryable=retryable)
    name = error.__class__.__name__
    return ModelError(f"the model client failed with {name}", type=RunErrorType.CONFIG_ERROR)


def retry_delay(retry: Retry, attempt: int, error: ModelError) -> float | None:
    """Seconds to wait before attempt `attempt + 1`, or None to give up. Never sleeps.

    `attempt` counts from 1: the one that failed. The caller parks the run for that long.
    """
    policy = Retrying(
        stop=stop_after_attempt(retry.max_attempts),
        wait=wait_exponential_jitter(
            multiplier=retry.initial_delay, max=retry.max_delay, jitter=retry.initial_delay
        ),
    )
    state = RetryCallState(retry_object=policy, fn=None, args=(), kwargs={})
    state.attempt_number = attempt
    asked = error.retry_after or 0.0
    if not error.retryable or asked > retry.max_retry_after or policy.stop(state):
        return None
    return max(float(policy.wait(state)), asked)


# --- the writer --------------------------------------------------------------------------------


def write_request(request: ModelRequest, *, send_reasoning: bool = False) -> dict[str, Any]:
    """The body to send. A history that breaks rule 1 of the loop is refused, never sent.

    A blank assistant turn and keys that a response carried but a request mustn't are left out.
    """
    body: dict[str, Any] = {
        "model": request.model,
        "messages": _write_messages(request.messages, send_reasoning=send_reasoning),
    }
    if request.tools:
        body["tools"] = [_write_tool(tool) for tool in request.tools]
        if request.tool_choice is not None:
            body["tool_choice"] = request.tool_choice
        if not request.parallel_tool_calls:  # true is the default, and some models refuse the word
            body["parallel_tool_calls"] = False
    return body


def _write_messages(
    messages: tuple[dict[str, Any], ...], *, send_reasoning: bool
) -> list[dict[str, Any]]:
    written: list[dict[str, Any]] = []
    open_ids: list[str] = []
    for message in messages:
        match message.get("role"):
            case "tool":
                if not open_ids or message.get("tool_call_id") != open_ids[0]:
                    raise _refuse_history("a tool message stands without its call or out of order")
                written.append(
                    {
                        "role": "tool",
                        "tool_call_id": open_ids.pop(0),
                        "content": _write_content(message.get("content")) or "",
                    }
                )
                continue
            case _ if open_ids:
                raise _refuse_history("a tool call has no result")
            case "assistant":
                turn = _write_turn(message, send_reasoning=send_reasoning)
                if turn is None:
                    continue
                written.append(turn)
                open_ids = [call["id"] for call in turn.get("tool_calls", ())]
            case "system" | "developer" | "user" as role:
                content = _write_content(message.get("content"))
                written.append({"role": role, "content": content or ""})
            case _:
                raise _refuse_history("a message has an unknown role")
    if open_ids:
        raise _refuse_history("a tool call has no result")
    if not written:
        raise _refuse_history("there is no message")
    return written


def _write_turn(message: Mapping[str, Any], *, send_reasoning: bool) -> dict[str, Any] | None:
    content = _write_content(message.get("content"))
    calls = [_write_call(call) for call in message.get("tool_calls") or ()]
    if not calls and not content:
        return None
    turn: dict[str, Any] = {"role": "assistant", "content": content or None}
    if calls:
        if len({call["id"] for call in calls}) < len(calls):
            raise _refuse_history("two calls of one turn have the same id")
        turn["tool_calls"] = calls
        if send_reasoning and message.get("reasoning_content"):
            turn["reasoning_content"] = scrub(str(message["reasoning_content"]))
    return turn


def _write_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    call_id, name, arguments = call.get("id"), function.get("name"), function.get("arguments")
    if not isinstance(call_id, str) or not 0 < len(call_id) <= MAX_ID_CHARS:
        raise _refuse_history("a tool call has no usable id")
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise _refuse_history("a tool call has an invalid name")
    text, fault = read_arguments(arguments)
    if fault or not isinstance(arguments, str):
        raise _refuse_history("the arguments of a tool call are not the text of a JSON object")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def _write_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    known = ("name", "description", "parameters", "strict")
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


def _refuse_history(fault: str) -> ModelError:
    return ModelError(
        f"the history can't be sent (rule 1): {fault}", type=RunErrorType.CONFIG_ERROR
    )


# --- the client --------------------------------------------------------------------------------


class OpenAIModel:
    """A `Model` on any server that speaks chat completions.

    `base_url` and `api_key` default to OPENAI_BASE_URL and OPENAI_API_KEY, read at the first call.
    `send_reasoning` sends `reasoning_content` of stored turns with calls back, as DeepSeek demands
    and OpenAI forbids. `now` is a clock in seconds since the epoch.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        send_reasoning: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._base_url = base_url
        self._api_key = api_key
        self._send_reasoning = send_reasoning
        self._now = now
        # A client that was inherited across a fork returned answers that belonged to other
        # processes, and one bound to another event loop hangs: hence both are in the key.
        self._clients: dict[tuple[int, asyncio.AbstractEventLoop], openai.AsyncOpenAI] = {}

    async def respond(self, request: ModelRequest) -> ModelReply:
        """Make one attempt, `request.timeout` seconds in all. Cancelling it closes the request."""
        if running_call.get() is not None:
            raise ModelError(
                "a tool may not call the agent's model (rule 11): return what it needs to know, "
                "and let the next step ask",
                type=RunErrorType.CONFIG_ERROR,
            )
        body = write_request(request, send_reasoning=self._send_reasoning)
        client = self._get_client()
        send: Any = client.chat.completions.with_raw_response.create
        timeout = openai.Timeout(request.timeout, connect=min(CONNECT_TIMEOUT, request.timeout))
        try:
            # The SDK's timeouts are per operation: a body that drips outlives them.
            async with asyncio.timeout(request.timeout):
                response = await send(**body, timeout=timeout)
                raw: str = response.content.decode("utf-8", "replace")
        except Exception as error:  # noqa: BLE001 - the border: the table names what is known
            failure = describe_exception(error, now=self._now(), secret=client.api_key)
        else:
            return read_reply(raw)
        # Raised outside of `except`, so that no SDK exception hangs on to it as its context.
        raise failure

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
        url = (self._base_url or os.environ.get("OPENAI_BASE_URL") or "").strip()
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
        if url and not re.match(r"https?://[^/]", url):
            raise ModelError(
                "OPENAI_BASE_URL must start with http:// or https://",
                type=RunErrorType.CONFIG_ERROR,
            )
        # Any Exception, since httpx2's InvalidURL is nothing more special; and suppressed, not
        # caught, so that it isn't the context of ours: its text quotes the URL.
        with suppress(Exception):
            return openai.AsyncOpenAI(
                api_key=key,
                base_url=url or DEFAULT_BASE_URL,
                max_retries=0,
                # Not the SDK's default client: that one closes itself as a stray task on whatever
                # loop runs when it is collected. A redirected POST would arrive as a GET.
                http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False),
            )
        raise ModelError(
            "the model client can't be made: is OPENAI_BASE_URL a URL?",
            type=RunErrorType.CONFIG_ERROR,
        )
