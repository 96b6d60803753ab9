"""The model client over real HTTP: what is sent, what ends an attempt, and what an error tells."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import runner
from runner import model as model_module
from runner import stream as stream_module
from runner.errors import ModelError
from runner.model import (
    MAX_ERROR_BYTES,
    OpenAIModel,
    describe_status,
    read_retry_after,
    retry_delay,
    write_request,
)
from runner.models import (
    Final,
    ModelReply,
    ModelRequest,
    Retry,
    RunErrorType,
    StreamingModel,
    ToolCalls,
    Usage,
)
from runner.profiles import DEEPSEEK
from runner.tools import running_call
from support.model_server import (
    ModelServer,
    as_stream,
    calls,
    check_request,
    chunk,
    error,
    final,
    stream_of,
)

KEY = "sk-very-secret-key"
GOAL = {"role": "user", "content": "the secret goal"}
PING: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "ping",
        "description": "Answer pong.",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}


def build_request(*messages: dict[str, Any], **options: Any) -> ModelRequest:
    return ModelRequest(**{"model": "fake-1", "messages": messages or (GOAL,), **options})


def ask(server: ModelServer | str, request: ModelRequest | None = None) -> ModelReply:
    """One attempt on an event loop of its own, and everything closed after it."""

    async def respond() -> ModelReply:
        model = OpenAIModel(server if isinstance(server, str) else server.url, KEY)
        try:
            return await model.respond(request or build_request())
        finally:
            await model.aclose()

    return asyncio.run(respond())


def failure(server: ModelServer | str, request: ModelRequest | None = None) -> ModelError:
    with pytest.raises(ModelError) as caught:
        ask(server, request)
    return caught.value


def turn(*ids: str, **extra: Any) -> dict[str, Any]:
    called = [
        {"id": call_id, "type": "function", "function": {"name": "ping", "arguments": "{}"}}
        for call_id in ids
    ]
    return {"role": "assistant", "content": None, "tool_calls": called, **extra}


def result(id: str, content: str = "pong") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


# --- a conversation ----------------------------------------------------------------------------


def test_calls_are_answered_and_their_results_are_sent_back() -> None:
    with ModelServer([calls(("ping", {}), text="Checking.")]) as server:
        first = ask(server, build_request(tools=(PING,)))
        assert isinstance(first, ToolCalls)
        messages = (GOAL, turn("c0"), result("c0"))
        second = ask(server, build_request(*messages, tools=(PING,)))
        assert isinstance(second, Final)
        assert second.text == "done"
        assert json.loads(second.raw)["choices"]
        assert server.violations == []
        assert [len(one.body["messages"]) for one in server.requests] == [1, 3]
        assert all("authorization" not in one.headers for one in server.requests)


def test_replies_may_be_computed_from_the_request() -> None:
    def echo(body: dict[str, Any]) -> dict[str, Any]:
        return final(body["messages"][-1]["content"].upper())

    with ModelServer(echo) as server:
        reply = ask(server, build_request({"role": "user", "content": "hello"}))
    assert isinstance(reply, Final)
    assert reply.text == "HELLO"


def test_the_environment_is_read_at_the_first_call_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def respond() -> ModelReply:
        model = OpenAIModel()
        # A key from a file has a newline at its end.
        monkeypatch.setenv("OPENAI_API_KEY", KEY + "\n")
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        try:
            return await model.respond(build_request())
        finally:
            await model.aclose()

    with ModelServer() as server:
        assert isinstance(asyncio.run(respond()), Final)


@pytest.mark.parametrize(
    ("url", "key", "cure"),
    [
        ("http://127.0.0.1:1/v1", "", "OPENAI_API_KEY"),
        ("http://127.0.0.1:1/v1", "kéy", "OPENAI_API_KEY"),
        ("http://127.0.0.1:1/v1", "key\nX-Other: 1", "OPENAI_API_KEY"),
        ("127.0.0.1:1/v1", KEY, "OPENAI_BASE_URL"),
        ("http://user:hunter2@127.0.0.1:port/v1", KEY, "OPENAI_BASE_URL"),
    ],
)
def test_a_setting_that_cannot_work_names_its_cure_and_nothing_secret(
    monkeypatch: pytest.MonkeyPatch, url: str, key: str, cure: str
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ModelError, match=cure) as caught:
        asyncio.run(OpenAIModel(url, key).respond(build_request()))
    assert (caught.value.type, caught.value.retryable) == (RunErrorType.CONFIG_ERROR, False)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_a_tool_may_not_call_the_agents_model() -> None:
    token = running_call.set("3.0")
    try:
        with ModelServer() as server:
            with pytest.raises(ModelError, match="rule 11") as caught:
                ask(server)
            assert server.requests == []
    finally:
        running_call.reset(token)
    assert caught.value.type is RunErrorType.CONFIG_ERROR


# --- what is sent ------------------------------------------------------------------------------


def test_nothing_about_tools_is_sent_when_there_are_none() -> None:
    body = write_request(build_request(tool_choice="auto", parallel_tool_calls=False))
    assert body.keys() == {"model", "messages"}


def test_one_call_at_a_time_is_said_only_where_it_is_wanted() -> None:
    one = write_request(build_request(tools=(PING,), parallel_tool_calls=False))
    many = write_request(build_request(tools=(PING,), tool_choice="required"))
    assert one["parallel_tool_calls"] is False
    assert many.keys() == {"model", "messages", "tools", "tool_choice"}
    assert check_request(one) == check_request(many) == []


def test_keys_that_only_a_response_has_and_blank_turns_are_left_out() -> None:
    body = write_request(
        build_request(
            {"role": "system", "content": "Be kind.", "name": "x"},
            GOAL,
            {"role": "assistant", "content": "", "tool_calls": []},
            {"role": "assistant", "content": "hm", "tool_calls": [], "annotations": []},
            turn("c1", refusal=None, audio=None, function_call=None, reasoning_content="a plan"),
            {**result("c1"), "name": "ping"},
        )
    )
    assert check_request(body) == []
    assert [message["role"] for message in body["messages"]] == [
        "system",
        "user",
        "assistant",
        "assistant",
        "tool",
    ]


def test_reasoning_goes_back_only_to_a_server_that_demands_it() -> None:
    request = build_request(GOAL, turn("c1", reasoning_content="a plan"), result("c1"))
    assert "reasoning_content" not in write_request(request)["messages"][1]
    told = write_request(request, profile=DEEPSEEK)["messages"][1]
    assert told["reasoning_content"] == "a plan"


@pytest.mark.parametrize(
    "messages",
    [
        (GOAL, result("c1")),
        (GOAL, turn("c1")),
        (GOAL, turn("c1", "c2"), result("c1")),
        (GOAL, turn("c1", "c2"), result("c2"), result("c1")),
        (GOAL, turn("c1"), GOAL, result("c1")),
        (GOAL, turn("c1"), result("c1"), result("c1")),
        (GOAL, turn("c1", "c1"), result("c1"), result("c1")),
        (GOAL, turn("x" * 41), result("x" * 41)),
        (GOAL, turn(""), result("")),
        (GOAL, {"role": "function", "content": "x"}),
        (GOAL, turn("c1", tool_calls=[{"id": "c1", "function": {"name": "a.b"}}]), result("c1")),
        ({"role": "assistant", "content": ""},),
    ],
)
def test_a_history_with_an_orphan_or_a_broken_call_is_never_sent(
    messages: tuple[dict[str, Any], ...],
) -> None:
    with pytest.raises(ModelError, match="rule 1") as caught:
        write_request(build_request(*messages))
    assert caught.value.type is RunErrorType.CONFIG_ERROR
    assert check_request({"model": "m", "messages": list(messages)}) != []


def test_text_that_cannot_be_encoded_is_sent_with_a_replacement() -> None:
    with ModelServer() as server:
        ask(
            server, build_request({"role": "user", "content": [{"type": "text", "text": "\ud800"}]})
        )
        assert server.requests[0].body["messages"][0]["content"][0]["text"] == "\ufffd"


# --- errors of the server ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "expected", "retryable"),
    [
        (400, "unsupported_parameter", RunErrorType.CONFIG_ERROR, False),
        (400, "context_length_exceeded", RunErrorType.CONTEXT_OVERFLOW, False),
        (400, "content_filter", RunErrorType.CONTENT_FILTERED, False),
        (401, "invalid_api_key", RunErrorType.AUTH_ERROR, False),
        (402, None, RunErrorType.QUOTA_EXHAUSTED, False),
        (403, None, RunErrorType.AUTH_ERROR, False),
        (404, "model_not_found", RunErrorType.CONFIG_ERROR, False),
        (408, None, RunErrorType.MODEL_HTTP_ERROR, True),
        (409, None, RunErrorType.MODEL_HTTP_ERROR, True),
        (413, None, RunErrorType.CONTEXT_OVERFLOW, False),
        (413, "rate_limit_exceeded", RunErrorType.RATE_LIMITED, True),
        (418, None, RunErrorType.CONFIG_ERROR, False),
        (422, None, RunErrorType.CONFIG_ERROR, False),
        (429, "rate_limit_exceeded", RunErrorType.RATE_LIMITED, True),
        (429, "insufficient_quota", RunErrorType.QUOTA_EXHAUSTED, False),
        (500, None, RunErrorType.MODEL_HTTP_ERROR, True),
        (503, None, RunErrorType.MODEL_HTTP_ERROR, True),
        (529, None, RunErrorType.MODEL_HTTP_ERROR, True),
    ],
)
def test_a_status_says_what_went_wrong_and_whether_to_try_again(
    status: int, code: str | None, expected: RunErrorType, retryable: bool
) -> None:
    with ModelServer([error(status, code, message=f"{GOAL['content']} {KEY}")]) as server:
        found = failure(server)
        assert len(server.requests) == 1
    assert (found.type, found.retryable, found.status) == (expected, retryable, status)
    assert not found.bad_response
    assert str(status) in str(found)
    assert "secret" not in str(found)
    assert KEY not in found.raw


@pytest.mark.parametrize("body", ["busy", "<html>", "", "[" * 100_000, "null", '{"error": null}'])
def test_an_error_page_that_is_not_json_is_judged_by_its_status(body: str) -> None:
    with ModelServer([{"status": 502, "text": body}]) as server:
        found = failure(server)
    assert (found.type, found.retryable) == (RunErrorType.MODEL_HTTP_ERROR, True)


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "insufficient_quota", "code": None},
        {"type": "insufficient_quota", "code": "429"},
        {"code": "billing_hard_limit_reached"},
    ],
)
def test_a_used_up_quota_is_known_by_code_or_type(fields: dict[str, Any]) -> None:
    found = describe_status(429, {"retry-after": "1"}, json.dumps({"error": fields}), now=0.0)
    assert (found.type, found.retryable) == (RunErrorType.QUOTA_EXHAUSTED, False)
    assert found.retry_after is None


@pytest.mark.parametrize(
    "body",
    [
        {"object": "error", "message": "This model's maximum context length is 8 tokens."},
        {"error": {"message": "prompt is too long: 9 tokens > 8 maximum"}},
        {"error": "the request exceeds the available context size"},
    ],
)
def test_a_conversation_too_long_is_known_by_a_sentence_where_there_is_no_code(body: Any) -> None:
    assert describe_status(400, {}, json.dumps(body), now=0.0).type == "CONTEXT_OVERFLOW"


def test_a_rate_limit_on_tokens_is_not_taken_for_a_conversation_too_long() -> None:
    text = json.dumps({"error": {"message": "too many tokens per minute"}})
    assert describe_status(429, {}, text, now=0.0).type is RunErrorType.RATE_LIMITED


def test_an_error_quotes_only_words_that_cannot_be_a_prompt_or_a_key() -> None:
    fields = {"code": "unsupported_parameter", "param": "tools[0].function", "message": "no"}
    text = str(describe_status(400, {}, json.dumps({"error": fields}), now=0.0, secret=KEY))
    assert "unsupported_parameter" in text
    assert "tools[0].function" in text
    fields = {"code": f"bad_{KEY}", "param": "a whole sentence"}
    text = str(describe_status(400, {}, json.dumps({"error": fields}), now=0.0, secret=KEY))
    assert KEY not in text
    assert "sentence" not in text


def test_a_redirect_is_an_error_and_nothing_goes_to_another_address() -> None:
    with ModelServer() as other:
        moved = {"status": 307, "headers": {"location": other.url}, "text": ""}
        with ModelServer([moved]) as server:
            found = failure(server)
        assert other.requests == []
    assert found.type is RunErrorType.CONFIG_ERROR


def test_an_error_survives_pickling_and_carries_nothing_of_the_sdk() -> None:
    with ModelServer([error(429, "rate_limit_exceeded", retry_after="7")]) as server:
        found = failure(server)
    assert found.__cause__ is None
    assert found.__context__ is None
    copy = pickle.loads(pickle.dumps(found))
    assert (copy.status, copy.retry_after, copy.type) == (429, 7.0, RunErrorType.RATE_LIMITED)


def test_no_log_shows_a_prompt_or_a_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with ModelServer([error(500), final("the secret answer")]) as server:
        failure(server)
        ask(server)
    assert "secret" not in caplog.text


# --- Retry-After and backoff -------------------------------------------------------------------

DATE = "Wed, 21 Oct 2026 07:28:00 GMT"
LATER = "Wed, 21 Oct 2026 07:28:30 GMT"
AT_DATE = 1792567680.0


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "2"}, 2.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": " 3 "}, 3.0),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9.0),
        ({"retry-after": "277403"}, 277403.0),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "later"}, None),
        ({"retry-after": LATER, "date": DATE}, 30.0),
        ({"retry-after": DATE, "date": LATER}, 0.0),
        ({"retry-after": LATER}, 40.0),
        ({"retry-after": LATER, "date": "today"}, 40.0),
    ],
)
def test_what_a_server_asks_to_wait_is_read_in_each_spelling(
    headers: dict[str, str], seconds: float | None
) -> None:
    assert read_retry_after(headers, now=AT_DATE - 10) == seconds


def test_retry_after_arrives_with_the_error() -> None:
    with ModelServer([error(503, retry_after="2"), error(429, retry_after="277403")]) as server:
        assert failure(server).retry_after == 2.0
        assert failure(server).retry_after == 277403.0


def test_waits_grow_and_stop_at_the_longest_one() -> None:
    retry = Retry(max_attempts=50, initial_delay=1.0, max_delay=20.0)
    busy = ModelError("busy", retryable=True)
    waits = [retry_delay(retry, attempt, busy) for attempt in (1, 2, 3, 4, 49)]
    for wait, least in zip(waits, (1.0, 2.0, 4.0, 8.0, 20.0), strict=True):
        assert wait is not None
        assert least <= wait <= min(20.0, least + 1.0)


def test_each_wait_is_longer_than_the_one_before_whatever_the_jitter() -> None:
    busy = ModelError("busy", retryable=True)
    drawn = [[retry_delay(Retry(), attempt, busy) or 0.0 for attempt in (1, 2)] for _ in range(200)]
    assert all(first * 1.2 < second for first, second in drawn)
    assert len({first for first, _ in drawn}) > 100


def test_an_attempt_is_given_up_when_no_other_would_help() -> None:
    busy = ModelError("busy", retryable=True)
    assert retry_delay(Retry(max_attempts=3), 2, busy) is not None
    assert retry_delay(Retry(max_attempts=3), 3, busy) is None
    assert retry_delay(Retry(max_attempts=1), 1, busy) is None
    assert retry_delay(Retry(), 1, ModelError("no such model")) is None


def test_what_the_server_asks_wins_when_it_is_longer_unless_it_is_too_long() -> None:
    retry = Retry(initial_delay=1.0, max_delay=5.0, max_retry_after=60.0)

    def wait(asked: float) -> float | None:
        return retry_delay(retry, 1, ModelError("busy", retryable=True, retry_after=asked))

    assert wait(60.0) == 60.0
    assert wait(60.5) is None
    assert 1.0 <= (wait(0.0) or 0.0) <= 2.0


# --- time and broken connections ---------------------------------------------------------------


def test_a_dripping_body_ends_at_the_deadline_of_the_attempt() -> None:
    with ModelServer([{**final("x" * 2_000), "drip": 0.02}]) as server:
        started = time.monotonic()
        found = failure(server, build_request(timeout=0.3))
        assert 0.25 < time.monotonic() - started < 1.5
        server.wait_for(lambda seen: seen.disconnects == 1)
    assert (found.type, found.retryable) == (RunErrorType.MODEL_TIMEOUT, True)
    assert found.__context__ is None


def test_no_time_left_is_a_timeout_and_no_request() -> None:
    with ModelServer() as server:
        assert failure(server, build_request(timeout=0.0)).type is RunErrorType.MODEL_TIMEOUT
        assert server.requests == []


def test_a_server_that_does_not_answer_ends_at_the_deadline() -> None:
    with ModelServer([{**final("late"), "hold": threading.Event()}]) as server:
        found = failure(server, build_request(timeout=0.2))
        server.wait_for(lambda seen: seen.disconnects == 1)
    assert (found.type, found.retryable) == (RunErrorType.MODEL_TIMEOUT, True)


@pytest.mark.parametrize("broken", [{"cut_body": True}, {"reset": True}])
def test_a_broken_connection_is_worth_another_attempt(broken: dict[str, Any]) -> None:
    with ModelServer([{**final("half"), **broken}]) as server:
        found = failure(server)
        reply = ask(server)
        assert len(server.requests) == 2
    assert (found.type, found.retryable) == (RunErrorType.MODEL_HTTP_ERROR, True)
    assert isinstance(reply, Final)


def test_a_server_that_is_not_there_is_worth_another_attempt() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        found = failure(f"http://user:hunter2@127.0.0.1:{unused.getsockname()[1]}/v1")
    assert (found.type, found.retryable) == (RunErrorType.MODEL_HTTP_ERROR, True)
    assert "hunter2" not in str(found)


def test_cancelling_an_attempt_closes_its_request() -> None:
    async def cancel_midway() -> None:
        model = OpenAIModel(server.url, KEY)
        attempt = asyncio.create_task(model.respond(build_request()))
        await asyncio.to_thread(server.wait_for, lambda seen: len(seen.requests) == 1)
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        # Before the client is closed: it is the cancel that the server must notice.
        await asyncio.to_thread(server.wait_for, lambda seen: seen.disconnects == 1)
        await model.aclose()

    with ModelServer([{**final("never"), "hold": threading.Event()}]) as server:
        asyncio.run(cancel_midway())


# --- streams -----------------------------------------------------------------------------------


def follow(
    server: ModelServer, request: ModelRequest | None = None, **options: Any
) -> tuple[ModelReply, list[str]]:
    """One streamed attempt, and the pieces of text that were told."""
    told: list[str] = []
    on_text = options.pop("on_text", told.append)

    async def attempt() -> ModelReply:
        model = OpenAIModel(server.url, KEY, **options)
        following: StreamingModel = model
        try:
            return await following.stream(request or build_request(), on_text)
        finally:
            await model.aclose()

    return asyncio.run(attempt()), told


def stream_failure(
    server: ModelServer, request: ModelRequest | None = None
) -> tuple[ModelError, list[str]]:
    """The error of one streamed attempt, and what was told before it."""
    told: list[str] = []
    with pytest.raises(ModelError) as caught:
        follow(server, request, on_text=told.append)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    return caught.value, told


def test_text_is_told_while_it_comes_and_the_reply_is_the_whole() -> None:
    more = threading.Event()
    told: list[str] = []

    def on_text(text: str) -> None:
        told.append(text)
        more.set()  # the server goes on only after it was heard

    answer = as_stream(final("Rome")["json"])
    with ModelServer([stream_of(*answer[:2], more, *answer[2:])]) as server:
        reply, _ = follow(server, on_text=on_text)
        assert server.violations == []
        assert server.requests[0].body["stream"] is True
        assert server.requests[0].body["stream_options"] == {"include_usage": True}
    assert isinstance(reply, Final)
    assert (reply.text, told) == ("Rome", ["Ro", "me"])
    assert reply.usage.known


def test_calls_come_from_the_whole_message_and_only_text_is_told() -> None:
    with ModelServer([calls(("ping", {"a": 1}), text="Checking.")]) as server:
        reply, told = follow(server, build_request(tools=(PING,)))
    assert isinstance(reply, ToolCalls)
    assert reply.calls[0].arguments == '{"a": 1}'
    assert "".join(told) == "Checking."


def test_a_server_that_ignores_the_wish_to_stream_is_read_as_it_answers() -> None:
    with ModelServer([{**final("Rome"), "plain": True}]) as server:
        reply, told = follow(server)
    assert isinstance(reply, Final)
    assert (reply.text, told) == ("Rome", ["Rome"])


def test_the_same_index_twice_is_two_calls() -> None:
    entries = [
        {"index": 0, "id": call_id, "function": {"name": "ping", "arguments": "{}"}}
        for call_id in ("a", "b")
    ]
    deltas = [{"choices": [{"index": 0, "delta": {"tool_calls": [entry]}}]} for entry in entries]
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    with ModelServer([stream_of(*deltas, end)]) as server:
        reply, _ = follow(server, build_request(tools=(PING,)))
    assert isinstance(reply, ToolCalls)
    assert [call.provider_id for call in reply.calls] == ["a", "b"]


@pytest.mark.parametrize("end", ["close", "cut", "reset"])
def test_a_stream_that_ends_early_or_breaks_is_worth_another_attempt(end: str) -> None:
    with ModelServer([stream_of(chunk({"content": "Ro"}), 0.05, end=end)]) as server:
        found, told = stream_failure(server)
        assert len(server.requests) == 1
    assert (found.type, found.retryable) == (RunErrorType.MODEL_HTTP_ERROR, True)
    assert not found.bad_response
    assert found.usage == Usage(requests=1, known=False)
    assert '"Ro"' in found.raw
    assert told == ["Ro"]


@pytest.mark.parametrize("broken", [{"reset": True}, {"cut_body": True, "text": ""}])
def test_a_connection_that_breaks_before_the_stream_is_too(broken: dict[str, Any]) -> None:
    with ModelServer([{"status": 200, **broken}]) as server:
        found, told = stream_failure(server)
    assert (found.type, found.retryable, told) == (RunErrorType.MODEL_HTTP_ERROR, True, [])
    assert found.usage is None


@pytest.mark.parametrize("status", [400, 503])
def test_an_error_whose_body_breaks_off_is_worth_another_attempt(status: int) -> None:
    with ModelServer([{**error(status), "cut_body": True}] * 2) as server:
        for found in (stream_failure(server)[0], failure(server)):
            assert (found.type, found.retryable) == (RunErrorType.MODEL_HTTP_ERROR, True)


@pytest.mark.parametrize(
    "items",
    [
        (),
        (chunk({"content": "Ro"}),),
        (chunk({"content": "Ro"}), *([": still here\n\n", 0.02] * 200)),
        (*([chunk({"content": "Ro"}), 0.02] * 200),),
    ],
)
def test_a_stream_that_hangs_or_never_ends_ends_at_the_deadline(items: tuple[Any, ...]) -> None:
    with ModelServer([stream_of(*items, end="hang")]) as server:
        started = time.monotonic()
        found, told = stream_failure(server, build_request(timeout=0.3))
        assert 0.25 < time.monotonic() - started < 1.5
        server.wait_for(lambda seen: seen.disconnects == 1)
    assert (found.type, found.retryable) == (RunErrorType.MODEL_TIMEOUT, True)
    assert set(told) <= {"Ro"}


@pytest.mark.parametrize("end", ["close", "cut", "reset", "hang"])
def test_a_whole_answer_is_kept_whatever_becomes_of_the_connection(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "LINGER", 0.2)
    answer = as_stream(final("Rome")["json"])
    with ModelServer([stream_of(*answer, 0.05, end=end)]) as server:
        started = time.monotonic()
        reply, told = follow(server, build_request(timeout=30.0))
        assert time.monotonic() - started < 5
    assert isinstance(reply, Final)
    assert (reply.text, "".join(told)) == ("Rome", "Rome")
    assert reply.usage.known


@pytest.mark.parametrize(
    ("reported", "expected", "retryable"),
    [
        ({"error": {"message": "busy"}}, RunErrorType.MODEL_HTTP_ERROR, True),
        ({"error": {"code": 502}}, RunErrorType.MODEL_HTTP_ERROR, True),
        ({"error": {"code": 429}}, RunErrorType.RATE_LIMITED, True),
        ({"error": {"code": "rate_limit_exceeded"}}, RunErrorType.RATE_LIMITED, True),
        ({"error": {"code": "insufficient_quota"}}, RunErrorType.QUOTA_EXHAUSTED, False),
        ({"error": {"type": "insufficient_quota"}}, RunErrorType.QUOTA_EXHAUSTED, False),
        ({"error": {"code": "context_length_exceeded"}}, RunErrorType.CONTEXT_OVERFLOW, False),
        ({"error": {"message": "prompt is too long"}}, RunErrorType.CONTEXT_OVERFLOW, False),
        ({"error": {"code": "content_filter"}}, RunErrorType.CONTENT_FILTERED, False),
        ({"error": {"code": "invalid_api_key"}}, RunErrorType.AUTH_ERROR, False),
    ],
)
@pytest.mark.parametrize("first", [(), (chunk({"content": "Ro"}), 0.02)])
def test_an_error_in_a_stream_is_judged_as_one_with_a_status(
    first: tuple[Any, ...], reported: Any, expected: RunErrorType, retryable: bool
) -> None:
    with ModelServer([stream_of(*first, reported, chunk({"content": "me"}))]) as server:
        found, told = stream_failure(server)
    assert (found.type, found.retryable) == (expected, retryable)
    assert found.bad_response is False
    assert told == (["Ro"] if first else [])


@pytest.mark.parametrize(
    ("status", "code", "expected", "retryable"),
    [
        (429, "insufficient_quota", RunErrorType.QUOTA_EXHAUSTED, False),
        (429, "rate_limit_exceeded", RunErrorType.RATE_LIMITED, True),
        (401, "invalid_api_key", RunErrorType.AUTH_ERROR, False),
        (503, None, RunErrorType.MODEL_HTTP_ERROR, True),
    ],
)
def test_a_status_says_the_same_when_a_stream_was_asked_for(
    status: int, code: str | None, expected: RunErrorType, retryable: bool
) -> None:
    with ModelServer([error(status, code, message=f"secret {KEY}", retry_after="7")]) as server:
        found, told = stream_failure(server)
        assert len(server.requests) == 1
    assert (found.type, found.retryable, found.status) == (expected, retryable, status)
    assert found.retry_after == (7.0 if retryable else None)
    assert KEY not in found.raw
    assert told == []


def test_who_follows_can_fail_without_harm_to_the_attempt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[str] = []

    def on_text(text: str) -> None:
        heard.append(text)
        raise RuntimeError(text)

    with ModelServer([final("Rome")]) as server:
        reply, _ = follow(server, on_text=on_text)
    assert isinstance(reply, Final)
    assert (reply.text, heard) == ("Rome", ["Ro"])
    assert "RuntimeError" in caplog.text
    assert "Rome" not in caplog.text


def test_cancelling_in_the_midst_of_a_stream_closes_it_at_once() -> None:
    async def cancel_midway() -> None:
        model = OpenAIModel(server.url, KEY)
        heard = asyncio.Event()
        attempt = asyncio.create_task(model.stream(build_request(), lambda _: heard.set()))
        await heard.wait()
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        await asyncio.to_thread(server.wait_for, lambda seen: seen.disconnects == 1)
        await model.aclose()

    with ModelServer([stream_of(chunk({"content": "Ro"}), end="hang")]) as server:
        asyncio.run(cancel_midway())


def test_a_tool_may_not_stream_from_the_agents_model_either() -> None:
    token = running_call.set("3.0")
    try:
        with ModelServer() as server:
            found, _ = stream_failure(server)
            assert server.requests == []
    finally:
        running_call.reset(token)
    assert found.type is RunErrorType.CONFIG_ERROR


def test_a_connection_is_kept_after_a_stream_that_ended_in_good_order() -> None:
    async def stream_twice() -> None:
        model = OpenAIModel(server.url, KEY)
        for _ in range(2):
            await model.stream(build_request(), lambda _: None)
        await model.aclose()

    with ModelServer() as server:
        asyncio.run(stream_twice())
        first, second = (one.port for one in server.requests)
    assert first == second


def test_a_body_without_end_is_given_up_and_asked_for_again_only_so_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_module, "MAX_BODY_BYTES", 50_000)
    monkeypatch.setattr(model_module, "MAX_BODY_BYTES", 50_000)
    endless = {**stream_of(*[" " * 9_999, "x" * 9_999] * 50, end="hang"), "plain": True}
    with ModelServer([endless, endless]) as server:
        for found in (failure(server), stream_failure(server)[0]):
            assert (found.type, found.bad_response) == (RunErrorType.MODEL_BAD_RESPONSE, True)
            assert len(found.raw) < 50_000


@pytest.mark.parametrize("status", [401, 503])
def test_of_the_body_of_an_error_only_the_beginning_is_read(status: int) -> None:
    told = '{"error": {"message": "no", "code": "x"}}'
    endless = stream_of(told, *["x" * 9_999] * 50, end="hang")
    with ModelServer([{**endless, "status": status}] * 2) as server:
        for found in (failure(server), stream_failure(server)[0]):
            assert found.status == status
            assert found.raw.startswith(told)
            assert len(found.raw) == MAX_ERROR_BYTES


# --- profiles and parameters of the user's -----------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_reasoning_and_parameters_arrive_as_the_profile_says(streamed: bool) -> None:
    async def respond() -> ModelReply:
        model = OpenAIModel(
            server.url,
            KEY,
            name="fake-1",
            profile="deepseek",
            extra={"max_completion_tokens": 9, "thinking": {"type": "enabled"}, "top_k": 3},
        )
        assert (model.name, model.profile.name) == ("fake-1", "deepseek")
        request = build_request(GOAL, turn("c1", reasoning_content="plan"), result("c1"))
        try:
            if streamed:
                return await model.stream(request, lambda _: None)
            return await model.respond(request)
        finally:
            await model.aclose()

    allow = {"reasoning_content", "max_tokens", "thinking", "top_k"}
    with ModelServer(allow=allow) as server:
        assert isinstance(asyncio.run(respond()), Final)
        assert server.violations == []
        body = server.requests[0].body
    assert body["messages"][1]["reasoning_content"] == "plan"
    assert (body["max_tokens"], body["top_k"]) == (9, 3)
    assert body["thinking"] == {"type": "enabled"}


def test_an_address_without_the_path_of_its_server_names_it() -> None:
    model = OpenAIModel("https://us.openai.azure.com", KEY)
    with pytest.raises(ModelError, match="/openai/v1") as caught:
        asyncio.run(model.respond(build_request()))
    assert caught.value.type is RunErrorType.CONFIG_ERROR


# --- one client per process and event loop -----------------------------------------------------


def test_many_attempts_at_once_share_one_client_and_get_their_own_answers() -> None:
    def echo(body: dict[str, Any]) -> dict[str, Any]:
        return {**final(body["messages"][0]["content"]), "delay": 0.02}

    async def ask_all() -> list[ModelReply]:
        model = OpenAIModel(server.url, KEY)
        tags = [build_request({"role": "user", "content": f"tag {n}"}) for n in range(40)]
        try:
            return await asyncio.gather(*(model.respond(tag) for tag in tags))
        finally:
            await model.aclose()

    with ModelServer(echo) as server:
        replies = asyncio.run(ask_all())
    assert [one.text for one in replies] == [f"tag {n}" for n in range(40)]


@pytest.fixture
def loops() -> Iterator[tuple[asyncio.AbstractEventLoop, asyncio.AbstractEventLoop]]:
    pair = asyncio.new_event_loop(), asyncio.new_event_loop()
    yield pair
    for loop in pair:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def test_one_model_serves_several_event_loops(
    loops: tuple[asyncio.AbstractEventLoop, asyncio.AbstractEventLoop],
) -> None:
    with ModelServer() as server:
        model = OpenAIModel(server.url, KEY)
        for loop in (*loops, *loops):
            assert isinstance(loop.run_until_complete(model.respond(build_request())), Final)
        for loop in loops:
            loop.run_until_complete(model.aclose())
            loop.run_until_complete(model.aclose())
        gc.collect()


def test_a_connection_is_kept_but_never_shared_with_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ask_as_two_processes() -> None:
        model = OpenAIModel(server.url, KEY)
        here = os.getpid()
        await model.respond(build_request())
        await model.respond(build_request())
        # What a forked child sees: the same objects under another process id.
        monkeypatch.setattr(os, "getpid", lambda: here + 1)
        await model.respond(build_request())
        await model.aclose()
        monkeypatch.setattr(os, "getpid", lambda: here)
        await model.aclose()

    with ModelServer() as server:
        asyncio.run(ask_as_two_processes())
        first, second, child = (one.port for one in server.requests)
    assert first == second != child


FORKING = """
import asyncio, os, sys
from runner.model import OpenAIModel
from runner.models import ModelRequest

