"""Planted secrets, looked for where people look: logs at DEBUG, events, errors, reprs, output."""

from __future__ import annotations

import json
import subprocess
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from runner import Agent, CeleriacError, Principal
from runner.model import OpenAIModel
from runner.settings import Settings
from support.command import COMMAND, PYTHONPATH
from support.fleet import wait_for
from support.model_server import calls, error, final
from support.plants import API_KEY, PASSWORD
from support.stage import Stage, by_turn
from tasks import Client, Run

CONTENT = "planted-in-"
ACME = Principal(id="planted-in-principal", tenant="acme")


@pytest.fixture
def app(stage: Stage) -> Iterator[Celery]:
    with Celery("shop", broker=stage.fleet.redis_url, set_as_current=False) as made:
        yield made


@pytest.fixture
def celery_events(app: Celery) -> Iterator[list[dict[str, Any]]]:
    """Every Celery event while it is open: what Flower is shown."""
    found: list[dict[str, Any]] = []
    connection = app.connection_for_read()
    receiver = app.events.Receiver(connection, handlers={"*": found.append})
    thread = threading.Thread(target=receiver.capture, daemon=True)
    thread.start()
    app.control.enable_events()  # as Flower does
    wait_for(lambda: found)
    yield found
    receiver.should_stop = True
    thread.join()
    connection.release()


def run_through(stage: Stage, app: Celery) -> list[Run]:
    """Runs with a secret at every place that has one, each to its end."""
    client, fleet = stage.client, stage.fleet
    turn = [("keep", {"secret": "planted-in-argument"}), ("leak", {})]
    turns = [
        calls(*turn, ("pay", {"account": "planted-in-account"}), text="planted-in-turn"),
        calls(("pay", {"account": "planted-in-account"}), ("measure", {"text": 7})),
        final("planted-in-answer"),
    ]
    for first_said in ("planted-in-goal", "planted-in-earlier"):
        stage.script(first_said, by_turn(turns))
    run = client.submit(
        "planted-in-goal",
        agent="guarded",
        principal=ACME,
        metadata={"note": "planted-in-metadata"},
        messages=[{"role": "user", "content": "planted-in-earlier"}],
        idempotency_key="planted-in-key",
        conversation="planted-in-conversation",
        on_finish="shop.done",
    )
    fleet.wait_for(run.approvals)
    run.send("planted-in-message")
    run.approve("0.2", by="planted-in-decider")
    fleet.wait_for(lambda: [each.call_id for each in run.approvals()] == ["1.0"])
    run.deny("1.0", "planted-in-reason")
    plain, refused = (str(uuid.uuid4()) for _ in "12")
    given = {"goal": "planted-in-goal", "agent": "guarded", "metadata": {"x": "planted-in-start"}}
    for run_id, options in ((plain, given), (refused, given | {"metdata": "planted-in-typo"})):
        app.send_task("celeriac.start", kwargs=options, task_id=run_id, queue="celeriac.steps")
    stage.script("planted-in-refusal", [error(401, "x", message=f"planted-in-error {API_KEY}")])
    failed = client.submit("planted-in-refusal", agent="guarded")
    stage.script("planted-in-cancel", [final("late") | {"delay": 5}])
    cancelled = client.submit("planted-in-cancel", agent="guarded")
    fleet.wait_for(lambda: cancelled.status() == "running")
    cancelled.cancel("planted-in-cancel-reason")
    fleet.wait_for(lambda: f"run={refused} is refused" in fleet.log("steps"))
    for each in (run, failed):
        each.result(timeout=20)
    fleet.wait_for(lambda: client.get(plain).approvals())
    client.get(plain).cancel()
    return [run, failed, cancelled, client.get(plain)]


