"""Loads the Lua transitions and checks their headers, so that a script is called as it is written.

A script's header names its purpose, each `KEYS[n]`, each `ARGV[n]` and the words it returns; the
prelude (clock, events, tool messages) is put in front of each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "lua"

KEY_LINE = re.compile(r"^-- KEYS\[(\d+)\] (\w+) ([A-Z]+)\b", re.MULTILINE)
ARG_LINE = re.compile(r"^-- ARGV\[(\d+)(\.\.)?\] (\w+)", re.MULTILINE)
RETURNS_LINE = re.compile(r"^-- Returns ((?:[A-Z]+)(?: \| [A-Z]+)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ScriptText:
    """One transition: its Lua text with the prelude, and what its header declares."""

    name: str
    body: str
    keys: tuple[str, ...]
    args: tuple[str, ...]
    open_ended: bool
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return _read("prelude") + self.body


def script_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.lua") if path.stem != "prelude")


@cache
def load_script(name: str) -> ScriptText:
    body = _read(name)
    returns = RETURNS_LINE.search(body)
    args = ARG_LINE.findall(body)
    return ScriptText(
        name=name,
        body=body,
        keys=tuple(key for _, key, _ in KEY_LINE.findall(body)),
        args=tuple(arg for _, _, arg in args),
        open_ended=any(more for _, more, _ in args),
        words=tuple(returns.group(1).split(" | ")) if returns else (),
    )


@cache
def _read(name: str) -> str:
    return (FOLDER / f"{name}.lua").read_text(encoding="utf-8")
