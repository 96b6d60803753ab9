"""A replay gives the same history as the recorded run, or names the place where it doesn't."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conftest import MakeStore
from runner import (
    Agent,
    CeleriacError,
    Evidence,
    Image,
    InvalidInput,
    Limits,
    ModelError,
    Price,
    Result,
    Retry,
    StopReason,
    ToolError,
    tool,
)
from runner import keys as redis_keys
from runner.agents import Agents
from runner.loop import CallTools, Loop, NextStep, Wait, cancel_run
from runner.models import RunErrorType, ToolCalls, ToolResult
from runner.reader import read_reply
from runner.recording import Recording, load_recording, read_recording, save_recording
from runner.redact import HIDDEN
from runner.replay import Difference, Replayed
from runner.settings import Settings
from runner.store import Outcome
from runner.testing import ScriptedModel, calls, replay
from support.loops import RUN, Loops, drive, open_loops

SECRET = "sk-4711"
PIXEL = Image(b"\x89PNG\r\n", "image/png")

ran: list[str] = []
"""The tools that ran, in order: a replay adds nothing."""


@tool(idempotent=True)
def echo(text: str) -> Result[str]:
    """Say it again."""
    ran.append(text)
    return Result(text, evidence=[Evidence(source="echo", text=text)])


@tool
def pay(cents: int) -> str:
    """Pay."""
    ran.append(f"pay {cents}")
    return "paid"


@tool(timeout=0.05, idempotent=True, attempts=2)
def sleepy(ms: int) -> str:
    """Sleep."""
    ran.append("sleepy")
    ends_at = time.monotonic() + ms / 1000
    while time.monotonic() < ends_at:
        time.sleep(0.005)
    return "awake"


@tool
def give_up() -> None:
    """End the run."""
    raise ToolError("closed", type="CLOSED", fatal=True)


@tool(final=True)
def answer_with(text: str) -> dict[str, str]:
    """Give the answer."""
    return {"text": text}


@tool(idempotent=True)
def look(n: int) -> list[Any]:
    """Look at images."""
    return ["seen", *[PIXEL] * n]


@tool(redact={"token"})
def log_in(token: str, user: str) -> dict[str, str]:
    """Log a user in."""
    return {"token": f"{token}-new", "user": user}


TOOLS = [echo, pay, sleepy, give_up, look, log_in]


def say(*texts: str) -> ToolCalls:
    return calls(*(("echo", {"text": text}) for text in texts))


def overloaded(type: RunErrorType = RunErrorType.RATE_LIMITED) -> ModelError:
    return ModelError("busy", type=type, retryable=True, status=429)


@pytest.fixture
def loops(make_store: MakeStore, no_leaked_keys: None) -> Iterator[Loops]:
    """Whatever run a test makes on these is replayed when the test ends."""
    ran.clear()
    yield from open_loops(make_store())


def agent_of(*replies: Any, **options: Any) -> Agent:
    given: dict[str, Any] = {"model": ScriptedModel(replies), "tools": TOOLS}
    given["model_retry"] = Retry(max_attempts=3, initial_delay=0.0)
    return Agent(name="a", **(given | options))


def go(loops: Loops, agent: Agent, *, limits: Limits | None = None) -> Loop:
    """Drive a run as far as it goes by itself."""
    loop = loops.start(agent, limits=limits)
    drive(loop)
    return loop


def replayed(loops: Loops) -> Replayed:
    before = list(ran)
    found = replay(read_recording(loops.store, RUN), loops.agents[RUN])
    assert ran == before, "a tool has run"
    return found


def check(loops: Loops, stop_reason: StopReason | None) -> None:
    """The run has this end, and its replay is the same."""
    assert loops.record.stop_reason == stop_reason
    found = replayed(loops)
    assert (found.differences, found.hidden, found.changed) == ((), (), False)


# --- each kind of run ---------------------------------------------------------------------------


def test_a_run_with_calls_and_an_answer_comes_out_the_same(loops: Loops) -> None:
    go(loops, agent_of(say("a", "b"), say("c"), "Done."))
    check(loops, StopReason.COMPLETED)


def test_results_that_came_in_another_order_than_they_were_called_come_out_the_same(
    loops: Loops,
) -> None:
    loop = loops.start(agent_of(say("a", "b", "c"), "Done."))
    assert loop.advance(RUN, 0) == CallTools(RUN, 0, (0, 1, 2))
    for index in (2, 0, 1):
        loop.call_tool(RUN, 0, index)
    loop.advance(RUN, 1)
    check(loops, StopReason.COMPLETED)


def test_calls_that_were_held_back_come_out_the_same(loops: Loops) -> None:
    agent = agent_of(say("a", "b", "c"), "Done.", limits=Limits(max_parallel_calls=1))
    go(loops, agent)
    check(loops, StopReason.COMPLETED)


def test_failed_attempts_and_waits_come_out_the_same(loops: Loops) -> None:
    loop = loops.start(agent_of(overloaded(), overloaded(), say("a"), overloaded(), "Done."))
    for step in (0, 0, 0):
        loop.store.redis.hset(redis_keys.run(RUN), "not_before", 0)
        loop.advance(RUN, step)
    loop.call_tool(RUN, 0, 0)
    assert loop.advance(RUN, 1) == Wait(RUN)
    loop.store.redis.hset(redis_keys.run(RUN), "not_before", 0)
    loop.advance(RUN, 1)
    check(loops, StopReason.COMPLETED)


def test_attempts_that_are_used_up_come_out_the_same(loops: Loops) -> None:
    loop = loops.start(agent_of(*[overloaded()] * 3))
    for _ in range(3):
        loop.store.redis.hset(redis_keys.run(RUN), "not_before", 0)
        loop.advance(RUN, 0)
    check(loops, StopReason.ERROR)


def test_a_wait_for_which_there_was_no_time_comes_out_the_same(loops: Loops) -> None:
    late = ModelError("busy", type=RunErrorType.RATE_LIMITED, retryable=True, retry_after=60)
    go(loops, agent_of(late), limits=Limits(timeout=30))
    check(loops, StopReason.ERROR)
    [(_, exchange)] = read_recording(loops.store, RUN).exchanges()
    assert exchange["out_of_time"] is True


def test_an_answer_that_was_sent_back_comes_out_the_same(loops: Loops) -> None:
    unusable = ModelError("no", type=RunErrorType.EMPTY_RESPONSE, bad_response=True)
    go(loops, agent_of("no JSON", unusable, '{"n": 1}', output_type=dict[str, int]))
    check(loops, StopReason.COMPLETED)


def test_an_answer_that_never_passed_comes_out_the_same(loops: Loops) -> None:
    go(loops, agent_of(*["no JSON"] * 3, output_type=dict[str, int]))
    check(loops, StopReason.ERROR)


def test_an_answer_that_a_validator_held_against_the_results_comes_out_the_same(
    loops: Loops,
) -> None:
    def names_a_result(draft: Any) -> str | None:
        said = [each.content for each in draft.results]
        return None if draft.text in said else f"say one of {len(said)} results"

    go(loops, agent_of(say("a"), "b", "a", validators=[names_a_result], evidence_required=True))
    check(loops, StopReason.COMPLETED)


def test_calls_that_were_refused_come_out_the_same(loops: Loops) -> None:
    wrong = ("echo", {"text": 7})
    go(loops, agent_of(calls(wrong), calls(wrong, ("echo", {"text": "a"}), ("nope", {})), "Done."))
    check(loops, StopReason.COMPLETED)


def test_calls_that_could_not_be_read_come_out_the_same(loops: Loops) -> None:
    made = [{"id": "x", "type": "function", "function": {"name": "echo", "arguments": "{"}}]
    body = {"choices": [{"message": {"content": None, "tool_calls": made}}]}
    loop = loops.start(agent_of(reads(body), "Done."))
    drive(loop)
    check(loops, StopReason.COMPLETED)
    assert "reply" not in next(read_recording(loops.store, RUN).exchanges())[1]


def reads(body: dict[str, Any]) -> Any:
    """The reply that a server's body is read as."""
    return read_reply(json.dumps(body))


