"""Forks and replays of runs that real workers made."""

from __future__ import annotations

import pytest

from runner import InvalidInput, StopReason, keys
from runner.errors import RunNotFound
from support.agents import helper
from support.model_server import calls, final
from support.replays import check_replay
from support.stage import Stage, by_turn
from tasks import Run

THREE_TURNS = [
    calls(("add", {"a": 1, "b": 1}), ("add", {"a": 2, "b": 2})),
    calls(("add", {"a": 3, "b": 3})),
    final("Six."),
]


@pytest.fixture
def origin(stage: Stage) -> Run:
    run = stage.submit(by_turn(THREE_TURNS), metadata={"ticket": "77"})
    assert run.result(timeout=20).answer == "Six."
    return run


def test_workers_take_a_fork_on_from_its_step(stage: Stage, origin: Run) -> None:
    before = origin.messages()
    goal = before[0]["content"]
    stage.script(goal, by_turn([*THREE_TURNS[:1], calls(("ping", {})), final("Otherwise.")]))

    fork = stage.client.fork(origin.id, step=1)

    result = fork.result(timeout=20)
    assert (result.answer, result.steps, result.usage.requests) == ("Otherwise.", 3, 2)
    assert [each.text for each in result.evidence] == ["1+1", "2+2"]
    assert fork.messages()[:4] == before[:4]
    assert fork.info().metadata == {"ticket": "77", "forked_from": {"run": origin.id, "step": 1}}
    assert origin.messages() == before
    entered = [line for line in stage.fleet.ledger if fork.id in line]
    assert entered == [f"ping {fork.id}.1.0 1"], "what was kept ran again"
    check_replay(stage.client.store, fork.id, helper)


def test_a_fork_whose_hint_is_lost_is_brought_back(stage: Stage, origin: Run) -> None:
    goal = origin.messages()[0]["content"]
    stage.script(goal, by_turn([*THREE_TURNS[:2], final("Again.")]))
    publish, stage.client._app.amqp.send_task_message = (
        stage.client._app.amqp.send_task_message,
        lambda *args, **options: None,
    )
    try:
        fork = stage.client.fork(origin.id, step=2)
    finally:
        stage.client._app.amqp.send_task_message = publish
    assert fork.result(timeout=20).answer == "Again."


def test_a_fork_of_what_is_not_there_is_refused(stage: Stage, origin: Run) -> None:
    with pytest.raises(InvalidInput, match="can't be forked at step 3; it can be at: 0, 1, 2"):
        stage.client.fork(origin.id, step=3)
    with pytest.raises(RunNotFound):
        stage.client.fork("01a00000-0000-7000-8000-000000000000", step=0)


def test_every_run_that_these_workers_made_is_replayed(stage: Stage, origin: Run) -> None:
    charged = stage.submit([calls(("charge", {"account_id": 1, "cents": 2})), final("ok")])
    assert charged.result(timeout=20).stop_reason is StopReason.COMPLETED
    before = stage.fleet.replay()
    assert before.replayed >= 2
    store, key = stage.client.store, keys.messages(charged.id)
    kept = str(store.redis.lindex(key, 2))
    store.redis.lset(key, 2, kept.replace("charged", "spoiled"))
    with pytest.raises(AssertionError, match="went another way"):
        stage.fleet.replay()
    store.redis.lset(key, 2, kept)
