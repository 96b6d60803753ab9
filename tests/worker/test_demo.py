"""`celeriac run` from nothing to the answer, and what is left behind: nothing, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from support.command import COMMAND, PYTHONPATH
from support.fleet import Fleet
from support.model_server import ModelServer, calls, final
from support.stage import Stage, open_stage

MARK = "DEMO_UNDER_TEST"

SLOW_AGENT = """
import time
from runner import Agent, tool

@tool(timeout=60, idempotent=True)
def list_files(path: str = ".") -> str:
    \"\"\"Take a minute.\"\"\"
    time.sleep(60)
    return "late"

slow = Agent(name="slow", tools=[list_files])
"""


class Demo:
    """`celeriac run` in a folder of its own; its temporary files are there too."""

    def __init__(
        self, folder: Path, *args: str, files: Mapping[str, str] | None = None, **more: str
    ) -> None:
        self.folder = folder
        self.temp = folder / "temp"
        self.temp.mkdir()
        work = folder / "work"
        work.mkdir()
        (work / "README.md").write_text("# Celery root\n\nA folder with one file.\n")
        for name, text in {"agents_here.py": SLOW_AGENT, **(files or {})}.items():
            (work / name).write_text(text)
        home = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
        self.process = subprocess.Popen(
            # As an installed command starts: without the current folder at the front of the path.
            [COMMAND[0], "-P", *COMMAND[1:], "run", *args],
            cwd=work,
            env={
                **home,
                "PYTHONPATH": PYTHONPATH,
                "TMPDIR": str(self.temp),
                MARK: str(folder),
                **more,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err

    def read_until(self, word: str) -> str:
        """The line with this word in it, as soon as it is there."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if word in line:
                return line
        raise AssertionError(f"it ended without {word!r}: {self.finish()}")

    def children(self) -> list[int]:
        """Every process that has our mark in its environment, but the run itself."""
        mark = f"{MARK}={self.folder}".encode()
        found = []
        for each in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (each / "environ").read_bytes().split(b"\0"):
                    found.append(int(each.name))
        return [pid for pid in found if pid != self.process.pid]

    def assert_nothing_is_left(self) -> None:
        assert self.children() == []
        assert list(self.temp.iterdir()) == []

    def close(self) -> None:
        for pid in (self.process.pid, *self.children()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


Start = Callable[..., Demo]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Demo] = []

    def begin(*args: str, **more: Any) -> Demo:
        made.append(Demo(tmp_path, *args, **more))
        return made[-1]

    yield begin
    for demo in made:
        demo.close()


def test_the_default_goal_without_a_key(start: Start) -> None:
    demo = start(CELERIAC_AGENTS="")

    code, out, err = demo.finish()

    assert (code, err) == (0, "")
    assert "no OPENAI_API_KEY is set, so a small offline model answers" in out
    for line in ("step 0 started", "model answered: 1 call", "list_files started", "list_files ok"):
        assert line in out
    assert re.search(r"call \d+\.\d+ read_file ok, \d+ ms", out)
    assert "A folder with one file." in out
    assert re.search(r"^evidence:\n  \[\d+\.\d+\] ", out, re.MULTILINE)
    assert "stop reason: COMPLETED" in out
    assert "\x1b" not in out
    demo.assert_nothing_is_left()


def test_with_a_key_the_endpoint_of_the_environment_is_used(start: Start) -> None:
    with ModelServer([calls(("list_files", {"path": "."})), final("one file")]) as model:
        demo = start(
            "What is here?",
            OPENAI_API_KEY="sk-test",
            OPENAI_BASE_URL=model.url,
            CELERIAC_MODEL="other-model",
        )
        code, out, err = demo.finish()

        assert (code, err) == (0, "")
        assert "one file" in out
        bodies = [each.body for each in model.requests]
        assert [body["model"] for body in bodies] == ["other-model", "other-model"]
        assert bodies[0]["messages"][-1]["content"] == "What is here?"
        assert model.violations == []
    demo.assert_nothing_is_left()


def test_a_proxy_of_the_environment_is_not_asked_for_the_offline_model(start: Start) -> None:
    demo = start(HTTP_PROXY="http://127.0.0.1:9", ALL_PROXY="http://127.0.0.1:9")

    assert demo.finish()[0] == 0


def test_a_user_s_own_files_of_known_names_are_not_in_the_way(start: Start) -> None:
    names = ("celery", "redis", "queue", "email")
    demo = start(files={f"{name}.py": "raise RuntimeError('mine')\n" for name in names})

    code, out, err = demo.finish()

    assert (code, err) == (0, "")
    assert "stop reason: COMPLETED" in out


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_cancels_the_run_and_stops_everything(
    start: Start, sent: signal.Signals
) -> None:
    demo = start("List.", CELERIAC_AGENTS="agents_here")
    # The offline model takes the tool for the one it knows.
    demo.read_until("list_files started")
    assert len(demo.children()) >= 3

    demo.process.send_signal(sent)
    code, _, err = demo.finish()

    assert (code, err) == (130, "celeriac: interrupted\n")
    demo.assert_nothing_is_left()


