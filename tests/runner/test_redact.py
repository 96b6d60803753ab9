"""No trace shows a field that is to be hidden, and nothing that the run needs is changed for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from conftest import MakeStore
from runner import Agent, Draft, Evidence, Final, Result, StopReason, ToolError, tool
from runner.loop import CallTools, Finish, NextStep
from runner.redact import HIDDEN, redact
from runner.testing import USAGE, ScriptedModel, calls
from support.loops import RUN, Loops, drive, open_loops

SECRET = "sk-4711"
NAMES = frozenset({"token"})

# --- the values themselves ---------------------------------------------------------------------


def test_without_names_a_value_is_left_as_it_is() -> None:
    value = {"token": SECRET}
    assert redact(value, frozenset()) is value


@pytest.mark.parametrize("secret", [SECRET, 7, None, True, ["a"], {"deep": SECRET}])
def test_the_value_of_a_field_is_hidden_whatever_it_is(secret: Any) -> None:
    assert redact({"token": secret, "n": 1}, NAMES) == {"token": HIDDEN, "n": 1}


def test_fields_are_found_at_any_depth_and_in_any_case() -> None:
    value = [{"a": ({"TOKEN": SECRET}, {"Token": SECRET})}, "token"]
    hidden = [{"a": [{"TOKEN": HIDDEN}, {"Token": HIDDEN}]}, "token"]
    assert redact(value, NAMES) == hidden
    assert redact({"token": SECRET}, frozenset({"ToKeN"})) == {"token": HIDDEN}


def test_what_is_given_is_not_changed() -> None:
    value = {"a": [{"token": SECRET}]}
    redact(value, NAMES)
    assert value == {"a": [{"token": SECRET}]}


def test_only_the_whole_name_counts() -> None:
    value = {"tokens": 3, "max_token": 4, "to": {"ken": 5}}
    assert redact(value, NAMES) == value


def test_text_that_is_json_is_looked_into_even_inside_of_other_text() -> None:
    arguments = json.dumps({"token": SECRET, "n": 9007199254740993})
    body = json.dumps({"choices": [{"arguments": arguments}]})
    hidden = json.loads(json.loads(redact(body, NAMES))["choices"][0]["arguments"])
    assert hidden == {"token": HIDDEN, "n": 9007199254740993}


def test_text_without_such_a_field_is_left_to_the_letter() -> None:
    for text in ('{ "a" : 1e2 }', "my token is nice", '["token"]', "token", '{"a":', ""):
        assert redact(text, NAMES) in (text, HIDDEN)
    assert redact('{ "a" : "token" }', NAMES) == '{ "a" : "token" }'


@pytest.mark.parametrize(
    "text",
    [f'{{"token": "{SECRET}', f'  [{{"token":"{SECRET}"}}, ...', '{"token":' + "[" * 100_000],
    ids=["cut", "not quite JSON", "nested too deeply"],
)
def test_text_that_names_a_field_and_cannot_be_read_is_hidden_whole(text: str) -> None:
    assert redact(text, NAMES) == HIDDEN


@pytest.mark.parametrize(
    "text",
    [
        'data: {"token": "sk-4711"}',
        '```json\n{"token": "sk-4711"}\n```',
        '<tool_result>\n{"TOKEN":"sk-4711"}\n</tool_result>',
        'data: {"arguments": "{\\"token\\": \\"sk-4711\\"}"}',
        "Sure: {'token' : 'sk-4711'}",
        '\ufeff{"\\u0074oken": "sk-4711"}',
    ],
)
def test_text_that_holds_a_field_among_other_things_is_hidden_whole(text: str) -> None:
    assert redact(text, NAMES) == HIDDEN


@pytest.mark.parametrize("text", ['the "token" is nice', "token: nice", 'see "my token": nice'])
def test_prose_may_speak_of_a_field(text: str) -> None:
    assert redact(text, NAMES) == text


@pytest.mark.parametrize("name", ["Schlüssel", "contraseña", "密码"])
def test_a_name_that_json_escapes_is_found_as_well(name: str) -> None:
    escaped = json.dumps({name: SECRET})
    assert "\\u" in escaped
    assert SECRET not in redact(escaped, frozenset({name}))


def test_a_name_that_is_escaped_to_get_by_is_found_as_well() -> None:
    assert SECRET not in redact(f'{{"\\u0074oken": "{SECRET}"}}', NAMES)
    nested = json.dumps({"arguments": f'{{"\\u0074oken": "{SECRET}"}}'})
    assert SECRET not in redact(nested, NAMES)


def test_text_with_escapes_and_no_such_field_is_left_to_the_letter() -> None:
    text = '{"city": "K\\u00f6ln"}'
    assert redact(text, NAMES) == text
    assert redact("C:\\users is prose", NAMES) == "C:\\users is prose"


# --- what a run keeps --------------------------------------------------------------------------


@tool(redact={"token"}, idempotent=True)
def log_in(token: str, user: str) -> dict[str, str]:
    """Log in."""
    given.append(token)
    return {"user": user, "token": f"{token}-new"}


@tool
def find(user: str) -> Result[str]:
    """Find what is known of a user."""
    return Result("found", evidence=[Evidence(source="ledger", data={"token": SECRET})])


@tool(idempotent=True)
def refuse(token: str) -> str:
    """Refuse whatever is given."""
    raise ToolError(json.dumps({"token": token}), fields={"token": token})


given: list[str] = []


@pytest.fixture
def loops(make_store: MakeStore, no_leaked_keys: None) -> Iterator[Loops]:
    given.clear()
    yield from open_loops(make_store())


def agent_of(model: Any, **options: Any) -> Agent:
    return Agent(name="a", model=model, tools=[log_in, find, refuse], **options)


LOG_IN = ("log_in", {"token": SECRET, "user": "ann"})


def test_a_tools_field_is_hidden_in_decisions_bodies_and_results(loops: Loops) -> None:
    turn = calls(LOG_IN, ("find", {"user": "ann"}), ("refuse", {"token": SECRET}))
    body = {"choices": [{"message": {"tool_calls": [{"arguments": json.dumps(LOG_IN[1])}]}}]}
    model = ScriptedModel([replace(turn, raw=json.dumps(body)), "done"])
    assert drive(loops.start(agent_of(model))) == Finish(RUN, StopReason.COMPLETED)
    kept = json.dumps(loops.store.read_trace(RUN))
    assert SECRET not in kept
    assert kept.count(HIDDEN) >= 5
    [decision, _, _] = loops.store.read_trace(RUN)[0]["decisions"]
    assert json.loads(decision["arguments"]) == {"token": HIDDEN, "user": "ann"}
    assert SECRET not in json.dumps([each.data for each in loops.store.read_events(RUN, "0")])


def test_the_tool_and_the_model_get_what_was_said(loops: Loops) -> None:
    model = ScriptedModel([calls(LOG_IN), "done"])
    drive(loops.start(agent_of(model)))
    assert given == [SECRET]
    [_, assistant, result] = model.requests[1].messages
    assert SECRET in assistant["tool_calls"][0]["function"]["arguments"]
    assert f"{SECRET}-new" in result["content"]


def test_a_call_that_is_refused_keeps_no_secret_either(loops: Loops) -> None:
    wrong = ("log_in", {"token": SECRET, "user": 7})
    model = ScriptedModel([calls(wrong), calls(wrong, ("find", {"user": "a"})), "done"])
    drive(loops.start(agent_of(model)))
    assert SECRET not in json.dumps(loops.store.read_trace(RUN))


def test_an_answer_that_went_back_keeps_no_secret(loops: Loops) -> None:
    text = json.dumps({"token": SECRET})
    model = ScriptedModel([Final(text, USAGE, raw=text), "[1]"])
    agent = agent_of(model, output_type=list[int])
    assert drive(loops.start(agent)) == Finish(RUN, StopReason.COMPLETED)
    assert len(loops.exchanges()) == 2
    assert SECRET not in json.dumps(loops.store.read_trace(RUN))


def test_the_setting_hides_fields_of_every_tool(
    make_store: MakeStore, no_leaked_keys: None
) -> None:
    opened = open_loops(make_store(redact=("user",)))
    loops = next(opened)
    drive(loops.start(agent_of(ScriptedModel([calls(LOG_IN), "done"]))))
    kept = json.dumps(loops.store.read_trace(RUN))
    assert "ann" not in kept
    assert SECRET not in kept
    assert [*opened] == []


def test_validators_see_results_as_the_trace_keeps_them(loops: Loops) -> None:
    drafts: list[Draft] = []
    model = ScriptedModel([calls(LOG_IN), "done"])
    agent = agent_of(model, validators=[lambda draft: drafts.append(draft)])
    assert drive(loops.start(agent)) == Finish(RUN, StopReason.COMPLETED)
    [draft] = drafts
    assert [each.data for each in draft.results] == [{"user": "ann", "token": HIDDEN}]


def test_a_result_in_a_fence_keeps_no_secret_either(loops: Loops) -> None:
    @tool(redact={"token"})
    def read_page() -> dict[str, str]:
        """Read a page."""
        return {"token": SECRET, "text": "<|im_start|>system"}

    model = ScriptedModel([calls(("read_page", {})), "done"])
    drive(loops.start(Agent(name="a", model=model, tools=[read_page])))
    assert loops.contents()[0].startswith("<tool_result>")
    assert SECRET not in json.dumps(loops.store.read_trace(RUN))


@pytest.mark.parametrize("name", ["name", "ok", "kind", "result", "evidence", "step"])
def test_a_field_called_like_one_of_the_traces_own_leaves_the_trace_readable(
    loops: Loops, name: str
) -> None:
    @tool(redact={name})
    def look() -> dict[str, str]:
        """Look somewhere."""
        return {name: SECRET}

    model = ScriptedModel([calls(("look", {})), "done"])
    agent = Agent(name="a", model=model, tools=[look], validators=[lambda draft: None])
    assert drive(loops.start(agent)) == Finish(RUN, StopReason.COMPLETED)
    trace = loops.store.read_trace(RUN)
    [decision] = trace[0]["decisions"]
    [found] = [each for each in trace if each.get("kind") == "result"]
    assert (decision["name"], found["step"], found["result"]["name"]) == ("look", 0, "look")
    assert SECRET not in json.dumps(trace)


def test_a_reply_to_a_question_keeps_no_secret(make_store: MakeStore, no_leaked_keys: None) -> None:
    opened = open_loops(make_store(redact=("token",)))
    loops = next(opened)
    model = ScriptedModel([calls(("ask_user", {"question": "Which token?"})), "done"])
    loop = loops.start(Agent(name="a", model=model, clarify=True))
    assert loop.advance(RUN, 0) == CallTools(RUN, 0, ())
    assert loops.reply(json.dumps({"token": SECRET})) == NextStep(RUN, 1)
    drive(loop, NextStep(RUN, 1))
    assert [*opened] == []
    assert SECRET not in json.dumps(loops.store.read_trace(RUN))
