"""What is compared, each with a server and workers of its own, all up at the same time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from celery import Celery

from benchmarks.load import Load, Message
from runner import keys
from runner.settings import Settings
from support.fleet import raw_client, url_of, valkey, wait_for
from tasks import Client

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Workers:
    """The processes of one contestant."""

    folder: Path
    environ: dict[str, str]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self.environ,
                cwd=self.folder,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        wait_for(lambda: all(" ready" in self.log(name) for name in self.processes), timeout=60)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str) -> None:
        """SIGKILL a worker and all of its children at once."""
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)

    def close(self) -> None:
        """End all at once: what was measured is measured, and nobody needs a graceful stop."""
        for name in list(self.processes):
            self.kill(name)


class Rig(Protocol):
    """Anything that can carry a load."""

    name: str
    url: str
    workers: Workers

    def submit(self, load: Load, earlier: Sequence[Message] = ()) -> str:
        """Start a run; answers its id."""

    def ended(self, run_ids: Sequence[str]) -> list[bool]:
        """Which of these runs have ended."""


def wait_for_runs(
    rig: Rig, run_ids: Iterable[str], *, every: float = 0.01, timeout: float = 120
) -> None:
    """Look every so many seconds, at one as long as that one hasn't ended, until all have.

    Who looks takes of the cores that are measured.
    """
    left = list(run_ids)
    ends_at = time.monotonic() + timeout
    while left:
        time.sleep(every)
        if all(rig.ended(left[-1:])):
            left = [run_id for run_id, over in zip(left, rig.ended(left), strict=True) if not over]
        if time.monotonic() > ends_at:
            raise TimeoutError(f"{len(left)} runs of {rig.name} haven't ended in {timeout:g} s")


class Ours:
    """Celeriac: a steps worker on threads and a tools worker on processes, as `celeriac worker`."""

    name = "celeriac"

    def __init__(self, url: str, folder: Path, **environ: str) -> None:
        self.url = url
        self.workers = Workers(
            folder,
            _environ()
            | {"CELERIAC_REDIS_URL": url, "CELERIAC_AGENTS": "benchmarks.agents"}
            | environ,
        )
        self.client = Client(settings=Settings.from_env(self.workers.environ))
        self._redis = raw_client(url)

    def start(self, queue: str, *, name: str | None = None, concurrency: int | None = None) -> None:
        code = (
            "import benchmarks.agents, worker.app as w; "
            f"exit(w.run_worker({queue!r}, concurrency={concurrency}))"
        )
        self.workers.start(name or queue, sys.executable, "-c", code)

    def submit(self, load: Load, earlier: Sequence[Message] = ()) -> str:
        return self.client.submit(load.goal, agent="bench", messages=list(earlier) or None).id

    def ended(self, run_ids: Sequence[str]) -> list[bool]:
        pipe = self._redis.pipeline(transaction=False)
        for run_id in run_ids:
            pipe.hget(keys.run(run_id), "status")
        return [status == "finished" for status in pipe.execute()]

    def close(self) -> None:
        self.workers.close()
        self.client.close()
        self._redis.close()


class Obvious:
    """The obvious Celery design: one worker with stock settings."""

    name = "obvious"

    def __init__(self, url: str, folder: Path, *, module: str = "benchmarks.obvious.app") -> None:
        self.url = url
        self.module = module
        self.workers = Workers(folder, _environ() | {"OBVIOUS_REDIS_URL": url})
        self._app = Celery(broker=url, set_as_current=False)
        self._redis = raw_client(url)

    def start(self, *, name: str = "worker", options: Sequence[str] = ()) -> None:
        self.workers.start(
            name, *_celery(self.module), "worker", "--loglevel=INFO", "-n", f"{name}@%h", *options
        )

    def submit(self, load: Load, earlier: Sequence[Message] = ()) -> str:
        run_id = str(uuid.uuid4())
        history = [*earlier, {"role": "user", "content": load.goal}]
        self._redis.set(f"obvious:{run_id}", json.dumps(history))
        self._app.send_task("benchmarks.obvious.app.step", (run_id,))
        return run_id

    def ended(self, run_ids: Sequence[str]) -> list[bool]:
        pipe = self._redis.pipeline(transaction=False)
        for run_id in run_ids:
            pipe.exists(f"obvious:{run_id}:answer")
        return [bool(found) for found in pipe.execute()]

    def close(self) -> None:
        self.workers.close()
        self._app.close()
        self._redis.close()


class Hop:
    """A task that enqueues itself: of a load it takes the steps alone, one hop for each."""

    name = "bare hop"

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.workers = Workers(folder, _environ() | {"HOP_REDIS_URL": url})
        self._app = Celery(broker=url, set_as_current=False)
        self._redis = raw_client(url)

    def start(self) -> None:
        self.workers.start("worker", *_celery("benchmarks.hop"), "worker", "--loglevel=INFO")

    def submit(self, load: Load, earlier: Sequence[Message] = ()) -> str:  # noqa: ARG002
        run_id = str(uuid.uuid4())
        self._app.send_task("benchmarks.hop.hop", (run_id, load.steps))
        return run_id

    def ended(self, run_ids: Sequence[str]) -> list[bool]:
        return [bool(self._redis.exists(f"hop:{run_id}")) for run_id in run_ids]

    def close(self) -> None:
        self.workers.close()
        self._app.close()
        self._redis.close()


@contextlib.contextmanager
def ours(folder: Path, *, started: bool = True, **environ: str) -> Iterator[Ours]:
    """Our contestant on a server of its own, with a worker of each kind unless told otherwise."""
    with server(folder) as url:
        rig = Ours(url, folder, **environ)
        try:
            if started:
                rig.start("steps")
                rig.start("tools")
                rig.workers.wait_until_ready()
            yield rig
        finally:
            rig.close()


@contextlib.contextmanager
def obvious(folder: Path) -> Iterator[Obvious]:
    with server(folder) as url:
        rig = Obvious(url, folder)
        try:
            rig.start()
            rig.workers.wait_until_ready()
            yield rig
        finally:
            rig.close()


@contextlib.contextmanager
def bare_hop(folder: Path) -> Iterator[Hop]:
    with server(folder) as url:
        rig = Hop(url, folder)
        try:
            rig.start()
            rig.workers.wait_until_ready()
            yield rig
        finally:
            rig.close()


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """A server with an append-only file that is written through once a second."""
    data = folder / "redis"
    data.mkdir(parents=True)
    with valkey(data, appendfsync="everysec") as started:
        yield url_of(started)


def _celery(module: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "celery", "-A", module)


def _environ() -> dict[str, str]:
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    return {**kept, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
