"""A streamed answer put together: whatever comes, however it is cut, a reply or a ModelError."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner import stream as stream_module
from runner.errors import ModelError
from runner.models import Final, ModelReply, RunErrorType, ToolCalls, Usage
from runner.reader import read_reply
from runner.stream import EventDecoder, ReplyStream
from support.model_server import as_stream, calls, chunk, final, respond_with

DONE = b"data: [DONE]\n\n"
BAD = RunErrorType.MODEL_BAD_RESPONSE
CUT = RunErrorType.MODEL_HTTP_ERROR


def encode(*items: Any) -> bytes:
    """Objects as events; text and bytes as they are."""
    return b"".join(
        item
        if isinstance(item, bytes)
        else item.encode()
        if isinstance(item, str)
        else f"data: {json.dumps(item)}\n\n".encode()
        for item in items
    )


def take(pieces: Iterable[bytes]) -> tuple[ModelReply, str]:
    """The reply, and the text that was told on the way."""
    incoming = ReplyStream()
    told = [incoming.feed(piece) for piece in pieces]
    told.append(incoming.end())
    reply = incoming.read()
    return reply, "".join((*told, incoming.rest()))


def reply_of(*items: Any) -> ModelReply:
    reply, told = take([encode(*items)])
    if isinstance(reply, Final):
        assert told == reply.text
    return reply


def fault_of(*items: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        take([encode(*items)])
    return caught.value


def delta(*entries: Any, **message: Any) -> dict[str, Any]:
    return chunk({"tool_calls": list(entries), **message})


def part(
    index: Any = None, id: Any = None, name: Any = None, arguments: Any = None
) -> dict[str, Any]:
    """One entry of `tool_calls`, without the keys that are None."""
    function = {"name": name, "arguments": arguments}
    entry = {"index": index, "id": id}
    given = {key: value for key, value in entry.items() if value is not None}
    return {**given, "function": {k: v for k, v in function.items() if v is not None}}


def calls_of(*entries: Any) -> list[tuple[str, str]]:
    """What is proposed by deltas of one entry each: name and arguments, an error as its type."""
    end = chunk(finish_reason="tool_calls")
    reply = reply_of(*(delta(entry) for entry in entries), end, DONE)
    assert isinstance(reply, ToolCalls)
    assert len({call.provider_id for call in reply.calls}) == len(reply.calls)
    return [(call.name, call.error.type if call.error else call.arguments) for call in reply.calls]


# --- a plain stream ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "completion",
    [
        final("Rome is the capital of Italy."),
        final("Rome", usage=None),
        calls(("add", {"a": 1, "b": 2}), ("ping", {}), text="Let me see."),
        respond_with({"content": "Rome", "reasoning_content": "easy"}),
    ],
)
def test_a_streamed_answer_reads_as_the_same_answer_unstreamed(completion: dict[str, Any]) -> None:
    whole = read_reply(json.dumps(completion["json"]))
    streamed = reply_of(*as_stream(completion["json"]), DONE)
    assert streamed.usage == whole.usage
    assert streamed.reasoning == whole.reasoning
    assert streamed.text == whole.text
    if isinstance(whole, ToolCalls):
        assert isinstance(streamed, ToolCalls)
        assert streamed.calls == whole.calls
    assert read_reply(streamed.raw) == streamed


def test_the_trace_gets_one_body_and_not_its_pieces() -> None:
    reply = reply_of(*as_stream(final("Rome")["json"]), DONE)
    body = json.loads(reply.raw)
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"] == "Rome"


@pytest.mark.parametrize(
    "text",
    [
        'data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n',
        'data:{"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n',
        'data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}',
        'data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}\r\n\r\n',
        'data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}\r\r',
        'data: {"choices":[{"delta":\ndata: {"content":"a"},"finish_reason":"stop"}]}\n\n',
        '\ufeffdata: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n',
        (
            ": hello\n\nid: 1\nretry: 3\nevent: message\n"
            'data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n: bye\n\n'
        ),
        (
            'data: {"choices":[{"delta":{"content":"a"}}]}\n'
            'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\ndata: [DONE]\n'
        ),
        (
            "data: ping\n\ndata:\n\ndata: keep-alive\n\ndata: null\n\n"
            'data: [{"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}]\n\n'
        ),
    ],
)
def test_an_event_is_read_in_each_of_its_spellings(text: str) -> None:
    reply = reply_of(text)
    assert isinstance(reply, Final)
    assert reply.text == "a"


def test_what_is_no_choice_and_what_repeats_the_role_is_passed_over() -> None:
    reply = reply_of(
        chunk({"role": "assistant"}),
        {"choices": None},
        {"choices": [None, 7]},
        {"choices": [], "prompt_filter_results": []},
        chunk({"role": "assistant", "content": "Ro"}),
        chunk({"role": "assistant", "content": None}),
        {"choices": [{"index": 0, "delta": None}]},
        chunk({"role": "assistant", "content": "me"}),
        chunk(finish_reason="stop"),
        DONE,
    )
    assert isinstance(reply, Final)
    assert reply.text == "Rome"


def test_bytes_that_are_no_text_are_replaced() -> None:
    reply = reply_of(encode(chunk({"content": "a?b"}, finish_reason="stop")).replace(b"?", b"\xff"))
    assert isinstance(reply, Final)
    assert reply.text == "a\ufffdb"


def test_a_character_that_two_chunks_share_is_one_again() -> None:
    reply = reply_of(
        chunk({"content": "a\ud83d"}), chunk({"content": "\ude00b"}, finish_reason="stop"), DONE
    )
    assert isinstance(reply, Final)
    assert reply.text == "a\U0001f600b"


def test_the_first_choice_is_the_answer_unless_another_has_the_calls() -> None:
    def second(content: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {"choices": [{"index": 1, "delta": content, "finish_reason": finish}]}

    ends = (chunk(finish_reason="stop"), second({}, "stop"))
    reply = reply_of(chunk({"content": "Rome"}), second({"content": "Oslo"}), *ends)
    assert isinstance(reply, Final)
    assert reply.text == "Rome"
    entry = part(0, "c1", "ping", "{}")
    reply = reply_of(chunk({"content": "Hm."}), second({"tool_calls": [entry]}), *ends)
    assert isinstance(reply, ToolCalls)


def test_a_message_that_comes_whole_is_read() -> None:
    whole = {"choices": [{"index": 0, "message": {"content": "Rome"}, "finish_reason": "stop"}]}
    reply, _ = take([encode(whole, DONE)])
    assert isinstance(reply, Final)
    assert reply.text == "Rome"


def test_parts_are_read_and_thoughts_among_them_are_not_told() -> None:
    thought = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]
    reply = reply_of(
        chunk({"content": thought}),
        chunk({"content": "Ro"}),
        chunk({"content": [{"type": "text", "text": "me"}]}, finish_reason="stop"),
    )
    assert isinstance(reply, Final)
    assert (reply.text, reply.reasoning) == ("Rome", "hm")


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_is_kept_and_never_told(key: str) -> None:
    ends = (chunk({"content": "Rome"}, finish_reason="stop"), DONE)
    reply = reply_of(chunk({key: "ea"}), chunk({key: "sy"}), *ends)
    assert isinstance(reply, Final)
    assert (reply.text, reply.reasoning) == ("Rome", "easy")


@pytest.mark.parametrize(
    "text",
    [
        "<think>hm</think>Rome",
        "\n<think>\nhm</thinking>\n\n Rome",
        "<thinking>h<b>m</thinking>Rome",
        "<thin ice>",
        "<thi",
        " <",
        "Rome <think>is</think> great",
        "  Rome",
        "<think>hm</think> \n <think>Rome",
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_thoughts_before_the_answer_are_not_told(text: str, size: int) -> None:
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    reply = reply_of(
        *(chunk({"content": piece}) for piece in pieces), chunk(finish_reason="stop"), DONE
    )
    assert isinstance(reply, Final)
    assert "hm" not in reply.text


def test_a_refusal_ends_it_as_one_that_was_not_streamed() -> None:
    ends = (chunk({"refusal": "not."}, finish_reason="stop"), DONE)
    assert fault_of(chunk({"refusal": "I can"}), *ends).type is RunErrorType.REFUSED


# --- usage -------------------------------------------------------------------------------------


def usage(total: int) -> dict[str, int]:
    return {"prompt_tokens": total - 1, "completion_tokens": 1, "total_tokens": total}


@pytest.mark.parametrize(
    "items",
    [
        (chunk({"content": "a"}, finish_reason="stop"), {"choices": [], "usage": usage(9)}),
        (chunk({"content": "a"}, usage=usage(3)), chunk(finish_reason="stop", usage=usage(9))),
        (chunk({"content": "a"}, usage=usage(9)), chunk(finish_reason="stop", usage=None)),
        (chunk({"content": "a"}, usage=usage(9)), chunk(finish_reason="stop", usage={})),
        ({"choices": [{"delta": {"content": "a"}, "finish_reason": "stop", "usage": usage(9)}]},),
    ],
)
def test_the_last_usage_counts_wherever_it_stands(items: tuple[Any, ...]) -> None:
    assert reply_of(*items, DONE).usage == Usage(requests=1, **usage(9))


def test_a_stream_without_usage_has_an_unknown_one() -> None:
    reply = reply_of(chunk({"content": "a"}, finish_reason="stop"), DONE)
    assert reply.usage == Usage(requests=1, known=False)


# --- tool calls --------------------------------------------------------------------------------

ADD = '{"a": 1, "b": 2}'


@pytest.mark.parametrize(
    "entries",
    [
        (part(0, "x", "add", ""), part(0, None, None, '{"a": 1,'), part(0, None, None, ' "b": 2}')),
        (part(0, "x", "add"), part(None, None, None, '{"a": 1,'), part(arguments=' "b": 2}')),
        (part(None, "x", "add"), part(0, None, None, '{"a": 1,'), part(0, arguments=' "b": 2}')),
        (part(0, "x", "add", '{"a": 1,'), part(0, "x", "add", ' "b": 2}')),
        (part(0, None, "add", '{"a": 1,'), part(0, None, "add", ' "b": 2}')),
        (part(None, None, "add", '{"a": 1,'), part(None, None, "add", ' "b": 2}')),
        (part(None, "x", "add", '{"a": 1,'), part(None, "x", None, ' "b": 2}')),
        (part(0, "x", "add", ADD), part(0, "x", "add", ADD)),
        (part(0, "x", "add", ADD), part(0, "x", None, ADD)),
        (part(0, "x", "add", ADD), part(0, "x", "add", "")),
        (part(0, "x", "add", ADD), part(0, "", "", "")),
        (part(0, "x", "ad", ""), part(0, None, "d", ADD)),
        (part(0, None, "add", '{"a": 1,'), part(0, "x", None, ' "b": 2}')),
        (part("0", "x", "add", ""), part(0, None, None, ADD)),
        (part(0, "x", "add", {}), part(0, None, None, ADD)),
        (part(0, 7, "add", ""), part(0, 7, None, ADD)),
        ({"index": 0, "id": "x", "name": "add", "arguments": ADD},),
        ({"index": 0, "id": "x", "function": {"name": "add", "parameters": ADD}},),
    ],
)
def test_deltas_of_one_call_are_one_call(entries: tuple[Any, ...]) -> None:
    assert calls_of(*entries) == [("add", ADD)]


@pytest.mark.parametrize(
    "entries",
    [
        (part(0, "x", "ping", "{}"), part(1, "y", "add", ADD)),
        (part(0, "x", "ping", "{}"), part(0, "y", "add", ADD)),
        (part(0, "x", "ping", ""), part(0, "y", "add", ""), part(0, None, None, ADD)),
        (part(None, "x", "ping", "{}"), part(None, "y", "add", ADD)),
        (part(None, None, "ping", "{}"), part(None, None, "add", ADD)),
        (part(None, None, "ping", ""), part(None, None, "add", ADD)),
        (part(0, None, "ping", "{}"), part(0, None, "add", ADD)),
        (part(0, None, "ping", "{}"), part(0, None, "add", ""), part(0, arguments=ADD)),
        (part(0, "x", "ping", "{}"), part(0, "x", "add", ADD)),
        (part(0, "x", "ping", "{}"), part(1, "x", "add", ADD)),
        (part(1, "y", "add", ADD), part(0, "x", "ping", "{}")),
        (part(0, "x", "ping", ""), part(1, "y", "add", '{"a": 1,'), part(1, "y", "", ' "b": 2}')),
        (part(None, "x", "ping", "{}"), part(1, "y", "add", ADD)),
        (part(0, "x", "ping", {}), part(0, "y", "add", ADD)),
    ],
)
def test_two_calls_stay_two_whatever_they_are_numbered(entries: tuple[Any, ...]) -> None:
    assert calls_of(*entries) == [("ping", "{}"), ("add", ADD)]


def test_the_same_call_twice_is_two_unless_it_has_the_same_id() -> None:
    assert len(calls_of(part(0, "x", "ping", "{}"), part(0, "y", "ping", "{}"))) == 2
    assert len(calls_of(part(0, None, "ping", "{}"), part(0, None, "ping", "{}"))) == 2
    assert len(calls_of(part(0, "x", "ping", "{}"), part(0, "x", "ping", "{}"))) == 1


def test_interleaved_deltas_go_to_their_own_calls() -> None:
    entries = (
        part(0, "x", "add", '{"a": 1,'),
        part(1, "y", "scale", '{"x":'),
        part(0, None, None, ' "b": 2}'),
        part(1, None, None, "3}"),
    )
    assert calls_of(*entries) == [("add", ADD), ("scale", '{"x":3}')]


def test_arguments_that_are_an_object_are_read_as_meant() -> None:
    assert calls_of(part(0, "x", "add", {"a": 1, "b": 2})) == [("add", ADD)]


@pytest.mark.parametrize(
    "entries",
    [
        (part(0, "x", "add", ADD), part(0, "x", None, '{"a": 5}')),
        (part(0, "x", "add", {"a": 1}), part(0, "x", None, {"b": 2})),
        (part(0, "x", "add", '{"a": 1'),),
        (part(0, "x", "add", '{"a": 1, "a": 2}'),),
    ],
)
def test_arguments_that_do_not_go_together_never_run(entries: tuple[Any, ...]) -> None:
    assert calls_of(*entries) == [("add", "INVALID_ARGUMENT")]


def test_a_key_that_comes_twice_in_an_object_is_refused_here_too() -> None:
    raw = '{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"x","function":{"name":"add",'
    raw += '"arguments":{"a":1,"a":2}}}]},"finish_reason":"tool_calls"}]}'
    reply = reply_of(f"data: {raw}\n\n")
    assert isinstance(reply, ToolCalls)
    assert reply.calls[0].error is not None


def test_an_entry_that_is_no_call_is_refused_and_its_siblings_are_read() -> None:
    found = calls_of(part(0, "x", "ping", "{}"), None, "junk", part(1, "y", "add", ADD))
    assert found[0] == ("ping", "{}")
    assert ("add", ADD) in found


def test_the_legacy_function_call_is_read() -> None:
    reply = reply_of(
        chunk({"function_call": {"name": "add", "arguments": '{"a": 1,'}}),
        chunk({"function_call": {"arguments": ' "b": 2}'}}, finish_reason="function_call"),
    )
    assert isinstance(reply, ToolCalls)
    assert (reply.calls[0].name, reply.calls[0].arguments) == ("add", ADD)


def test_calls_of_an_answer_cut_at_the_token_limit_do_not_run() -> None:
    reply = reply_of(delta(part(0, "x", "ping", "{}")), chunk(finish_reason="length"), DONE)
    assert isinstance(reply, ToolCalls)
    assert reply.calls[0].error is not None
    assert reply.calls[0].error.type == "OUTPUT_TRUNCATED"


# --- streams that are no answer ----------------------------------------------------------------


@pytest.mark.parametrize(
    "items",
    [
        (),
        (DONE,),
        ("\n\n",),
        (": only comments\n\n",),
        (chunk({"content": "Ro"}),),
        (chunk({"content": "Ro"}), b'data: {"choi'),
        (delta(part(0, "x", "ping", "{}")),),
        (delta(part(0, "x", "add", "")), DONE),
        (delta(part(0, "x", "add", '{"a": 1')), DONE),
        (chunk({"content": "Ro"}, finish_reason="stop"), chunk({"content": "me"})),
        ({"choices": []}, DONE),
    ],
)
def test_a_stream_that_ends_early_is_a_failed_attempt(items: tuple[Any, ...]) -> None:
    error = fault_of(*items)
    assert (error.type, error.retryable, error.bad_response) == (CUT, True, False)


@pytest.mark.parametrize(
    "items",
    [
        (chunk({"content": "Rome"}, finish_reason="stop"),),
        (chunk({"content": "Rome"}), DONE),
        (chunk({"content": "Rome"}, finish_reason="stop"), b'data: {"usage": {"to'),
        (chunk({"content": "Rome"}), DONE, chunk({"content": "!"}), b"data: {"),
    ],
)
def test_a_stream_is_whole_once_the_server_says_so(items: tuple[Any, ...]) -> None:
    reply = reply_of(*items)
    assert isinstance(reply, Final)
    assert reply.text == "Rome"


@pytest.mark.parametrize("text", ['{"choi', "{'a': 1}", '"}]}', "[" * 100_000, "<html>"])
def test_a_garbled_event_is_a_failed_attempt_since_a_piece_is_missing(text: str) -> None:
    error = fault_of(chunk({"content": "Ro"}), f"data: {text}\n\n", chunk(finish_reason="stop"))
    assert (error.type, error.bad_response, error.retryable) == (BAD, False, True)
    assert error.usage == Usage(requests=1, known=False)


@pytest.mark.parametrize(
    "item",
    [
        {"error": {"message": "no", "code": 503}},
        {"error": "no"},
        [{"error": {"code": 503}}],
        {"object": "error", "message": "no"},
        {"choices": [{"index": 0, "delta": {}, "error": {"code": 503}}]},
        'event: error\ndata: {"message": "no"}\n\n',
        '{"error": {"message": "no"}}\n',
    ],
)
def test_an_error_object_is_reported_and_nothing_is_told_after_it(item: Any) -> None:
    incoming = ReplyStream()
    assert incoming.feed(encode(chunk({"content": "Ro"}))) == "Ro"
    told = incoming.feed(encode(item, "\n", chunk({"content": "me"}, finish_reason="stop"), DONE))
    told += incoming.feed(encode(chunk({"content": "me"}))) + incoming.end()
    assert told == ""
    assert incoming.reported is not None
    assert not incoming.is_whole
    with pytest.raises(ModelError):
        incoming.read()


def test_text_that_comes_together_with_its_failure_is_not_told() -> None:
    incoming = ReplyStream()
    assert incoming.feed(encode(chunk({"content": "Ro"}), {"error": {"code": 503}})) == ""
    assert incoming.reported is not None


@pytest.mark.parametrize("body", [final("Rome")["json"], [final("Rome")["json"]]])
def test_a_server_that_does_not_stream_is_read_as_such(body: Any) -> None:
    incoming = ReplyStream()
    assert incoming.feed(b" \n" + json.dumps(body, indent=1).encode()) + incoming.end() == ""
    if isinstance(body, dict):
        assert isinstance(incoming.read(), Final)
    else:
        with pytest.raises(ModelError):
            incoming.read()


def test_a_page_that_is_no_stream_at_all_says_what_to_check() -> None:
    error = fault_of("<html>\n<body>please log in</body>\n</html>")
    assert (error.type, error.bad_response) == (BAD, True)
    assert "/v1" in str(error)


@pytest.mark.parametrize(
    "piece",
    [
        b'{"a": "' + b"x" * 999,
        b"data: " + b"x" * 999,
        b"data: " + b"x" * 999 + b"\n",
        encode(chunk({"content": "x" * 999})),
    ],
)
def test_a_body_without_end_is_given_up(piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MAX_BODY_BYTES", 20_000)
    incoming = ReplyStream()
    if not piece.startswith(b"{"):
        incoming.feed(encode(chunk({"content": "Ro"})))
    for _ in range(24):
        incoming.feed(piece)
    assert incoming.fault is not None
    assert (incoming.fault.type, incoming.fault.bad_response) == (BAD, True)
    with pytest.raises(ModelError, match="larger"):
        incoming.read()


def test_the_envelopes_of_a_long_stream_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MAX_BODY_BYTES", 20_000)
    envelope = {"padding": "x" * 2_000}
    text = [chunk({"content": "a"}, **envelope) for _ in range(20)]
    reply = reply_of(*text, chunk(finish_reason="stop"))
    assert isinstance(reply, Final)
    assert reply.text == "a" * 20


def test_a_flood_of_calls_is_given_up_and_names_in_each_delta_cost_no_more() -> None:
    flood = [delta(part(n, f"c{n}", "ping", "{}")) for n in range(3_000)]
    assert fault_of(*flood, chunk(finish_reason="tool_calls")).type is BAD
    text = json.dumps({"text": "} " * 30_000})
    started = time.process_time()
    pieces = [text[at : at + 4] for at in range(0, len(text), 4)]
    assert calls_of(*(part(0, "x", "save", piece) for piece in pieces)) == [("save", text)]
    assert time.process_time() - started < 5


# --- any of that kind --------------------------------------------------------------------------

VALID = [
    encode(*as_stream(completion["json"]), DONE)
    for completion in (
        final("<think>hm</think> Rome è 🏛️ bella"),
        calls(("add", {"a": 1, "b": "🏛️"}), ("ping", {}), text="So:"),
        respond_with({"content": "Rome", "reasoning_content": "easy"}),
    )
]
VALID.append(VALID[0].replace(b'"choices"', b'\ndata: "choices"'))
VALID += [stream.replace(b"\n", b"\r\n") for stream in VALID]
VALID += [stream.replace(b"\n", b"\r") for stream in VALID[:3]]


@given(st.sampled_from(VALID), st.lists(st.integers(0, 3_000), max_size=40))
def test_however_a_stream_is_cut_it_is_the_same_reply(stream: bytes, cuts: list[int]) -> None:
    at = sorted({0, *(cut for cut in cuts if cut < len(stream)), len(stream)})
    pieces = [stream[start:end] for start, end in pairwise(at)]
    assert take(pieces) == take([stream])


def test_cut_into_single_bytes_it_is_the_same_reply() -> None:
    for stream in VALID:
        assert take([stream[at : at + 1] for at in range(len(stream))]) == take([stream])


def test_a_stream_cut_off_anywhere_is_never_another_answer() -> None:
    for stream in VALID:
        whole, _ = take([stream])
        for length in range(len(stream)):
            incoming = ReplyStream()
            incoming.feed(stream[:length])
            incoming.end()
            if not incoming.is_whole:
                with pytest.raises(ModelError) as caught:
                    incoming.read()
                assert caught.value.retryable
                continue
            reply = incoming.read()
            assert reply.text == whole.text
            assert getattr(reply, "calls", None) == getattr(whole, "calls", None)


SCALAR = st.sampled_from([None, True, 0, 1, -1, "", "x", "{}", '{"a":1}', "ping", "stop", 1e9])
ANY_JSON = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner)
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "index": SCALAR,
        "id": SCALAR,
        "function": ANY_JSON
        | st.fixed_dictionaries({}, optional={"name": SCALAR, "arguments": ANY_JSON}),
    },
)
DELTA = st.fixed_dictionaries(
    {},
    optional={
        "role": SCALAR,
        "content": ANY_JSON,
        "refusal": SCALAR,
        "reasoning_content": ANY_JSON,
        "tool_calls": ANY_JSON | st.lists(ENTRY | ANY_JSON, max_size=3),
        "function_call": ANY_JSON,
    },
)
CHOICE = st.fixed_dictionaries(
    {},
    optional={
        "index": SCALAR,
        "delta": DELTA | ANY_JSON,
        "message": ANY_JSON,
        "finish_reason": SCALAR | st.just("tool_calls"),
        "error": SCALAR,
    },
)
CHUNK = st.fixed_dictionaries(
    {"choices": st.lists(CHOICE | ANY_JSON, max_size=2) | ANY_JSON},
    optional={"usage": ANY_JSON, "error": SCALAR, "id": ANY_JSON, "created": SCALAR},
)
ITEM = (
    CHUNK
    | ANY_JSON
    | st.sampled_from([DONE, b"\n", b": hi\n\n", b"data: {\n\n", b"event: error\n", b"\xff\n\n"])
    | st.binary(max_size=12)
)


@settings(max_examples=400)
@given(st.lists(ITEM, max_size=6), st.integers(1, 200))
def test_any_stream_is_a_reply_or_a_model_error(items: list[Any], size: int) -> None:
    stream = encode(*(item if not isinstance(item, str) else json.dumps(item) for item in items))
    incoming = ReplyStream()
    for start in range(0, len(stream), size):
        failed = incoming.has_failed
        told = incoming.feed(stream[start : start + size])
        assert not (told and failed)
        assert not (told and incoming.has_failed)
    incoming.end()
    incoming.as_raw().encode()
    try:
        reply = incoming.read()
    except ModelError as error:
        error.raw.encode()
    else:
        reply.raw.encode()
        assert not incoming.has_failed


@given(st.binary(max_size=300))
def test_any_bytes_are_decoded_without_an_error(stream: bytes) -> None:
    decoder = EventDecoder()
    whole = [*decoder.feed(stream), *decoder.end()]
    decoder = EventDecoder()
    bits = [event for at in range(len(stream)) for event in decoder.feed(stream[at : at + 1])]
    assert [*bits, *decoder.end()] == whole


def test_the_extra_content_of_a_streamed_call_is_kept() -> None:
    signed = {"google": {"thought_signature": "c2ln"}}
    whole = {"id": "a", "function": {"name": "ping", "arguments": "{}"}}
    end = chunk(finish_reason="tool_calls")
    for entries in (
        [{"index": 0, **whole, "extra_content": signed}],
        [{"index": 0, **whole}, {"index": 0, "extra_content": signed}],
        [{"index": 0, **whole}, {"index": 0, **whole, "extra_content": signed}],
    ):
        reply = reply_of(*(delta(entry) for entry in entries), end, DONE)
        assert isinstance(reply, ToolCalls)
        assert [one.extra for one in reply.calls] == [signed]
