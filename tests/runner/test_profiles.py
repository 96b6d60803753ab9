"""Profiles: which one an address gets, and what the writer does differently for each."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

import runner
from runner.context import assistant_message
from runner.errors import SettingsError
from runner.model import OpenAIModel, write_request
from runner.models import ModelRequest, ProposedCall, ToolCalls, Usage
from runner.profiles import (
    AZURE,
    DEEPSEEK,
    GEMINI,
    LLAMACPP,
    MISTRAL,
    OLLAMA,
    OPENAI,
    PROFILES,
    VLLM,
    Profile,
    profile_for,
    profile_named,
)
from support.model_server import check_request

GOAL = {"role": "user", "content": "goal"}
NUDGE = {"role": "user", "content": "answer now"}
PING: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "ping",
        "description": "Answer pong.",
        "parameters": {"type": "object", "properties": {}},
        "strict": True,
    },
}


def turn(*ids: str, **extra: Any) -> dict[str, Any]:
    function = {"name": "ping", "arguments": "{}"}
    called = [{"id": call_id, "type": "function", "function": function} for call_id in ids]
    return {"role": "assistant", "content": None, "tool_calls": called, **extra}


def result(id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": "pong"}


def write(
    profile: Profile, *messages: dict[str, Any], extra: Any = None, **options: Any
) -> dict[str, Any]:
    request = ModelRequest(model="m", messages=messages or (GOAL,), **options)
    return write_request(request, profile=profile, extra=extra)


# --- which one ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://api.openai.com/v1", OPENAI),
        ("https://api.deepseek.com", DEEPSEEK),
        ("https://API.DeepSeek.com/beta", DEEPSEEK),
        ("https://api.mistral.ai/v1", MISTRAL),
        ("https://codestral.mistral.ai/v1", MISTRAL),
        ("https://generativelanguage.googleapis.com/v1beta/openai/", GEMINI),
        ("https://us.openai.azure.com/openai/v1/", AZURE),
        ("https://us.services.ai.azure.com/openai/v1", AZURE),
        ("http://localhost:11434/v1", OLLAMA),
        ("http://localhost:8000/v1", OPENAI),
        ("https://deepseek.com.example.org/v1", OPENAI),
        ("https://notdeepseek.com/v1", OPENAI),
        ("http://host:port/v1", OPENAI),
        ("http://[::1/v1", OPENAI),
        ("", OPENAI),
    ],
)
def test_the_address_tells_the_profile(url: str, expected: Profile) -> None:
    assert profile_for(url) is expected


def test_a_profile_has_a_name_and_an_unknown_one_lists_them() -> None:
    assert profile_named(" DeepSeek ") is DEEPSEEK
    with pytest.raises(SettingsError, match="deepseek, mistral, gemini, azure, vllm, ollama"):
        OpenAIModel(profile="deepsek")
    assert list(PROFILES) == [profile.name for profile in PROFILES.values()]


def test_a_model_uses_the_profile_it_is_given_or_else_its_addresss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    assert OpenAIModel().profile is OPENAI
    assert OpenAIModel("https://api.mistral.ai/v1").profile is MISTRAL
    assert OpenAIModel("https://api.mistral.ai/v1", profile="vllm").profile is VLLM
    mine = runner.Profile(name="mine", empty_content="")
    assert OpenAIModel(profile=mine).profile is mine
    model = OpenAIModel()
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:11434/v1")
    assert model.profile is OLLAMA


# --- what the writer does ----------------------------------------------------------------------


def test_the_content_of_a_turn_without_text_is_what_the_server_takes() -> None:
    for profile in PROFILES.values():
        written = write(profile, GOAL, turn("c1"), result("c1"))["messages"][1]
        empty = "" if profile in (MISTRAL, OLLAMA, LLAMACPP) else None
        assert written["content"] == empty, profile.name
        written = write(profile, GOAL, turn("c1", content="Hm."), result("c1"))["messages"][1]
        assert written["content"] == "Hm."


def test_reasoning_goes_back_with_every_turn_that_has_calls_or_with_none() -> None:
    history = (
        GOAL,
        turn("c1", reasoning_content="plan"),
        result("c1"),
        turn("c2"),
        result("c2"),
        {"role": "assistant", "content": "Rome", "reasoning_content": "sure"},
        NUDGE,
    )
    told = [one.get("reasoning_content") for one in write(DEEPSEEK, *history)["messages"]]
    assert told == [None, "plan", None, "", None, None, None]
    for profile in PROFILES.values():
        if profile is not DEEPSEEK:
            assert "reasoning_content" not in str(write(profile, *history))


def test_ids_take_the_servers_shape_in_the_call_and_in_its_result_alike() -> None:
    history = (
        GOAL,
        turn("call_1", "abcDEF123", "call_2"),
        result("call_1"),
        result("abcDEF123"),
        result("call_2"),
        turn("call_1"),
        result("call_1"),
    )
    messages = write(MISTRAL, *history)["messages"]
    ids = [call["id"] for call in messages[1]["tool_calls"]]
    assert all(re.fullmatch("[A-Za-z0-9]{9}", call_id) for call_id in ids)
    assert ids[1] == "abcDEF123"
    assert len(set(ids)) == 3
    assert [one["tool_call_id"] for one in messages[2:5]] == ids
    assert messages[5]["tool_calls"][0]["id"] == messages[6]["tool_call_id"] == ids[0]
    assert write(MISTRAL, *history)["messages"] == messages
    assert [call["id"] for call in history[1]["tool_calls"]] == ["call_1", "abcDEF123", "call_2"]


def test_ids_stay_distinct_even_where_few_fit() -> None:
    short = dataclasses.replace(MISTRAL, id_length=1)
    ids = tuple(f"call_{n}" for n in range(12))
    messages = write(short, GOAL, turn(*ids), *map(result, ids))["messages"]
    assert len({call["id"] for call in messages[1]["tool_calls"]}) == 12


def test_the_output_limit_has_the_servers_name_for_it() -> None:
    for given in ("max_tokens", "max_completion_tokens"):
        for profile in PROFILES.values():
            body = write(profile, extra={given: 7, "temperature": 0})
            assert body[profile.output_limit] == 7
            assert len(body.keys() & {"max_tokens", "max_completion_tokens"}) == 1
            assert body["temperature"] == 0
    assert (OPENAI.output_limit, MISTRAL.output_limit) == ("max_completion_tokens", "max_tokens")


@pytest.mark.parametrize("choice", ["required", "auto", {"type": "function", "function": {}}])
def test_a_tool_is_demanded_only_where_the_server_lets_us(choice: Any) -> None:
    assert write(OPENAI, tools=(PING,), tool_choice=choice)["tool_choice"] == choice
    assert "tool_choice" not in write(DEEPSEEK, tools=(PING,), tool_choice=choice)
    assert write(DEEPSEEK, tools=(PING,), tool_choice="none")["tool_choice"] == "none"


def test_parameters_that_a_server_refuses_are_left_out() -> None:
    plain = write(OPENAI, tools=(PING,), parallel_tool_calls=False)
    assert plain["parallel_tool_calls"] is False
    assert plain["tools"][0]["function"]["strict"] is True
    bare = write(GEMINI, tools=(PING,), parallel_tool_calls=False)
    assert "parallel_tool_calls" not in bare
    assert "strict" not in bare["tools"][0]["function"]
    assert PING["function"]["strict"] is True


def test_usage_is_asked_for_in_a_stream_only_where_that_is_taken() -> None:
    request = ModelRequest(model="m", messages=(GOAL,))
    asked = write_request(request, profile=OPENAI, stream=True)
    assert (asked["stream"], asked["stream_options"]) == (True, {"include_usage": True})
    bare = write_request(request, profile=MISTRAL, stream=True)
    assert (bare["stream"], "stream_options" in bare) == (True, False)
    assert not write_request(request).keys() & {"stream", "stream_options"}


def test_a_result_is_followed_by_a_turn_where_the_server_demands_it() -> None:
    history = (GOAL, turn("c1"), result("c1"), NUDGE)
    roles = [one["role"] for one in write(MISTRAL, *history)["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]
    assert [one["role"] for one in write(OPENAI, *history)["messages"]] == [
        "user",
        "assistant",
        "tool",
        "user",
    ]
    answered = (GOAL, turn("c1"), result("c1"), turn("c2"), result("c2"))
    assert len(write(MISTRAL, *answered)["messages"]) == 5


def test_a_developer_is_the_system_where_there_is_no_such_role() -> None:
    told = {"role": "developer", "content": "Be brief."}
    assert write(OPENAI, told, GOAL)["messages"][0]["role"] == "developer"
    assert write(DEEPSEEK, told, GOAL)["messages"][0]["role"] == "system"


def test_a_call_carries_its_signature_or_the_word_for_none() -> None:
    signed = turn("c1", "c2")
    signed["tool_calls"][0] = {**signed["tool_calls"][0], "extra_content": {"google": {"x": "y"}}}
    history = (GOAL, signed, result("c1"), result("c2"))
    first, second = write(GEMINI, *history)["messages"][1]["tool_calls"]
    assert first["extra_content"] == {"google": {"x": "y"}}
    assert "skip_thought_signature_validator" in str(second["extra_content"])
    assert "extra_content" not in str(write(OPENAI, *history))


def test_a_profile_of_ones_own_may_want_signatures_back_and_have_no_word_for_none() -> None:
    signed = turn("c1", "c2")
    signed["tool_calls"][0] = {**signed["tool_calls"][0], "extra_content": {"x": "y"}}
    own = Profile(call_extra={})
    first, second = write(own, GOAL, signed, result("c1"), result("c2"))["messages"][1][
        "tool_calls"
    ]
    assert first["extra_content"] == {"x": "y"}
    assert "extra_content" not in second


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.name)
def test_a_signature_that_a_server_sent_goes_back_to_it_and_to_no_other_kind(
    profile: Profile,
) -> None:
    extra = {"google": {"thought_signature": "c2ln"}}
    proposed = ProposedCall("c1", "ping", "{}", extra=extra)
    stored = assistant_message(ToolCalls((proposed,), None, Usage(), "raw"))
    sent = write(profile, GOAL, stored, result("c1"))["messages"][1]["tool_calls"][0]
    assert sent.get("extra_content") == (extra if profile is GEMINI else None)


def test_no_profile_breaks_what_the_strictest_server_checks() -> None:
    history = (GOAL, turn("c1", "c2"), result("c1"), result("c2"), NUDGE)
    for profile in PROFILES.values():
        body = write(profile, *history, tools=(PING,), parallel_tool_calls=False)
        allow = {"reasoning_content"} if profile.sends_reasoning else set()
        allow |= {"extra_content"} if profile.call_extra else set()
        assert check_request(body, allow=allow) == [], profile.name


# --- the user's own parameters -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "cure"),
    [
        ({"messages": []}, "history"),
        ({"model": "x"}, "name="),
        ({"tools": []}, "Agent"),
        ({"stream": True}, "runtime decides"),
        ({"stream_options": {}}, "Profile"),
        ({"tool_choice": "none"}, "Agent"),
        ({"n": 2}, "one answer"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "give one"),
        ({"temperature": float("nan")}, "JSON only"),
        ({"stop": {1, 2}}, "JSON only"),
    ],
)
def test_a_parameter_that_is_not_the_users_is_refused_with_the_cure(extra: Any, cure: str) -> None:
    with pytest.raises(SettingsError, match=cure):
        OpenAIModel(extra=extra)