def test_a_tool_that_was_tried_again_comes_out_the_same(loops: Loops) -> None:
    loop = loops.start(agent_of(calls(("sleepy", {"ms": 2_000})), "Done."))
    drive(loop)
    loop.store.redis.hset(redis_keys.calls(RUN), "0.not_before", 0)
    loop.call_tool(RUN, 0, 0)
    loop.advance(RUN, 1)
    check(loops, StopReason.COMPLETED)
    kinds = [each["kind"] for each in read_recording(loops.store, RUN).trace]
    assert kinds == ["model", "retried_result", "result", "model"]


def test_a_fatal_result_with_others_before_the_end_comes_out_the_same(loops: Loops) -> None:
    agent = agent_of(calls(("give_up", {}), ("echo", {"text": "a"}), ("echo", {"text": "b"})))
    loop = loops.start(agent)
    loop.advance(RUN, 0)
    end = loops.store.end_run

    def end_late(*args: Any, **options: Any) -> Any:
        loops.store.end_run = end  # type: ignore[method-assign]
        loop.call_tool(RUN, 0, 1)  # by another worker, between the result and the end
        return end(*args, **options)

    loops.store.end_run = end_late  # type: ignore[method-assign]
    loop.call_tool(RUN, 0, 0)
    assert loops.contents()[1:2] == ["a"]
    check(loops, StopReason.ERROR)


