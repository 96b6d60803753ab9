"""Every line of `cases.jsonl` is a test: real workers, over HTTP, through the real SDK.

A line is covered by the one test that is parametrized with it. What a sentence of a line means is
a predicate of its own, above the tests; a sentence without one fails.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runner import (
    AlreadyDecided,
    ModelRequest,
    ProposedCall,
    StopReason,
    Tool,
    ToolCalls,
    ToolDefinitionError,
    Usage,
)
from runner.context import (
    Message,
    answer_message,
    assistant_message,
    build_request,
    goal_message,
    tool_message,
)
from runner.loop import CallTools, NextStep
from runner.model import write_request
from runner.tools import Context, execute
from runner.view import MESSAGE_BYTES, NOTE_BYTES, View, describe_dropped, fit_view, size_of
from support import protocol_agents as agents
from support.fleet import ROOT
from support.model_server import ModelServer, Reply, calls, check_request, final
from support.protocol import (
    SENTENCES,
    Case,
    Seen,
    check_run,
    check_sentence,
    error_in,
    goal_of,
    load_cases,
    means,
    submit,
)
from support.protocol_agents import WRITTEN
from support.stage import Stage
from tasks import Run
from tasks.hints import publish

HERE = Path(__file__).parent
CASES = load_cases(HERE / "cases.jsonl")

LATER: set[str] = set()
"""Lines about what is not built yet. Whoever builds it moves them to a test of their own."""

STEPS_SLOTS = 8
"""How many steps the stage's one steps worker takes at once."""


# --- what the sentences mean: envelopes and final messages ----------------------------------------


@means("P1a", "history", "stored assistant message has no tool_calls key")
def stored_answer_has_no_calls(seen: Seen) -> None:
    (answer,) = [each for each in seen.run.messages() if each["role"] == "assistant"]
    assert answer == {"role": "assistant", "content": "Paris"}


@means("P4a", "history", "blank turn not stored")
def blank_turn_is_not_stored(seen: Seen) -> None:
    for messages in (seen.run.messages(), seen.view):
        said = [each["content"] for each in messages if each["role"] == "assistant"]
        assert all(text.strip() for text in said)
    assert [each["role"] for each in seen.run.messages()] == ["user", "assistant"]


@means("P4d", "note", "policy: one re-ask, then fail unparsed_tool_call")
def markup_is_never_an_answer(seen: Seen) -> None:
    assert len(seen.calls) == 2
    assert seen.case.replies is not None
    stubborn = submit(seen.stage, seen.case, seen.case.replies[:1] * 9, n=1)
    assert stubborn.result.stop_reason is StopReason.ERROR
    assert stubborn.result.error is not None
    assert stubborn.result.error.type == "MODEL_BAD_RESPONSE"
    assert len(stubborn.calls) == 1 + stubborn.agent.response_retries


@means("P5a", "history", "assistant turn keeps 'Checking now.' and c1")
def turn_keeps_its_text_and_its_call(seen: Seen) -> None:
    (turn,) = seen.turns
    assert turn["content"] == "Checking now."
    assert [call["id"] for call in turn["tool_calls"]] == ["c1"]


@means("P7a", "history", "replayed arguments are {}")
def cut_arguments_are_sent_back_empty(seen: Seen) -> None:
    assert [call["function"]["arguments"] for call in seen.called] == ["{}"]


@means("P11b", "history", "2nd request's assistant message keys ⊆ {role, content, tool_calls}")
def no_key_of_a_response_is_sent_back(seen: Seen) -> None:
    (turn,) = seen.bodies[1]["messages"][-2:-1]
    assert turn["role"] == "assistant"
    assert turn.keys() <= {"role", "content", "tool_calls"}


@means(
    "P12a",
    "history",
    "profile=deepseek: 2nd request carries reasoning_content 'plan'; profile=openai: key absent",
)
def reasoning_is_sent_where_the_profile_says(seen: Seen) -> None:
    (turn,) = [each for each in seen.bodies[1]["messages"] if each["role"] == "assistant"]
    if seen.agent is agents.deepseek:
        assert seen.bodies[1]["model"] == "deepseek-reasoner"
        assert turn["reasoning_content"] == "plan"
    else:
        assert "reasoning_content" not in turn


@means(
    "P45a",
    "note",
    "after reject(b): final, tool messages a ok, b rejected; ping ran once",
)
def denied_call_is_told_beside_its_sibling(seen: Seen) -> None:
    assert seen.result.answer == "done"
    assert [each["tool_call_id"] for each in seen.tool_messages] == ["a", "b"]
    ok, denied = (error_in(content) for content in seen.contents)
    assert ok is None
    assert denied is not None
    assert (denied["type"], denied["message"]) == ("DENIED", "not this month")
    assert [each.tool for each in seen.entries] == ["ping"]


# --- ids, names and arguments ---------------------------------------------------------------------


