"""Each command against a real server: what it prints, its exit code, one line where it fails."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path

import pytest

from runner import keys
from runner.models import Event, FinalResult, RunStatus, StopReason
from runner.record import RunInfo
from support.command import COMMAND, Invoke, Ran
from support.fleet import url_of, valkey
from tasks import Client, Run
from worker import cli

NO_SUCH_RUN = "01a00000-0000-7000-8000-000000000000"

Spawn = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def run(client: Client) -> Run:
    return client.submit("What is new?", agent="helper", metadata={"ticket": "77"})


def complete(client: Client, run: Run) -> None:
    client.store.end_run(run.id, StopReason.COMPLETED, answer="All is well.", closer="closed")
    assert run.status() is RunStatus.FINISHED


# --- what the commands do ----------------------------------------------------------------------


def test_submit_prints_the_id_of_a_run_that_then_waits_for_a_worker(
    invoke: Invoke, client: Client
) -> None:
    ran = invoke("submit", "What is new?", "--agent", "helper")

    assert (ran.code, ran.err) == (0, "")
    info = client.get(ran.out.strip()).info()
    assert (info.agent, info.status) == ("helper", RunStatus.QUEUED)


def test_check_holds_a_run_against_the_rules(invoke: Invoke, client: Client, run: Run) -> None:
    assert (invoke("check", run.id).code, invoke("check", NO_SUCH_RUN).code) == (0, 4)

    client.store.redis.zrem(keys.DUE, run.id)

    ran = invoke("check", run.id, "--json")
    assert ran.code == 1
    [fault] = json.loads(ran.out)["faults"]
    assert "due" in fault


def test_submit_with_json_prints_one_object(invoke: Invoke, client: Client) -> None:
    ran = invoke("submit", "What is new?", "--agent", "helper", "--json")

    assert ran.code == 0
    assert client.get(json.loads(ran.out)["run_id"]).status() is RunStatus.QUEUED


def test_the_same_idempotency_key_gives_the_same_run(invoke: Invoke) -> None:
    first, second = (
        invoke("submit", "What is new?", "--agent", "helper", "--idempotency-key", "ticket-77")
        for _ in range(2)
    )

    assert (first.code, second.code) == (0, 0)
    assert first.out == second.out


def test_a_goal_may_come_from_standard_input(
    invoke: Invoke, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("Wie geht's, Jörg?".encode())))

    ran = invoke("submit", "-", "--agent", "helper")

    assert client.get(ran.out.strip()).messages()[0]["content"] == "Wie geht's, Jörg?"


def test_submit_and_wait_ends_0_for_a_run_that_completed(spawn: Spawn, client: Client) -> None:
    process = spawn("submit", "What is new?", "--agent", "helper", "--wait")
    assert process.stdout is not None
    complete(client, client.get(process.stdout.readline().strip()))

    out, err = process.communicate(timeout=30)

    assert (process.returncode, err) == (0, "")
    assert "All is well." in out
    assert "COMPLETED" in out


def test_submit_and_wait_ends_1_for_a_run_that_ended_otherwise(
    invoke: Invoke, client: Client, run: Run
) -> None:
    key = ("--idempotency-key", "k")
    run_id = invoke("submit", "What is new?", "--agent", "helper", *key).out.strip()
    client.get(run_id).cancel("changed my mind")

    ran = invoke("submit", "What is new?", "--agent", "helper", *key, "--wait", "--json")

    assert ran.code == 1
    result = FinalResult.model_validate_json(ran.out)
    assert (result.run_id, result.stop_reason) == (run_id, StopReason.CANCELLED)


def test_ctrl_c_ends_the_wait_and_not_the_run(spawn: Spawn, client: Client) -> None:
    process = spawn("submit", "What is new?", "--agent", "helper", "--wait")
    assert process.stdout is not None
    run_id = process.stdout.readline().strip()

    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)

    assert process.returncode == 130
    assert f"the run goes on: celeriac events {run_id}" in err
    assert "Traceback" not in err
    assert client.get(run_id).status() is RunStatus.QUEUED


def test_runs_lists_runs_by_status(invoke: Invoke, client: Client, run: Run) -> None:
    complete(client, run)
    other = client.submit("And now?", agent="helper")

    everything = json.loads(invoke("runs", "--json").out)
    finished = json.loads(invoke("runs", "--status", "finished", "--json").out)
    table = invoke("runs")

    assert {each["id"] for each in everything} == {run.id, other.id}
    assert [RunInfo.model_validate(each).id for each in finished] == [run.id]
    assert len(json.loads(invoke("runs", "--limit", "1", "--json").out)) == 1
    assert table.code == 0
    assert "COMPLETED" in table.out
    assert table.out.count("\n") == 3


def test_runs_of_an_empty_redis_is_an_empty_list(invoke: Invoke) -> None:
    assert invoke("runs", "--json").out == "[]\n"
    assert invoke("runs").out == "no runs\n"


def test_show_of_a_run_that_goes_on_has_no_result(invoke: Invoke, run: Run) -> None:
    shown = json.loads(invoke("show", run.id, "--json").out)

    assert RunInfo.model_validate(shown["info"]).metadata == {"ticket": "77"}
    assert shown["result"] is None
    assert "status:    queued" in invoke("show", run.id).out


def test_show_of_a_finished_run_has_its_result(invoke: Invoke, client: Client, run: Run) -> None:
    complete(client, run)

    shown = json.loads(invoke("show", run.id, "--json").out)
    ran = invoke("show", run.id)

    assert FinalResult.model_validate(shown["result"]).answer == "All is well."
    assert ran.code == 0
    assert "All is well." in ran.out
    assert "stop reason: COMPLETED" in ran.out


def test_events_follows_a_run_until_it_ends(spawn: Spawn, client: Client, run: Run) -> None:
    process = spawn("events", run.id, "--json")
    assert process.stdout is not None
    first = Event.model_validate_json(process.stdout.readline())
    assert first.type == "run.created"

    complete(client, run)
    out, err = process.communicate(timeout=30)

    assert (process.returncode, err) == (0, "")
    assert [Event.model_validate_json(line).type for line in out.splitlines()] == ["run.finished"]


def test_events_can_be_resumed_after_the_last_one_seen(
    invoke: Invoke, client: Client, run: Run
) -> None:
    complete(client, run)
    first, last = invoke("events", run.id, "--json").out.splitlines()

    resumed = invoke("events", run.id, "--after", json.loads(first)["id"], "--json")

    assert resumed.out.splitlines() == [last]
    assert "run finished: COMPLETED" in invoke("events", run.id).out


def test_cancel_ends_a_run_with_its_reason_and_is_no_error_twice(invoke: Invoke, run: Run) -> None:
    first = invoke("cancel", run.id, "--reason", "wrong customer")
    second = invoke("cancel", run.id)

    assert (first.code, second.code) == (0, 0)
    error = run.result(timeout=5).error
    assert error is not None
    assert (error.type, error.message) == ("CANCELLED", "wrong customer")


def test_resume_takes_up_a_run_that_a_limit_ended(invoke: Invoke, client: Client, run: Run) -> None:
    client.store.end_run(run.id, StopReason.MAX_STEPS, closer="closed")

    ran = invoke("resume", run.id, "--max-steps", "3")

    assert ran == Ran(0, f"resumed {run.id}\n", "")
    assert run.status() is RunStatus.QUEUED


def test_resume_of_a_run_that_goes_on_says_so_and_changes_nothing(invoke: Invoke, run: Run) -> None:
    before = run.info()

    ran = invoke("resume", run.id, "--max-steps", "3")
    asked = invoke("resume", run.id, "--json")

    assert ran == Ran(0, f"{run.id} hasn't ended, it is queued; nothing was changed\n", "")
    assert asked == Ran(0, f'{{"run_id": "{run.id}", "resumed": false}}\n', "")
    assert run.info() == before


def test_resume_of_a_run_that_completed_ends_5(invoke: Invoke, client: Client, run: Run) -> None:
    complete(client, run)

    invoke("resume", run.id).refused(5, "ended COMPLETED", "submit anew")


def test_trace_of_a_run_that_no_worker_took_is_empty(invoke: Invoke, run: Run) -> None:
    ran = invoke("trace", run.id)

    assert json.loads(invoke("trace", run.id, "--json").out)["steps"] == []
    assert ran.code == 0
    assert "nothing was sent" in ran.out


def test_each_command_with_json_prints_it_the_same_way(
    invoke: Invoke, client: Client, run: Run
) -> None:
    client.store.end_run(run.id, StopReason.ERROR, closer="closed")
    key = ("--idempotency-key", "k")
    cancelled = invoke("submit", "goal", "--agent", "helper", *key, "--json")
    client.get(json.loads(cancelled.out)["run_id"]).cancel()

    printed = [
        cancelled,
        invoke("resume", run.id, "--json"),
        invoke("cancel", run.id, "--json"),
        invoke("ping", "--queue", "steps", "--timeout", "0.01", "--json"),
        invoke("submit", "goal", "--agent", "helper", *key, "--wait", "--json"),
        *(invoke(command, run.id, "--json") for command in ("show", "events", "trace")),
        invoke("runs", "--json"),
    ]

    lines = [line for ran in printed for line in ran.out.splitlines()]
    assert len(lines) == len(printed) + 3  # there are four events
    for line in lines:
        assert line == json.dumps(json.loads(line), ensure_ascii=False)
    asked, resumed, ended, deaf = (json.loads(ran.out) for ran in printed[:4])
    assert list(asked) == ["run_id"]
    assert resumed == {"run_id": run.id, "resumed": True}
    assert ended == {"run_id": run.id, "cancelled": True}
    assert deaf == {"queue": "steps", "seconds": None}
    assert printed[3].code == 1


def test_version_is_that_of_the_package(invoke: Invoke) -> None:
    assert invoke("--version") == Ran(0, f"celeriac {metadata.version('celeriac')}\n", "")


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["COMMAND", "celeriac --help"]),
        (["launch"], ["launch", "celeriac --help"]),
        (["submit", "goal"], ["--agent", "celeriac submit --help"]),
        (["worker", "--queue", "mail"], ["steps", "tools"]),
        (["worker", "--queue", "steps", "--concurrency", "0"], ["1 or more"]),
        (["runs", "--limit", "-1"], ["1 or more"]),
        (["runs", "--limit", "many"], ["'many' isn't a whole number"]),
        (["runs", "--limit", "9" * 30], ["below 10^9"]),
        (["resume", NO_SUCH_RUN, "--max-steps", "1.5"], ["--max-steps", "'1.5' isn't a whole"]),
        (["resume", NO_SUCH_RUN, "--max-steps", "0"], ["--max-steps", "1 or more"]),
        (["resume", NO_SUCH_RUN, "--timeout", "soon"], ["--timeout", "'soon' isn't a number of"]),
        (["resume", NO_SUCH_RUN, "--timeout", "nan"], ["--timeout", "seconds greater than 0"]),
        (["runs", "--status", "asleep"], ["queued", "finished"]),
        (["show"], ["RUN", "celeriac show --help"]),
    ],
)
def test_a_wrong_command_line_ends_2_and_names_its_help(
    invoke: Invoke, args: list[str], words: list[str]
) -> None:
    invoke(*args).refused(2, *words)


@pytest.mark.parametrize("command", ["show", "events", "cancel", "resume", "trace"])
def test_an_unknown_run_ends_4(invoke: Invoke, command: str) -> None:
    invoke(command, NO_SUCH_RUN).refused(4, NO_SUCH_RUN, "never submitted here")


@pytest.mark.parametrize("command", ["show", "events", "cancel", "trace"])
def test_what_is_no_run_id_ends_2(invoke: Invoke, command: str) -> None:
    invoke(command, "a:b").refused(2, "letters, digits")


def test_cancel_of_a_finished_run_ends_5_and_changes_nothing(
    invoke: Invoke, client: Client, run: Run
) -> None:
    complete(client, run)

    invoke("cancel", run.id).refused(5, "already ended COMPLETED", "nothing was changed")

    assert run.result().stop_reason is StopReason.COMPLETED


def test_what_is_no_event_id_ends_2(invoke: Invoke, run: Run) -> None:
    invoke("events", run.id, "--after", "yesterday").refused(2, "--after", "id of an event")


def test_a_goal_of_10_mb_ends_2_and_nothing_is_written(
    invoke: Invoke, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"x" * 10_000_000)))

    ran = invoke("submit", "-", "--agent", "helper")

    ran.refused(2, "10000000 characters", "CELERIAC_MAX_GOAL_CHARS")
    assert client.store.redis.dbsize() == 0


@pytest.mark.parametrize(
    ("goal", "word"), [("", "empty"), (" \n", "empty"), ("half \udc80", "surrogate")]
)
def test_a_goal_that_is_no_text_ends_2(invoke: Invoke, goal: str, word: str) -> None:
    invoke("submit", goal, "--agent", "helper").refused(2, "the goal", word)


def test_a_goal_on_standard_input_that_is_no_text_ends_2(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))

    invoke("submit", "-", "--agent", "helper").refused(2, "UTF-8")


def test_an_empty_idempotency_key_ends_2(invoke: Invoke) -> None:
    ran = invoke("submit", "goal", "--agent", "helper", "--idempotency-key", "")

    ran.refused(2, "idempotency_key", "leave it out")


@pytest.mark.parametrize("command", ["submit", "worker"])
class TestAgents:
    """`CELERIAC_AGENTS`, for the two commands that read it."""

    @staticmethod
    def args(command: str) -> list[str]:
        return {
            "submit": ["submit", "goal", "--agent", "nobody"],
            "worker": ["worker", "--queue", "steps"],
        }[command]

    def test_a_module_that_is_missing_ends_2(self, invoke: Invoke, command: str) -> None:
        ran = invoke(*self.args(command), CELERIAC_AGENTS="no_such.agents")

        ran.refused(2, "CELERIAC_AGENTS", "no_such.agents", "ModuleNotFoundError", "PYTHONPATH")

    @pytest.mark.parametrize(
        ("source", "words"),
        [
            ("agents = [", ["SyntaxError"]),
            ("raise RuntimeError('two\\nlines')", ["RuntimeError: two lines"]),
            (
                "from runner import Limits\nLimits(max_steps=-1, timeout=0)",
                [
                    "Limits: max_steps: Input should be greater than or equal to 1; timeout: Input",
                    "should be greater than 0\n",
                ],
            ),
            ("from runner import Agent\nAgent(name='a b')", ["import", ": agent name 'a b'"]),
            ("print('hello')", ["no Agent at the top level"]),
        ],
    )
    def test_a_module_that_fails_or_is_empty_ends_2(
        self,
        invoke: Invoke,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        command: str,
        source: str,
        words: list[str],
    ) -> None:
        name = f"agents_{abs(hash((source, command)))}"
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        printed = "hello\n" if "print" in source else ""

        ran = invoke(*self.args(command), CELERIAC_AGENTS=name)

        assert ran.err.startswith(printed) or ran.out.startswith(printed)
        shown = Ran(ran.code, "", ran.err.removeprefix(printed))
        shown.refused(2, "CELERIAC_AGENTS", name, *words)


def test_a_worker_without_agents_ends_2(invoke: Invoke) -> None:
    invoke("worker", "--queue", "tools").refused(2, "set CELERIAC_AGENTS")


def test_submit_checks_the_name_against_the_agents_at_hand(invoke: Invoke, client: Client) -> None:
    ran = invoke("submit", "goal", "--agent", "nobody", CELERIAC_AGENTS="examples.orders")

    ran.refused(2, "no agent named 'nobody'", "support")
    assert client.store.redis.dbsize() == 0


def test_submit_checks_the_name_against_what_workers_have_announced(
    invoke: Invoke, client: Client
) -> None:
    from examples.orders import agent

    client.store.publish_agents({"support": agent.limits})

    ran = invoke("submit", "goal", "--agent", "nobody")

    ran.refused(2, "no agent named 'nobody'", "support")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("CELERIAC_REDIS_URL", "http://127.0.0.1/", ["redis://"]),
        ("CELERIAC_REDIS_URL", "redis://127.0.0.1:port/0", ["redis://127.0.0.1:6379/0"]),
        ("CELERIAC_REDIS_URL", "redis://127.0.0.1/0?socket_timeout=x", ["redis://127.0.0.1:6379"]),
        ("CELERIAC_BROKER_URL", "amqp://localhost", ["redis://"]),
        ("CELERIAC_BROKER_URL", "redis://127.0.0.1:port/0", ["redis://127.0.0.1:6379/0"]),
        ("CELERIAC_LEASE", "soon", ["must be a number"]),
        ("CELERIAC_LEASE", "-1", ["greater than 0"]),
        ("CELERIAC_RENEW_EVERY", "60", ["smaller than CELERIAC_LEASE"]),
        ("CELERIAC_MAX_EVENTS", "1.5", ["must be a number"]),
    ],
)
@pytest.mark.parametrize(
    "args", [["runs"], ["submit", "goal", "--agent", "helper"], ["worker", "--queue", "steps"]]
)
def test_a_bad_setting_ends_2_and_is_named(
    invoke: Invoke, args: list[str], name: str, value: str, words: list[str]
) -> None:
    invoke(*args, **{name: value}).refused(2, name, *words)


# --- Redis -------------------------------------------------------------------------------------


class NotRedis(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def http_port() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), NotRedis) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture
def closed_port() -> int:
    with HTTPServer(("127.0.0.1", 0), NotRedis) as server:
        return server.server_port


ALL = [
    ["submit", "goal", "--agent", "helper"],
    ["runs"],
    *[[command, NO_SUCH_RUN] for command in ("show", "events", "cancel", "resume", "trace")],
    ["worker", "--queue", "steps"],
]


@pytest.mark.parametrize("args", ALL, ids=lambda args: args[0])
def test_a_redis_that_does_not_answer_ends_3(
    invoke: Invoke, closed_port: int, args: list[str]
) -> None:
    url = f"redis://:secret@127.0.0.1:{closed_port}/0"

    ran = invoke(*args, CELERIAC_REDIS_URL=url, CELERIAC_AGENTS="support.agents")

    ran.refused(3, "doesn't answer", "CELERIAC_REDIS_URL", "start it")
    assert "secret" not in ran.err


@pytest.mark.parametrize("args", ALL, ids=lambda args: args[0])
def test_a_server_that_is_not_redis_ends_3(invoke: Invoke, http_port: int, args: list[str]) -> None:
    url = f"redis://127.0.0.1:{http_port}/0"

    ran = invoke(*args, CELERIAC_REDIS_URL=url, CELERIAC_AGENTS="support.agents")

    ran.refused(3, "isn't Redis", "check host and port")


def test_a_redis_that_refuses_the_password_ends_3(invoke: Invoke, redis_url: str) -> None:
    ran = invoke("runs", CELERIAC_REDIS_URL=redis_url.replace("//", "//nobody:wrong@"))

    ran.refused(3, "refused the credentials", "CELERIAC_REDIS_URL")
    assert "wrong" not in ran.err


@pytest.mark.parametrize("args", ALL, ids=lambda args: args[0])
@pytest.mark.parametrize("name", ["CELERIAC_REDIS_URL", "CELERIAC_BROKER_URL"])
def test_a_redis_elsewhere_without_a_password_is_refused_before_it_is_asked(
    invoke: Invoke, args: list[str], name: str
) -> None:
    # Of a range that nobody has: to ask it would end 3, after a while.
    url = "redis://192.0.2.1:6379/0"

    ran = invoke(*args, CELERIAC_AGENTS="support.agents", **{name: url})

    ran.refused(2, name, "without a password or TLS", "CELERIAC_ALLOW_INSECURE_REDIS=1")


def test_a_redis_that_dies_ends_the_wait_and_not_the_run(spawn: Spawn, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    with valkey(data) as server:
        waiting = spawn(
            *("submit", "What is new?", "--agent", "helper", "--wait"),
            CELERIAC_REDIS_URL=url_of(server),
        )
        assert waiting.stdout is not None
        run_id = waiting.stdout.readline().strip()
    out, err = waiting.communicate(timeout=60)

    assert (waiting.returncode, out) == (3, "")
    first, last = err.splitlines()
    assert first == f"celeriac: the run goes on when Redis is back: celeriac events {run_id}"
    assert last.startswith("celeriac: error: Redis")


# --- a worker's start --------------------------------------------------------------------------


def warnings_of(worker: subprocess.Popen[str]) -> list[str]:
    """Our warnings on a worker's way to its start."""
    assert worker.stderr is not None
    seen = []
    for line in worker.stderr:
        seen.append(line)
        if line.endswith(" ready.\n"):
            break
    else:
        raise AssertionError("".join(seen))
    worker.terminate()
    worker.communicate(timeout=60)
    return [line for line in seen if line.startswith("celeriac: ")]


