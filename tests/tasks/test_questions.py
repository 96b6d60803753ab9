"""A model that asks the user, and an answer that is told as it comes: on real workers."""

from __future__ import annotations

import json

import pytest

from runner import InvalidInput, RunStatus, StopReason
from support.model_server import calls, final
from support.stage import Stage
from tasks import Run
from worker import cli

QUESTION = calls(("ask_user", {"question": "Which order?"}), ("ping", {}))


def ask(stage: Stage) -> Run:
    run = stage.submit([QUESTION], agent="curious")
    stage.fleet.wait_for(lambda: run.status() is RunStatus.WAITING)
    return run


def test_a_question_waits_without_a_worker_and_the_reply_goes_to_the_model(stage: Stage) -> None:
    run = ask(stage)
    assert run.questions() == {"0.0": "Which order?"}
    [waiting] = [
        each for each in stage.client.store.read_events(run.id, "0") if "wait" in each.type
    ]
    assert (waiting.call, waiting.data["question"]) == ("0.0", "Which order?")

    run.reply("A001, the lamp")

    assert run.result(timeout=20).answer == "done"
    assert stage.results(run) == ["A001, the lamp", "pong"]
    assert run.questions() == {}


def test_a_reply_that_nobody_asked_for_is_refused(stage: Stage) -> None:
    run = ask(stage)
    with pytest.raises(InvalidInput, match=r"open: 0\.0"):
        run.reply("A001", call="0.1")
    with pytest.raises(InvalidInput, match="empty"):
        run.reply("  ")
    run.reply("A001")
    with pytest.raises(InvalidInput, match="open: none"):
        run.reply("A002")
    assert run.result(timeout=20).ok


def test_a_run_that_waits_for_a_reply_can_be_cancelled(stage: Stage) -> None:
    run = ask(stage)
    run.cancel()
    assert run.result(timeout=5).stop_reason is StopReason.CANCELLED
    assert len(stage.requests(run)) == 1


def test_the_command_line_shows_a_question_and_answers_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CELERIAC_REDIS_URL", stage.fleet.redis_url)
    run = ask(stage)

    assert cli.main(["reply", run.id]) == 0
    assert capsys.readouterr().out == "0.0  Which order?\n"
    assert cli.main(["reply", run.id, "A001", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["replied"] is True
    assert run.result(timeout=20).ok
    assert cli.main(["reply", run.id, "A001"]) == 2


def test_an_answer_is_told_as_it_streams_in(stage: Stage) -> None:
    text = "The answer comes in pieces. " * 20
    run = stage.submit([calls(("ping", {})), final(text)], agent="chatty")

    deltas = [each for each in run.events() if each.type == "model.delta"]

    assert run.result(timeout=5).answer == text
    assert "".join(str(each.data["text"]) for each in deltas) == text
    assert {(each.step, each.data["exchange"]) for each in deltas} == {(1, 1)}
    assert all(body["stream"] for body in stage.requests(run))