def ids_of(seen: Seen) -> list[str]:
    """The ids of the calls, which are those of the tool messages too, in the same order."""
    ids = [call["id"] for call in seen.called]
    assert ids == [each["tool_call_id"] for each in seen.tool_messages]
    assert all(ids)
    return ids


@means("P13a", "history", "two distinct non-empty ids; results 2 and 4 in that order")
def made_up_ids_are_distinct(seen: Seen) -> None:
    assert len(set(ids_of(seen))) == 2
    assert seen.contents == ["2", "4"]


@means("P13d", "history", "replayed id ≤ 40 chars and equal in both messages")
def long_id_is_replaced(seen: Seen) -> None:
    (made_up,) = ids_of(seen)
    assert len(made_up) <= 40


@means("P14a", "history", "ids unique, results 2 then 10")
def repeated_id_is_replaced(seen: Seen) -> None:
    assert len(set(ids_of(seen))) == 2
    assert seen.contents == ["2", "10"]


@means("P15a", "history", "second tool message is 20, not 2")
def id_of_an_earlier_turn_finds_its_own_result(seen: Seen) -> None:
    assert seen.contents == ["2", "20"]


@means("P16b", "note", "b starts after a ends")
def calls_run_one_after_the_other(seen: Seen) -> None:
    lines = [line.split(" ")[:2] for line in seen.ledger]
    assert lines == [["0.0", "enter"], ["0.0", "leave"], ["0.1", "enter"], ["0.1", "leave"]]


@means("P17a", "history", "replayed arguments '{}'")
@means("P17b", "history", "replayed arguments '{}'")
def empty_arguments_are_sent_back_as_an_object(seen: Seen) -> None:
    assert [call["function"]["arguments"] for call in seen.called] == ["{}"]


@means("P17e", "history", "replayed arguments is a string")
def arguments_are_sent_back_as_text(seen: Seen) -> None:
    (call,) = seen.called
    assert isinstance(call["function"]["arguments"], str)
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}


@means("P18d", "note", "tool receives the str '[1,2]'")
def text_that_holds_json_stays_text(seen: Seen) -> None:
    assert [(each.tool, each.arguments) for each in seen.entries] == [("save", {"text": "[1,2]"})]


@means("P21a", "history", "json.loads(arguments) of every assistant call in request 2 is a dict")
def broken_arguments_do_not_poison_the_history(seen: Seen) -> None:
    (turn,) = [each for each in seen.bodies[1]["messages"] if each["role"] == "assistant"]
    arguments = [json.loads(call["function"]["arguments"]) for call in turn["tool_calls"]]
    assert arguments
    assert all(isinstance(each, dict) for each in arguments)


@means("P23a", "note", "tool sees 9007199254740993 exactly")
def large_integer_is_exact(seen: Seen) -> None:
    assert [each.arguments["account_id"] for each in seen.entries] == [9007199254740993]


@means("P26a", "history", "stored name 'ping'")
@means("P26b", "history", "stored name 'ping'")
def stored_name_has_no_decoration(seen: Seen) -> None:
    stored = [call for each in seen.run.messages() for call in each.get("tool_calls", ())]
    assert [call["function"]["name"] for call in stored] == ["ping"]


@means("P26d", "history", "name in request 2 is non-empty and regex-valid")
def blank_name_is_sent_back_valid(seen: Seen) -> None:
    (turn,) = [each for each in seen.bodies[1]["messages"] if each["role"] == "assistant"]
    (call,) = turn["tool_calls"]
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", call["function"]["name"])


@means("P27a", "history", "no '.' in any replayed name")
def no_dot_is_sent_back_in_a_name(seen: Seen) -> None:
    names = [call["function"]["name"] for call in seen.called]
    assert names
    assert not any("." in name for name in names)


# --- registration: the subject is the tool, or the error ------------------------------------------


