"""Loads the Lua transitions and checks their headers, so that a script is called as it is written.

A script's header names its purpose, each `KEYS[n]`, each `ARGV[n]` and the words it returns. In
front of each stands what it uses of the prelude (clock, events, tool messages, hints), and no more:
Redis makes every function there anew each time that a script is called. One that is made of others
names them (`Uses`), and has each as a function of its keys and arguments.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "lua"

KEY_LINE = re.compile(r"^-- KEYS\[\d+(?:\.\.)?\] (\w+)", re.MULTILINE)
USES_LINE = re.compile(r"^-- Uses (\w+(?:, \w+)*)$", re.MULTILINE)
ARG_LINE = re.compile(r"^-- ARGV\[(\d+)(\.\.)?\] (\w+)", re.MULTILINE)
RETURNS_LINE = re.compile(r"^-- Returns ((?:[A-Z]+)(?: \| [A-Z]+)*)", re.MULTILINE)
COMMENT = re.compile(r"--.*")
DEFINED = re.compile(r"^local (?:function )?(\w+)", re.MULTILINE)
HOLE = re.compile(r"\{(run|step|index|tag)\}")

HOLDER = re.compile(r"[\w-]{1,64}(\.[0-9]{1,9}){1,2}", re.ASCII)
"""A step or a call, as its message's id has it."""

NO_ENVELOPES = "local ENVELOPES = nil\n"
"""The line of the prelude into which a store writes how hints are sent."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A Celery message as its queue's list in Redis holds it.

    A script that sends it fills in `{run}`, `{step}`, `{index}` and a unique `{tag}`.
    """

    queue: str
    task: str
    text: str

    def holder_in(self, message: str) -> str | None:
        """The step or call that a message is a hint of, as in a trace id; None for any other."""
        try:
            headers = json.loads(message)["headers"]
            task, holder = headers["task"], headers["id"]
        except (ValueError, LookupError, TypeError):
            return None
        if task != self.task or not isinstance(holder, str) or not HOLDER.fullmatch(holder):
            return None
        numbers = 2 if "{index}" in self.text else 1
        return holder if holder.count(".") == numbers else None


@dataclass(frozen=True, slots=True)
class Envelopes:
    """The messages that the scripts send by themselves: the hints of a step and of a call."""

    step: Envelope
    call: Envelope


@dataclass(frozen=True, slots=True)
class ScriptText:
    """One transition: its Lua text with the prelude, and what its header declares."""

    name: str
    body: str
    keys: tuple[str, ...]
    args: tuple[str, ...]
    open_ended: bool
    words: tuple[str, ...]
    uses: tuple[ScriptText, ...] = ()

    @property
    def text(self) -> str:
        code = "".join([*(each.as_function for each in self.uses), self.body])
        return _used_prelude(code) + code

    @property
    def as_function(self) -> str:
        return f"local function {self.name}(KEYS, ARGV)\n{self.body}\nend\n"

    def sending(self, envelopes: Envelopes | None) -> str:
        """The text of the script for a store that has it send its hints."""
        if envelopes is None:
            return self.text
        writer = (
            "local function ENVELOPES(run, step, index, tag)\n"
            f"  if index == '' then\n    return {_lua(envelopes.step)}\n  end\n"
            f"  return {_lua(envelopes.call)}\nend\n"
        )
        return self.text.replace(NO_ENVELOPES, writer, 1)


def script_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.lua") if path.stem != "prelude")


@cache
def load_script(name: str) -> ScriptText:
    body = _read(name)
    returns = RETURNS_LINE.search(body)
    args = ARG_LINE.findall(body)
    uses = USES_LINE.search(body)
    return ScriptText(
        name=name,
        body=body,
        keys=tuple(KEY_LINE.findall(body)),
        args=tuple(arg for _, _, arg in args),
        open_ended=any(more for _, more, _ in args),
        words=tuple(returns.group(1).split(" | ")) if returns else (),
        uses=tuple(map(load_script, uses.group(1).split(", "))) if uses else (),
    )


def _used_prelude(body: str) -> str:
    """The paragraphs of the prelude that a script uses, with those that these use in turn."""
    used, kept = _names(body), ""
    # None uses what is written below it.
    for paragraph in reversed(_read("prelude").strip().split("\n\n")):
        if not used.isdisjoint(DEFINED.findall(paragraph)):
            used |= _names(paragraph)
            kept = f"{paragraph}\n\n{kept}"
    return kept


def _names(code: str) -> set[str]:
    return set(re.findall(r"\w+", COMMENT.sub("", code)))


def _lua(envelope: Envelope) -> str:
    """The queue and the text, as expressions of `run`, `step`, `index` and `tag`."""
    literal, *more = HOLE.split(envelope.text)
    text = f"[==[{literal}]==]"
    for hole, literal in zip(more[::2], more[1::2], strict=True):
        text += f" .. {hole} .. [==[{literal}]==]"
    return f"[==[{envelope.queue}]==], {text}"


@cache
def _read(name: str) -> str:
    return (FOLDER / f"{name}.lua").read_text(encoding="utf-8")
