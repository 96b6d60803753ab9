"""A result that is too long for the model is kept whole by real workers, out of the broker."""

from __future__ import annotations

from runner import keys
from support.model_server import calls
from support.stage import Stage


def test_r44_a_result_of_five_megabytes_can_be_read_whole(shared_stage: Stage) -> None:
    stage = shared_stage
    run = stage.submit([calls(("big", {}))])
    assert run.result(timeout=20).ok
    (content,) = stage.results(run)
    assert len(content) <= 65_536
    assert run.whole_result("0.0") == "x" * 5_000_000
    store = stage.client.store
    assert store.redis.pttl(keys.whole(run.id)) > 0
    assert 0 < (store.redis.memory_usage(keys.trace(run.id)) or 0) < 500_000