model = OpenAIModel(sys.argv[1], "sk-test")

async def ask(tag):
    goal = {"role": "user", "content": tag}
    return (await model.respond(ModelRequest(model="fake-1", messages=(goal,)))).text

async def ask_ten(who):
    tags = [f"{who}-{n}" for n in range(10)]
    return tags == await asyncio.gather(*map(ask, tags))

parent = asyncio.new_event_loop()
assert parent.run_until_complete(ask("parent")) == "parent"   # leaves an open connection behind
children = []
for who in range(4):
    child = os.fork()
    if child == 0:
        ok = False
        try:
            ok = asyncio.new_event_loop().run_until_complete(ask_ten(f"child {who}"))
        finally:
            os._exit(0 if ok else 1)
    children.append(child)
assert parent.run_until_complete(ask_ten("parent"))
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
parent.run_until_complete(model.aclose())
print("each got its own")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_never_uses_its_parents_client() -> None:
    def echo(body: dict[str, Any]) -> dict[str, Any]:
        return {**final(body["messages"][0]["content"]), "delay": 0.01}

    root = Path(runner.__file__).parents[1]
    with ModelServer(echo) as server:
        done = subprocess.run(
            [sys.executable, "-c", FORKING, server.url],
            env={**os.environ, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stdout == "each got its own\n", done.stderr
    assert len(server.requests) == 51


# --- the strict server itself ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ({}, "messages are missing"),
        ({"messages": [GOAL], "stop": None}, "unknown key stop"),
        ({"messages": [GOAL], "tool_choice": "auto"}, "tool_choice without tools"),
        ({"messages": [GOAL], "stream": 1}, "stream is not a boolean"),
        ({"messages": [GOAL], "stream_options": {}}, "without stream"),
        ({"messages": [GOAL], "stream": True, "stream_options": {}}, "else than include_usage"),
        ({"messages": [GOAL, turn("c1", reasoning_content="x")]}, "unknown key reasoning_content"),
        ({"messages": [{**GOAL, "name": "x"}]}, "unknown key name"),
        ({"messages": [GOAL, turn()]}, "filled list"),
        ({"messages": [GOAL, {"role": "assistant", "content": None}]}, "neither content nor calls"),
        ({"messages": [GOAL], "tools": []}, "list of 1 to 128"),
        ({"messages": [GOAL], "tools": [PING, PING]}, "invalid or repeated"),
        ({"messages": [GOAL], "tools": [{"type": "function"}]}, "exactly type and function"),
        (
            {"messages": [GOAL], "tools": [{**PING, "function": {"name": "x"}}]},
            "not the schema of an object",
        ),
        (
            {"messages": [GOAL], "tools": [PING], "tool_choice": {"function": {"name": "x"}}},
            "names no tool",
        ),
    ],
)
def test_the_strict_server_finds_what_a_strict_endpoint_would(
    body: dict[str, Any], fault: str
) -> None:
    assert any(fault in one for one in check_request({"model": "m", **body}))


def test_a_request_that_is_not_clean_is_refused_and_remembered() -> None:
    unknown = {**PING, "function": {**PING["function"], "parameters": {"type": "string"}}}
    with ModelServer([final("unused")]) as server:
        found = failure(server, build_request(tools=(unknown,)))
        assert server.violations == ["ping: parameters are not the schema of an object"]
        reply = ask(server)
    assert found.status == 400
    assert isinstance(reply, Final)
    assert reply.text == "unused"
