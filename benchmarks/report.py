"""Writes `docs/benchmarks.md` and its plots from what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.plots import draw
from benchmarks.tables import Cell, Table

DOCS = Path(__file__).resolve().parent.parent / "docs"

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def write_report(results: Mapping[str, Table], docs: Path = DOCS) -> None:
    """Put the tables between the marks of the document, and the plots beside it."""
    plots = docs / "plots"
    parts = [show_bars(results)]
    for name, table in results.items():
        parts.append(show_table(table))
        if table.plot is not None:
            plots.mkdir(exist_ok=True)
            (plots / f"{name}.svg").write_text(draw(table), encoding="utf-8")
            parts.append(f"![{table.title}](plots/{name}.svg)")
    fill_in(docs / "benchmarks.md", "\n\n".join(parts))


def fill_in(page: Path, text: str) -> None:
    """Put a text between the marks of a document."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def show_bars(results: Mapping[str, Table]) -> str:
    rows: list[list[Cell]] = []
    for table in results.values():
        for bar in table.bars:
            sign, met = "at least" if bar.at_least else "at most", "yes" if bar.met else "no"
            rows.append([bar.what, f"{sign} {bar.limit:g}", float(bar.measured), met])
    head = ["what was promised", "bar", "measured", "reached"]
    return f"## Against the bars\n\n{show_rows(head, rows)}"


def show_table(table: Table) -> str:
    shown = show_rows(table.columns, table.rows)
    return f"## {table.title}\n\n{wrap(table.about)}\n\n{shown}\n\nMeasured: {table.measured}."


def show_rows(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(map(_show, row))} |" for row in rows]
    return "\n".join(lines)


def wrap(text: str, width: int = 110) -> str:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def _show(cell: Cell) -> str:
    return (
        f"{cell:,}" if isinstance(cell, int) else f"{cell:g}" if isinstance(cell, float) else cell
    )