def test_an_answer_of_a_tools_comes_out_the_same(loops: Loops) -> None:
    answer = calls(("answer_with", {"text": "a"}), ("echo", {"text": "b"}))
    go(loops, agent_of(answer, tools=[*TOOLS, answer_with]))
    check(loops, StopReason.COMPLETED)


def test_images_come_out_the_same_and_are_in_no_trace(loops: Loops) -> None:
    go(loops, agent_of(calls(("look", {"n": 2}), ("look", {"n": 1}), ("pay", {"cents": 1})), "ok"))
    check(loops, StopReason.COMPLETED)
    assert "base64" not in json.dumps(read_recording(loops.store, RUN).trace)


def test_a_question_and_its_reply_come_out_the_same(loops: Loops) -> None:
    asks = calls(("ask_user", {"question": "Which?"}), ("echo", {"text": "a"}))
    loop = go(loops, agent_of(asks, "Done.", clarify=True))
    drive(loop, loops.reply("the second", "0.0"))
    check(loops, StopReason.COMPLETED)


def test_a_fallback_model_and_what_it_cost_come_out_the_same(loops: Loops) -> None:
    out = ModelError("used up", type=RunErrorType.QUOTA_EXHAUSTED, status=429)
    second = Named("second", "Done.")
    agent = agent_of(model=Named("first", out), fallback_models=[second], prices={"second": PRICE})
    loop = go(loops, agent)
    loop.store.redis.hset(redis_keys.run(RUN), "not_before", 0)
    loop.advance(RUN, 0)
    check(loops, StopReason.COMPLETED)
    assert loops.record.usage.cost


PRICE = Price(prompt=1000, completion=2000)


def test_steps_of_workers_with_another_default_model_come_out_the_same(
    loops: Loops,
) -> None:
    model = ScriptedModel([say("a"), "Done."])
    agent = replace(agent_of(), model=None)
    loops.start(agent)
    for step, name in enumerate(("one", "two")):
        loop = Loop(loops.store, Agents([agent]), settings=Settings(model=name), model=model)
        loops.loops.append(loop)
        if loop.advance(RUN, step) == CallTools(RUN, step, (0,)):
            loop.call_tool(RUN, step, 0)
    sent = [each["request"]["model"] for _, each in read_recording(loops.store, RUN).exchanges()]
    assert sent == ["one", "two"]
    check(loops, StopReason.COMPLETED)


class Named(ScriptedModel):
    """A model with a name, as the server's have one."""

    def __init__(self, name: str, *replies: Any) -> None:
        super().__init__(replies)
        self.name = name


