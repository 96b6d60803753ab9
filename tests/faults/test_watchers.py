"""Who looks on or asks from outside: plain Celery apps, `inspect`, events, and a real Flower."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from runner import RunNotFound, RunStatus, StopReason
from runner.models import Principal
from support.fleet import wait_for
from support.model_server import calls, error, final
from support.stage import OpenStage, Stage, by_turn, open_stage
from tasks import Run

AGENTS = r'''
import time

from runner import Agent, Context, Retry, ToolError, tool
from support.agents import TOOLS, note


@tool(timeout=60)
def keep(ctx: Context, secret: str) -> str:
    """Hold on to a secret for a moment, and to one that is looked for a little longer."""
    note(f"keep {ctx.trace_id}")
    time.sleep(1.5 if secret.startswith("planted") else 0.1)
    return "planted-in-result"


@tool
def leak() -> None:
    """Fail with a secret in the exception's text."""
    raise RuntimeError("planted-in-exception")


@tool
def tell() -> None:
    """Fail with a secret that the model may read."""
    raise ToolError("planted-in-tool-error", type="TOLD")


watched = Agent(
    name="watched",
    instructions="planted-in-instructions",
    tools=[*TOOLS, keep, leak, tell],
    model_retry=Retry(max_attempts=2, initial_delay=0.1),
)
'''

PLANTED = "planted-"
API_KEY = "sk-test-planted-secret"


@contextlib.contextmanager
def watched_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("watchers")
    (folder / "watched_agents.py").write_text(AGENTS)
    with open_stage(
        folder, agents="watched_agents", CELERIAC_LEASE="5", CELERIAC_RENEW_EVERY="1.5"
    ) as made:
        made.fleet.wait_for(lambda: "ready" in made.fleet.log("tools"))
        made.fleet.wait_for(lambda: "ready" in made.fleet.log("steps"))
        yield made


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with watched_stage(tmp_path_factory) as made:
        yield made


@pytest.fixture
def app(stage: Stage) -> Iterator[Celery]:
    """An app that knows nothing of ours but the broker."""
    with Celery("shop", broker=stage.fleet.redis_url, set_as_current=False) as made:
        yield made


def types(run: Run) -> list[str]:
    return [each.type for each in run._store.read_events(run.id, "0")]


def seen(stage: Stage, run_id: str, type: str) -> bool:
    try:
        return type in types(stage.client.get(run_id))
    except RunNotFound:
        return False


# --- a plain Celery app ---------------------------------------------------------------------------


def start(app: Celery, goal: str, *, agent: str = "watched", **options: Any) -> str:
    run_id = str(uuid.uuid4())
    app.send_task(
        "celeriac.start",
        kwargs={"goal": goal, "agent": agent},
        task_id=run_id,
        queue="celeriac.steps",
        **options,
    )
    return run_id


def test_a_plain_app_starts_a_run_under_its_task_id(stage: Stage, app: Celery) -> None:
    stage.script("start me plainly", by_turn([calls(("ping", {})), final("plainly done")]))

    run_id = start(app, "start me plainly")

    stage.fleet.wait_for(lambda: seen(stage, run_id, "run.finished"))
    result = stage.client.get(run_id).result(timeout=1)
    assert (result.run_id, result.stop_reason, result.answer) == (
        run_id,
        StopReason.COMPLETED,
        "plainly done",
    )


def test_a_start_that_comes_twice_is_one_run(stage: Stage, app: Celery) -> None:
    stage.script("start me once", by_turn([calls(("keep", {"secret": "short"}))]))
    run_id = start(app, "start me once")
    app.send_task(
        "celeriac.start",
        kwargs={"goal": "start me once", "agent": "watched"},
        task_id=run_id,
        queue="celeriac.steps",
    )

    stage.fleet.wait_for(lambda: seen(stage, run_id, "run.finished"))
    run = stage.client.get(run_id)
    assert run.result(timeout=1).ok
    assert types(run).count("step.started") == 2
    assert [line for line in stage.fleet.ledger if run_id in line] == [f"keep {run_id}.0.0"]


@pytest.mark.parametrize("terminate", [False, True])
def test_a_plain_app_revokes_the_run_that_it_started(
    stage: Stage, app: Celery, terminate: bool
) -> None:
    goal = f"start me and revoke me, terminate={terminate}"
    stage.script(goal, [final("too late") | {"delay": 30}])
    run_id = start(app, goal)
    stage.fleet.wait_for(lambda: seen(stage, run_id, "step.started"))

    app.control.revoke(run_id, terminate=terminate)

    run = stage.client.get(run_id)
    assert run.result(timeout=5).stop_reason is StopReason.CANCELLED


def test_a_start_for_an_agent_that_nobody_has_is_refused_without_a_traceback(
    stage: Stage, app: Celery
) -> None:
    run_id = start(app, "planted-in-refused-goal", agent="nobody")

    stage.fleet.wait_for(lambda: f"celeriac.start[{run_id}]" in stage.fleet.log("steps"))
    stage.fleet.wait_for(lambda: refused_or_ended(stage, run_id))
    assert "Traceback" not in stage.fleet.log("steps")
    assert "planted-in-refused-goal" not in stage.fleet.log("steps")


def test_a_start_that_reaches_a_worker_without_its_agent_is_left_to_one_that_has_it(
    open_fleet: OpenStage,
) -> None:
    stage = open_fleet()
    fleet = stage.fleet
    fleet.wait_for(lambda: "ready" in fleet.log("steps"))
    fleet.stop("steps")
    (fleet.folder / "other_agents.py").write_text(
        'from runner import Agent\nother = Agent(name="other")\n'
    )
    known, fleet.environ["CELERIAC_AGENTS"] = fleet.environ["CELERIAC_AGENTS"], "other_agents"
    fleet.start("steps", name="other")
    fleet.environ["CELERIAC_AGENTS"] = known
    fleet.wait_for(lambda: "ready" in fleet.log("other"))
    with Celery("shop", broker=fleet.redis_url, set_as_current=False) as app:
        run_id = start(app, "start me in the middle of a deployment", agent="helper")
        fleet.wait_for(lambda: seen(stage, run_id, "run.waiting"))
        fleet.start("steps", name="again")
        assert stage.client.get(run_id).result(timeout=20).answer == "done"


def refused_or_ended(stage: Stage, run_id: str) -> bool:
    """Either the record says CONFIG_ERROR, or the log says that the start was refused."""
    try:
        result = stage.client.get(run_id).result(timeout=5)
    except RunNotFound:
        return "no agent named 'nobody'" in stage.fleet.log("steps")
    return result.error is not None and result.error.type == "CONFIG_ERROR"


# --- R46: nothing planted comes to light ----------------------------------------------------------


class Events:
    """Every Celery event while it is open."""

    def __init__(self, app: Celery) -> None:
        self.found: list[dict[str, Any]] = []
        self._connection = app.connection_for_read()
        self._receiver = app.events.Receiver(self._connection, handlers={"*": self.found.append})
        self._thread = threading.Thread(target=self._receiver.capture, daemon=True)
        self._thread.start()
        # It asks the workers for their heartbeats, so that there is one as soon as it listens.
        wait_for(lambda: self.found)
        # Of tasks they tell only who asks for it, as Flower does.
        assert app.control.broadcast("enable_events", reply=True)

    def close(self) -> None:
        self._receiver.should_stop = True
        self._thread.join()
        self._connection.release()


@pytest.fixture
def celery_events(stage: Stage, app: Celery) -> Iterator[Events]:
    made = Events(app)
    yield made
    made.close()


def look(app: Celery, *task_ids: str) -> str:
    """All that `celery inspect` shows."""
    inspect = app.control.inspect(timeout=2, limit=2)
    shown = [
        inspect.active(safe=False),
        inspect.reserved(safe=False),
        inspect.scheduled(safe=False),
        inspect.query_task(*task_ids),
        inspect.conf(with_defaults=True),
        inspect.registered(),
    ]
    assert all(shown), "both workers answer each question"
    return json.dumps(shown, default=str)


def test_r46_no_planted_secret_comes_to_light(
    stage: Stage, app: Celery, celery_events: Events
) -> None:
    turns = [
        calls(("keep", {"secret": "planted-in-argument"}), ("leak", {}), ("tell", {})),
        calls(("keep", {"secret": "planted-in-argument"}), text="planted-in-turn"),
        final("planted-in-answer"),
    ]
    stage.script("planted-in-goal", by_turn([turns[0] | {"delay": 2}, *turns[1:]]))
    run = stage.client.submit(
        "planted-in-goal",
        agent="watched",
        principal=Principal(id="planted-in-principal"),
        metadata={"note": "planted-in-metadata"},
    )
    plain = start(app, "planted-in-goal")
    stage.script("planted-in-refusal", [error(401, "bad", message=f"planted-in-error {API_KEY}")])
    refused = stage.client.submit("planted-in-refusal", agent="watched")
    # One start waits in its worker's hands, where `inspect` sees it.
    waiting = start(app, "planted-in-goal", countdown=60)
    stage.fleet.wait_for(lambda: f"start[{waiting}]" in stage.fleet.log("steps"))
    stage.fleet.wait_for(lambda: "step.started" in types(run))

    shown = [look(app, waiting, f"{run.id}.0")]
    stage.fleet.wait_for(lambda: f"keep {run.id}.0.0" in stage.fleet.ledger)
    shown.append(look(app, waiting, f"{run.id}.0.0"))
    assert run.result(timeout=20).answer == "planted-in-answer"
    assert refused.result(timeout=20).stop_reason is StopReason.ERROR
    stage.fleet.wait_for(lambda: seen(stage, plain, "run.finished"))
    app.control.revoke(waiting)
    last = f"{run.id}.2"
    stage.fleet.wait_for(lambda: has_succeeded(celery_events, last))

    events = json.dumps(celery_events.found, default=str)
    assert waiting in shown[0]
    assert f'"{run.id}.0"' in shown[0]
    assert f'"{run.id}.0.0"' in shown[1]
    assert "planted-in-exception" not in str(run.messages())
    for told in (*shown, events, stage.fleet.logs()):
        assert PLANTED not in told
        assert API_KEY not in told
    received = [each for each in celery_events.found if each["type"] == "task-received"]
    arguments = {each["uuid"]: (each["args"], each["kwargs"]) for each in received}
    assert arguments[f"{run.id}.0"] == (f"('{run.id}', 0)", "{}")
    assert arguments[f"{run.id}.0.0"] == (f"('{run.id}', 0, 0)", "{}")
    assert arguments[plain] == ("{...}", "{...}")
    results = [each["content"] for each in run.messages() if each["role"] == "tool"]
    assert "planted-in-tool-error" in results[2]  # what is meant for the model does reach it


def has_succeeded(events: Events, task_id: str) -> bool:
    return any(
        each["type"] == "task-succeeded" and each["uuid"] == task_id for each in list(events.found)
    )


# --- R47: Flower ----------------------------------------------------------------------------------

USER = "ops:flower-password"


class Flower:
    """A real Flower on a free port, with basic auth."""

    def __init__(self, stage: Stage) -> None:
        assert importlib.util.find_spec("flower"), (
            "flower isn't installed; pip install -e '.[dev]', or '.[flower]'"
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self.log = stage.fleet.folder / "flower.txt"
        command = [sys.executable, "-m", "celery", "--broker", stage.fleet.redis_url, "flower"]
        options = [f"--port={port}", "--address=127.0.0.1", f"--basic-auth={USER}"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *options],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=stage.fleet.environ,
                cwd=stage.fleet.folder,
                start_new_session=True,
            )

    def ask(
        self, path: str, *, credentials: str | None = USER, method: str = "GET"
    ) -> tuple[int, str]:
        """Status (0: nobody listens) and body."""
        request = urllib.request.Request(self._url + path, method=method)
        if credentials:
            token = base64.b64encode(credentials.encode()).decode()
            request.add_header("Authorization", f"Basic {token}")
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, refused.read().decode()
        except OSError:
            return 0, ""

    def task(self, task_id: str) -> dict[str, Any]:
        status, text = self.ask(f"/api/task/info/{task_id}")
        return dict(json.loads(text)) if status == 200 else {}

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


@pytest.fixture(scope="module")
def flower(stage: Stage) -> Iterator[Flower]:
    made = Flower(stage)
    try:
        stage.fleet.wait_for(lambda: made.ask("/api/workers")[0] == 200, timeout=30)
        warm = stage.submit([], agent="watched")
        assert warm.result(timeout=20).ok
        # Flower misses what happened before it listened.
        stage.fleet.wait_for(lambda: listens(stage, made), timeout=30)
        yield made
    finally:
        made.kill()


def listens(stage: Stage, flower: Flower) -> bool:
    run = stage.submit([], agent="watched")
    assert run.result(timeout=20).ok
    return bool(flower.task(f"{run.id}.0"))


def test_r47_every_path_of_flower_wants_credentials(stage: Stage, flower: Flower) -> None:
    run = stage.submit([calls(("ping", {}))], agent="watched")
    assert run.result(timeout=20).ok
    task = f"{run.id}.0"
    for path in (
        "/",
        "/workers",
        "/tasks",
        "/tasks/datatable",
        f"/task/{task}",
        "/broker",
        "/api/workers",
        "/api/tasks",
        "/api/task/types",
        "/api/queues/length",
        f"/api/task/info/{task}",
        f"/api/task/result/{task}",
    ):
        for credentials in (None, "ops:wrong"):
            assert flower.ask(path, credentials=credentials)[0] == 401, path
    for path in (f"/api/task/revoke/{task}", "/api/task/send-task/celeriac.start"):
        assert flower.ask(path, credentials=None, method="POST")[0] == 401, path


def test_r47_a_runs_tasks_are_visible_without_their_content(stage: Stage, flower: Flower) -> None:
    run = stage.submit(
        [calls(("add", {"a": 1, "b": 2})), final("planted-in-answer")], agent="watched"
    )
    assert run.result(timeout=20).ok

    step = stage.fleet.wait_for(lambda: flower.task(f"{run.id}.1"))
    call = stage.fleet.wait_for(lambda: flower.task(f"{run.id}.0.0"))
    assert (step["name"], step["args"]) == ("celeriac.step", f"('{run.id}', 1)")
    assert (call["name"], call["args"]) == ("celeriac.call_tool", f"('{run.id}', 0, 0)")
    assert {step["root_id"], call["root_id"]} == {run.id}
    # What is done says what it was: a step its calls or its end, a call its tool.
    first = stage.fleet.wait_for(lambda: flower.task(f"{run.id}.0"))
    assert (first["result"], step["result"]) == ("'calls tools'", "'COMPLETED'")
    assert call["result"] == "'add OK'"
    _, listed = flower.ask("/api/tasks?limit=1000")
    assert f"{run.id}.0.0" in listed
    assert PLANTED not in listed


@pytest.mark.parametrize("terminate", ["false", "true"])
@pytest.mark.parametrize("what", ["step", "call"])
def test_r30_flowers_revoke_cancels_the_run(
    stage: Stage, flower: Flower, what: str, terminate: str
) -> None:
    if what == "step":
        run = stage.submit([final("too late") | {"delay": 30}], agent="watched")
        stage.fleet.wait_for(lambda: stage.requests(run))
        task_id = f"{run.id}.0"
    else:
        run = stage.submit([calls(("wait_for_end", {}))], agent="watched")
        stage.fleet.wait_for(lambda: "call.started" in types(run))
        task_id = f"{run.id}.0.0"
    before = stage.model.disconnects
    stage.fleet.wait_for(lambda: flower.task(task_id))

    status, text = flower.ask(f"/api/task/revoke/{task_id}?terminate={terminate}", method="POST")

    assert (status, text[:20] != "") == (200, True)
    assert run.result(timeout=5).stop_reason is StopReason.CANCELLED
    if what == "step":
        stage.model.wait_for(lambda server: server.disconnects > before, timeout=2)
    # All slots are free again.
    again = stage.submit([calls(*[("slow", {"n": n}) for n in range(4)])], agent="watched")
    assert again.result(timeout=20).ok


def test_r47_runs_dont_notice_that_flower_is_killed(stage: Stage) -> None:
    flower = Flower(stage)
    tracebacks = stage.fleet.logs().count("Traceback")
    try:
        stage.fleet.wait_for(lambda: flower.ask("/api/workers")[0] == 200, timeout=30)
        turns = [calls(("add", {"a": n, "b": n})) for n in range(5)]
        runs = [stage.submit(by_turn(turns), agent="watched") for _ in range(20)]
        stage.fleet.wait_for(lambda: any(run.status() is RunStatus.FINISHED for run in runs))
    finally:
        flower.kill()
    runs += [stage.submit(by_turn(turns), agent="watched") for _ in range(10)]

    for run in runs:
        result = run.result(timeout=30)
        assert (result.stop_reason, result.steps) == (StopReason.COMPLETED, 6)
        started = [e.data["attempt"] for e in run.events() if e.type.endswith(".started")]
        assert started == [1] * 11
    assert stage.fleet.logs().count("Traceback") == tracebacks