def test_ctrl_c_in_the_terminal_reaches_only_the_command_itself(start: Start) -> None:
    demo = start("List.", CELERIAC_AGENTS="agents_here")
    demo.read_until("list_files started")

    for pid in demo.children():
        if os.getpgid(pid) == os.getpgid(demo.process.pid):
            os.kill(pid, signal.SIGINT)
    demo.process.send_signal(signal.SIGINT)

    code, _, err = demo.finish()
    assert (code, err) == (130, "celeriac: interrupted\n")
    demo.assert_nothing_is_left()


def test_a_worker_that_dies_ends_the_run_and_its_log_is_shown(start: Start) -> None:
    demo = start("List.", CELERIAC_AGENTS="agents_here")
    demo.read_until("list_files started")
    (worker,) = [pid for pid in demo.children() if command_line(pid)[-3:-2] == ["steps"]]

    os.kill(worker, signal.SIGKILL)
    code, _, err = demo.finish()

    assert code == 1
    assert "celeriac: error: the steps worker ended with exit code -9; its log follows\n" in err
    demo.assert_nothing_is_left()


def test_a_reader_that_goes_away_ends_everything_too(start: Start) -> None:
    demo = start("List.", CELERIAC_AGENTS="agents_here")
    demo.read_until("step 0 started")
    assert demo.process.stdout is not None
    demo.process.stdout.close()

    assert demo.process.wait(60) == 141
    demo.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("args", "environ", "words"),
    [
        (["--agent", "nobody"], {}, ["no agent named 'nobody'", "workspace"]),
        ([], {"CELERIAC_AGENTS": "no_such"}, ["CELERIAC_AGENTS", "no_such"]),
        ([], {"CELERIAC_AGENTS": "examples.workspace,examples.orders"}, ["--agent", "support"]),
        ([], {"CELERIAC_LEASE": "soon"}, ["CELERIAC_LEASE"]),
        ([""], {}, ["the goal is empty"]),
        ([], {"WORKSPACE": "no-such-folder"}, ["WORKSPACE: no-such-folder isn't a folder"]),
        ([], {"WORKSPACE": "README.md"}, ["WORKSPACE: README.md isn't a folder"]),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_left(
    start: Start, args: list[str], environ: dict[str, str], words: list[str]
) -> None:
    demo = start(*args, **environ)

    code, _, err = demo.finish()

    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("celeriac: error: ")
    assert [word for word in words if word not in err] == []
    demo.assert_nothing_is_left()


# --- runs of real workers, as the other commands show them -------------------------------------


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with open_stage(tmp_path_factory.mktemp("stage")) as made:
        yield made


def celeriac(fleet: Fleet, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args],
        env=fleet.environ | {"PYTHONPATH": PYTHONPATH},
        cwd=fleet.folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_submit_and_wait_ends_with_the_answer(stage: Stage) -> None:
    ran = celeriac(stage.fleet, "submit", "goal x", "--agent", "helper", "--wait", "--json")

    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["answer"] == "done"


def test_submit_and_wait_ends_1_for_a_run_that_a_limit_stopped(stage: Stage) -> None:
    goal = "goal without an end"
    replies = iter([calls(("add", {"a": n, "b": n})) for n in range(9)])
    stage._scripts[goal] = lambda _body: next(replies)

    ran = celeriac(stage.fleet, "submit", goal, "--agent", "two-steps", "--wait")

    assert ran.returncode == 1
    assert "stop reason: MAX_STEPS (max_steps)" in ran.stdout


def test_a_trace_rebuilds_each_request_as_the_server_received_it(stage: Stage) -> None:
    asked = calls(("add", {"a": 1, "b": 2}), ("launch_rocket", {}))
    run = stage.submit([asked, final("three")])
    run.result(timeout=20)

    traced = json.loads(celeriac(stage.fleet, "trace", run.id, "--json").stdout)

    requests = [
        exchange["request"]
        for step in traced["steps"]
        for attempt in step["attempts"]
        for exchange in attempt["exchanges"]
    ]
    received = stage.requests(run)
    for name in ("model", "messages", "tools"):
        assert [each[name] for each in requests] == [body[name] for body in received]
    assert [each["name"] for each in traced["steps"][0]["decisions"]] == ["add", "launch_rocket"]
    assert [each["ok"] for each in traced["steps"][0]["results"]] == [True, False]
    assert traced["result"]["answer"] == "three"

    text = celeriac(stage.fleet, "trace", run.id).stdout
    assert "ToolResult 0.0 add ok" in text
    assert "refused: UNKNOWN_TOOL" in text


def test_events_shows_a_run_of_real_workers_to_its_end(stage: Stage) -> None:
    run = stage.submit([calls(("add", {"a": 1, "b": 2})), final("three")])

    ran = celeriac(stage.fleet, "events", run.id)

    assert (ran.returncode, ran.stderr) == (0, "")
    assert "call 0.0 add ok" in ran.stdout
    assert "run finished: COMPLETED" in ran.stdout


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
