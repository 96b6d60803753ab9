"""The code of a document, and the folder that a user has who copies the README's files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from support.fleet import ROOT

FENCE = re.compile(r"^(?:<!-- test: ([^\n]+) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block. `how` says what a test does with it; None: nothing.

    `run` executes it, and `file <path>` is a file of the user's. `shell` is a list of commands, of
    which the last may end with another code than 0 (`shell 1`); `output` is what they print, and
    `start <what>` runs on in a terminal of its own (`support.guide`).
    """

    how: str | None
    language: str
    code: str


def blocks_of(path: Path) -> list[Block]:
    return [
        Block(how or None, language, code)
        for how, language, code in FENCE.findall(path.read_text(encoding="utf-8"))
    ]


def write_files(folder: Path, *documents: Path) -> Path:
    """Write the files that these documents show, and the README before them."""
    for document in (ROOT / "README.md", *documents):
        for block in blocks_of(document):
            if block.how and block.how.startswith("file "):
                path = folder / block.how.removeprefix("file ")
                path.parent.mkdir(exist_ok=True)
                path.write_text(block.code, encoding="utf-8")
    return folder