def test_a_steps_worker_without_a_key_warns_in_one_line(spawn: Spawn) -> None:
    (line,) = warnings_of(
        spawn("worker", "--queue", "steps", "--pool", "solo", CELERIAC_AGENTS="examples.orders")
    )

    assert line.startswith("celeriac: warning: OPENAI_API_KEY isn't set, so runs of support will")
    assert "set it" in line


@pytest.mark.parametrize(
    ("queue", "more"),
    [
        ("steps", {"OPENAI_API_KEY": "sk-test"}),
        ("steps", {"CELERIAC_AGENTS": "own_model"}),
        ("tools", {"CELERIAC_ALLOW_UNLIMITED_TOOLS": "1"}),
    ],
)
def test_a_worker_that_needs_no_key_or_has_one_does_not_warn(
    spawn: Spawn, tmp_path: Path, queue: str, more: dict[str, str]
) -> None:
    (tmp_path / "own_model.py").write_text(
        "from runner import Agent\n"
        "class Model:\n"
        "    async def respond(self, request): ...\n"
        "agent = Agent(name='own', model=Model())\n"
    )
    options = ("worker", "--queue", queue, "--pool", "solo")

    assert warnings_of(spawn(*options, **{"CELERIAC_AGENTS": "examples.orders", **more})) == []