def command(stage: Stage, *words: str, code: int = 0, **environ: str) -> str:
    """All that a command of the command line prints."""
    done = subprocess.run(
        [*COMMAND, *words],
        env=stage.fleet.environ | {"PYTHONPATH": PYTHONPATH} | environ,
        cwd=stage.fleet.folder,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_no_planted_secret_comes_to_light(
    stage: Stage, app: Celery, celery_events: list[dict[str, Any]]
) -> None:
    runs = run_through(stage, app)

    events = [each for run in runs for each in run.events()]
    inspect = app.control.inspect(timeout=2, limit=2)
    shown = {
        "logs": stage.fleet.logs(),
        "Celery's events": celery_events,
        "inspect": [inspect.conf(with_defaults=True), inspect.stats(), inspect.report()],
        "a run's events": [each.model_dump() for each in events],
        "reprs": [stage.client, stage.client.store, stage.client._app, *runs, *map(vars, runs)],
        "runs": command(stage, "runs"),
        "events": command(stage, "events", runs[0].id),
        "check": command(stage, "check", runs[0].id),
        "replay": command(stage, "replay", runs[0].id),
    }
    # What a run's own reader is to see, and no one else: content, but neither key nor password.
    content = {
        "show": command(stage, "show", runs[0].id),
        "trace": command(stage, "trace", runs[0].id),
        "trace as JSON": command(stage, "trace", runs[1].id, "--json"),
        "result": [run.result() for run in runs],
        "messages": [run.messages() for run in runs],
    }
    assert "DEBUG" in shown["logs"]
    assert any(each["type"] == "task-received" for each in celery_events)
    assert CONTENT in str(content)
    for name, told in (shown | content).items():
        assert API_KEY not in str(told), name
        assert PASSWORD not in str(told), name
    visible = {"a run's events", "runs"}  # who decided, and the metadata that is for lists
    for name, told in shown.items():
        text = str(told)
        for meant in ("planted-in-decider", "planted-in-metadata", "planted-in-start"):
            text = text.replace(meant, "") if name in visible or name == "events" else text
        text = text.replace("planted-in-conversation", "") if name == "runs" else text
        assert CONTENT not in text, (name, text[max(0, text.find(CONTENT) - 200) :][:400])


def test_task_arguments_are_ids_and_numbers_alone(
    stage: Stage, app: Celery, celery_events: list[dict[str, Any]]
) -> None:
    run = stage.submit([calls(("measure", {"text": "planted-in-argument"}))], agent="guarded")
    assert run.result(timeout=20).ok
    wait_for(lambda: [each for each in celery_events if each.get("uuid") == f"{run.id}.1"])

    sent = [each for each in celery_events if str(each.get("uuid", "")).startswith(run.id)]
    shown = {(each["args"], each["kwargs"]) for each in sent if "args" in each}
    assert shown == {
        (f"('{run.id}', 0)", "{}"),
        (f"('{run.id}', 0, 0)", "{}"),
        (f"('{run.id}', 1)", "{}"),
    }


URL = f"redis://app:{PASSWORD}@127.0.0.1:1/0"

FAILURES: dict[str, Callable[[], object]] = {
    "a Redis that is away": lambda: Client(URL).list(),
    "a broker that is away": lambda: Client(
        settings=Settings(redis_url="redis://127.0.0.1:1/0", broker_url=URL)
    ).ping("steps"),
    "a URL of no Redis": lambda: Client(f"http://app:{PASSWORD}@127.0.0.1/0"),
    "a setting": lambda: Settings.from_env({"CELERIAC_REDIS_URL": URL, "CELERIAC_LEASE": "x"}),
}


@pytest.mark.parametrize("act", FAILURES.values(), ids=FAILURES)
def test_no_error_and_no_traceback_has_the_password(act: Callable[[], object]) -> None:
    with pytest.raises(CeleriacError) as found:
        act()

    whole = "".join(traceback.format_exception(found.value))
    assert PASSWORD not in whole + repr(found.value)


def test_no_repr_of_what_holds_a_secret_shows_it() -> None:
    settings = Settings(redis_url=URL, broker_url=URL, result_backend=URL)
    model = OpenAIModel("http://127.0.0.1:1/v1", API_KEY)
    agent = Agent(name="helper", model=model)
    with Client(settings=settings) as client:
        for each in (settings, client, client.store, client._app, model, agent, [settings]):
            assert PASSWORD not in repr(each) + str(each)
            assert API_KEY not in repr(each) + str(each)
        assert PASSWORD not in json.dumps(client._app.conf.humanize())


@pytest.mark.parametrize("words", [["runs"], ["submit", "--agent", "guarded", "go"]])
def test_a_command_that_finds_no_redis_does_not_show_its_password(
    stage: Stage, words: list[str]
) -> None:
    assert PASSWORD not in command(stage, *words, code=3, CELERIAC_REDIS_URL=URL)
