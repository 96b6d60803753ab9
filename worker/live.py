"""A run as it happens: one line for each event, and on a terminal a bar for whatever is under way.

Elsewhere (a file, a pipe, a terminal that can't move its cursor) there are the lines alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

from runner.models import Event
from worker.show import EventView, printable

Say = Callable[[str], None]

NOTHING: frozenset[str] = frozenset()


def is_live() -> bool:
    """Whether whoever reads our output sees it on a terminal that can redraw a line."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def follow(
    events: Iterable[Event],
    view: EventView,
    *,
    say: Say,
    live: bool,
    quiet: Collection[str] = NOTHING,
) -> None:
    """Show events until there are no more; those of a type in `quiet` have no line."""
    if live:
        _follow_live(events, view, quiet)
        return
    for event in events:
        line = view.line(event)  # also of a quiet one: it may name a call's tool
        if event.type not in quiet:
            say(line)


def _follow_live(events: Iterable[Event], view: EventView, quiet: Collection[str]) -> None:
    # Here, since a command that shows nothing live needn't wait for it.
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column
    from rich.text import Text

    with Progress(
        TextColumn(
            "{task.description}",
            markup=False,
            table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
        ),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[amount]}", markup=False),
        TimeElapsedColumn(),
        transient=True,
        expand=True,
    ) as progress:
        bars = Bars(progress)
        for event in events:
            line = view.line(event)
            bars.show(event, view.tool_of(event))
            if event.type not in quiet:
                progress.console.print(Text.from_ansi(line), soft_wrap=True)


class Bars:
    """The bars of one run: a model call and each tool call have one for as long as they take."""

    def __init__(self, progress: object) -> None:
        self._progress: Any = progress
        self._open: dict[str, Any] = {}

    def show(self, event: Event, tool: str) -> None:
        match event.type:
            case "step.started":
                self._begin("model", f"step {event.step}: asking the model")
            case "model.answered" | "run.waiting":
                self._end("model")
            case "call.started":
                self._begin(str(event.call), f"call {event.call} {tool}")
            case "call.progress":
                self._move(event, tool)
            case "call.finished" | "call.waiting":
                self._end(str(event.call))
            case "run.finished":
                for name in list(self._open):
                    self._end(name)

    def _begin(self, name: str, description: str) -> None:
        self._end(name)
        self._open[name] = self._progress.add_task(description, total=None, amount="")

    def _end(self, name: str) -> None:
        if name in self._open:
            self._progress.remove_task(self._open.pop(name))

    def _move(self, event: Event, tool: str) -> None:
        name, data = str(event.call), event.data
        if name not in self._open:
            self._begin(name, f"call {event.call} {tool}")
        done, total = _number(data.get("done")), _number(data.get("total"))
        note = printable(" ".join(str(data.get("note") or "").split()), one_line=True)
        self._progress.update(
            self._open[name],
            completed=done or 0,
            total=total,
            description=f"call {event.call} {tool} {note}".rstrip(),
            amount=f"{done or 0:g}" + (f"/{total:g}" if total is not None else ""),
        )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
