"""Talking to runs by the client and the command line, on real workers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from runner import ConversationBusy, InvalidInput, Principal, RunFinished, RunNotFound, StopReason
from runner import keys as redis_keys
from runner.errors import RedisUnavailable
from runner.invariants import check_run
from runner.loop import Wait
from runner.store import EndedRun, RunStore
from support.model_server import Reply, calls, final
from support.stage import Stage
from tasks import Run
from tasks.accept import accept_goal
from worker import cli

Invoke = Callable[..., tuple[int, str]]


@pytest.fixture
def invoke(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Invoke:
    monkeypatch.setenv("CELERIAC_REDIS_URL", stage.fleet.redis_url)

    def run(*words: str) -> tuple[int, str]:
        code = cli.main(list(words))
        return code, capsys.readouterr().out

    return run


def shown(stage: Stage, run: Run, number: int = -1) -> list[str]:
    """The texts of a request: `call` for a turn with calls."""
    messages = stage.requests(run)[number]["messages"]
    said = [str(each["content"] or "call") for each in messages if each["role"] != "system"]
    return said[1:]  # the goal is the stage's own


def waiting_for_a_tool(stage: Stage, **options: Any) -> Run:
    """A run with two calls, of which one returns when it is told to."""
    turn = calls(("wait_until_told", {"n": 1}), ("ping", {}))
    run = stage.submit([turn, final("first"), final("second")], agent="attentive", **options)
    entered = f"{run.id}.0.0 enter wait_until_told"
    stage.fleet.wait_for(lambda: entered in stage.fleet.ledger)
    return run


# --- run.send ----------------------------------------------------------------------------------


def test_a_message_to_a_running_run_is_in_its_next_request(stage: Stage) -> None:
    run = waiting_for_a_tool(stage)
    run.send("stop after this")
    stage.fleet.tell(run.id)
    assert run.result(timeout=20).answer == "first"
    assert shown(stage, run) == ["call", "1", "pong", "stop after this"]
    assert check_run(stage.client.store, run.id) == []


def test_a_message_that_comes_while_the_model_answers_is_answered_too(stage: Stage) -> None:
    sent = threading.Event()
    replies = iter([final("first"), final("second")])

    def answer_when_sent(_: dict[str, Any]) -> Reply:
        assert sent.wait(15)
        return next(replies)

    run = stage.submit(answer_when_sent)
    stage.fleet.wait_for(lambda: any(each.type == "step.started" for each in _so_far(stage, run)))
    run.send("and A002", idempotency_key="k")
    run.send("and A002", idempotency_key="k")
    sent.set()
    result = run.result(timeout=20)
    assert (result.answer, result.steps) == ("second", 2)
    assert shown(stage, run) == ["first", "and A002"]
    assert [each.type for each in run.events()].count("run.message") == 1
    assert check_run(stage.client.store, run.id) == []


def test_a_message_to_an_ended_run_says_how_to_go_on(stage: Stage) -> None:
    run = stage.submit([final("done")])
    run.result(timeout=20)
    with pytest.raises(RunFinished, match=rf"submit\(goal, agent='helper', after='{run.id}'\)"):
        run.send("and A002")
    with pytest.raises(RunNotFound):
        Run(stage.client.store, "no-such-run", run._app).send("hello")


@pytest.mark.parametrize("text", ["", "  ", 7, None, "half \ud800"])
def test_what_is_no_text_is_not_sent(stage: Stage, text: Any) -> None:
    run = stage.submit([final("done")])
    with pytest.raises(InvalidInput, match="the message"):
        run.send(text)


# --- submit(messages=, after=) -----------------------------------------------------------------


def test_a_run_goes_on_from_an_ended_one_in_a_valid_request(stage: Stage) -> None:
    first = stage.submit([calls(("ping", {})), final("it is alive")])
    first.result(timeout=20)
    stage.script(str(first.messages()[0]["content"]), [final("still alive")])

    second = stage.client.submit("And now?", agent="helper", after=first.id)

    assert second.result(timeout=20).answer == "still alive"
    assert second.info().after == first.id
    said = [each["content"] for each in second.messages()[1:]]
    assert said == [None, "pong", "it is alive", "And now?", "still alive"]
    assert check_run(stage.client.store, second.id) == []


def test_earlier_messages_are_sent_before_the_goal(stage: Stage) -> None:
    stage.script("hello, it's me", [final("hello again")])
    earlier: list[dict[str, Any]] = [
        {"role": "user", "content": "hello, it's me"},
        {"role": "assistant", "content": "hello", "refusal": None},
    ]
    run = stage.client.submit("And now?", agent="helper", messages=earlier)
    assert run.result(timeout=20).answer == "hello again"
    assert [each["content"] for each in run.messages()][1:] == ["hello", "And now?", "hello again"]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"messages": [{"role": "system", "content": "x"}]}, r"Agent\(instructions"),
        ({"messages": "hello"}, "messages"),
        ({"after": "no-such-run"}, "no run no-such-run of this tenant"),
        ({"after": 7}, "after"),
        ({"after": "x"}, "run id"),
        ({"after": "no-such-run", "conversation": "c"}, "after or conversation"),
        ({"conversation": ""}, "conversation is empty"),
        ({"conversation": 7}, "conversation"),
        ({"conversation": "c" * 1000}, "shorter name"),
        ({"conversation": "c", "when_busy": "wait"}, "reject, enqueue, interrupt"),
    ],
)
def test_what_a_run_cant_go_on_from_is_refused_and_nothing_is_written(
    stage: Stage, options: dict[str, Any], word: str
) -> None:
    before = stage.client.store.redis.zcard(redis_keys.RUNS)
    with pytest.raises(InvalidInput, match=word):
        stage.client.submit("goal", agent="helper", **options)
    assert stage.client.store.redis.zcard(redis_keys.RUNS) == before


def test_nobody_goes_on_from_a_run_of_another_tenant_or_one_that_runs(stage: Stage) -> None:
    run = waiting_for_a_tool(stage, principal=Principal(id="u", tenant="acme"))
    with pytest.raises(InvalidInput, match="of this tenant"):
        stage.client.submit("goal", agent="helper", after=run.id)
    with pytest.raises(InvalidInput, match=r"run\.send\(text\)"):
        stage.client.submit(
            "goal", agent="helper", after=run.id, principal={"id": "u", "tenant": "acme"}
        )
    run.cancel()


# --- conversations -----------------------------------------------------------------------------


def begin(stage: Stage, name: str, **options: Any) -> Run:
    return waiting_for_a_tool(stage, conversation=name, **options)


def test_a_busy_conversation_refuses_and_names_its_live_run(stage: Stage) -> None:
    live = begin(stage, "refusing")
    with pytest.raises(ConversationBusy, match=live.id) as caught:
        stage.client.submit("goal", agent="helper", conversation="refusing")
    assert caught.value.run_id == live.id
    live.cancel()


def test_an_enqueued_run_begins_with_the_end_of_the_one_before(stage: Stage) -> None:
    live = begin(stage, "patient")
    options: dict[str, Any] = {"agent": "helper", "conversation": "patient"}
    second = stage.client.submit("And now?", when_busy="enqueue", **options)
    assert second.status() == "waiting"
    stage.fleet.tell(live.id)

    assert second.result(timeout=20).answer == "second"

    ended, begun = live.info().ended, _at(second, "step.started")
    assert ended is not None
    assert 0 <= begun - ended < 1.5, "by its own hint, and not by recovery"
    said = [each["content"] for each in second.messages()[1:]]
    assert said == [None, "1", "pong", "first", "And now?", "second"]
    assert [check_run(stage.client.store, each.id) for each in (live, second)] == [[], []]


def _at(run: Run, type: str) -> float:
    return next(each.at for each in run.events() if each.type == type)


def test_an_interrupting_run_ends_the_live_one_and_goes_on_from_it(stage: Stage) -> None:
    live = begin(stage, "hasty")
    second = stage.client.submit(
        "Never mind", agent="helper", conversation="hasty", when_busy="interrupt"
    )
    assert second.result(timeout=20).answer == "first"
    result = live.result(timeout=1)
    assert result.stop_reason is StopReason.CANCELLED
    assert result.error is not None
    assert "interrupted" in result.error.message
    roles = [each["role"] for each in second.messages()]
    assert roles == ["user", "assistant", "tool", "tool", "user", "assistant"]


class Away(RunStore):
    """A store whose Redis goes away before it can end a run."""

    def end_run(self, *args: Any, **options: Any) -> EndedRun:
        raise RedisUnavailable("Redis doesn't answer")


def test_an_interrupt_that_the_submit_didnt_come_to_is_made_good(stage: Stage) -> None:
    live = begin(stage, "away")
    store = Away(stage.fleet.settings)
    accepted = accept_goal(
        store, "Never mind", agent="helper", conversation="away", when_busy="interrupt"
    )
    store.close()
    assert (accepted.created, accepted.coming) == (True, Wait(accepted.run_id))
    assert stage.client.get(accepted.run_id).result(timeout=20).ok
    assert live.result(timeout=1).stop_reason is StopReason.CANCELLED


def test_cancelling_the_live_run_lets_the_next_one_begin_at_once(stage: Stage) -> None:
    live = begin(stage, "cancelled")
    second = stage.client.submit(
        "And now?", agent="helper", conversation="cancelled", when_busy="enqueue"
    )
    live.cancel()
    assert second.result(timeout=20).ok
    ended = live.info().ended
    assert ended is not None
    assert _at(second, "step.started") - ended < 1.5


def test_one_that_the_conversation_has_left_behind_cant_be_resumed(stage: Stage) -> None:
    turns: list[Reply] = [calls(("ping", {})), calls(("ping", {})), final("later")]
    first = stage.submit(turns, agent="two-steps", conversation="left-behind")
    assert first.result(timeout=20).stop_reason is StopReason.MAX_STEPS
    stage.client.submit("go", agent="helper", conversation="left-behind").result(timeout=20)
    with pytest.raises(ConversationBusy, match="has gone on"):
        first.resume()


def test_a_plain_celery_app_names_a_conversation_too(stage: Stage) -> None:
    live = begin(stage, "plain")
    run_id = "run-of-a-plain-app"
    options = {"conversation": "plain", "when_busy": "enqueue"}
    stage.client._app.send_task(
        "celeriac.start",
        kwargs={"goal": "And now?", "agent": "helper", **options},
        task_id=run_id,
        queue="celeriac.steps",
    )
    stage.fleet.wait_for(lambda: stage.client.store.redis.exists(redis_keys.run(run_id)))
    stage.fleet.tell(live.id)
    assert stage.client.get(run_id).result(timeout=20).ok
    assert stage.client.get(run_id).info().after == live.id


# --- deleting ----------------------------------------------------------------------------------


def keys_of(stage: Stage, run: Run) -> list[str]:
    return [str(key) for key in stage.client.store.redis.scan_iter(f"*{run.id}*")]


def test_a_deleted_run_is_gone_and_a_second_delete_is_no_error(stage: Stage) -> None:
    run = stage.submit([final("done")], idempotency_key="deleted")
    run.result(timeout=20)
    assert stage.client.delete(run.id) is True
    assert stage.client.delete(run.id) is False
    assert keys_of(stage, run) == []
    with pytest.raises(RunNotFound):
        stage.client.get(run.id)
    assert run.id not in [each.id for each in stage.client.list()]


def test_a_live_run_is_cancelled_first_where_that_is_said(stage: Stage) -> None:
    run = stage.submit([calls(("wait_for_end", {}))])
    stage.fleet.wait_for(lambda: any(each.type == "call.started" for each in _so_far(stage, run)))
    with pytest.raises(InvalidInput, match="cancel=True"):
        stage.client.delete(run.id)
    stage.client.delete(run.id, cancel=True)
    stage.fleet.wait_for(lambda: any("wait-end" in line for line in stage.fleet.ledger))
    # Whatever the tool's worker writes now, it is told that there is no such run.
    assert stage.client.ping("tools") is not None
    assert keys_of(stage, run) == []


def _so_far(stage: Stage, run: Run) -> list[Any]:
    return list(stage.client.store.read_events(run.id, "0"))


# --- the command line --------------------------------------------------------------------------


def test_the_commands_talk_to_a_run_and_delete_it(stage: Stage, invoke: Invoke) -> None:
    run = begin(stage, "commands")
    assert cli.main(["delete", run.id]) == 2
    assert invoke("send", run.id, "stop after this", "--json") == (
        0,
        json.dumps({"run_id": run.id, "sent": True}) + "\n",
    )
    options = ("--agent", "helper", "--conversation", "commands")
    assert cli.main(["submit", "And now?", *options]) == 2
    _, second = invoke("submit", "And now?", *options, "--when-busy", "enqueue")
    assert invoke("send", second.strip(), "too") == (0, f"sent to {second}")
    stage.fleet.tell(run.id)
    assert run.result(timeout=20).answer == "first"
    assert stage.client.get(second.strip()).result(timeout=20).answer == "second"
    assert cli.main(["send", run.id, "too late"]) == 5

    code, third = invoke("submit", "go", "--agent", "helper", "--after", run.id)
    assert code == 0
    assert stage.client.get(third.strip()).info().after == run.id
    shown = invoke("show", third.strip())[1]
    assert f"after:     {run.id}" in shown
    assert invoke("delete", run.id) == (0, f"deleted {run.id}\n")
    assert invoke("delete", run.id) == (0, f"no run {run.id}: nothing to delete\n")


def test_prune_deletes_what_it_is_told_to_and_nothing_else(stage: Stage, invoke: Invoke) -> None:
    run = stage.submit([calls(("ping", {}))] * 3, agent="two-steps")
    assert run.result(timeout=20).stop_reason is StopReason.MAX_STEPS
    done = stage.submit([final("done")])
    done.result(timeout=20)
    assert cli.main(["prune"]) == 2
    words = ("prune", "--stop-reason", "max_steps", "--older-than", "0")
    assert run.id not in invoke("prune", "--stop-reason", "MAX_STEPS", "--older-than", "3600")[1]
    assert run.id in invoke(*words, "--dry-run")[1].splitlines()
    assert keys_of(stage, run)
    assert run.id in json.loads(invoke(*words, "--json")[1])["runs"]
    assert keys_of(stage, run) == []
    assert done.status() == "finished"
