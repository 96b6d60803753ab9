"""What may follow the end of a run: resuming it, a task of the user's, `AsyncResult`."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult

from runner import InvalidInput, Limits, RunFinished, StopReason
from support.fleet import fleet, raw_client
from support.model_server import calls, error, final
from support.stage import Stage
from tasks.deliver import RunFailed, close_backend


def popped(stage: Stage, queue: str) -> list[dict[str, Any]]:
    """The messages on a queue of the user's, taken off."""
    client = raw_client(stage.fleet.redis_url)
    found = client.lpop(queue, 100) or []
    client.close()
    return [json.loads(text) for text in found]


def test_a_run_stopped_by_its_cap_goes_on_where_it_was(stage: Stage) -> None:
    turns = [calls(("add", {"a": n, "b": n})) for n in range(4)]
    run = stage.submit([*turns, final("in the end")], agent="two-steps")
    assert run.result(timeout=20).stop_reason is StopReason.MAX_STEPS

    run.resume()
    assert run.result(timeout=20).stop_reason is StopReason.MAX_STEPS
    run.resume(limits=Limits(max_steps=1))

    result = run.result(timeout=20)
    assert (result.stop_reason, result.answer) == (StopReason.COMPLETED, "in the end")
    started = [line for line in stage.fleet.ledger if run.id in line]
    assert len(started) == len(set(started))


def test_a_run_that_ended_in_an_error_can_be_resumed(stage: Stage) -> None:
    run = stage.submit([calls(("charge", {"account_id": 7, "cents": 1})), error(401, "bad_key")])
    assert run.result(timeout=20).stop_reason is StopReason.ERROR

    run.resume()

    result = run.result(timeout=20)
    assert (result.stop_reason, result.error) == (StopReason.COMPLETED, None)
    assert len([line for line in stage.fleet.ledger if run.id in line]) == 1
    finished = [each.type for each in run.events()]
    assert finished.count("run.finished") == 2
    assert finished[-1] == "run.finished"


def test_a_run_that_timed_out_in_a_tool_goes_on_with_that_call_cancelled(stage: Stage) -> None:
    run = stage.submit([calls(("wait_for_end", {}), ("ping", {})), final("ok")], agent="hasty")
    assert run.result(timeout=20).stop_reason is StopReason.TIMEOUT

    run.resume(limits=Limits(timeout=30))

    assert run.result(timeout=20).answer == "ok"
    cancelled, pong = stage.results(run)
    assert json.loads(cancelled)["error"]["type"] == "CANCELLED"
    assert pong == "pong"


def test_a_finished_run_is_not_resumed_and_a_running_one_is_left_alone(stage: Stage) -> None:
    done = stage.submit([])
    done.result(timeout=20)
    with pytest.raises(RunFinished, match="submit anew"):
        done.resume()

    cancelled = stage.submit([final("late") | {"delay": 30}])
    stage.fleet.wait_for(lambda: stage.requests(cancelled))
    cancelled.resume()
    cancelled.cancel()
    with pytest.raises(RunFinished):
        cancelled.resume()
    assert len(stage.requests(cancelled)) == 1


def test_on_finish_hands_the_result_to_a_task_of_the_users(stage: Stage) -> None:
    run = stage.submit([final("42")], on_finish="shop.open_ticket")
    run.result(timeout=20)

    def settled() -> bool:
        return not stage.client.store.read_run(run.id).promised

    stage.fleet.wait_for(settled)
    (message,) = popped(stage, "celery")
    assert message["headers"]["task"] == "shop.open_ticket"
    assert message["headers"]["id"] == f"{run.id}.finished"
    assert message["headers"]["root_id"] == run.id
    assert "42" not in message["headers"]["kwargsrepr"]
    _, kwargs, _ = json.loads(base64.b64decode(message["body"]))
    assert kwargs["result"]["answer"] == "42"
    assert kwargs["result"]["stop_reason"] == "COMPLETED"


def test_on_finish_comes_after_a_cancel_too(stage: Stage) -> None:
    options = {"task": "shop.open_ticket", "queue": "shop"}
    run = stage.submit([final("late") | {"delay": 30}], on_finish=options)
    run.cancel()

    (message,) = stage.fleet.wait_for(lambda: popped(stage, "shop"))
    assert message["headers"]["id"] == f"{run.id}.finished"


def test_on_finish_without_a_name_is_refused(stage: Stage) -> None:
    with pytest.raises(InvalidInput, match="on_finish"):
        stage.submit([], on_finish="")


def test_async_result_is_true_where_a_backend_is_set(stage: Stage, tmp_path: Path) -> None:
    backend = stage.fleet.redis_url.replace("/0", "/3")
    stage.script("refuse this", [error(401, "bad_key")])
    with (
        fleet(
            stage.fleet.redis_url.replace("/0", "/2"),
            tmp_path,
            model=stage.model,
            CELERIAC_RESULT_BACKEND=backend,
        ) as other,
        other.client() as client,
        Celery("shop", broker=other.redis_url, backend=backend, set_as_current=False) as app,
    ):
        done = client.submit("do this", agent="helper")
        refused = client.submit("refuse this", agent="helper")
        cancelled = client.submit("never mind", agent="helper")
        assert AsyncResult(done.id, app=app).state == "STARTED"
        cancelled.cancel()

        other.start("steps")

        answer = AsyncResult(done.id, app=app).get(timeout=20)
        assert (answer["answer"], answer["ok"]) == ("done", True)
        other.wait_for(lambda: AsyncResult(cancelled.id, app=app).state == "REVOKED")
        with pytest.raises(RunFailed, match="ERROR"):
            AsyncResult(refused.id, app=app).get(timeout=20)
        assert AsyncResult(refused.id, app=app).state == "FAILURE"
        close_backend(app)
