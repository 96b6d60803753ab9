"""A model may ask the user: the run waits for the reply, and no worker waits with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from runner import (
    Agent,
    CeleriacError,
    InvalidInput,
    Limits,
    Price,
    RunNotFound,
    RunStatus,
    StopReason,
    tool,
)
from runner import keys as redis_keys
from runner.errors import ToolDefinitionError
from runner.loop import CLOSER, CallTools, Finish, NextStep, Skip, Wait, answer_question, cancel_run
from runner.store import Outcome, RunStore
from runner.testing import ScriptedModel, calls, run_agent
from support.loops import RUN, Loops, check_requests, drive, open_loops

WHICH = ("ask_user", {"question": "Which order?"})
WHEN = ("ask_user", {"question": "Since when?"})
LOOK: tuple[str, dict[str, Any]] = ("look", {})


@tool(idempotent=True)
def look() -> str:
    """Look somewhere."""
    return "seen"


@pytest.fixture
def loops(store: RunStore, no_leaked_keys: None) -> Iterator[Loops]:
    yield from open_loops(store)


def agent_of(model: ScriptedModel, **options: Any) -> Agent:
    return Agent(name="a", model=model, tools=[look], **{"clarify": True, **options})


def asked(loops: Loops, *turns: Any, **options: Any) -> tuple[Any, ScriptedModel]:
    """A run whose model asks this, and its loop, after the first step."""
    model = ScriptedModel([calls(*turn) if isinstance(turn, list) else turn for turn in turns])
    loop = loops.start(agent_of(model, **options))
    return loop, model


# --- asking ------------------------------------------------------------------------------------


def test_a_question_parks_the_run_and_publishes_nothing(loops: Loops) -> None:
    loop, _ = asked(loops, [WHICH])
    assert loop.advance(RUN, 0) == CallTools(RUN, 0, ())
    assert loops.record.status is RunStatus.WAITING
    [event] = loops.events("run.waiting")
    assert (event.step, event.call) == (0, "0.0")
    assert event.data == {"reason": "QUESTION", "question": "Which order?"}
    assert loops.store.read_questions(RUN) == {"0.0": "Which order?"}
    assert loops.events("call.queued") == []


def test_no_worker_can_run_a_question(loops: Loops) -> None:
    loop, _ = asked(loops, [WHICH])
    loop.advance(RUN, 0)
    assert loop.call_tool(RUN, 0, 0) == Skip(RUN, Outcome.BUSY)
    assert loop.advance(RUN, 0) == Skip(RUN, Outcome.STALE)
    assert loops.store.read_questions(RUN) == {"0.0": "Which order?"}
    with pytest.raises(AssertionError, match="never run"):
        agent_of(ScriptedModel([])).toolbox.get("ask_user")("x")  # type: ignore[misc]


def test_the_reply_is_the_calls_result_and_opens_the_next_step(loops: Loops) -> None:
    loop, model = asked(loops, [WHICH], "done")
    loop.advance(RUN, 0)
    assert loops.reply("A001") == NextStep(RUN, 1)
    assert loops.record.status is RunStatus.QUEUED
    assert drive(loop, NextStep(RUN, 1)) == Finish(RUN, StopReason.COMPLETED)
    assert loops.contents() == ["A001"]
    assert model.requests[1].messages[-1]["role"] == "tool"
    check_requests(loops.store, model.requests)


def test_an_agent_that_may_not_ask_has_no_such_tool(loops: Loops) -> None:
    loop, model = asked(loops, [WHICH], "done", clarify=False)
    assert drive(loop) == Finish(RUN, StopReason.COMPLETED)
    assert "UNKNOWN_TOOL" in loops.contents()[0]
    assert [each["function"]["name"] for each in model.requests[0].tools] == ["look"]


def test_a_tool_of_the_same_name_is_refused_beside_it() -> None:
    @tool
    def ask_user(question: str) -> str:
        """Ask by post."""
        return question

    with pytest.raises(ToolDefinitionError, match="two tools are called ask_user"):
        Agent(name="a", tools=[ask_user], clarify=True)
    Agent(name="a", tools=[ask_user])


@pytest.mark.parametrize("arguments", [{}, {"question": 7}, {"question": "x", "more": 1}])
def test_a_question_with_wrong_arguments_is_refused_and_nobody_waits(
    loops: Loops, arguments: dict[str, Any]
) -> None:
    loop, _ = asked(loops, [("ask_user", arguments)], "done")
    assert drive(loop) == Finish(RUN, StopReason.COMPLETED)
    assert "INVALID_ARGUMENT" in loops.contents()[0]
    assert loops.events("run.waiting") == []


@pytest.mark.parametrize("question", ["", "\0", "q" * 60_000, '"},{"x":"'])
def test_whatever_a_model_asks_the_run_goes_on(loops: Loops, question: str) -> None:
    loop, model = asked(loops, [("ask_user", {"question": question})], "done")
    drive(loop)
    assert loops.store.read_questions(RUN) == {"0.0": question}
    assert drive(loop, loops.reply("A001")) == Finish(RUN, StopReason.COMPLETED)
    check_requests(loops.store, model.requests)


def test_questions_use_up_no_tool_calls(loops: Loops) -> None:
    loop, _ = asked(loops, [WHICH, LOOK], "done", limits=Limits(max_tool_calls=1))
    assert loop.advance(RUN, 0) == CallTools(RUN, 0, (1,))
    assert loops.record.tool_calls == 1
    assert loops.record.used == {"look": 1}


def test_a_run_that_has_made_its_tool_calls_may_still_ask(loops: Loops) -> None:
    loop, _ = asked(loops, [LOOK], [WHICH], "done", limits=Limits(max_tool_calls=1))
    drive(loop)
    assert loops.store.read_questions(RUN) == {"1.0": "Which order?"}
    assert drive(loop, loops.reply("A001")) == Finish(RUN, StopReason.COMPLETED)


def test_the_question_of_the_last_step_is_not_asked(loops: Loops) -> None:
    loop, _ = asked(loops, [WHICH], limits=Limits(max_steps=1))
    assert drive(loop) == Finish(RUN, StopReason.MAX_STEPS)
    assert loops.events("run.waiting") == []


# --- beside other calls ------------------------------------------------------------------------


def test_siblings_run_while_a_question_is_open(loops: Loops) -> None:
    loop, _ = asked(loops, [LOOK, WHICH, LOOK], "done")
    assert loop.advance(RUN, 0) == CallTools(RUN, 0, (0, 2))
    seen = [loops.record.status]
    for index in (0, 2):
        assert loop.call_tool(RUN, 0, index) == Wait(RUN)
        seen.append(loops.record.status)
    assert seen == [RunStatus.RUNNING, RunStatus.RUNNING, RunStatus.WAITING]
    assert loops.reply("A001") == NextStep(RUN, 1)
    drive(loop, NextStep(RUN, 1))
    assert loops.contents() == ["seen", "A001", "seen"]


def test_a_reply_that_comes_before_the_siblings_are_done_waits_for_them(loops: Loops) -> None:
    loop, model = asked(loops, [WHICH, LOOK], "done")
    loop.advance(RUN, 0)
    assert loops.reply("A001") == Wait(RUN)
    assert loops.record.status is RunStatus.RUNNING
    assert loop.call_tool(RUN, 0, 1) == NextStep(RUN, 1)
    drive(loop, NextStep(RUN, 1))
    assert loops.contents() == ["A001", "seen"]
    check_requests(loops.store, model.requests)


def test_a_refused_sibling_does_not_keep_a_run_from_waiting(loops: Loops) -> None:
    loop, _ = asked(loops, [("nope", {}), WHICH], "done")
    assert loop.advance(RUN, 0) == CallTools(RUN, 0, ())
    assert loops.record.status is RunStatus.WAITING
    assert drive(loop, loops.reply("A001")) == Finish(RUN, StopReason.COMPLETED)


@pytest.mark.parametrize("parallel", [1, 2])
def test_a_call_that_is_held_back_runs_although_a_question_is_open(
    loops: Loops, parallel: int
) -> None:
    limits = Limits(max_parallel_calls=parallel)
    loop, _ = asked(loops, [WHICH, LOOK, LOOK, LOOK], "done", limits=limits)
    first = loop.advance(RUN, 0)
    assert first == CallTools(RUN, 0, (1, 2, 3)[:parallel])
    drive(loop, first)
    assert loops.record.status is RunStatus.WAITING
    assert loops.reply("A001") == NextStep(RUN, 1)


def test_a_reply_lets_no_more_calls_run_at_once(loops: Loops) -> None:
    limits = Limits(max_parallel_calls=1)
    loop, _ = asked(loops, [WHICH, LOOK, LOOK], "done", limits=limits)
    assert loop.advance(RUN, 0) == CallTools(RUN, 0, (1,))
    assert loops.reply("A001") == Wait(RUN), "the first look is still out"
    assert loop.call_tool(RUN, 0, 1) == CallTools(RUN, 0, (2,))
    assert loop.call_tool(RUN, 0, 2) == NextStep(RUN, 1)


# --- replies that can't be taken ---------------------------------------------------------------


def test_two_questions_need_the_call_that_is_answered(loops: Loops) -> None:
    loop, _ = asked(loops, [WHICH, WHEN], "done")
    loop.advance(RUN, 0)
    with pytest.raises(InvalidInput, match=r"open: 0\.0, 0\.1"):
        loops.reply("A001")
    assert loops.reply("yesterday", "0.1") == Wait(RUN)
    assert loops.record.status is RunStatus.WAITING
    assert loops.store.read_questions(RUN) == {"0.0": "Which order?"}
    assert loops.reply("A001") == NextStep(RUN, 1), "the one that is left needs no id"
    drive(loop, NextStep(RUN, 1))
    assert loops.contents() == ["A001", "yesterday"]


def test_a_reply_twice_is_refused_and_changes_nothing(loops: Loops) -> None:
    loop, _ = asked(loops, [WHICH, WHEN], [WHICH], "done")
    loop.advance(RUN, 0)
    loops.reply("A001", "0.0")
    for again in ("0.0", "0.7", "1.0", "x", ""):
        with pytest.raises(InvalidInput, match=r"no such open question; open: 0\.1"):
            loops.reply("A002", again)
    loops.reply("yesterday", "0.1")
    with pytest.raises(InvalidInput, match="open: none"):
        loops.reply("A002")
    loop.advance(RUN, 1)
    with pytest.raises(InvalidInput, match=r"open: 1\.0"):
        loops.reply("A002", "0.0")
    assert loops.contents() == ["A001", "yesterday"]


def test_a_call_of_a_tools_is_no_question(loops: Loops) -> None:
    loop, _ = asked(loops, [LOOK, WHICH], "done")
    loop.advance(RUN, 0)
    with pytest.raises(InvalidInput, match=r"open: 0\.1"):
        loops.reply("forged", "0.0")
    assert loop.call_tool(RUN, 0, 0) == Wait(RUN)


def test_a_run_that_is_not_there_or_asks_nothing_takes_no_reply(loops: Loops) -> None:
    loops.start(agent_of(ScriptedModel([])))
    with pytest.raises(InvalidInput, match="open: none"):
        loops.reply("A001")
    with pytest.raises(RunNotFound):
        answer_question(loops.store, "no-such-run", "A001", None)


def test_a_reply_is_made_fit_to_be_stored(loops: Loops) -> None:
    loop, model = asked(loops, [WHICH], "done")
    loop.advance(RUN, 0)
    drive(loop, loops.reply("half \ud800 and \0"))
    assert loops.contents() == ["half \ufffd and \ufffd"]
    check_requests(loops.store, model.requests)


# --- ends while it waits -----------------------------------------------------------------------


def test_a_cancel_closes_the_question(loops: Loops) -> None:
    loop, _ = asked(loops, [WHICH])
    loop.advance(RUN, 0)
    cancel_run(loops.store, RUN, "enough")
    assert loops.result.stop_reason is StopReason.CANCELLED
    assert loops.contents() == [CLOSER]
    assert loops.store.read_questions(RUN) == {}
    with pytest.raises(InvalidInput, match="open: none"):
        loops.reply("A001", "0.0")


def test_a_run_that_waits_is_due_at_its_deadline_and_not_before(loops: Loops) -> None:
    loop, _ = asked(loops, [WHICH])
    loop.advance(RUN, 0)
    assert loop.recover(RUN) == Skip(RUN, Outcome.WAIT)
    score = loops.store.redis.zscore(redis_keys.DUE, RUN)
    assert score is not None
    assert int(float(score)) == loops.record.deadline


def test_the_deadline_ends_a_run_that_waits(loops: Loops) -> None:
    loop, _ = asked(loops, [WHICH])
    loop.advance(RUN, 0)
    loops.store.redis.hset(redis_keys.run(RUN), "deadline", 1)
    assert loop.recover(RUN) == Finish(RUN, StopReason.TIMEOUT)
    assert (loops.result.limit, loops.contents()) == ("timeout", [CLOSER])


def test_a_run_whose_question_nobody_answered_is_resumed_and_may_ask_again(loops: Loops) -> None:
    loop, model = asked(loops, [WHICH], [WHICH], "done")
    loop.advance(RUN, 0)
    loops.store.redis.hset(redis_keys.run(RUN), "deadline", 1)
    loop.recover(RUN)
    assert loops.store.resume_run(loops.record, Limits()) is Outcome.OK
    assert loop.advance(RUN, 1) == CallTools(RUN, 1, ())
    assert loops.record.status is RunStatus.WAITING
    assert drive(loop, loops.reply("A001")) == Finish(RUN, StopReason.COMPLETED)
    assert loops.contents() == [CLOSER, "A001"]
    check_requests(loops.store, model.requests)


def test_a_users_test_replies_to_the_models_questions() -> None:
    agent = Agent(name="a", model="m", clarify=True, prices={"m": Price(prompt=1, completion=1)})
    asking = calls(("ask_user", {"question": "which?"}))

    result = run_agent(agent, "go", model=ScriptedModel([asking, "done"]), replies=["the lamp"])

    assert (result.answer, result.usage.cost) == ("done", 30 / 1_000_000)
    with pytest.raises(CeleriacError, match="replies="):
        run_agent(agent, "go", model=ScriptedModel([asking]))