def test_a_cancel_with_calls_open_comes_out_the_same(loops: Loops) -> None:
    loop = loops.start(agent_of(say("a", "b", "c")))
    loop.advance(RUN, 0)
    loop.call_tool(RUN, 0, 1)
    cancel_run(loops.store, RUN, "enough")
    check(loops, StopReason.CANCELLED)


def test_a_result_that_came_after_the_end_changes_nothing(loops: Loops) -> None:
    loop = loops.start(agent_of(say("a", "b")))
    loop.advance(RUN, 0)
    cancel_run(loops.store, RUN, "enough")
    late = ToolResult(call_id="0.0", name="echo", ok=True, content="late")
    assert loops.store.record_result(RUN, 0, 0, late)[0] is Outcome.STALE
    assert read_recording(loops.store, RUN).trace[-1]["late"] is True
    check(loops, StopReason.CANCELLED)


def test_a_second_result_of_a_call_changes_nothing(loops: Loops) -> None:
    loop = loops.start(agent_of(say("a", "b"), "Done."))
    loop.advance(RUN, 0)
    loop.call_tool(RUN, 0, 0)
    late = ToolResult(call_id="0.0", name="echo", ok=True, content="late")
    assert loops.store.record_result(RUN, 0, 0, late)[0] is Outcome.DUPLICATE
    loop.call_tool(RUN, 0, 1)
    loop.advance(RUN, 1)
    check(loops, StopReason.COMPLETED)


def test_a_call_that_a_worker_without_the_tool_passed_on_comes_out_the_same(loops: Loops) -> None:
    agent = agent_of(say("a"), "Done.")
    loop = loops.start(agent)
    loop.advance(RUN, 0)
    assert loops.open(replace(agent, tools=[pay])).call_tool(RUN, 0, 0) == Wait(RUN)
    loops.agents[RUN] = agent
    loops.store.redis.hset(redis_keys.calls(RUN), "0.not_before", 0)
    loop.call_tool(RUN, 0, 0)
    loop.advance(RUN, 1)
    check(loops, StopReason.COMPLETED)


def test_a_cancel_before_anything_was_asked_comes_out_the_same(loops: Loops) -> None:
    loops.start(agent_of())
    cancel_run(loops.store, RUN, "enough")
    check(loops, StopReason.CANCELLED)


@pytest.mark.parametrize(
    ("limits", "stop_reason"),
    [
        (Limits(max_steps=1), StopReason.MAX_STEPS),
        (Limits(max_tool_calls=1), StopReason.BUDGET_EXHAUSTED),
        (Limits(max_tokens=20), StopReason.BUDGET_EXHAUSTED),
        (Limits(max_repeats=1), StopReason.REPEATED_ERROR),
    ],
    ids=["steps", "tool calls", "tokens", "repeats"],
)
def test_an_end_by_a_limit_comes_out_the_same(
    loops: Loops, limits: Limits, stop_reason: StopReason
) -> None:
    go(loops, agent_of(*[say("a", "b")] * 6), limits=limits)
    check(loops, stop_reason)


def test_a_deadline_that_passed_comes_out_the_same(loops: Loops) -> None:
    loop = loops.start(agent_of(say("a", "b")))
    loop.advance(RUN, 0)
    loop.call_tool(RUN, 0, 0)
    loops.store.redis.hset(redis_keys.run(RUN), "deadline", 1)
    loop.recover(RUN)
    check(loops, StopReason.TIMEOUT)


def test_a_step_whose_attempts_died_comes_out_the_same(loops: Loops) -> None:
    loop = loops.start(agent_of("Done."))
    for _ in range(2):
        loops.store.begin_step(RUN, 0)
        loops.store.redis.hset(redis_keys.run(RUN), "lease", 1)
    loop.advance(RUN, 0)
    check(loops, StopReason.COMPLETED)


def test_a_poisoned_step_comes_out_the_same(loops: Loops) -> None:
    loop = loops.start(agent_of(say("a"), "Done."))
    loop.advance(RUN, 0)
    loop.call_tool(RUN, 0, 0)
    for _ in range(3):
        loops.store.begin_step(RUN, 1)
        loops.store.redis.hset(redis_keys.run(RUN), "lease", 1)
    loop.advance(RUN, 1)
    check(loops, StopReason.ERROR)