# --- as a process ------------------------------------------------------------------------------


def test_a_reader_that_went_away_ends_141_without_a_word(environ: dict[str, str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [*COMMAND, "runs", "--json"],
        env=environ,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=30,
        check=False,
    )
    os.close(writer)

    assert (ran.returncode, ran.stderr) == (141, "")


def test_an_error_of_a_process_of_its_own_is_one_line_too(spawn: Spawn) -> None:
    process = spawn("show", NO_SUCH_RUN)
    out, err = process.communicate(timeout=30)

    assert (process.returncode, out) == (4, "")
    assert err.startswith("celeriac: error: no run")
    assert err.count("\n") == 1


def test_help_waits_for_no_heavy_import(environ: dict[str, str], tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "celeriac", "submit", "--help"],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )

    imported = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
    assert "worker.cli" in imported
    assert imported & {"celery", "kombu", "pydantic", "openai", "redis", "runner", "tasks"} == set()
    assert "--idempotency-key" in ran.stdout


def test_a_terminal_without_unicode_is_no_reason_to_fail(
    spawn: Spawn, client: Client, run: Run
) -> None:
    client.store.end_run(run.id, StopReason.COMPLETED, answer="Grüße 東京", closer="closed")

    process = spawn("show", run.id, PYTHONIOENCODING="ascii")
    out, err = process.communicate(timeout=30)

    assert (process.returncode, err) == (0, "")
    assert "Gr\\xfc\\xdfe" in out


def test_json_stays_json_on_such_a_terminal(spawn: Spawn, client: Client, run: Run) -> None:
    client.store.end_run(run.id, StopReason.COMPLETED, answer="Grüße 東京", closer="closed")

    out, err = spawn("show", run.id, "--json", PYTHONIOENCODING="ascii").communicate(timeout=30)

    assert err == ""
    assert json.loads(out)["result"]["answer"] == "Grüße 東京"


# --- what is written about it ------------------------------------------------------------------


def test_help_and_the_module_list_the_same_exit_codes(invoke: Invoke) -> None:
    told = re.findall(r"^  (\d+) ", invoke("--help").out, re.MULTILINE)
    written = re.findall(r"^\| (\d+) ", cli.__doc__ or "", re.MULTILINE)

    used = [*range(cli.HAD_ENDED + 1), cli.INTERRUPTED, cli.BROKEN_PIPE]
    assert told == written == [str(code) for code in used]


def test_the_statuses_offered_are_those_that_there_are() -> None:
    assert set(cli.STATUSES) == set(RunStatus)
