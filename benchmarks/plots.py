"""Draws lines as a small SVG: axes, a few ticks and a legend, and nothing to install."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from benchmarks.tables import Table

SVG = "http://www.w3.org/2000/svg"

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 50
COLOURS = ("#1b7f5c", "#c2542d", "#3b5fa4", "#8a6d1f")


def draw(table: Table) -> str:
    """The plot of a table that has one."""
    plot = table.plot
    assert plot is not None
    columns = {name: n for n, name in enumerate(table.columns)}
    xs = [float(row[columns[plot.x]]) for row in table.rows]
    lines = {name: [float(row[columns[name]]) for row in table.rows] for name in plot.y}
    values = [value for line in lines.values() for value in line]
    place_x = scale(xs, LEFT, WIDTH - RIGHT, logarithmic=plot.logarithmic)
    place_y = scale(
        [*values, 0.0] if not plot.logarithmic else values,
        HEIGHT - BOTTOM,
        TOP,
        logarithmic=plot.logarithmic,
    )
    parts = [
        f'<svg xmlns="{SVG}" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(table.title)}: {escape(plot.unit)}</text>',
        f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" stroke="#555" fill="none"/>',
    ]
    parts += [_text(place_x(x), HEIGHT - BOTTOM + 18, f"{x:,.0f}", "middle") for x in xs]
    for y in ticks(values, logarithmic=plot.logarithmic):
        parts.append(_text(LEFT - 8, place_y(y) + 4, f"{y:,g}", "end"))
        parts.append(f'<path d="M{LEFT} {place_y(y):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, plot.x, "middle"))
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(
            f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in zip(xs, line, strict=True)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(_text(LEFT + 10, TOP + 14 + 16 * number, name, "start", colour))
    return "\n".join([*parts, "</svg>"]) + "\n"


def scale(
    values: Sequence[float], start: float, end: float, *, logarithmic: bool
) -> Callable[[float], float]:
    """Where a value stands between two coordinates."""
    bend: Callable[[float], float] = (lambda v: math.log10(max(v, 1e-9))) if logarithmic else float
    low, high = bend(min(values)), bend(max(values))
    span = (high - low) or 1.0
    return lambda value: start + (bend(value) - low) / span * (end - start)


def ticks(values: Sequence[float], *, logarithmic: bool) -> list[float]:
    """A few round numbers within the values."""
    if not logarithmic:
        step = 10 ** math.floor(math.log10(max(values) or 1))
        return [step * n for n in range(1, 11) if step * n <= max(values)]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    candidates = [base * 10.0**power for power in range(low, high + 1) for base in (1, 2, 5)]
    return [each for each in candidates if min(values) <= each <= max(values)]


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#333") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}" font-size="12">{escape(text)}</text>'
