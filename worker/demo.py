"""What `celeriac run` does: all the parts on this machine for one goal, and nothing left behind.

Whatever happens (Ctrl-C, a worker that dies, a terminal that goes away), the run is ended first and
then each part that was started.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Self

from runner.agents import Agents, load_agents
from runner.errors import AgentError, CeleriacError
from runner.models import FinalResult
from runner.settings import Settings
from tasks import Client, Run
from worker.embedded import embedded_server
from worker.live import Say, follow
from worker.offline_model import OfflineModel
from worker.show import EventView, Style, describe_result

EXAMPLE = "examples.workspace"

CONCURRENCY = {"steps": 4, "tools": 4}
"""Enough for one run, and quick to start."""

STOP_WITHIN = 5.0
"""Seconds that a worker has for a clean stop once its run has ended."""

LOOPBACK = "127.0.0.1,localhost"

QUIET = frozenset({"run.created", "call.queued"})
"""Events that the live view leaves out: what follows on them says the same."""


class WorkerDied(CeleriacError):
    """A worker of the demo ended by itself; `log` is what it said."""

    def __init__(self, message: str, *, exit_code: int = 1, log: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.log = log


def run_goal(
    goal: str, agent: str | None, *, say: Say, style: Style, live: bool = False
) -> FinalResult:
    """Run one goal with a server, workers and, without a key, a model of its own."""
    environ = dict(os.environ)
    environ["CELERIAC_AGENTS"] = ",".join(_agent_modules(environ))
    environ.pop("CELERIAC_BROKER_URL", None)
    environ.pop("CELERIAC_REDIS_URL", None)
    # All that can be refused is refused before anything is started.
    agents = load_agents(Settings.from_env(environ).agents)
    name = _choose_agent(agents, agent)
    with contextlib.ExitStack() as parts:
        parts.enter_context(_ends_on_signals())
        folder = Path(parts.enter_context(tempfile.TemporaryDirectory(prefix="celeriac-")))
        # Also what a killed worker can't clean up is in the folder that goes at the end.
        environ["TMPDIR"] = str(folder)
        # They are stopped after the run has ended: there is nothing to wait for.
        environ["CELERIAC_DRAIN"] = "1"
        environ["CELERIAC_REDIS_URL"] = parts.enter_context(embedded_server(folder / "redis"))
        if environ.get("OPENAI_API_KEY"):
            say(f"model: {environ.get('OPENAI_BASE_URL') or 'api.openai.com'}")
        else:
            say("model: no OPENAI_API_KEY is set, so a small offline model answers by its rules")
            environ |= _offline(environ, parts.enter_context(OfflineModel()).url)
        workers = parts.enter_context(Workers(environ, folder))
        for queue, concurrency in CONCURRENCY.items():
            workers.start(queue, concurrency)
        client = Client(settings=Settings.from_env(environ), agents=agents)
        parts.enter_context(client)
        # The first hint waits on its queue: nobody has to wait for the workers.
        run = client.submit(goal, agent=name)
        try:
            workers.watch(run)
            return _follow(run, name, workers, say=say, style=style, live=live)
        except BaseException:
            with contextlib.suppress(CeleriacError):
                run.cancel("celeriac run was stopped")
            raise


def _follow(
    run: Run, agent: str, workers: Workers, *, say: Say, style: Style, live: bool
) -> FinalResult:
    say(f"run:   {run.id}, agent {agent}\n")
    view = EventView(run.info().created, style)
    follow(run.events(), view, say=say, live=live, quiet=QUIET)
    workers.check()
    result = run.result(timeout=10)
    say(f"\n{describe_result(result, style)}")
    return result


def _agent_modules(environ: Mapping[str, str]) -> tuple[str, ...]:
    given = environ.get("CELERIAC_AGENTS", "").strip()
    if given:
        return (given,)
    try:
        found = importlib.util.find_spec(EXAMPLE)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise AgentError(
            "no agents: set CELERIAC_AGENTS to the modules that define them, e.g. shop.agents"
        )
    return (EXAMPLE,)


def _choose_agent(agents: Agents, name: str | None) -> str:
    if name is not None:
        return agents[name].name
    if len(agents) > 1:
        raise AgentError(f"there are several agents: name one with --agent: {', '.join(agents)}")
    return next(iter(agents))


def _offline(environ: Mapping[str, str], url: str) -> dict[str, str]:
    """What sends the workers' model calls to the offline model, also behind a proxy."""
    beyond = environ.get("NO_PROXY") or environ.get("no_proxy")
    no_proxy = f"{beyond},{LOOPBACK}" if beyond else LOOPBACK
    return {
        "OPENAI_API_KEY": "offline",
        "OPENAI_BASE_URL": url,
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }


class Workers:
    """Worker processes of one run. Leaving the context ends them, whatever state they are in."""

    def __init__(self, environ: Mapping[str, str], folder: Path) -> None:
        self._environ = dict(environ)
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stopping = False
        self._died: str | None = None

    def __enter__(self) -> Self:
        return self

    def start(self, queue: str, concurrency: int) -> None:
        # -P: a user's own files in the current folder don't stand in for the standard library's.
        command = [sys.executable, "-P", "-m", "celeriac", "worker", "--queue", queue]
        with self._log(queue).open("wb") as log:
            self._processes[queue] = subprocess.Popen(  # noqa: S603 - our own command
                [*command, "--concurrency", str(concurrency)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environ,
                # The terminal's Ctrl-C is for us: the run is cancelled before they stop.
                start_new_session=True,
            )

    def watch(self, run: Run) -> None:
        """Cancel the run as soon as a worker ends by itself: nobody would finish it."""
        for queue in self._processes:
            threading.Thread(target=self._wait, args=(queue, run), daemon=True).start()

    def check(self) -> None:
        """Raise `WorkerDied` where one has ended by itself."""
        if self._died is None:
            return
        code = self._processes[self._died].returncode
        raise WorkerDied(
            f"the {self._died} worker ended with exit code {code}; its log follows",
            exit_code=code if code > 0 else 1,
            log=self._log(self._died).read_text(encoding="utf-8", errors="replace"),
        )

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        try:
            for process in self._processes.values():
                process.terminate()
            for process in self._processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_WITHIN)
        finally:
            # The last resort, also on a second Ctrl-C; it takes a worker's children with it.
            for process in self._processes.values():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            for process in self._processes.values():
                process.wait()

    def _wait(self, queue: str, run: Run) -> None:
        self._processes[queue].wait()
        if self._stopping or self._died is not None:
            return
        self._died = queue
        with contextlib.suppress(CeleriacError):
            run.cancel(f"the {queue} worker ended")

    def _log(self, queue: str) -> Path:
        return self._folder / f"{queue}.log"


@contextlib.contextmanager
def _ends_on_signals() -> Iterator[None]:
    """SIGTERM and a closed terminal end the run as cleanly as Ctrl-C does."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
