"""Real workers, a real server, a scripted model: what every agent runner must get right."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from runner import RunFinished, RunStatus, StopReason
from runner.models import Principal
from support.model_server import calls, error, final
from support.stage import Stage
from tasks import Run


def tool_messages(stage: Stage, run: Run) -> list[Any]:
    return [json.loads(content) for content in stage.results(run)]


def test_two_tools_then_an_answer(stage: Stage) -> None:
    run = stage.submit([calls(("add", {"a": 1, "b": 2}), ("ping", {})), final("three")])

    result = run.result(timeout=20)

    assert (result.stop_reason, result.ok, result.answer) == (StopReason.COMPLETED, True, "three")
    assert stage.results(run) == ["3", "pong"]
    assert [(each.source, each.text, each.call_id) for each in result.evidence] == [
        ("sum", "1+2", "0.0")
    ]
    assert (result.steps, result.usage.requests, result.usage.total_tokens) == (2, 2, 36)
    assert run.status() is RunStatus.FINISHED


def test_an_unknown_tool_is_an_error_for_its_own_call_and_its_sibling_runs(stage: Stage) -> None:
    run = stage.submit([calls(("launch_rocket", {}), ("ping", {})), final("no rocket")])

    assert run.result(timeout=20).answer == "no rocket"
    unknown, pong = stage.results(run)
    error = json.loads(unknown)["error"]
    assert error["type"] == "UNKNOWN_TOOL"
    assert "ping" in error["message"]
    assert pong == "pong"


def test_wrong_arguments_never_reach_the_handler(stage: Stage) -> None:
    run = stage.submit([calls(("charge", {"account_id": "x"})), final("sorry")])

    assert run.result(timeout=20).answer == "sorry"
    (refused,) = tool_messages(stage, run)
    assert refused["ok"] is False
    assert refused["error"]["type"] == "INVALID_ARGUMENT"
    assert set(refused["error"]["fields"]) == {"account_id", "cents"}
    assert not [line for line in stage.fleet.ledger if run.id in line]


def test_a_model_that_never_ends_is_stopped_by_max_steps(stage: Stage) -> None:
    endless = [calls(("add", {"a": n, "b": n})) for n in range(10)]
    run = stage.submit(endless, agent="two-steps")

    result = run.result(timeout=20)

    assert result.stop_reason is StopReason.MAX_STEPS
    assert (result.limit, result.steps, result.ok) == ("max_steps", 2, False)
    assert len(stage.requests(run)) == 2
    assert len([line for line in stage.fleet.ledger if run.id in line]) == 1


def test_results_stand_in_call_order_whatever_order_they_finish_in(stage: Stage) -> None:
    run = stage.submit([calls(("slow", {"n": 1}), ("ping", {}), ("add", {"a": 2, "b": 2}))])

    run.result(timeout=20)

    finished = [each.call for each in run.events() if each.type == "call.finished"]
    assert finished[-1] == "0.0"
    turn, *results = stage.requests(run)[-1]["messages"][2:]
    assert [each["tool_call_id"] for each in results] == [each["id"] for each in turn["tool_calls"]]
    assert [each["content"] for each in results] == ["1", "pong", "4"]


def test_a_tools_exception_becomes_a_result_with_its_class_name_alone(stage: Stage) -> None:
    run = stage.submit([calls(("boom", {}), ("ping", {}))])

    assert run.result(timeout=20).ok
    failed, pong = stage.results(run)
    assert json.loads(failed)["error"]["type"] == "TOOL_ERROR"
    assert "RuntimeError" in failed
    assert "hunter2" not in failed
    assert "db.internal" not in failed
    assert pong == "pong"


def test_a_tool_error_is_shown_to_the_model_as_it_was_meant(stage: Stage) -> None:
    run = stage.submit([calls(("get_weather", {"city": "Atlantis"}))])

    run.result(timeout=20)

    (failed,) = tool_messages(stage, run)
    assert failed == {
        "ok": False,
        "error": {
            "type": "NOT_FOUND",
            "message": "no weather for that city",
            "retryable": False,
            "fields": {"city": "unknown"},
        },
    }


def test_a_fatal_tool_error_ends_the_run(stage: Stage) -> None:
    run = stage.submit([calls(("give_up", {}))])

    result = run.result(timeout=20)

    assert result.stop_reason is StopReason.ERROR
    assert result.error is not None
    assert (result.error.type, result.error.message) == ("TOOL_ERROR", "the account is closed")
    assert len(stage.requests(run)) == 1


def test_r22_a_tool_that_hangs_gets_one_timeout_result(stage: Stage) -> None:
    run = stage.submit([calls(("hang", {}), ("ping", {}))])

    assert run.result(timeout=20).ok
    timed_out, _ = stage.results(run)
    assert json.loads(timed_out)["error"]["type"] == "TIMEOUT"
    started = [each for each in run.events() if each.type == "call.started" and each.call == "0.0"]
    assert len(started) == 1


def test_an_idempotent_tool_that_hangs_is_started_again_within_its_attempts(stage: Stage) -> None:
    run = stage.submit([calls(("hang_idempotent", {}))])

    assert run.result(timeout=20).ok
    (timed_out,) = tool_messages(stage, run)
    assert timed_out["error"]["type"] == "TIMEOUT"
    attempts = [each.data["attempt"] for each in run.events() if each.type == "call.started"]
    assert attempts == [1, 2]


def test_r23_a_tool_that_swallows_its_interrupt_is_ended_with_its_process(stage: Stage) -> None:
    run = stage.submit([calls(("stubborn", {})), calls(("ping", {}))])

    assert run.result(timeout=30).ok
    timed_out, pong = stage.results(run)
    assert json.loads(timed_out)["error"]["type"] == "TIMEOUT"
    assert pong == "pong"


def test_a_tool_that_dies_is_not_run_again_and_the_model_is_told(stage: Stage) -> None:
    run = stage.submit([calls(("die", {}), ("ping", {}))])

    assert run.result(timeout=30).ok
    unknown, pong = stage.results(run)
    assert json.loads(unknown)["error"]["type"] == "OUTCOME_UNKNOWN"
    assert pong == "pong"


def test_the_deadline_ends_a_run_in_the_middle_of_a_tool(stage: Stage) -> None:
    started = time.monotonic()
    run = stage.submit([calls(("wait_for_end", {}))], agent="hasty")

    result = run.result(timeout=20)

    assert (result.stop_reason, result.limit) == (StopReason.TIMEOUT, "timeout")
    assert time.monotonic() - started < 4
    turn, closed = run.messages()[-2:]
    assert closed["tool_call_id"] == turn["tool_calls"][0]["id"]
    assert json.loads(closed["content"])["error"]["type"] == "CANCELLED"


def test_calls_over_the_budget_are_refused_and_then_the_run_is_stopped(stage: Stage) -> None:
    turn = calls(*[("add", {"a": n, "b": n}) for n in range(3)])
    run = stage.submit([turn, calls(("ping", {}))], agent="frugal")

    result = run.result(timeout=20)

    assert (result.stop_reason, result.limit) == (StopReason.BUDGET_EXHAUSTED, "max_tool_calls")
    assert stage.results(run)[:2] == ["0", "2"]
    assert json.loads(stage.results(run)[2])["error"]["type"] == "CALL_LIMIT"


def test_the_token_budget_stops_a_run(stage: Stage) -> None:
    run = stage.submit([calls(("ping", {})), calls(("ping", {}))], agent="sparing")

    result = run.result(timeout=20)

    assert (result.stop_reason, result.limit) == (StopReason.BUDGET_EXHAUSTED, "max_tokens")
    assert result.usage.total_tokens == 36


def test_calls_over_max_parallel_calls_wait_for_their_turn(stage: Stage) -> None:
    run = stage.submit([calls(*[("slow", {"n": n}) for n in range(3)])], agent="narrow")

    assert run.result(timeout=20).ok
    lines = [line.split()[0] for line in stage.fleet.ledger if run.id in line]
    assert lines == ["slow-begin", "slow-end"] * 3
    assert stage.results(run) == ["0", "1", "2"]


def test_identical_calls_of_a_tool_with_side_effects_run_once(stage: Stage) -> None:
    charge = ("charge", {"account_id": 1, "cents": 5})
    run = stage.submit([calls(charge, charge)])

    assert run.result(timeout=20).ok
    charged, repeated = stage.results(run)
    assert charged == "charged 5"
    assert json.loads(repeated)["error"]["type"] == "DUPLICATE_CALL"
    assert len([line for line in stage.fleet.ledger if run.id in line]) == 1


def test_a_big_integer_reaches_the_tool_exactly(stage: Stage) -> None:
    run = stage.submit([calls(("charge", {"account_id": 9007199254740993, "cents": 1}))])

    assert run.result(timeout=20).ok
    assert [line for line in stage.fleet.ledger if f"{run.id}.0.0 1 9007199254740993 1" in line]


def test_a_result_of_five_megabytes_is_cut_with_a_marker(stage: Stage) -> None:
    run = stage.submit([calls(("big", {}))])

    assert run.result(timeout=20).ok
    (content,) = stage.results(run)
    assert len(content) <= 65_536
    assert "5000000 characters" in content


def test_the_context_tells_a_tool_whose_run_it_is(stage: Stage) -> None:
    run = stage.submit(
        [calls(("whoami", {}))],
        principal=Principal(id="u42", tenant="acme"),
        metadata={"ticket": "77"},
    )

    assert run.result(timeout=20).ok
    (known,) = tool_messages(stage, run)
    assert known == {
        "run": run.id,
        "call": "0.0",
        "trace": f"{run.id}.0.0",
        "key": f"{run.id}.0.0",
        "principal": "u42",
        "ticket": "77",
    }
    progress = [each.data for each in run.events() if each.type == "call.progress"]
    assert progress == [{"done": 1, "total": 2, "note": "half way"}]


def test_a_cancel_ends_the_run_and_interrupts_the_tool(stage: Stage) -> None:
    run = stage.submit([calls(("wait_for_end", {}), ("ping", {}))])
    stage.fleet.wait_for(lambda: "0.0" in [e.call for e in seen(run) if e.type == "call.started"])
    stage.fleet.wait_for(lambda: [e for e in seen(run) if e.type == "call.finished"])
    ends_before = len([line for line in stage.fleet.ledger if line.startswith("wait-end")])

    cancelled_at = time.time()
    run.cancel(reason="changed my mind")

    result = run.result(timeout=5)
    assert result.stop_reason is StopReason.CANCELLED
    assert result.error is not None
    assert result.error.message == "changed my mind"

    def interrupted() -> list[str]:
        return [line for line in stage.fleet.ledger if line.startswith("wait-end")][ends_before:]

    (end,) = stage.fleet.wait_for(interrupted)
    assert float(end.split()[1]) - cancelled_at < 1
    _, waiting, pong = run.messages()[-3:]
    assert json.loads(waiting["content"])["error"]["type"] == "CANCELLED"
    assert pong["content"] == "pong"
    assert len(stage.requests(run)) == 1


def test_a_cancel_closes_the_request_of_a_running_model_call(stage: Stage) -> None:
    run = stage.submit([final("too late") | {"delay": 30}])
    stage.fleet.wait_for(lambda: stage.requests(run))
    before = stage.model.disconnects

    run.cancel()

    assert run.result(timeout=1).stop_reason is StopReason.CANCELLED
    stage.model.wait_for(lambda server: server.disconnects > before, timeout=1)


def test_cancelling_twice_is_no_error_and_cancelling_a_finished_run_is(stage: Stage) -> None:
    run = stage.submit([final("too late") | {"delay": 30}])
    run.cancel()
    run.cancel()
    finished = stage.submit([])
    finished.result(timeout=20)

    with pytest.raises(RunFinished, match="COMPLETED"):
        finished.cancel()


def test_a_failed_model_attempt_parks_the_run_and_is_tried_again(stage: Stage) -> None:
    run = stage.submit([error(503, "busy"), error(502, "bad"), final("at last")])

    result = run.result(timeout=20)

    assert result.answer == "at last"
    assert [each.type for each in run.events()].count("run.waiting") == 2
    assert result.usage.requests == 3


def test_a_refused_key_ends_the_run_at_once_with_its_type(stage: Stage) -> None:
    run = stage.submit([error(401, "invalid_api_key")])

    result = run.result(timeout=20)

    assert result.stop_reason is StopReason.ERROR
    assert result.error is not None
    assert result.error.type == "AUTH_ERROR"
    assert "sk-test-planted-secret" not in result.model_dump_json()
    assert len(stage.requests(run)) == 1


def test_a_final_answer_of_the_wrong_type_goes_back_to_the_model(stage: Stage) -> None:
    run = stage.submit([final("well"), final('{"n": 3}')], agent="typed")

    result = run.result(timeout=20)

    assert result.answer == {"n": 3}
    assert len(stage.requests(run)) == 2
    assert "JSON" in stage.requests(run)[1]["messages"][-1]["content"]
    assert [each["content"] for each in run.messages()] == [
        stage.requests(run)[0]["messages"][1]["content"],
        '{"n": 3}',
    ]


def seen(run: Run) -> list[Any]:
    return run._store.read_events(run.id, "0")
