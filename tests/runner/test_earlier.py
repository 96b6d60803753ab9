"""Messages that a submit brings along: what is taken, what is left out, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner import InvalidInput, ModelRequest
from runner.earlier import MAX_MESSAGES, check_messages
from runner.model import write_request

MOST = 10_000
SECRET = "hunter2"

Message = dict[str, Any]


def call(call_id: str = "c1", arguments: Any = "{}", name: str = "ping") -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def turn(*calls: Message, content: str | None = None) -> Message:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def result(call_id: str = "c1", content: Any = "pong") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hello"}


def test_none_and_an_empty_list_are_no_messages() -> None:
    assert check_messages(None, MOST) == check_messages([], MOST) == []


def test_whole_blocks_are_kept_as_they_are() -> None:
    given = [USER, turn(call("c1"), call("c2")), result("c1"), result("c2"), ANSWER, USER]
    assert check_messages(given, MOST) == given


def test_a_picture_is_a_typed_part() -> None:
    parts = [
        {"type": "text", "text": "what is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    ]
    given = [{"role": "user", "content": parts}]
    assert check_messages(given, MOST) == given


def test_what_a_response_carries_and_a_request_mustnt_is_left_out() -> None:
    response = {**turn(call()), "refusal": None, "annotations": [], "audio": None}
    response["tool_calls"] = [{**call(), "index": 0}]
    named = {**USER, "name": "Ann", "id": 7}
    assert check_messages([named, response, result()], MOST) == [USER, turn(call()), result()]


def test_an_answer_with_an_empty_list_of_calls_has_none() -> None:
    assert check_messages([{**ANSWER, "tool_calls": []}], MOST) == [ANSWER]


def test_what_was_given_is_not_changed() -> None:
    given = [{**turn(call()), "refusal": None}, result()]
    check_messages(given, MOST)
    assert given[0]["refusal"] is None


def test_half_a_pair_and_a_nul_are_replaced() -> None:
    [message] = check_messages([{"role": "user", "content": "a\ud800b\0"}], MOST)
    assert message["content"] == "a�b�"


FAULTS = [
    (0, [{"role": "system", "content": SECRET}], r"Agent\(instructions=...\)"),
    (1, [USER, {"role": "developer", "content": SECRET}], r"Agent\(instructions=...\)"),
    (0, [{"role": SECRET, "content": ""}], "role"),
    (0, [{"content": SECRET}], "role"),
    (1, [USER, SECRET], "isn't a dict"),
    (0, [{"role": "user", "content": " "}], "empty"),
    (0, [{"role": "user"}], "empty"),
    (0, [{"role": "user", "content": []}], "empty"),
    (0, [{"role": "user", "content": {"text": SECRET}}], "neither text"),
    (0, [{"role": "user", "content": [SECRET]}], "typed parts"),
    (0, [{"role": "user", "content": float("nan")}], "JSON"),
    (0, [{"role": "user", "content": {SECRET}}], "JSON"),
    (2, [USER, ANSWER, {"role": "assistant", "content": None}], "neither text nor calls"),
    (0, [{"role": "assistant", "content": "", "function_call": {"name": SECRET}}], "neither"),
    (0, [{**ANSWER, "tool_calls": SECRET}], "tool_calls"),
    (0, [{**ANSWER, "tool_calls": [{"id": SECRET}]}], "tool_calls"),
    (0, [{**ANSWER, "reasoning_content": [SECRET]}], "reasoning_content"),
    (1, [USER, result(content=SECRET)], "without its call"),
    (0, [result(content=SECRET)], "without its call"),
    (1, [USER, turn(call())], "has no result"),
    (1, [USER, turn(call()), USER], "has no result"),
    (0, [turn(call("a"), call("b")), result("b"), result("a")], "out of order"),
    (0, [turn(call("a"), call("a")), result("a"), result("a")], "same id"),
    (0, [turn(call("a" * 41)), result("a" * 41)], "usable id"),
    (0, [turn(call(arguments=f"{{{SECRET}")), result()], "JSON object"),
    (0, [turn(call(arguments={"k": SECRET})), result()], "JSON object"),
    (0, [turn(call(name=f"no {SECRET}")), result()], "invalid name"),
]


@pytest.mark.parametrize(("at", "messages", "word"), FAULTS, ids=range(len(FAULTS)))
def test_a_fault_is_named_with_its_place_and_without_its_content(
    at: int, messages: list[Any], word: str
) -> None:
    with pytest.raises(InvalidInput, match=rf"^messages\[{at}\]: .*{word}") as caught:
        check_messages(messages, MOST)
    assert SECRET not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("given", ["hello", {"role": "user"}, 7, b"x"])
def test_what_is_no_list_is_refused(given: object) -> None:
    with pytest.raises(InvalidInput, match="list of chat-completions dicts"):
        check_messages(given, MOST)


def test_there_are_bounds_to_their_number_and_their_size() -> None:
    with pytest.raises(InvalidInput, match=f"at most {MAX_MESSAGES}"):
        check_messages([USER] * (MAX_MESSAGES + 1), 10**9)
    with pytest.raises(InvalidInput, match=f"at most {MOST} .*CELERIAC_MAX_GOAL_CHARS"):
        check_messages([{"role": "user", "content": "x" * 600}] * 20, MOST)
    assert len(check_messages([USER] * MAX_MESSAGES, 10**9)) == MAX_MESSAGES


shapes = st.sampled_from(
    [USER, ANSWER, turn(call("a")), turn(call("a"), call("b")), result("a"), result("b"), {}, None]
)
odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
roles = st.sampled_from(["user", "assistant", "tool"])
built = st.fixed_dictionaries(
    {"role": roles}, optional={"content": odd, "tool_calls": odd, "tool_call_id": odd}
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(shapes | built, max_size=6))
def test_what_is_taken_can_be_sent_and_anything_else_is_invalid_input(messages: list[Any]) -> None:
    try:
        taken = check_messages(messages, MOST)
    except InvalidInput:
        return
    goal = {"role": "user", "content": "goal"}
    body = write_request(ModelRequest(model="m", messages=(*taken, goal)))
    assert len(body["messages"]) == len(messages) + 1
