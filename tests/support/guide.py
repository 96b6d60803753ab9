"""Someone who follows a document: does block after block, and sees what the document shows."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import string
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from support.fleet import Fleet
from support.readme import Block, blocks_of
from worker import cli

RUN = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


class Follower:
    """One who has the workers of a fleet, and one terminal for each document.

    Commands of ours run in this process, through the same parser: a process of its own for each
    would take a second.
    """

    def __init__(self, fleet: Fleet, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._fleet = fleet
        self._folder = folder
        self._patch = patch
        self._variables: dict[str, str] = {}
        self.space: dict[str, Any] = {}
        self.shown = ""
        for name, value in fleet.environ.items():
            patch.setenv(name, value)

    def follow(self, document: Path) -> None:
        for block in blocks_of(document):
            self.do(block)

    def do(self, block: Block) -> None:
        match (block.how or "").split():
            case ["shell", *code]:
                self._shell(block.code, expected=int(code[0]) if code else 0)
            case ["output"]:
                check_output(block.code, self.shown)
            case ["run"]:
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(block.code, "a guide", "exec"), self.space)
                self.shown = out.getvalue()
            case ["start", "server"]:
                pass  # a free port takes the place of the usual one
            case ["start", *_]:
                start(self._fleet, block, self._folder)

    def _shell(self, code: str, *, expected: int) -> None:
        self.shown = ""
        *others, last = commands_of(code)
        for line in others:
            assert self._command(line) == 0, (line, self.shown)
        assert self._command(last) == expected, (last, self.shown)

    def _command(self, line: str) -> int:
        line = string.Template(line).substitute(self._variables) if "=$(" not in line else line
        if kept := re.fullmatch(r"(\w+)=\$\((.*)\)", line):
            before = self.shown
            code = self._command(kept[2])
            self._variables[kept[1]] = self.shown.removeprefix(before).strip()
            return code
        verb, *arguments = shlex.split(line, comments=True)
        if verb == "export":
            for each in arguments:
                self._patch.setenv(*each.split("=", 1))
            return 0
        assert verb == "celeriac", f"a test doesn't know how to do this: {line}"
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = cli.main(arguments)
        self.shown += out.getvalue()
        return code


def commands_of(code: str) -> list[str]:
    """The commands of a block; one that ends with a backslash goes on."""
    lines = code.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.split("#")[0].strip()]


def start(fleet: Fleet, block: Block, folder: Path) -> None:
    """What runs on in a terminal of its own: a worker, by the command as it stands there."""
    [line] = commands_of(block.code)
    verb, *arguments = shlex.split(line)
    assert verb == "celeriac"
    name = f"{arguments[2]}-{len(fleet.workers)}"
    with (fleet.folder / f"{name}.log").open("ab") as log:
        fleet.workers[name] = subprocess.Popen(
            [sys.executable, "-m", "celeriac", *arguments],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=fleet.environ,
            cwd=folder,
            start_new_session=True,
        )
    fleet.wait_for(lambda: " ready." in fleet.log(name))


def check_output(told: str, shown: str) -> None:
    """Each line that a document shows was printed, in this order; ids and numbers are others."""
    left = iter(_plain(shown))
    for line in _plain(told):
        assert line in ("", "...") or line in left, f"{line!r} isn't in what came:\n{shown}"


def _plain(text: str) -> Iterable[str]:
    text = re.sub(r"\d+(?:\.\d+)?", "N", re.sub(RUN, "RUN", text))
    return [" ".join(line.split()) for line in text.splitlines()]


def path_of(*folders: Path) -> str:
    return os.pathsep.join(map(str, folders))