@pytest.mark.parametrize(("name", "starts"), [("pay", 1), ("echo", 3)])
def test_a_call_whose_holder_died_comes_out_the_same(loops: Loops, name: str, starts: int) -> None:
    arguments = {"cents": 1} if name == "pay" else {"text": "a"}
    loop = loops.start(agent_of(calls((name, arguments)), "Done."))
    loop.advance(RUN, 0)
    for _ in range(starts):
        loops.store.begin_call(RUN, 0, 0)
        loops.store.redis.hset(redis_keys.calls(RUN), "0.lease", 1)
    loop.call_tool(RUN, 0, 0)
    loop.advance(RUN, 1)
    assert loops.contents()[0].startswith('{"ok":false')
    check(loops, StopReason.COMPLETED)


def test_a_resumed_run_comes_out_the_same_with_all_its_lives(loops: Loops) -> None:
    agent = agent_of(say("a"), say("b"), say("c"), say("d"), "Done.", limits=Limits(max_steps=2))
    loop = go(loops, agent)
    assert loops.record.stop_reason is StopReason.MAX_STEPS
    for step in (2, 4):
        loops.store.resume_run(loops.record, Limits(max_steps=2))
        drive(loop, NextStep(RUN, step))
    check(loops, StopReason.COMPLETED)
    assert loops.record.resumed == 2


def test_a_run_that_has_not_ended_is_replayed_as_far_as_it_has_come(loops: Loops) -> None:
    loop = loops.start(agent_of(say("a"), say("b", "c")))
    loop.advance(RUN, 0)
    loop.call_tool(RUN, 0, 0)
    loop.advance(RUN, 1)
    loop.call_tool(RUN, 1, 1)
    check(loops, None)


def test_a_model_that_answers_what_is_no_reply_comes_out_the_same(loops: Loops) -> None:
    go(loops, agent_of(lambda _: None))
    check(loops, StopReason.ERROR)


def test_a_reply_of_a_users_own_model_is_kept_and_one_of_a_servers_is_not(loops: Loops) -> None:
    body = {"choices": [{"message": {"content": "Done."}}], "usage": {"total_tokens": 3}}
    go(loops, agent_of(say("a"), reads(body)))
    own, servers = (each for _, each in read_recording(loops.store, RUN).exchanges())
    assert own["reply"]["calls"][0]["name"] == "echo"
    assert "reply" not in servers
    check(loops, StopReason.COMPLETED)


# --- what is hidden -----------------------------------------------------------------------------

LOG_IN = calls(("log_in", {"token": SECRET, "user": "ann"}), ("echo", {"text": "a"}))


def test_a_step_of_which_the_trace_hides_something_is_named_and_makes_no_difference(
    loops: Loops,
) -> None:
    go(loops, agent_of(say("a"), LOG_IN, say("b"), "Done."))
    found = replayed(loops)
    assert (found.differences, found.hidden, found.blind_from) == ((), (1,), None)


def test_a_hidden_argument_of_a_servers_answer_that_also_speaks_makes_no_difference(
    loops: Loops,
) -> None:
    function = {"name": "log_in", "arguments": json.dumps({"token": SECRET, "user": "ann"})}
    call = {"id": "c0", "type": "function", "function": function}
    message = {"role": "assistant", "content": "let me see", "tool_calls": [call]}
    body = {"choices": [{"message": message}], "usage": {"total_tokens": 3}}
    go(loops, agent_of(reads(body), "Done."))
    found = replayed(loops)
    assert (found.differences, found.hidden, found.blind_from) == ((), (0,), None)


def test_from_a_hidden_answer_on_that_decides_the_run_nothing_is_compared(loops: Loops) -> None:
    hidden = json.dumps({"token": SECRET, "n": 1})
    options: dict[str, Any] = {"output_type": dict[str, int]}
    go(loops, agent_of(LOG_IN, hidden, '{"n": 1}', **options))
    found = replayed(loops)
    assert found.same
    assert 1 in found.hidden


