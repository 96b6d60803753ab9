"""A run that gets nowhere is told so, and ended if that changes nothing; others never are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from runner import Agent, Limits, StopReason, ToolError, tool
from runner.guards import Progress, look_at_progress
from runner.loop import Finish
from runner.models import ModelReply, ProposedCall
from runner.store import RunStore
from runner.testing import ScriptedModel, calls
from support.loops import RUN, Loops, check_requests, drive, open_loops

Message = dict[str, Any]
Call = tuple[str, str]

GOAL = {"role": "user", "content": "go"}
CLOSED = '{"ok":false,"error":{"type":"CLOSED","message":"the till is closed"}}'
LOOK = ("look", '{"at":1}')
ASK = ("ask", '{"at":1}')


def block(*made: tuple[Call, str]) -> list[Message]:
    """A turn with these calls and what came of each."""
    entries = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, ((name, arguments), _) in enumerate(made)
    ]
    results = [
        {"role": "tool", "tool_call_id": f"c{n}", "content": content}
        for n, (_, content) in enumerate(made)
    ]
    return [{"role": "assistant", "content": None, "tool_calls": entries}, *results]


def look_at(*blocks: list[Message], most: int = 3) -> Progress:
    return look_at_progress([GOAL, *(message for each in blocks for message in each)], most)


def proposed(*made: Call) -> list[ProposedCall]:
    return [ProposedCall(f"x{n}", *each) for n, each in enumerate(made)]


# --- what the history says ---------------------------------------------------------------------


def test_a_history_without_calls_has_no_notice() -> None:
    progress = look_at()
    assert progress == Progress()
    assert progress.notice(1) is None
    assert not progress.repeats(proposed(LOOK), 1)


@pytest.mark.parametrize(("times", "told"), [(1, False), (2, False), (3, True), (4, True)])
def test_the_same_call_with_the_same_result_is_told_from_the_limit_on(
    times: int, told: bool
) -> None:
    progress = look_at(*[block((LOOK, "nothing"))] * times)
    assert progress.same_calls == times
    notice = progress.notice(3)
    assert (notice is not None) == told
    assert progress.repeats(proposed(LOOK), 3) == told
    assert notice is None or f"{times} times" in notice


def test_two_turns_that_alternate_get_nowhere_either() -> None:
    one, other = block((LOOK, "nothing")), block((ASK, "nobody"))
    assert look_at(one, other, one, other).notice(3) is None
    progress = look_at(one, other, one, other, one)
    assert progress.same_calls == 3
    assert progress.repeats(proposed(LOOK), 3)
    assert not progress.repeats(proposed(ASK), 3), "it comes for the third time"
    again = look_at(one, other, one, other, one, other)
    assert again.repeats(proposed(LOOK), 3)
    assert again.repeats(proposed(ASK), 3)


def test_a_look_that_comes_again_between_steps_that_move_is_told_and_not_ended() -> None:
    edits = [block((ASK, f"line {n} written")) for n in range(3)]
    one = block((LOOK, "nothing"))
    assert look_at(one, edits[0], one, edits[1], one).notice(3) is not None
    assert not look_at(one, edits[0], one, edits[1], one, edits[2]).repeats(proposed(LOOK), 3)


def test_a_poll_whose_results_change_is_no_repetition() -> None:
    progress = look_at(*[block((LOOK, f"{done} of 9 done")) for done in range(9)])
    assert progress.same_calls == 1
    assert progress.notice(3) is None


def test_the_order_of_keys_and_of_calls_makes_no_difference() -> None:
    forward = block((("look", '{"a": 1, "b": 2}'), "x"), (ASK, "y"))
    back = block((ASK, "y"), (("look", '{"b":2,"a":1}'), "x"))
    progress = look_at(forward, back, forward)
    assert progress.same_calls == 3
    assert progress.repeats(proposed(ASK, ("look", '{"b":2,"a":1}')), 3)


def test_a_call_more_or_fewer_is_another_turn() -> None:
    progress = look_at(*[block((LOOK, "nothing"))] * 3)
    assert not progress.repeats(proposed(LOOK, ASK), 3)
    assert not progress.repeats(proposed(ASK), 3)
    assert not progress.repeats(proposed(("look", '{"at":2}')), 3)


def test_the_same_error_after_other_arguments_is_told() -> None:
    tries = [block((("look", json.dumps({"at": n})), CLOSED)) for n in range(3)]
    progress = look_at(*tries)
    assert (progress.same_calls, progress.same_errors) == (1, 3)
    notice = progress.notice(3)
    assert notice is not None
    assert "same error" in notice
    assert not progress.repeats(proposed(("look", '{"at":9}')), 3)


@pytest.mark.parametrize(
    "between",
    [
        block((LOOK, "it worked")),
        block((ASK, CLOSED)),
        block((LOOK, CLOSED.replace("till", "shop"))),
        block((LOOK, CLOSED), (ASK, "it worked")),
    ],
    ids=["a success", "another tool", "another error", "a sibling that worked"],
)
def test_errors_in_a_row_are_counted_and_no_others(between: list[Message]) -> None:
    failed = block((LOOK, CLOSED))
    assert look_at(failed, failed, between, failed).same_errors == 1


def test_results_that_merely_say_not_ok_are_no_errors() -> None:
    sold_out = '{"ok":false,"reason":"sold out"}'
    tries = [block((("look", json.dumps({"at": n})), sold_out)) for n in range(5)]
    progress = look_at(*tries)
    assert progress.same_errors == 0
    assert progress.notice(3) is None


def test_a_message_of_the_users_starts_the_count_anew() -> None:
    repeated = block((LOOK, CLOSED))
    said = [{"role": "user", "content": "the till is open now"}]
    progress = look_at(repeated, repeated, repeated, said, repeated)
    assert (progress.same_calls, progress.same_errors) == (1, 1)


def test_the_message_that_shows_images_does_not_start_the_count_anew() -> None:
    shown = {"role": "user", "content": [{"type": "text", "text": "Images returned by call 0.0"}]}
    repeated = [*block((LOOK, "[image 1]")), shown]
    assert look_at(repeated, repeated, repeated).same_calls == 3


def test_only_the_last_turns_are_looked_at() -> None:
    others = [block((("look", json.dumps({"at": n})), "x")) for n in range(9)]
    progress = look_at(block((ASK, "y")), block((ASK, "y")), *others, block((ASK, "y")))
    assert progress.same_calls == 1


@pytest.mark.parametrize("text", ["not JSON", "", '{"n":' + "9" * 5000 + "}", "[" * 100_000])
def test_arguments_that_cannot_be_read_are_compared_as_text(text: str) -> None:
    progress = look_at(*[block((("look", text), CLOSED))] * 3)
    assert progress.same_calls == 3
    assert progress.repeats(proposed(("look", text)), 3)
    assert not progress.repeats(proposed(LOOK), 3)


# --- what the loop makes of it -----------------------------------------------------------------


@tool(idempotent=True)
def look(at: int) -> str:
    """Look somewhere."""
    return "nothing"


@tool(idempotent=True)
def ask(at: int) -> str:
    """Ask somebody."""
    return "nobody"


@tool
def open_till(at: int) -> str:
    """Open a till."""
    raise ToolError("the till is closed", type="CLOSED")


polls: list[int] = []


@tool(idempotent=True)
def poll() -> str:
    """See how far it is."""
    polls.append(1)
    return f"{len(polls)} of 9 done"


@pytest.fixture
def loops(store: RunStore, no_leaked_keys: None) -> Iterator[Loops]:
    polls.clear()
    yield from open_loops(store)


def agent_of(model: ScriptedModel, **limits: Any) -> Agent:
    return Agent(name="a", model=model, tools=[look, ask, open_till, poll], limits=Limits(**limits))


def turn(name: str, at: int = 1) -> ModelReply:
    return calls((name, {"at": at}))


def told(model: ScriptedModel) -> list[bool]:
    """For each request, whether a notice of the runtime's ends it."""
    last = [request.messages[-1] for request in model.requests]
    return [each["role"] == "user" and each["content"] != "go" for each in last]


