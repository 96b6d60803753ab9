"""Writes `docs/benchmarks.md` and its plots from what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.plots import draw
from benchmarks.tables import Table

DOCS = Path(__file__).resolve().parent.parent / "docs"

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def write_report(results: Mapping[str, Table], docs: Path = DOCS) -> None:
    """Put the tables between the marks of the document, and the plots beside it."""
    page = docs / "benchmarks.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    plots = docs / "plots"
    parts = [show_bars(results)]
    for name, table in results.items():
        parts.append(show_table(table))
        if table.plot is not None:
            plots.mkdir(exist_ok=True)
            (plots / f"{name}.svg").write_text(draw(table), encoding="utf-8")
            parts.append(f"![{table.title}](plots/{name}.svg)")
    measured = "\n\n".join([BEGIN, *parts, END])
    page.write_text(f"{before}{measured}{after}", encoding="utf-8")


def show_bars(results: Mapping[str, Table]) -> str:
    lines = ["| what was promised | bar | measured | reached |", "|---|---|---|---|"]
    for table in results.values():
        for bar in table.bars:
            sign = "at least" if bar.at_least else "at most"
            met = "yes" if bar.met else "no"
            lines.append(f"| {bar.what} | {sign} {bar.limit:g} | {bar.measured:g} | {met} |")
    return "## Against the bars\n\n" + "\n".join(lines)


def show_table(table: Table) -> str:
    head = [f"| {' | '.join(table.columns)} |", "|---" * len(table.columns) + "|"]
    rows = [f"| {' | '.join(_show(cell) for cell in row)} |" for row in table.rows]
    about = wrap(table.about)
    return "\n".join(
        [f"## {table.title}", "", about, "", *head, *rows, "", f"Measured: {table.measured}."]
    )


def wrap(text: str, width: int = 110) -> str:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def _show(cell: str | float) -> str:
    return (
        f"{cell:,}" if isinstance(cell, int) else f"{cell:g}" if isinstance(cell, float) else cell
    )