def test_a_saved_recording_holds_nothing_that_is_hidden(loops: Loops, tmp_path: Path) -> None:
    go(loops, agent_of(LOG_IN, "Done."))
    recording = read_recording(loops.store, RUN)
    assert SECRET in recording.model_dump_json()
    save_recording(recording.redacted(frozenset()), tmp_path / "run.json")
    assert SECRET not in (tmp_path / "run.json").read_text()
    assert HIDDEN in (tmp_path / "run.json").read_text()
    found = replay(tmp_path / "run.json", loops.agents[RUN])
    assert (found.same, found.hidden) == (True, (0,))


def test_a_saved_recording_without_secrets_is_the_same_after_it_was_read(
    loops: Loops, tmp_path: Path
) -> None:
    go(loops, agent_of(say("a", "b"), "Done."))
    recording = read_recording(loops.store, RUN)
    save_recording(recording.redacted(frozenset()), tmp_path / "run.json")
    assert load_recording(tmp_path / "run.json") == recording
    assert replay(str(tmp_path / "run.json"), loops.agents[RUN]).same


# --- damage -------------------------------------------------------------------------------------

Damage = Callable[[list[dict[str, Any]], list[dict[str, Any]], dict[str, str]], None]


def change_result(trace: list[Any], messages: list[Any], record: dict[str, str]) -> None:
    trace[1]["result"]["content"] = "another"


def change_answer(trace: list[Any], messages: list[Any], record: dict[str, str]) -> None:
    trace[-1]["exchanges"][0]["reply"]["text"] = "Another."


def change_arguments(trace: list[Any], messages: list[Any], record: dict[str, str]) -> None:
    trace[0]["exchanges"][0]["reply"]["calls"][0]["arguments"] = '{"text":"z"}'


def change_history(trace: list[Any], messages: list[Any], record: dict[str, str]) -> None:
    messages[2]["content"] = "another"


def swap_results(trace: list[Any], messages: list[Any], record: dict[str, str]) -> None:
    messages[2], messages[3] = messages[3], messages[2]


def swap_calls(trace: list[Any], messages: list[Any], record: dict[str, str]) -> None:
    first, second = trace[1]["result"], trace[2]["result"]
    first["call_id"], second["call_id"] = second["call_id"], first["call_id"]


def swap_steps(trace: list[Any], messages: list[Any], record: dict[str, str]) -> None:
    trace[2], trace[3] = trace[3], trace[2]


def drop_result(trace: list[Any], messages: list[Any], record: dict[str, str]) -> None:
    del trace[2]


def drop_last_result(trace: list[Any], messages: list[Any], record: dict[str, str]) -> None:
    del trace[-2]


def drop_answer(trace: list[Any], messages: list[Any], record: dict[str, str]) -> None:
    del trace[-1]


def drop_message(trace: list[Any], messages: list[Any], record: dict[str, str]) -> None:
    del messages[-1]


def change_end(trace: list[Any], messages: list[Any], record: dict[str, str]) -> None:
    record["stop_reason"] = "CANCELLED"


def change_usage(trace: list[Any], messages: list[Any], record: dict[str, str]) -> None:
    record["total_tokens"] = "1"


@pytest.mark.parametrize(
    ("damage", "place"),
    [
        (change_result, "step 0, messages[2].content"),
        (change_answer, "step 2, messages[6].content"),
        (change_arguments, "step 0, decisions[0].arguments"),
        (change_history, "step 0, messages[2].content"),
        (swap_results, "step 0, messages[2]"),
        (swap_calls, "step 0, messages[2].content"),
        (swap_steps, "call 0.1, result"),
        (drop_result, "call 0.1, result"),
        (drop_last_result, "call 1.0, result"),
        (drop_answer, "the end, stop_reason"),
        (drop_message, "the end, messages"),
        (change_end, "the end, stop_reason"),
        (change_usage, "the end, usage.total_tokens"),
    ],
)
def test_a_damaged_recording_is_found_out_at_its_place(
    loops: Loops, damage: Damage, place: str
) -> None:
    go(loops, agent_of(say("a", "b"), say("c"), "Done."))
    damaged = json.loads(read_recording(loops.store, RUN).model_dump_json())
    damage(damaged["trace"], damaged["messages"], damaged["record"])
    found = replay(Recording.model_validate(damaged), loops.agents[RUN])
    assert not found.same
    assert str(found.differences[0]).startswith(place), [*map(str, found.differences)]