def keys_in(schema: Any) -> Iterator[str]:
    """Every key at any depth."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            yield key
            yield from keys_in(value)
    elif isinstance(schema, list):
        for each in schema:
            yield from keys_in(each)


def answer_of(tool: Tool, arguments: str) -> str:
    return execute(tool, Context(), arguments).result.content


@means("P29c", "schema", "strict is False")
def tool_is_not_strict(tool: Tool) -> None:
    assert tool.strict is False
    assert tool.definition()["function"].get("strict", False) is False


@means(
    "P30a",
    "schema",
    "no 'default' key anywhere; n nullable and in required; {\"n\": null} calls f(10)",
)
def null_stands_for_the_default(tool: Tool) -> None:
    assert "default" not in set(keys_in(tool.parameters))
    assert tool.parameters["required"] == ["n"]
    told = tool.parameters["properties"]["n"]
    types = told.get("type") or [each["type"] for each in told["anyOf"]]
    assert sorted(types) == ["integer", "null"]
    assert answer_of(tool, '{"n": null}') == "f(10)"


@means("P30b", "schema", "n not in required; {} calls f(10)")
def default_may_be_left_out(tool: Tool) -> None:
    assert "n" not in tool.parameters.get("required", [])
    assert answer_of(tool, "{}") == "f(10)"


@means("P31a", "schema", "terminates; contains $defs/Node")
def recursive_model_is_a_definition(tool: Tool) -> None:
    assert "Node" in tool.parameters["$defs"]
    assert answer_of(tool, '{"n": {"v": 1, "nxt": {"v": 2}}}') == "1"


@means("P31b", "note", "today the SDK helper raises RecursionError here")
def endless_model_is_refused_before_it_recurses(error: ToolDefinitionError) -> None:
    chain: list[BaseException | None] = [error]
    while chain[-1] is not None:
        chain.append(chain[-1].__cause__ or chain[-1].__context__)
    assert not any(isinstance(each, RecursionError) for each in chain)


@means("P31d", "schema", "anyOf, no oneOf, no discriminator")
def strict_union_is_an_any_of(tool: Tool) -> None:
    keys = set(keys_in(tool.parameters))
    assert "anyOf" in keys
    assert not keys & {"oneOf", "discriminator"}


@means(
    "P31f",
    "note",
    "tool receives real Enum/datetime/Decimal objects after crossing the queue, not strings",
)
def arguments_arrive_as_objects(seen: Seen) -> None:
    (content,) = seen.contents
    assert json.loads(content) == [
        "Color red",
        "str x",
        "datetime 2020-01-02 03:04:05+00:00",
        "Decimal 1.10",
    ]


# --- what a tool returned, as the model reads it --------------------------------------------------


def read_strictly(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@means("P32a", "tool_message", 'valid JSON; d is "1.10"; n is null; nothing raised')
def mixed_values_are_json(seen: Seen) -> None:
    (content,) = seen.contents
    told = read_strictly(content)
    assert told.keys() == {"t", "d", "s", "b", "n", "u"}
    assert (told["d"], told["n"], told["s"]) == ("1.10", None, [1])
    assert told["t"].startswith("2020-01-01T00:00:00")
    assert told["u"] == "00000000-0000-0000-0000-000000000001"


@means("P32b", "tool_message", "token masked")
def secret_is_masked(seen: Seen) -> None:
    (content,) = seen.contents
    told = json.loads(content)
    assert told["a"] == 1
    assert set(told["token"]) == {"*"}


@means("P32c", "tool_message", "fallback text naming the type; tool not re-run")
def unencodable_value_is_named_by_its_type(seen: Seen) -> None:
    (content,) = seen.contents
    assert "object" in content
    assert " at 0x" not in content
    assert len(seen.entries) == 1


@means("P33a", "tool_message", "'a\ufffdb'")
def lone_surrogate_is_replaced(seen: Seen) -> None:
    assert seen.contents == ["a\ufffdb"]


@means("P33c", "tool_message", "contains the two characters themselves")
def characters_are_not_escaped(seen: Seen) -> None:
    (content,) = seen.contents
    assert "\u4f60\u597d" in content
    assert "\\u" not in content


@means("P34a", "tool_message", "null")
def nothing_is_null(seen: Seen) -> None:
    assert seen.contents == ["null"]


@means("P34b", "tool_message", "[]")
def empty_list_is_an_empty_list(seen: Seen) -> None:
    assert seen.contents == ["[]"]


@means("P35a", "tool_message", "≤ cap, says 1000000 characters")
def huge_result_is_cut_and_says_so(seen: Seen) -> None:
    (content,) = seen.contents
    assert 60_000 < len(content) <= agents.megabyte.max_output_chars == 65_536
    assert "1000000 characters" in content


@means(
    "P35b",
    "history",
    "role=tool content is str; image only in a later role=user message",
)
def image_stands_in_a_user_message(seen: Seen) -> None:
    roles = [each["role"] for each in seen.view]
    assert roles[-3:] == ["assistant", "tool", "user"]
    assert all(isinstance(each["content"], str) for each in seen.view[:-1] if each["content"])
    parts = [part for part in seen.view[-1]["content"] if part["type"] == "image_url"]
    (image,) = parts
    assert image["image_url"]["url"].startswith("data:image/png;base64,")


@means("P36a", "tool_message", "1")
def coroutine_is_awaited(seen: Seen) -> None:
    assert seen.contents == ["1"]


@means("P38c", "note", "run continues; tool not re-run unless idempotent=True")
def death_is_repeated_only_where_that_is_safe(seen: Seen) -> None:
    assert len(seen.entries) == 1
    turn = calls(("process_death_once", {}))
    safe = submit(seen.stage, seen.case, (turn,), n=1)
    assert safe.result.stop_reason is StopReason.COMPLETED
    assert [each.tool for each in safe.entries] == ["process_death_once"] * 2
    assert safe.contents == ["alive"]


@means("P39a", "note", "step closes in ~1 s")
def hanging_tool_is_closed_in_time(seen: Seen) -> None:
    times = {each.type: each.at for each in seen.events if each.call == "0.0"}
    assert 0.9 < times["call.finished"] - times["call.started"] < 4


@means("P40a", "history", "tool messages a, b")
def results_stand_in_call_order(seen: Seen) -> None:
    assert ids_of(seen) == ["a", "b"]
    assert seen.contents == ["1", "pong"]
    finished = [each.call for each in seen.events if each.type == "call.finished"]
    assert finished == ["0.1", "0.0"]


@means("P41a", "note", "#2 never starts; #1's later result ignored")
def cancelled_calls_stay_cancelled(seen: Seen) -> None:
    before = seen.run.messages()
    seen.stage.fleet.wait_for(lambda: "0.1 leave answer_late" in seen.ledger)
    # Whoever held the call has written what it wanted to, once it takes another.
    turn = calls(("slow", {"n": 1}), ("slow", {"n": 2}))
    others = [submit(seen.stage, seen.case, (turn,), agent=agents.plain, n=n) for n in (1, 2, 3)]
    assert all(each.result.ok for each in others)
    assert seen.run.messages() == before
    assert "too late" not in json.dumps(seen.run.messages())
    assert [(each.index, each.tool) for each in seen.entries] == [(0, "ping"), (1, "answer_late")]


@means("P42a", "history", "assistant(2 calls), tool, tool, user")
def message_stands_behind_the_block(seen: Seen) -> None:
    for messages in (seen.view, seen.run.messages()[:-1]):
        goal, turn, *results, said = messages
        assert goal["content"] == seen.goal
        assert [call["id"] for call in turn["tool_calls"]] == ["c0", "c1"]
        assert [(each["role"], each["content"]) for each in results] == [
            ("tool", "1"),
            ("tool", "2"),
        ]
        assert said == {"role": "user", "content": "stop after this"}
    assert seen.run.messages()[-1] == {"role": "assistant", "content": "done"}


@means("P46c", "history", "request 2 has tool_choice auto or none")
def forced_choice_holds_for_the_first_step(seen: Seen) -> None:
    assert seen.bodies[0]["tool_choice"] == "required"
    assert seen.bodies[1]["tool_choice"] in ("auto", "none")


# --- transport, safety, queue, streaming ----------------------------------------------------------


@means("P50a", "note", "second request ≥ 2 s later; worker slot free meanwhile")
def waiting_runs_hold_no_slot(seen: Seen) -> None:
    first, second = seen.calls
    assert 2.0 <= second.at - first.at < 10.0
    at: dict[str, list[float]] = {}
    for call in seen.server.requests:
        at.setdefault(goal_of(call.body), []).append(call.at)
    waits = [times for goal, times in at.items() if goal.startswith("case P50a,")]
    held, (passed,) = (
        [times for times in waits if len(times) == 2],
        [times for times in waits if len(times) == 1],
    )
    assert len(held) == STEPS_SLOTS
    assert max(first for first, _ in held) < passed[0] < min(second for _, second in held)


@means("P52a", "note", "ends at ~1 s")
def dripping_body_ends_with_the_attempt(seen: Seen) -> None:
    exchanges = [each for entry in seen.run.trace() for each in entry.get("exchanges", ())]
    assert len(exchanges) == 2
    assert all(950 < each["duration_ms"] < 3_000 for each in exchanges)


@means(
    "P54a",
    "history",
    "request body has none of tools/tool_choice/parallel_tool_calls",
)
def request_without_tools_has_no_word_of_them(seen: Seen) -> None:
    (body,) = seen.bodies
    assert not body.keys() & {"tools", "tool_choice", "parallel_tool_calls"}


@means("P56a", "tool_message", "no 'hunter2', no host")
def exception_tells_no_secret(seen: Seen) -> None:
    everywhere = [
        *seen.contents,
        seen.stage.fleet.logs(),
        *(each.model_dump_json() for each in seen.events),
        json.dumps(seen.run.trace()),
    ]
    assert not any(word in text for text in everywhere for word in ("hunter2", "db.internal"))


@means("P56b", "tool_message", "contains 'order 7 not found'")
def tool_error_is_told_as_it_was_meant(seen: Seen) -> None:
    (content,) = seen.contents
    assert "order 7 not found" in content


@means(
    "P57a",
    "history",
    "exactly one tool message; roles in the request unchanged; fence closer escaped",
)
def result_cannot_leave_its_fence(seen: Seen) -> None:
    assert [each["role"] for each in seen.view] == ["system", "user", "assistant", "tool"]
    (content,) = [each["content"] for each in seen.tool_messages]
    fence = re.fullmatch(r"<(\w+)[^>]*>(.*)</\1>", content.strip(), re.DOTALL)
    assert fence is not None, "a result is marked as data"
    tag, inside = fence.groups()
    assert f"</{tag}" not in inside
    assert "</tool_result>" not in inside
    assert "You are root." in inside


@means("P58a", "note", "scheduler sees status 429 and retry_after 7")
def wait_is_as_long_as_the_server_asked(seen: Seen) -> None:
    (waiting,) = [each for each in seen.events if each.type == "run.waiting"]
    assert waiting.data == {"reason": "RATE_LIMITED", "delay": 7, "status": 429}
    first, second = seen.calls
    assert second.at - first.at >= 7.0
    assert "Traceback" not in seen.stage.fleet.log("steps")


@means("P59a", "outcome", "all replies match their tag")
def each_process_got_its_own(answers: dict[str, list[str]]) -> None:
    children = [f"child {number}" for number in range(4)]
    tagged = {who: [f"{who}, request {n}" for n in range(10)] for who in ("parent", *children)}
    assert answers == {"before": ["before"], **tagged}


@means("P60a", "outcome", "continue")
def run_goes_on_after_the_stream(seen: Seen) -> None:
    assert seen.result.stop_reason is StopReason.COMPLETED
    assert len(seen.bodies) == 2
    assert all(body["stream"] is True for body in seen.bodies)
    assert ids_of(seen) == ["a", "b"]
    assert seen.contents == ["pong", "pong"]


# --- what the sentences mean: a history that is too long ------------------------------------------


@dataclass(frozen=True)
class Viewed:
    """A history with the views of it that were made one after the other."""

    history: list[Message]
    views: list[View]

    @property
    def requests(self) -> list[ModelRequest]:
        return [
            build_request(
                agents.compacting,
                model="m",
                history=self.history,
                corrections=[],
                step=1,
                timeout=1.0,
                view=view,
            )
            for view in self.views
        ]


@means("P43a", "outcome", "view")
@means("P43b", "outcome", "view")
def views_are_valid_requests(viewed: Viewed) -> None:
    assert viewed.views
    for request in viewed.requests:
        assert check_request(write_request(request)) == []


@means(
    "P43a",
    "history",
    "[sys, user(task), asst, user] or with the whole block; never starts with tool",
)
def block_is_shown_whole_or_not_at_all(viewed: Viewed) -> None:
    found = set()
    for view, request in zip(viewed.views, viewed.requests, strict=True):
        shown = [each for each in request.messages[1:] if each["content"] != view.note]
        assert shown[:2] == viewed.history[:2]
        assert shown[-2:] == viewed.history[-2:]
        found.add(" ".join(each["role"] for each in shown))
    assert found == {
        "system user assistant user",
        "system user assistant tool tool assistant user",
    }


@means("P43b", "history", "system byte-identical; nothing between the compactions lost")
def second_view_goes_on_where_the_first_ended(viewed: Viewed) -> None:
    first, second = viewed.views
    assert 0 < first.dropped < second.dropped < len(viewed.history)
    systems = {json.dumps(request.messages[0]) for request in viewed.requests}
    assert systems == {json.dumps({"role": "system", "content": agents.compacting.instructions})}
    last = viewed.requests[1].messages
    told = re.search(r"ping (\d+)", second.note)
    assert told is not None
    called = sum(len(each.get("tool_calls", ())) for each in viewed.history)
    assert int(told[1]) + sum(len(each.get("tool_calls", ())) for each in last) == called
    assert list(last[3:])[-2:] == viewed.history[-2:]
    assert len(last) == 3 + len(viewed.history) - second.dropped


@means("P53a", "history", "request 2 smaller than request 1, still valid")
def second_request_is_smaller(seen: Seen) -> None:
    first, second = seen.bodies
    assert len(json.dumps(second)) < len(json.dumps(first))
    assert check_request(second) == []
    assert first["messages"][:2] == second["messages"][:2]


# --- which test runs which line -------------------------------------------------------------------

REGISTRATIONS = [
    each.id for each in CASES.values() if "registration" in each.expected and each.id != "P31f"
]
TOOL_RESULTS = [
    each.id for each in CASES.values() if each.tool_definition and "tool_result" in each.expected
]
RUNS = [
    each.id
    for each in CASES.values()
    if each.replies is not None
    and each.id not in {"P12a", "P40a", "P45a", "P48a", "P50a", "P53a"} | LATER
]
BROKEN_REPLIES: dict[str, Reply] = {
    "P52b": {"status": 200, "text": "x" * 20, "cut_body": True},
    "P52c": {"reset": True},
}
DRIP: Reply = {**final("x" * 500), "drip": 0.2}
RATE_LIMITED_FOR_7_S: Reply = {
    "status": 429,
    "headers": {"retry-after": "7"},
    "json": {"error": {"message": "slow down", "code": "rate_limit_exceeded"}},
}

WANT_7_S = "P58a"
CHARGE = ("charge", {"account_id": 1, "cents": 5})


def plan(case: Case) -> tuple[Reply, ...] | None:
    """The replies of a case whose run can be started beside all others; None for any other."""
    if case.id in RUNS:
        return case.replies
    if case.id in TOOL_RESULTS and case.id in WRITTEN:
        return (calls((WRITTEN[case.id].thing.name, {})),)
    if case.id in BROKEN_REPLIES:
        return (BROKEN_REPLIES[case.id], final("done"))
    if case.id == WANT_7_S:
        return (RATE_LIMITED_FOR_7_S, final("done"))
    return None


def with_cases(*ids: str) -> pytest.MarkDecorator:
    """The lines that a test covers: it runs once for each."""
    return pytest.mark.parametrize("case", [pytest.param(CASES[each], id=each) for each in ids])


@pytest.fixture(scope="module")
def started(stage: Stage, request: pytest.FixtureRequest) -> dict[str, Seen]:
    """The runs of all chosen cases, which go on beside each other while tests await their own."""
    chosen: list[Case] = []
    for item in request.session.items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            case = item.callspec.params.get("case")
            chosen += [case] if isinstance(case, Case) else []
    # The one that waits longest first.
    chosen.sort(key=lambda case: case.id != WANT_7_S)
    planned = [(case, plan(case)) for case in chosen]
    return {
        case.id: submit(stage, case, replies) for case, replies in planned if replies is not None
    }


# --- tests ----------------------------------------------------------------------------------------


def covered() -> Counter[str]:
    """How many tests of this module run each line."""
    return Counter(
        param.id
        for name, test in globals().items()
        if name.startswith("test_")
        for mark in getattr(test, "pytestmark", ())
        if mark.name == "parametrize" and mark.args[0] == "case"
        for param in mark.args[1]
    )


def test_every_line_is_covered_by_exactly_one_test() -> None:
    assert covered() == Counter(CASES.keys() - LATER)
    assert CASES.keys() > LATER


def test_every_sentence_has_a_predicate_and_every_predicate_a_sentence() -> None:
    words = ("history", "note", "tool_message", "schema", "outcome")
    sentences = {
        (each.id, key, each.expected[key])
        for each in CASES.values()
        if each.id not in LATER
        for key in words
        if key in each.expected
    }
    assert sentences == SENTENCES.keys()


def test_every_definition_is_written_as_the_line_says() -> None:
    given = {
        each.id: each.tool_definition
        for each in CASES.values()
        if each.tool_definition is not None and each.id not in LATER
    }
    assert {case_id: each.text for case_id, each in WRITTEN.items()} == given


def test_a_key_or_a_sentence_that_nobody_knows_fails(stage: Stage, tmp_path: Path) -> None:
    case = Case(id="X", expected={"mood": "good"})
    seen = submit(stage, case, (final("done"),))
    with pytest.raises(AssertionError, match="no check for 'mood'"):
        check_run(seen)
    seen.case = replace(case, expected={"history": "is long"})
    with pytest.raises(AssertionError, match="no predicate for history 'is long'"):
        check_run(seen)
    seen.case = replace(case, expected={"tool_messages": [{"ok": True}]})
    with pytest.raises(AssertionError):
        check_run(seen)
    (tmp_path / "cases.jsonl").write_text('{"id": "X", "mood": "good", "expected": {}}\n')
    with pytest.raises(ValueError, match="nothing reads mood"):
        load_cases(tmp_path / "cases.jsonl")


@with_cases(*REGISTRATIONS)
def test_a_tool_is_registered_or_refused(case: Case) -> None:
    expected = dict(case.expected)
    define = WRITTEN[case.id].thing
    subject: object
    match expected.pop("registration"):
        case "refused with a clear error":
            with pytest.raises(ToolDefinitionError) as caught:
                define()
            subject = caught.value
            assert caught.value.code == expected.pop("about")
            assert len(str(caught.value).splitlines()) == 1
        case "accepted":
            subject = define()
        case other:
            raise AssertionError(f"no check for registration {other!r}")
    for key, sentence in expected.items():
        check_sentence(case, key, sentence, subject)


@with_cases(*RUNS)
def test_a_run_ends_as_the_line_says(case: Case, started: dict[str, Seen]) -> None:
    check_run(started[case.id])


@with_cases(*TOOL_RESULTS)
def test_what_a_tool_does_reaches_the_model(case: Case, started: dict[str, Seen]) -> None:
    check_run(started[case.id])


@with_cases(*BROKEN_REPLIES)
def test_a_reply_that_breaks_off_is_asked_for_again(case: Case, started: dict[str, Seen]) -> None:
    check_run(started[case.id])


@with_cases("P31f")
def test_arguments_cross_the_queue_as_what_they_are(case: Case, stage: Stage) -> None:
    given = {"c": "red", "m": "x", "t": "2020-01-02T03:04:05Z", "d": "1.10"}
    seen = submit(stage, case, (calls(("typed_arguments", given)),))

    assert seen.result.ok
    assert case.expected.keys() == {"registration", "note"}
    assert case.expected["registration"] == "accepted"
    offered = [each["function"]["name"] for each in seen.bodies[0]["tools"]]
    assert "typed_arguments" in offered
    check_sentence(case, "note", case.expected["note"], seen)


@with_cases("P39a")
def test_a_tool_that_hangs_is_a_timeout(case: Case, stage: Stage) -> None:
    check_run(submit(stage, case, (calls(("hang", {})),)))


@with_cases("P40a")
def test_results_stand_in_call_order_when_the_first_is_slow(case: Case, stage: Stage) -> None:
    assert case.replies is not None
    check_run(submit(stage, case, case.replies))


@with_cases("P41a")
def test_a_cancel_in_the_middle_of_a_step_answers_every_call(case: Case, stage: Stage) -> None:
    turn = calls(("ping", {}), ("answer_late", {}), ("charge", {"account_id": 1, "cents": 5}))
    seen = submit(stage, case, (turn,), agent=agents.one_call_at_a_time)
    stage.fleet.wait_for(lambda: "0.1 enter answer_late {}" in seen.ledger)

    seen.run.cancel()

    check_run(seen)


@with_cases("P42a")
def test_a_message_to_a_running_run_stands_behind_the_block(case: Case, stage: Stage) -> None:
    turn = calls(("wait_until_told", {"n": 1}), ("wait_until_told", {"n": 2}))
    seen = submit(stage, case, (turn,), agent=agents.attentive)
    stage.fleet.wait_for(lambda: len(seen.ledger) == 2)

    seen.run.send("stop after this")
    stage.fleet.tell(seen.run.id)

    check_run(seen)


@with_cases("P44a")
def test_a_tool_whose_worker_was_killed_is_not_run_again(case: Case, fragile_stage: Stage) -> None:
    seen = submit(fragile_stage, case, (calls(CHARGE),))
    check_run(seen)
    workers = fragile_stage.fleet.workers
    ended = [name for name, process in workers.items() if process.poll() is not None]
    assert len(ended) == 1


@with_cases("P44b")
def test_a_message_that_comes_again_runs_nothing_again(case: Case, stage: Stage) -> None:
    for n, call in enumerate([CHARGE, ("slow", {"n": 1})]):
        seen = submit(stage, case, (calls(call),), n=n)
        again = CallTools(seen.run.id, 0, (0, 0, 0))
        stage.fleet.wait_for(partial(getattr, seen, "ledger"))
        publish(stage.client._app, stage.client.store, again)
        check_run(seen)
        publish(stage.client._app, stage.client.store, again)
        # Taken after those, by whichever process.
        assert stage.client.ping("tools") is not None
        check_run(seen)


@with_cases("P50a")
def test_a_run_that_waits_for_a_server_holds_no_slot(case: Case, stage: Stage) -> None:
    assert case.replies is not None
    waiting = [submit(stage, case, case.replies, n=n) for n in range(STEPS_SLOTS)]
    for seen in waiting:
        stage.fleet.wait_for(partial(getattr, seen, "calls"))
    passing = submit(stage, case, (final("done"),), n=STEPS_SLOTS)
    assert passing.result.ok
    for seen in waiting:
        assert seen.result.ok
    for seen in waiting:
        check_run(seen)


@with_cases("P52a")
def test_a_body_that_drips_ends_with_its_attempt(case: Case, hasty_stage: Stage) -> None:
    check_run(submit(hasty_stage, case, (DRIP,) * 3, agent=agents.two_attempts))


@with_cases("P54a")
def test_an_agent_without_tools_says_nothing_of_tools(case: Case, stage: Stage) -> None:
    check_run(submit(stage, case, (final("done"),), agent=agents.toolless))


@with_cases("P59a")
def test_a_forked_process_is_answered_what_it_asked(case: Case) -> None:
    def echo(body: dict[str, Any]) -> Reply:
        return {**final(goal_of(body)), "delay": 0.01}

    with ModelServer(echo) as server:
        done = subprocess.run(
            [sys.executable, HERE / "fork_client.py", server.url],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert server.violations == []
    assert case.expected.keys() == {"outcome"}
    check_sentence(case, "outcome", case.expected["outcome"], json.loads(done.stdout))


@with_cases(WANT_7_S)
def test_a_wait_is_parked_and_as_long_as_asked(case: Case, started: dict[str, Seen]) -> None:
    check_run(started[case.id])


@with_cases("P12a")
def test_reasoning_is_sent_back_where_the_profile_says(
    case: Case, stage: Stage, deepseek_server: ModelServer
) -> None:
    assert case.replies is not None
    check_run(submit(stage, case, case.replies, agent=agents.plain))
    check_run(submit(stage, case, case.replies, agent=agents.deepseek, server=deepseek_server))


@with_cases("P45a")
def test_a_call_waits_for_an_approval_while_its_sibling_finishes(case: Case, stage: Stage) -> None:
    assert case.replies is not None
    expected = dict(case.expected)
    status = expected.pop("status")
    seen = submit(stage, case, case.replies, agent=agents.guarded)
    stage.fleet.wait_for(lambda: seen.run.status() == status)
    assert len(seen.entries) == expected["tool_executions"]
    assert [each.call_id for each in seen.run.approvals()] == ["0.1"]

    seen.run.deny("0.1", "not this month")

    seen.case = replace(case, expected=expected)
    check_run(seen)


@with_cases("P45b")
def test_of_two_approvals_at_once_one_is_told_of_the_other(case: Case, stage: Stage) -> None:
    turn = calls(("ping", {}), CHARGE)
    for n in range(10):
        seen = submit(stage, case, (turn,), agent=agents.guarded, n=n)
        stage.fleet.wait_for(seen.run.approvals)
        start = threading.Barrier(2)

        def approve(by: str, run: Run = seen.run, start: threading.Barrier = start) -> str:
            start.wait(10)
            try:
                run.approve("0.1", by=by)
            except AlreadyDecided as error:
                return str(error)
            return ""

        with ThreadPoolExecutor() as pool:
            told = sorted(pool.map(approve, ("u1", "u2")))
        assert told[0] == ""
        assert re.match(r"call 0\.1 was already approved by u[12]; nothing was changed", told[1])
        check_run(seen)


@with_cases("P48a")
def test_a_final_answer_tool_ends_the_run_beside_its_sibling(case: Case, stage: Stage) -> None:
    assert case.replies is not None
    check_run(submit(stage, case, case.replies, agent=agents.final_tool))


@with_cases("P60a")
def test_a_stream_with_one_index_for_two_calls_is_two_calls(case: Case, stage: Stage) -> None:
    assert case.stream is not None
    reply: Reply = {"status": 200, "stream": list(case.stream)}
    check_run(submit(stage, case, (reply,), agent=agents.streaming))


def turn_with(*results: str, text: str | None = None) -> list[Message]:
    """A block: calls of `ping` with some text beside them, and what they brought."""
    proposed = tuple(ProposedCall(f"c{n}", "ping", "{}") for n in range(len(results)))
    turn = assistant_message(ToolCalls(proposed, text, Usage(), ""))
    return [turn, *(tool_message(f"c{n}", each) for n, each in enumerate(results))]


@with_cases("P43a")
def test_a_view_that_ends_inside_of_a_block_is_none(case: Case) -> None:
    history = [
        {"role": "system", "content": "You help."},
        goal_message("task"),
        *turn_with("a" * 4_000, "b" * 4_000, text="t" * 3_000),
        answer_message("Almost."),
        goal_message("And now?"),
    ]
    least = size_of([*history[:2], *history[-2:]]) + NOTE_BYTES + MESSAGE_BYTES
    limits = range(least, size_of(history) + 100, 50)
    assert size_of(history[-4:]) in range(min(limits), max(limits))
    views = [fit_view(history, View(goal=1), limit=each) for each in limits]
    views = [
        replace(each, note=describe_dropped(history, each)) if each.dropped else each
        for each in views
    ]
    check_all(case, Viewed(history, views))


@with_cases("P43b")
def test_two_compactions_lose_nothing_between_them(case: Case) -> None:
    history = [goal_message("task")]
    view, views = View(), []
    for length in (20, 40):
        while len(history) < length:
            history += turn_with("x" * 350)
        view = fit_view(history, view, limit=size_of(history[:12]))
        view = replace(view, note=describe_dropped(history, view))
        views.append(view)
    check_all(case, Viewed(history, views))


def check_all(case: Case, subject: Viewed) -> None:
    for key, sentence in case.expected.items():
        check_sentence(case, key, sentence, subject)


@with_cases("P53a")
def test_a_request_that_is_too_long_is_made_shorter_once(case: Case, stage: Stage) -> None:
    assert case.replies is not None
    goal, store = f"case {case.id}", stage.client.store
    stage.script(goal, case.replies)
    store.create_run(
        run_id="run-of-P53a",
        agent=case.agent.name,
        messages=[goal_message(goal), *turn_with("x" * 20_000), *turn_with("pong")],
        limits=case.agent.limits,
    )
    run = stage.client.get("run-of-P53a")
    publish(stage.client._app, store, NextStep(run.id, 0))
    check_run(Seen(stage, case, case.agent, goal, run, stage.model))


def test_no_request_was_ever_refused(stage: Stage) -> None:
    assert stage.model.violations == []
