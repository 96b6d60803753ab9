"""A fork begins where a step of another run began: with what came before it, and nothing after."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from conftest import MakeStore
from runner import Agent, Evidence, InvalidInput, Limits, Result, StopReason, keys, tool
from runner.fork import find_starts, fork_run
from runner.loop import CallTools, Finish, NextStep, cancel_run
from runner.recording import read_recording
from runner.replay import replay
from runner.store import Outcome
from runner.testing import ScriptedModel, calls
from support.loops import RUN, Loops, drive, open_loops
from support.replays import check_replay

FORK = "a-fork-of-that-run"


@tool(idempotent=True)
def look(n: int) -> Result[str]:
    """Look something up."""
    return Result(f"found {n}", evidence=[Evidence(source="look", text=str(n))])


@pytest.fixture
def loops(make_store: MakeStore, no_leaked_keys: None) -> Iterator[Loops]:
    yield from open_loops(make_store())


def turn(*numbers: int) -> Any:
    return calls(*(("look", {"n": n}) for n in numbers))


def agent_of(*replies: Any, **options: Any) -> Agent:
    return Agent(name="a", model=ScriptedModel(replies), tools=[look], **options)


def fork(loops: Loops, step: int, *, limits: Limits | None = None, run_id: str = FORK) -> Outcome:
    recording = read_recording(loops.store, RUN)
    return fork_run(
        loops.store, recording, step=step, run_id=run_id, agent="a", limits=limits or Limits()
    )


def finish(loops: Loops, agent: Agent, step: int, run_id: str = FORK) -> None:
    """Let the fork run to its end, and replay it."""
    drive(loops.open(agent), NextStep(run_id, step))
    check_replay(loops.store, run_id, agent)


def test_a_fork_has_what_came_before_its_step_and_nothing_after(loops: Loops) -> None:
    drive(loops.start(agent_of(turn(1), turn(2, 3), turn(4), "Done.")))
    assert fork(loops, 2) is Outcome.CREATED
    before = loops.store.read_messages(RUN)
    record = loops.store.read_run(FORK)
    assert loops.store.read_messages(FORK) == before[:6]
    assert [each.text for each in loops.store.read_evidence(FORK)] == ["1", "2", "3"]
    assert (record.step, record.epoch, record.tool_calls, record.usage.requests) == (2, 0, 0, 0)
    assert record.metadata["forked_from"] == {"run": RUN, "step": 2}
    cancel_run(loops.store, FORK, "not needed")


def test_a_fork_goes_on_by_itself_and_leaves_its_origin_as_it_was(loops: Loops) -> None:
    drive(loops.start(agent_of(turn(1), turn(2), "Done.")))
    before = read_recording(loops.store, RUN)
    fork(loops, 1)
    other = agent_of(turn(7), "Otherwise.")
    finish(loops, other, 1)
    result = loops.store.read_result(FORK)
    assert result is not None
    assert (result.answer, result.steps) == ("Otherwise.", 3)
    assert [each.text for each in result.evidence] == ["1", "7"]
    assert [each.call_id for each in result.evidence] == ["0.0", "1.0"]
    assert read_recording(loops.store, RUN) == before


def test_a_fork_at_the_first_step_has_the_goal_alone(loops: Loops) -> None:
    drive(loops.start(agent_of(turn(1), "Done.")))
    fork(loops, 0)
    assert loops.store.read_messages(FORK) == [{"role": "user", "content": "go"}]
    finish(loops, agent_of("Again."), 0)


def test_a_forks_answer_is_checked_against_what_was_kept_too(loops: Loops) -> None:
    seen: list[list[str]] = []

    def check(draft: Any) -> str | None:
        seen.append([each.content for each in draft.results])
        return None

    drive(loops.start(agent_of(turn(1), turn(2), "Done.")))
    fork(loops, 1)
    finish(loops, agent_of(turn(3), "Done.", validators=[check]), 1)
    assert seen[0] == ["found 1", "found 3"]


def test_a_forks_limits_count_from_its_step(loops: Loops) -> None:
    agent = agent_of(turn(1), turn(2), limits=Limits(max_steps=2))
    drive(loops.start(agent))
    assert loops.record.stop_reason is StopReason.MAX_STEPS
    # The calls of the last step never ran, so that the step is there to be taken again.
    assert sorted(find_starts(read_recording(loops.store, RUN))) == [0, 1]
    fork(loops, 1, limits=Limits(max_steps=2))
    finish(loops, agent_of(turn(3), "Done."), 1)
    result = loops.store.read_result(FORK)
    assert result is not None
    assert result.stop_reason is StopReason.COMPLETED


def test_a_fork_of_a_fork_has_the_evidence_and_the_results_of_both(loops: Loops) -> None:
    drive(loops.start(agent_of(turn(1), turn(2), "Done.")))
    fork(loops, 1)
    finish(loops, agent_of(turn(3), "Done."), 1)
    second = "a-fork-of-the-fork"
    recording = read_recording(loops.store, FORK)
    fork_run(loops.store, recording, step=2, run_id=second, agent="a", limits=Limits())
    [entry] = loops.store.read_trace(second)
    assert [each["content"] for each in entry["results"]] == ["found 1", "found 3"]
    assert [each.text for each in loops.store.read_evidence(second)] == ["1", "3"]
    finish(loops, agent_of("Done."), 2, second)


def test_a_cancelled_run_can_be_forked_behind_its_closed_block(loops: Loops) -> None:
    loop = loops.start(agent_of(turn(1, 2)))
    assert loop.advance(RUN, 0) == CallTools(RUN, 0, (0, 1))
    loop.call_tool(RUN, 0, 0)
    cancel_run(loops.store, RUN, "enough")
    fork(loops, 1)
    contents = [each["content"] for each in loops.store.read_messages(FORK) if "found" in str(each)]
    assert contents == ["found 1"]
    finish(loops, agent_of("Done."), 1)


def test_a_run_that_goes_on_can_be_forked_at_a_step_that_has_begun(loops: Loops) -> None:
    loop = loops.start(agent_of(turn(1), turn(2), "Done."))
    loop.advance(RUN, 0)
    with pytest.raises(InvalidInput, match="can't be forked at step 1; it can be at: 0"):
        fork(loops, 1)
    loop.call_tool(RUN, 0, 0)
    assert fork(loops, 1) is Outcome.CREATED
    assert loop.advance(RUN, 1) == CallTools(RUN, 1, (0,))
    finish(loops, agent_of("Done."), 1)
    drive(loop, CallTools(RUN, 1, (0,)))


@pytest.mark.parametrize("step", [3, 17])
def test_a_step_that_never_began_is_refused_and_nothing_is_written(loops: Loops, step: int) -> None:
    drive(loops.start(agent_of(turn(1), turn(2), "Done.")))
    with pytest.raises(InvalidInput, match="it can be at: 0, 1, 2"):
        fork(loops, step)
    assert not loops.store.redis.exists(keys.run(FORK))


def test_a_fork_sent_twice_is_one(loops: Loops) -> None:
    drive(loops.start(agent_of(turn(1), "Done.")))
    assert [fork(loops, 1), fork(loops, 1)] == [Outcome.CREATED, Outcome.EXISTS]
    assert len(loops.store.read_messages(FORK)) == 3
    assert len(loops.store.read_evidence(FORK)) == 1
    assert loops.store.sweep_runs() == 0  # it is in due already
    finish(loops, agent_of("Done."), 1)


def test_a_forks_replay_needs_nothing_of_its_origin(loops: Loops) -> None:
    drive(loops.start(agent_of(turn(1), turn(2), "Done.")))
    fork(loops, 1)
    other = agent_of(turn(3), "Done.")
    assert drive(loops.open(other), NextStep(FORK, 1)) == Finish(FORK, StopReason.COMPLETED)
    recording = read_recording(loops.store, FORK)
    assert replay(recording, other).same
    damaged = recording.model_copy(update={"evidence": recording.evidence[:-1]})
    assert not replay(damaged, other).same
