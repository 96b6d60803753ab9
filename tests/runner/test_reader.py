"""What is read from a response: whatever a server sends, calls that are safe, or a ModelError."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.errors import ModelError
from runner.models import Final, ModelReply, ProposedCall, RunErrorType, ToolCalls, Usage
from runner.reader import is_leaked_markup, read_arguments, read_name, read_reply, read_usage
from support.model_server import USAGE, calls, check_request, final, respond_with

BAD = RunErrorType.MODEL_BAD_RESPONSE
EMPTY = RunErrorType.EMPTY_RESPONSE


def read(reply: dict[str, Any]) -> ModelReply:
    return read_reply(json.dumps(reply["json"]) if "json" in reply else reply["text"])


def read_message(message: dict[str, Any], finish_reason: str = "stop") -> ModelReply:
    return read(respond_with({"role": "assistant", **message}, finish_reason=finish_reason))


def read_calls(
    *entries: Any, finish_reason: str = "tool_calls", **message: Any
) -> tuple[ProposedCall, ...]:
    reply = read_message({"content": None, "tool_calls": list(entries), **message}, finish_reason)
    assert isinstance(reply, ToolCalls)
    return reply.calls


def call(id: Any = "c1", name: Any = "ping", arguments: Any = "{}") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def failure(raw: str) -> ModelError:
    with pytest.raises(ModelError) as caught:
        read_reply(raw)
    return caught.value


def failure_of(message: dict[str, Any], finish_reason: str = "stop") -> ModelError:
    return failure(json.dumps(respond_with(message, finish_reason=finish_reason)["json"]))


# --- the envelope ------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [{}, {"tool_calls": None}, {"tool_calls": []}])
def test_no_calls_in_any_spelling_is_a_final_answer(extra: dict[str, Any]) -> None:
    reply = read_message({"content": "Rome", **extra})
    assert isinstance(reply, Final)
    assert reply.text == "Rome"
    assert reply.usage == Usage(requests=1, **USAGE)


@pytest.mark.parametrize(
    "body",
    [
        "",
        " ",
        "<html>please log in</html>",
        "service unhappy",
        "data: {}\n\ndata: [DONE]",
        "[" * 100_000,
        "null",
        "7",
        "[]",
        "{}",
        '{"choices": []}',
        '{"choices": null}',
        '{"choices": {}}',
        '{"choices": [null]}',
        '{"choices": [{"message": null}]}',
        '{"choices": [{"message": {"content": "x"}, "finish_reason": "error"}]}',
        '{"choices": [{"message": {"content": "x"}, "error": {"code": 502}}]}',
        '{"choices": [{"message": {"content": "x", "tool_calls": "ping()"}}]}',
        '{"error": {"message": "upstream", "code": 503}}',
        '{"error": "upstream"}',
        '[{"error": {"code": 500, "status": "INTERNAL"}}]',
        '{"object": "error", "message": "worker died", "code": 500}',
    ],
)
def test_a_success_that_is_no_completion_is_asked_again(body: str) -> None:
    error = failure(body)
    assert (error.type, error.bad_response, error.retryable) == (BAD, True, True)
    assert error.raw == body
    assert error.usage == Usage(requests=1, known=False)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"code": "insufficient_quota"}, RunErrorType.QUOTA_EXHAUSTED),
        ({"type": "insufficient_quota", "code": 429}, RunErrorType.QUOTA_EXHAUSTED),
        ({"code": "context_length_exceeded"}, RunErrorType.CONTEXT_OVERFLOW),
        ({"message": "the prompt is too long: 9 > 8"}, RunErrorType.CONTEXT_OVERFLOW),
        ({"code": "content_filter"}, RunErrorType.CONTENT_FILTERED),
    ],
)
def test_an_error_in_a_success_that_asking_again_cannot_cure_ends_it(
    fields: dict[str, Any], expected: RunErrorType
) -> None:
    error = failure(json.dumps({"error": {"message": "no", **fields}}))
    assert (error.type, error.bad_response, error.retryable) == (expected, False, False)


def test_a_byte_order_mark_and_raw_control_characters_are_no_reason_to_refuse() -> None:
    reply = read_reply('\ufeff{"choices": [{"message": {"content": "a\nb"}}]}')
    assert isinstance(reply, Final)
    assert reply.text == "a\nb"


def test_calls_that_came_in_a_choice_of_their_own_are_found() -> None:
    body = {
        "choices": [
            {"message": {"content": "Let me see."}},
            {"message": {"content": None, "tool_calls": [call()]}},
        ]
    }
    assert isinstance(read_reply(json.dumps(body)), ToolCalls)


def test_text_and_reasoning_beside_calls_are_kept() -> None:
    reply = read_message(
        {"content": "Looking.", "reasoning_content": "a plan", "tool_calls": [call()]}
    )
    assert isinstance(reply, ToolCalls)
    assert (reply.text, reply.reasoning) == ("Looking.", "a plan")


@pytest.mark.parametrize(
    "message",
    [
        {"content": "Rome", "reasoning_content": "easy"},
        {"content": "Rome", "reasoning": "easy"},
        {"content": "<think>easy</think>Rome"},
    ],
)
def test_the_reasoning_before_an_answer_is_kept_beside_it(message: dict[str, Any]) -> None:
    reply = read_message(message)
    assert isinstance(reply, Final)
    assert (reply.text, reply.reasoning) == ("Rome", "easy")


@pytest.mark.parametrize(
    "message",
    [
        {"content": None},
        {"content": ""},
        {"content": " \n"},
        {"content": []},
        {"content": 42},
        {"content": None, "reasoning_content": "hm"},
        {"content": "<think>hm</think>\n"},
        {"content": "<think>hm"},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]},
        {"content": None, "tool_calls": [None]},
        {},
    ],
)
def test_an_answer_without_anything_is_asked_again(message: dict[str, Any]) -> None:
    error = failure_of(message)
    assert (error.type, error.bad_response, error.retryable) == (EMPTY, True, True)
    assert error.usage == Usage(requests=1, **USAGE)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "4"}, {"type": "text", "text": "2"}], "42"),
        ([{"type": "reasoning", "text": "hm"}, {"type": "output_text", "text": "42"}], "42"),
        ([{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, "42"], "42"),
        ({"type": "text", "text": {"value": "42"}}, "42"),
        ("<think>six times seven</think>\n\n42", "42"),
        ("half a pair: \ud83d", "half a pair: \ufffd"),
    ],
)
def test_content_is_read_in_each_of_its_shapes(content: Any, text: str) -> None:
    reply = read_message({"content": content})
    assert isinstance(reply, Final)
    assert reply.text == text


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "ping", "arguments": {}}</tool_call>',
        '\n<tool_call>\n{"name": "ping"}',
        "<tool_call>ping\n<arg_key>n</arg_key>\n<arg_value>1</arg_value></tool_call>",
        "<function=ping>{}</function>",
        '<function_calls>\n<invoke name="ping"></invoke>\n</function_calls>',
        "<|tool_call_begin|>functions.ping:0<|tool_call_argument_begin|>{}",
        "<｜tool▁calls▁begin｜>ping",
        '<|python_tag|>{"name": "ping"}',
        '[TOOL_CALLS] [{"name": "ping"}]',
        "[TOOL_CALLS]ping{}",
        "<|channel|>commentary to=functions.ping <|message|>{}",
        '```xml\n<tool_call>{"name": "ping"}</tool_call>\n```',
        'I will check.\n\n<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>\n',
        "One moment.\n<function=ping>\n</function>",
        "Two things.\n<|tool_call|>ping<|tool_call_end|>\n<|tool_call|>ping<|tool_call_end|>",
    ],
)
def test_a_call_that_leaked_as_text_is_no_final_answer(text: str) -> None:
    error = failure_of({"content": text})
    assert (error.type, error.bad_response) == (BAD, True)


@pytest.mark.parametrize(
    "text",
    [
        "Wrap it in `<tool_call>` and close it with `</tool_call>`.",
        "<tool_call> is the tag that Hermes models use.",
        'It looks like this:\n```\n<tool_call>\n{"name": "x"}\n</tool_call>\n```',
        'First\n<tool_call>{"name": "x"}</tool_call>\nand then\n\nThe server runs it.',
        '{"name": "Ada", "arguments": {}}',
        "<p>hello</p>",
        "a < b and [b] > c",
        "The function=ping pair means nothing.",
    ],
)
def test_a_text_about_tool_markup_is_a_final_answer(text: str) -> None:
    assert not is_leaked_markup(text)
    assert isinstance(read_message({"content": text}), Final)


@pytest.mark.parametrize(
    "piece",
    ["\n", " ", "<|tool", "<", "<think>", "[TOOL_CALLS]", "\n<tool_call>", "```", "</x>\n ", "a.-"],
)
def test_the_longest_of_hostile_texts_is_judged_at_once(piece: str) -> None:
    """The reader runs in the event loop that all model calls of the process share."""
    text = piece * (400_000 // len(piece))
    started = time.monotonic()
    for hostile in (text, f"<|{text}", f"<tool_call>{text}", f"x{text}>"):
        is_leaked_markup(hostile)
        read_name(hostile)
    assert time.monotonic() - started < 2.0


# --- finish reasons ----------------------------------------------------------------------------


@pytest.mark.parametrize("finish", ["stop", "tool_calls", "end_turn", "function_call", ""])
def test_the_message_decides_and_not_the_finish_reason(finish: str) -> None:
    assert isinstance(read_message({"content": None, "tool_calls": [call()]}, finish), ToolCalls)
    assert isinstance(read_message({"content": "hi", "tool_calls": []}, finish), Final)
    assert failure_of({"content": None, "tool_calls": []}, finish).type is EMPTY


@pytest.mark.parametrize("finish", ["length", "max_tokens"])
@pytest.mark.parametrize("arguments", ['{"n": 1', '{"n": 1}'])
def test_calls_of_a_cut_off_answer_never_run_even_if_they_parse(
    finish: str, arguments: str
) -> None:
    (found,) = read_calls(call(arguments=arguments), finish_reason=finish)
    assert found.error is not None
    assert found.error.type == "OUTPUT_TRUNCATED"
    assert (found.arguments, found.raw_arguments) == ("{}", arguments)


@pytest.mark.parametrize("content", ["The answer i", "", None])
def test_a_cut_off_text_ends_it_since_the_same_request_is_cut_again(content: str | None) -> None:
    error = failure_of({"content": content}, "length")
    assert (error.type, error.retryable) == (RunErrorType.OUTPUT_TRUNCATED, False)


@pytest.mark.parametrize(
    "message",
    [
        {"content": None, "refusal": "I can't."},
        {"content": "", "refusal": "I can't."},
        {"content": [{"type": "refusal", "refusal": "I can't."}]},
    ],
)
def test_a_refusal_ends_it(message: dict[str, Any]) -> None:
    error = failure_of(message)
    assert (error.type, error.retryable) == (RunErrorType.REFUSED, False)
    assert "can't" not in str(error)


@pytest.mark.parametrize("content", [None, "Step one is"])
def test_a_filtered_answer_ends_it_even_with_some_text(content: str | None) -> None:
    error = failure_of({"content": content}, "content_filter")
    assert (error.type, error.retryable) == (RunErrorType.CONTENT_FILTERED, False)


# --- ids ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids",
    [
        ["", ""],
        [None, None],
        ["x", "x"],
        ["x", "x", "x", ""],
        ["i" * 41, "i" * 53],
        [7, {"a": 1}],
        ["a b", "\n", "é"],
    ],
)
def test_unusable_ids_become_safe_and_distinct_and_stay_the_same(ids: list[Any]) -> None:
    entries = [call(id=given) for given in ids]
    found = [one.provider_id for one in read_calls(*entries)]
    assert len(set(found)) == len(ids)
    assert all(re.fullmatch(r"[\x21-\x7e]{1,40}", one) for one in found)
    assert found == [one.provider_id for one in read_calls(*entries)]


def test_a_usable_id_is_kept_whatever_stands_beside_it() -> None:
    entries = [call(id=given) for given in ("add:0", "", "add:0", " b ")]
    found = [one.provider_id for one in read_calls(*entries)]
    assert found[0] == "add:0"
    assert found[3] == "b"


def test_a_call_without_the_key_for_its_id_gets_one() -> None:
    (found,) = read_calls({"function": {"name": "ping", "arguments": "{}"}})
    assert found.provider_id
    assert found.error is None


def test_made_up_ids_of_two_turns_differ() -> None:
    (first,) = read_calls(call(id="", arguments='{"n": 1}'))
    (second,) = read_calls(call(id="", arguments='{"n": 2}'))
    assert first.provider_id != second.provider_id


# --- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "ping",
        "ping\n",
        "  ping ",
        "functions.ping",
        "functions.functions.ping",
        "functions.ping:0",
        "ping<|channel|>commentary",
        "<|tool_call_begin|>ping",
        "<｜tool▁sep｜>ping",
        "ping</tool_call>",
        "`ping`",
        '"ping"',
    ],
)
def test_decoration_is_taken_off_a_name(name: str) -> None:
    assert read_name(name) == ("ping", None)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "  ",
        None,
        7,
        {},
        "<|end|>",
        "multi_tool_use.parallel",
        "get weather",
        "naïve",
        "x" * 65,
        "ping.",
        "a/b",
    ],
)
def test_a_name_that_no_tool_can_have_is_made_valid_and_refused(name: Any) -> None:
    (found,) = read_calls(call(name=name))
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", found.name)
    assert found.error is not None
    assert found.error.type == "UNKNOWN_TOOL"
    if isinstance(name, str):
        assert found.raw_name == name


@pytest.mark.parametrize("entry", ["ping", 7, [1], {"id": "c1"}, {"id": "c1", "function": None}])
def test_an_entry_that_is_no_call_is_refused_and_its_siblings_are_read(entry: Any) -> None:
    odd, good = read_calls(entry, call(id="c2"))
    assert odd.error is not None
    assert odd.error.type == "UNKNOWN_TOOL"
    assert good.error is None


@pytest.mark.parametrize(
    "message",
    [
        {"function_call": {"name": "ping", "arguments": '{"n": 1}'}},
        {"tool_calls": {"id": "c1", "function": {"name": "ping", "arguments": '{"n": 1}'}}},
        {"tool_calls": [{"id": "c1", "name": "ping", "arguments": '{"n": 1}'}]},
        {"tool_calls": [{"id": "c1", "function": {"name": "ping", "parameters": {"n": 1}}}]},
    ],
)
def test_other_spellings_of_one_call_are_read(message: dict[str, Any]) -> None:
    reply = read_message({"content": None, **message})
    assert isinstance(reply, ToolCalls)
    (found,) = reply.calls
    assert (found.name, json.loads(found.arguments), found.error) == ("ping", {"n": 1}, None)


# --- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["", "  ", "null", " null\n", None, "{}", '""', {}])
def test_no_arguments_in_any_spelling_are_an_empty_object(given: Any) -> None:
    assert read_arguments(given) == ("{}", None)


def test_missing_arguments_are_an_empty_object() -> None:
    (found,) = read_calls({"id": "c1", "type": "function", "function": {"name": "ping"}})
    assert (found.arguments, found.error) == ("{}", None)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"a": 1, "b": [2]}, {"a": 1, "b": [2]}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ('{"text": "one\ntwo\t"}', {"text": "one\ntwo\t"}),
        ('{\n  "a": 1\n}\n', {"a": 1}),
        ('{"xs": "[1, 2]"}', {"xs": "[1, 2]"}),
        ('{"id": 9007199254740993}', {"id": 9007199254740993}),
        ({"id": 9007199254740993}, {"id": 9007199254740993}),
        ('{"s": "\\u0000 \\ud83d\\ude00"}', {"s": "\0 \U0001f600"}),
    ],
)
def test_one_object_in_any_wrapping_is_read_as_meant(given: Any, meant: dict[str, Any]) -> None:
    text, fault = read_arguments(given)
    assert fault is None
    assert json.loads(text) == meant


def test_the_text_of_valid_arguments_is_kept_as_it_came() -> None:
    text = '{"amount": 0.10000000000000000001, "id": 12345678901234567890}'
    assert read_arguments(f" {text}\n") == (text, None)


@pytest.mark.parametrize(
    "given",
    [
        '{"a": 1}{"a": 2}',
        '{"a": 1} {"a": 2}',
        "{'a': 1}",
        "{a: 1}",
        '```json\n{"a": 1}\n```',
        '{"a": ',
        '{"a": 1} I hope this helps',
        "[1, 2]",
        [],
        [{"a": 1}],
        "7",
        7,
        True,
        "true",
        '"hello"',
        '"\\"{}\\""',
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        '{"a": {"b": 1, "b": 2}}',
        '{"a": ' + "9" * 5_000 + "}",
        '{"a": ' + "[" * 100 + "]" * 100 + "}",
        '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"a": "' + "x" * 1_000_001 + '"}',
        {"a": "é" * 600_000},
        '{"a": "\\ud800"}',
    ],
)
def test_anything_but_one_plain_object_is_refused_without_an_echo(given: Any) -> None:
    (found,) = read_calls(call(arguments=given))
    assert found.arguments == "{}"
    assert found.error is not None
    assert (found.error.type, found.error.retryable) == ("INVALID_ARGUMENT", True)
    assert len(found.error.message) < 120
    assert "helps" not in found.error.message
    if isinstance(given, str):
        assert found.raw_arguments == given


@pytest.mark.parametrize(
    "arguments", ['{"a": 1, "a": 2}', '{"a": NaN}', '{"a": ' + "9" * 5_000 + "}"]
)
def test_arguments_that_came_as_an_object_are_held_to_the_same_rules(arguments: str) -> None:
    body = '{"choices": [{"message": {"tool_calls": [{"id": "c1", "function": '
    reply = read_reply(body + '{"name": "ping", "arguments": ' + arguments + "}}]}}]}")
    assert isinstance(reply, ToolCalls)
    assert reply.calls[0].error is not None
    assert reply.calls[0].error.type == "INVALID_ARGUMENT"


def test_one_unreadable_call_does_not_touch_its_sibling() -> None:
    bad, good = read_calls(call(arguments="{a: 1}"), call(id="c2", arguments='{"a": 1}'))
    assert bad.error is not None
    assert (good.arguments, good.error, good.raw_arguments) == ('{"a": 1}', None, None)


# --- usage -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        (USAGE, (11, 7, 18, True)),
        (None, (0, 0, 0, False)),
        ([], (0, 0, 0, False)),
        ({}, (0, 0, 0, False)),
        ({"prompt_tokens": 11, "completion_tokens": 7}, (11, 7, 18, True)),
        ({"input_tokens": 11, "output_tokens": 7}, (11, 7, 18, True)),
        ({"prompt_tokens": 11, "completion_tokens": None}, (11, 0, 11, False)),
        ({"total_tokens": 18}, (0, 0, 18, True)),
        ({"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 3}, (11, 7, 18, True)),
        ({"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 30}, (11, 7, 30, True)),
        ({"prompt_tokens": -1, "completion_tokens": 7, "total_tokens": -1}, (0, 7, 7, False)),
        ({"prompt_tokens": 1e300, "completion_tokens": 7}, (0, 7, 7, False)),
        ({"prompt_tokens": "11", "completion_tokens": True}, (0, 0, 0, False)),
        ({"prompt_tokens": 11.0, "completion_tokens": 7.5}, (11, 0, 11, False)),
        ({"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}, (0, 0, 0, False)),
    ],
)
def test_usage_is_what_is_credible_and_says_whether_it_is_known(
    reported: Any, expected: tuple[int, int, int, bool]
) -> None:
    usage = read_usage(reported)
    assert usage.requests == 1
    found = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, usage.known)
    assert found == expected


# --- whatever comes ----------------------------------------------------------------------------

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
WORDS = st.sampled_from(["ping", "", "functions.ping", "{}", '{"a": 1}', "null", "text", "length"])
ANY_VALUE = ANY_JSON | WORDS


def _shaped(keys: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries({}, optional=keys) | ANY_VALUE


ANY_FUNCTION = _shaped({"name": ANY_VALUE, "arguments": ANY_VALUE, "parameters": ANY_VALUE})
ANY_CALL = _shaped({"id": ANY_VALUE, "type": ANY_VALUE, "function": ANY_FUNCTION})
ANY_PART = _shaped({"type": WORDS, "text": ANY_VALUE, "thinking": ANY_VALUE, "refusal": ANY_VALUE})
ANY_MESSAGE = _shaped(
    {
        "content": st.lists(ANY_PART, max_size=3) | ANY_VALUE,
        "tool_calls": st.lists(ANY_CALL, max_size=4) | ANY_VALUE,
        "function_call": ANY_FUNCTION,
        "refusal": ANY_VALUE,
        "reasoning_content": ANY_VALUE,
    }
)
ANY_CHOICE = _shaped({"message": ANY_MESSAGE, "finish_reason": ANY_VALUE, "error": ANY_VALUE})
ANY_BODY = _shaped(
    {
        "choices": st.lists(ANY_CHOICE, max_size=2) | ANY_VALUE,
        "usage": _shaped({"prompt_tokens": ANY_VALUE, "total_tokens": ANY_VALUE}),
        "error": st.none() | ANY_VALUE,
    }
)


@settings(max_examples=400, deadline=None)
@given(ANY_BODY)
def test_any_json_is_a_reply_that_can_be_sent_back_or_a_model_error(body: Any) -> None:
    try:
        reply = read_reply(json.dumps(body))
    except ModelError as error:
        str(error).encode()
        return
    if isinstance(reply, Final):
        assert reply.text.strip()
        reply.text.encode()
        return
    turn = {
        "role": "assistant",
        "content": reply.text,
        "tool_calls": [call(one.provider_id, one.name, one.arguments) for one in reply.calls],
    }
    results = [
        {"role": "tool", "tool_call_id": one.provider_id, "content": "x"} for one in reply.calls
    ]
    goal = {"role": "user", "content": "go"}
    assert check_request({"model": "m", "messages": [goal, turn, *results]}) == []
    json.dumps([turn, [(one.raw_name, one.raw_arguments) for one in reply.calls]]).encode()


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_is_read_or_a_model_error(text: str) -> None:
    with pytest.raises(ModelError):
        read_reply(text)


def test_the_scripted_helpers_read_as_what_they_say() -> None:
    reply = read(calls(("add", {"a": 1, "b": 2}), ("ping", {})))
    assert isinstance(reply, ToolCalls)
    assert [(one.provider_id, one.name) for one in reply.calls] == [("c0", "add"), ("c1", "ping")]
    done = read(final("done", usage=None))
    assert isinstance(done, Final)
    assert not done.usage.known


# --- what a server wants back with a call ------------------------------------------------------

SIGNED = {"google": {"thought_signature": "c2ln", "big": 9007199254740993}}


def test_the_extra_content_of_a_call_is_kept_as_it_came() -> None:
    first, second = read_calls({**call("c1"), "extra_content": SIGNED}, call("c2"))
    assert (first.extra, second.extra) == (SIGNED, None)


def deep(levels: int) -> Any:
    return {"a": deep(levels - 1)} if levels else {}


@pytest.mark.parametrize(
    "extra",
    [
        None,
        {},
        "text",
        ["list"],
        5,
        {"a": "\ud800"},
        {"a": float("nan")},
        deep(70),
        {"a": "x" * 10**6},
    ],
)
def test_extra_content_that_could_not_be_sent_back_is_left_out(extra: Any) -> None:
    [one] = read_calls({**call(), "extra_content": extra})
    assert one.extra is None
    assert one.error is None
