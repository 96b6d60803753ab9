"""What a part of the benchmark hands back: a table, what to draw of it, what it is held to."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

Cell = str | float | int

RESULTS = Path(__file__).parent / "results.json"


@dataclass(frozen=True)
class Size:
    """How much is measured: `share` is 1 for all of it, and smaller for a look or a test."""

    share: float = 1.0

    def of(self, full: int, least: int = 1) -> int:
        return max(least, round(full * self.share))

    def some(self, full: Sequence[int], least: int = 1) -> list[int]:
        """The first of some sizes: as many as the share allows."""
        return list(full[: self.of(len(full), least)])


@dataclass(frozen=True)
class Bar:
    """A figure that was promised: `measured` is to be at most `limit`, or at least it."""

    what: str
    measured: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


@dataclass(frozen=True)
class Plot:
    """Lines over the column `x`, one for each of the columns `y`."""

    x: str
    y: Sequence[str]
    unit: str
    logarithmic: bool = False


@dataclass(frozen=True)
class Table:
    """What one part measured. `about` says what was done and what must be known to read it."""

    title: str
    about: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    bars: Sequence[Bar] = ()
    plot: Plot | None = None
    measured: str = field(default="", compare=False)
    """When and where; filled in by the command."""


def median_and_spread(values: Sequence[float], digits: int = 2) -> str:
    """The median, and in brackets the smallest and the largest."""
    middle = round(statistics.median(values), digits)
    return f"{middle:g} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios of what was measured right after each other."""
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def load_results(path: Path = RESULTS) -> dict[str, Table]:
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return {name: _read_table(given) for name, given in found.items()}


def save_results(results: dict[str, Table], path: Path = RESULTS) -> None:
    text = json.dumps({name: asdict(each) for name, each in results.items()}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def _read_table(given: dict[str, object]) -> Table:
    plot, bars = given.pop("plot"), given.pop("bars")
    return Table(
        **given,  # type: ignore[arg-type]
        bars=[Bar(**bar) for bar in bars],  # type: ignore[attr-defined]
        plot=Plot(**plot) if isinstance(plot, dict) else None,
    )
