"""What one run learns of a model's endpoint holds for all."""

from __future__ import annotations

import pytest

from runner import Agent, Limits, Retry
from runner.agents import Agents
from runner.errors import ModelError
from runner.loop import Loop, Wait
from runner.models import RunErrorType
from runner.store import RunStore
from runner.testing import ScriptedModel


@pytest.mark.parametrize("retry_after", [None, 0.0, 1.0, 30.0])
def test_a_server_that_is_asked_too_much_is_left_alone_by_all_runs(
    store: RunStore, retry_after: float | None
) -> None:
    busy = ModelError(
        "busy", type=RunErrorType.RATE_LIMITED, retryable=True, retry_after=retry_after
    )
    model = ScriptedModel([busy])
    retry = Retry(max_attempts=2, initial_delay=20)
    agent = Agent(name="a", model=model, model_concurrency=8, model_retry=retry)
    loop = Loop(store, Agents([agent]), settings=store.settings)
    for run_id in ("run-one-0", "run-two-0"):
        store.create_run(
            run_id=run_id,
            agent="a",
            messages=[{"role": "user", "content": "go"}],
            limits=Limits(),
        )

    assert loop.advance("run-one-0", 0) == Wait("run-one-0")
    assert loop.advance("run-two-0", 0) == Wait("run-two-0")

    assert len(model.requests) == 1
    loop.close()