def test_the_same_call_again_and_again_is_told_once_and_then_ends_the_run(loops: Loops) -> None:
    model = ScriptedModel([turn("look")] * 4)
    assert drive(loops.start(agent_of(model))) == Finish(RUN, StopReason.REPEATED_ERROR)
    assert told(model) == [False, False, False, True]
    assert (loops.result.limit, loops.result.steps) == ("max_repeats", 4)
    assert loops.error_type == "REPEATED_ERROR"
    assert loops.contents() == ["nothing"] * 3
    assert all(each["content"] == "go" for each in loops.store.read_messages(RUN)[:1])
    check_requests(loops.store, model.requests)


def test_the_notice_is_seen_but_never_stored_and_a_model_that_heeds_it_goes_on(
    loops: Loops,
) -> None:
    model = ScriptedModel([turn("look"), turn("look"), turn("look"), turn("ask"), "done"])
    assert drive(loops.start(agent_of(model))) == Finish(RUN, StopReason.COMPLETED)
    assert told(model) == [False, False, False, True, False]
    users = [each for each in loops.store.read_messages(RUN) if each["role"] == "user"]
    assert [each["content"] for each in users] == ["go"]
    check_requests(loops.store, model.requests)


def test_two_calls_that_alternate_end_the_run_too(loops: Loops) -> None:
    model = ScriptedModel([turn(name) for name in ("look", "ask") * 6])
    assert drive(loops.start(agent_of(model))) == Finish(RUN, StopReason.REPEATED_ERROR)
    assert loops.result.limit == "max_repeats"
    assert told(model) == [False] * 5 + [True] * 2
    assert loops.contents() == ["nothing", "nobody"] * 3
    check_requests(loops.store, model.requests)


def test_the_same_error_after_other_arguments_ends_the_run(loops: Loops) -> None:
    model = ScriptedModel([turn("open_till", at) for at in range(5)])
    assert drive(loops.start(agent_of(model))) == Finish(RUN, StopReason.REPEATED_ERROR)
    assert told(model) == [False, False, False, True]
    assert (loops.result.limit, len(loops.contents())) == ("max_repeats", 4)
    check_requests(loops.store, model.requests)


def test_a_poll_may_go_on_until_the_last_step(loops: Loops) -> None:
    model = ScriptedModel([*[calls(("poll", {}))] * 9, "done"])
    assert drive(loops.start(agent_of(model))) == Finish(RUN, StopReason.COMPLETED)
    assert not any(told(model))


def test_an_agent_says_how_often_is_too_often(loops: Loops) -> None:
    model = ScriptedModel([turn("look")] * 3)
    loop = loops.start(agent_of(model, max_repeats=2))
    assert drive(loop) == Finish(RUN, StopReason.REPEATED_ERROR)
    assert told(model) == [False, False, True]


def test_arguments_that_are_no_json_at_all_do_not_end_the_run(loops: Loops) -> None:
    broken = ProposedCall("c0", "look", "at=1")
    first = calls(("look", {}))
    model = ScriptedModel([type(first)((broken,), None, first.usage, ""), "done"])
    assert drive(loops.start(agent_of(model))) == Finish(RUN, StopReason.COMPLETED)
