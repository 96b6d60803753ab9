"""The live view in a real pseudo-terminal, and the plain lines wherever there is none."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.models import StopReason
from support.command import COMMAND
from support.fleet import wait_for
from tasks import Client, Run

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOURS = re.compile(r"\x1b\[[0-9;]*(?:3[0-7]|38|9[0-7])[0-9;]*m")


class Terminal:
    """A command that has a terminal of so many columns to itself."""

    def __init__(self, *args: str, env: dict[str, str], cwd: Path, columns: int) -> None:
        self._screen, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.process = subprocess.Popen(
            [*COMMAND, *args], env=env, cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        self.raw = ""

    @property
    def text(self) -> str:
        """All that was written so far, without what moves the cursor or paints."""
        return ESCAPES.sub("", self.raw)

    def read_until(self, pattern: str) -> str:
        """The first line that matches, as soon as it is there."""
        find = re.compile(pattern).search
        found = wait_for(lambda: self._read() and find(self.text), explain=lambda: self.text)
        return str(found[0])

    def finish(self) -> int:
        wait_for(lambda: self._read() and self.process.poll() is not None)
        while self._read(0.0) == "more":
            pass
        return self.process.returncode

    def _read(self, timeout: float = 0.05) -> str:
        ready, _, _ = select.select([self._screen], [], [], timeout)
        if not ready:
            return "nothing"
        try:
            self.raw += os.read(self._screen, 65536).decode(errors="replace")
        except OSError:
            return "closed"  # the command has ended
        return "more"

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        os.close(self._screen)


Open = Callable[..., Terminal]


@pytest.fixture
def terminal(environ: dict[str, str], tmp_path: Path) -> Iterator[Open]:
    made: list[Terminal] = []

    def start(*args: str, columns: int = 100, **more: str) -> Terminal:
        env = environ | {"TERM": "xterm-256color"} | more
        made.append(Terminal(*args, env=env, cwd=tmp_path, columns=columns))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.fixture
def run(client: Client) -> Run:
    """A run with a call under way that has told how far it is."""
    made = client.submit("copy the files", agent="helper")
    tell(client, made, "step.started", attempt=1)
    tell(client, made, "model.answered", calls=1, refused=0)
    tell(client, made, "call.queued", call="0.0", tool="copy_files")
    tell(client, made, "call.started", call="0.0", attempt=1)
    tell(client, made, "call.progress", call="0.0", done=3, total=10, note="half\x1b[2J way")
    return made


def tell(client: Client, run: Run, type: str, *, call: str | None = None, **data: object) -> None:
    client.store.add_event(run.id, type, step=0, call=call, data=data)


def end(client: Client, run: Run) -> None:
    tell(client, run, "call.progress", call="0.0", done=10, total=10, note="all of them")
    tell(client, run, "call.finished", call="0.0", tool="copy_files", ok=True, duration_ms=5)
    client.store.end_run(run.id, StopReason.COMPLETED, answer="copied", closer="closed")


@pytest.mark.parametrize("columns", [100, 40])
def test_a_terminal_shows_a_bar_that_moves_and_goes(
    terminal: Open, client: Client, run: Run, columns: int
) -> None:
    shown = terminal("events", run.id, columns=columns)
    bar = shown.read_until(r".*━.*3/10.*")
    end(client, run)

    assert shown.finish() == 0
    assert "call 0.0 copy_files" in bar
    assert "run finished: COMPLETED" in shown.text
    assert "\x1b[2K" in shown.raw.rpartition("━")[2]  # the last bar was wiped away
    assert all(len(line) <= columns for line in shown.text.splitlines() if "━" in line)
    assert "\x1b[2J" not in shown.raw  # a tool's note moves no cursor
    assert "\x1b[?25h" in shown.raw.split("COMPLETED")[-1]  # the cursor is there again


def test_no_color_means_none(terminal: Open, client: Client, run: Run) -> None:
    end(client, run)
    painted = terminal("events", run.id)
    plain = terminal("events", run.id, NO_COLOR="1")

    assert (painted.finish(), plain.finish()) == (0, 0)
    assert COLOURS.search(painted.raw)
    assert not COLOURS.search(plain.raw)
    assert "run finished: COMPLETED" in plain.text


def test_a_dumb_terminal_has_lines_alone(terminal: Open, client: Client, run: Run) -> None:
    end(client, run)
    shown = terminal("events", run.id, TERM="dumb", NO_COLOR="1")

    assert shown.finish() == 0
    assert "\x1b" not in shown.raw.replace("\\x1b", "")
    assert "call 0.0 copy_files at 3/10 half" in shown.text


def test_a_pipe_has_lines_alone(
    spawn: Callable[..., subprocess.Popen[str]], client: Client, run: Run
) -> None:
    end(client, run)

    out, err = spawn("events", run.id, TERM="xterm-256color").communicate(timeout=30)

    assert err == ""
    assert "\x1b" not in out
    assert "━" not in out
    assert out.splitlines()[-1].endswith("run finished: COMPLETED")


def test_ctrl_c_leaves_a_terminal_that_can_be_used(
    terminal: Open, client: Client, run: Run
) -> None:
    shown = terminal("events", run.id)
    shown.read_until("3/10")
    at = time.monotonic()

    shown.process.send_signal(2)

    assert shown.finish() == 130
    assert time.monotonic() - at < 5
    assert "\x1b[?25h" in shown.raw
    assert "interrupted" in shown.text
    assert "Traceback" not in shown.text
