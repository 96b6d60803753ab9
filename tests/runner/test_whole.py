"""The whole text of a result: what is hidden in a trace is hidden in it, and a fork has it too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conftest import MakeStore
from runner import Agent, Limits, keys, tool
from runner.fork import fork_run
from runner.loop import cancel_run
from runner.recording import read_recording
from runner.testing import ScriptedModel, calls
from support.loops import RUN, Loops, drive, open_loops

FORK = "a-fork-of-that-run"


@pytest.fixture
def loops(make_store: MakeStore, no_leaked_keys: None) -> Iterator[Loops]:
    yield from open_loops(make_store())


@tool(redact=("card",), max_output_chars=300)
def account(rows: int) -> dict[str, object]:
    """Tell what is known of an account."""
    return {"card": "planted-card", "rows": ["row"] * rows}


@pytest.mark.parametrize("rows", [1, 1_000], ids=["whole", "cut for the model"])
def test_the_text_of_a_result_hides_what_its_tool_redacts_whether_it_was_cut_or_not(
    loops: Loops, rows: int
) -> None:
    model = ScriptedModel([calls(("account", {"rows": rows})), "done"])
    loop = loops.start(Agent(name="a", model=model, tools=[account]))
    drive(loop)

    text = loops.store.read_whole_result(RUN, "0.0")

    assert text is not None
    assert "planted" not in text
    assert text.count("row") >= rows


def test_a_fork_has_the_whole_results_before_its_step_and_no_others(loops: Loops) -> None:
    turn = calls(("account", {"rows": 1_000}), ("account", {"rows": 1}))
    agent = Agent(name="a", model=ScriptedModel([turn, turn, "done"]), tools=[account])
    drive(loops.start(agent))
    store = loops.store

    recording = read_recording(store, RUN)
    fork_run(store, recording, step=1, run_id=FORK, agent="a", limits=Limits())

    assert store.redis.hkeys(keys.whole(FORK)) == ["0.0"]
    for call in ("0.0", "0.1"):
        assert store.read_whole_result(FORK, call) == store.read_whole_result(RUN, call)
    assert store.read_whole_result(FORK, "1.0") is None
    cancel_run(store, FORK, "not needed")
    assert store.redis.pttl(keys.whole(FORK)) > 0
    store.delete_run(RUN)
    assert str(store.read_whole_result(FORK, "0.0")).count("row") > 1_000
    store.delete_run(FORK)
    assert store.redis.exists(keys.whole(FORK), keys.whole(RUN)) == 0
