"""The code of a document, and the folder that a user has who copies the README's files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from support.fleet import ROOT

FENCE = re.compile(r"^(?:<!-- test: ([^\n]+) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block. `how`: `run`, `file <path>`, or None where nothing is said."""

    how: str | None
    language: str
    code: str


def blocks_of(path: Path) -> list[Block]:
    return [
        Block(how or None, language, code)
        for how, language, code in FENCE.findall(path.read_text(encoding="utf-8"))
    ]


def write_files(folder: Path) -> Path:
    """Write the files that the README shows."""
    for block in blocks_of(ROOT / "README.md"):
        if block.how and block.how.startswith("file "):
            path = folder / block.how.removeprefix("file ")
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.code, encoding="utf-8")
    return folder