def test_an_image_that_was_changed_is_found_out(loops: Loops) -> None:
    go(loops, agent_of(calls(("look", {"n": 1})), "Done."))
    damaged = json.loads(read_recording(loops.store, RUN).model_dump_json())
    parts = damaged["messages"][3]["content"]
    parts[1]["image_url"]["url"] = parts[1]["image_url"]["url"][:-4] + "AAAA"
    found = replay(Recording.model_validate(damaged), loops.agents[RUN])
    assert str(found.differences[0]).startswith("call 0.0, images")


# --- an agent that has changed ------------------------------------------------------------------


def test_an_agent_with_other_instructions_is_said_and_makes_no_difference(loops: Loops) -> None:
    go(loops, agent_of(say("a"), "Done."))
    other = replace(loops.agents[RUN], instructions="Be brief.")
    found = replay(read_recording(loops.store, RUN), other)
    assert (found.changed, found.same) == (True, True)


def test_an_agent_that_decides_otherwise_is_told_where(loops: Loops) -> None:
    go(loops, agent_of(say("a"), calls(("pay", {"cents": 1})), "Done."))
    other = replace(loops.agents[RUN], tools=[echo])
    found = replay(read_recording(loops.store, RUN), other)
    assert found.changed
    first = found.differences[0]
    assert (first.step, first.field) == (1, "decisions[0].error")


def test_an_agent_that_checks_its_answers_differently_is_told_where(loops: Loops) -> None:
    go(loops, agent_of(say("a"), "Done."))
    other = replace(loops.agents[RUN], validators=[lambda _: "no"])
    found = replay(read_recording(loops.store, RUN), other)
    assert [str(each) for each in found.differences] == [
        "step 1, exchanges: recorded 1, replayed 2"
    ]


# --- how a difference is told -------------------------------------------------------------------


def test_a_difference_tells_sizes_and_its_values_only_when_asked() -> None:
    difference = Difference(1, "1.0", "result.content", "my secret", None)
    assert "secret" not in str(difference) + repr(difference)
    assert re.fullmatch(
        r"call 1\.0, result\.content: recorded 9 characters \([0-9a-f]{12}\), replayed nothing",
        str(difference),
    )
    assert difference.describe(show=True).endswith('recorded "my secret", replayed null')


def test_words_of_our_own_and_numbers_are_told_at_once() -> None:
    assert str(Difference(None, None, "stop_reason", "COMPLETED", "ERROR")) == (
        "the end, stop_reason: recorded COMPLETED, replayed ERROR"
    )
    assert str(Difference(2, None, "usage.total_tokens", 3, 4)).endswith("recorded 3, replayed 4")


# --- what can't be replayed ---------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{}", '{"version": 2}', "[]"])
def test_a_file_that_holds_no_recording_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(InvalidInput, match=r"run\.json holds no recording"):
        replay(tmp_path / "run.json", agent_of())


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"can't read run\.json: No such file"):
        replay(tmp_path / "run.json", agent_of())


@pytest.mark.parametrize("name", ["result", "kind", "step", "usage", "request", "history"])
def test_a_trace_that_hides_its_own_fields_is_refused_in_words(loops: Loops, name: str) -> None:
    go(loops, agent_of(say("a"), "Done."))
    recording = read_recording(loops.store, RUN).redacted(frozenset({name}))
    with pytest.raises(InvalidInput, match="hides fields that it needs itself"):
        replay(recording, loops.agents[RUN])


def test_without_its_extra_a_replay_says_what_to_install(
    loops: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(loops, agent_of("Done."))
    recording = read_recording(loops.store, RUN)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "lupa", None)
        with pytest.raises(CeleriacError, match=r"pip install 'celeriac\[testing\]'"):
            replay(recording, loops.agents[RUN])
