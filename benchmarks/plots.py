"""Plots of results as SVG, in light and dark: bars, and lines over categories."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

WIDTH, LEFT, RIGHT, TOP = 760, 250, 110, 34
BAR, GAP = 15, 7
HEIGHT, STEPS = 230, 4
COLORS = ("3f51b5", "b27b00", "2e7d32", "c2185b", "777777")
DARK = ("8c9eff", "e0a93b", "81c784", "f48fb1", "aaaaaa")
STYLE = """    text { fill: #222 }
    .title { font-weight: bold }
    .grid { stroke: #ddd }
    .mark { stroke: #c2185b; stroke-dasharray: 5 3 }
"""
DARK_STYLE = """      text { fill: #e8e8ee }
      .grid { stroke: #3a3b47 }
      .mark { stroke: #f48fb1 }
"""


def bars(title: str, values: Mapping[str, float], mark: float | None = None) -> str:
    """Return horizontal bars, with a dashed line at ``mark``."""
    scale = (WIDTH - LEFT - RIGHT) / max(*values.values(), mark or 0)
    height = TOP + len(values) * (BAR + GAP)
    parts = []
    for at, (name, value) in enumerate(values.items()):
        y = TOP + at * (BAR + GAP)
        width = max(1.0, value * scale)
        parts += [
            _text(LEFT - 8, y + 12, name, anchor="end"),
            f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" class="fill0"/>',
            _text(LEFT + width + 6, y + 12, _figure(value)),
        ]
    if mark is not None:
        x = LEFT + mark * scale
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{height}" class="mark"/>')
    return _svg(title, height + 6, parts)


def lines(
    title: str, columns: Sequence[str], series: Mapping[str, Sequence[float]], *, log: bool = False
) -> str:
    """Return a line for each series, over equally spaced columns, from 0 to the next tenth.

    ``log``: between powers of ten.
    """
    left, right = 50, WIDTH - 150
    positive = [value for values in series.values() for value in values if value > 0]
    limit = -(-max(positive) * 10 // 1) / 10
    ticks = [limit * step / STEPS for step in range(STEPS + 1)]
    first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    if log:
        ticks = [10.0**power for power in range(first, max(last, first + 1) + 1)]

    def x_of(column: int) -> float:
        return left + column * (right - left) / (len(columns) - 1)

    def y_of(value: float) -> float:
        value = max(value, ticks[0])
        share = math.log(value / ticks[0], ticks[-1] / ticks[0]) if log else value / limit
        return TOP + HEIGHT * (1 - share)

    parts = []
    for tick in ticks:
        y = y_of(tick)
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" class="grid"/>')
        parts.append(_text(left - 8, y + 4, _figure(tick), anchor="end"))
    parts += [_text(x_of(at), TOP + HEIGHT + 20, name, anchor="middle") for at, name in enumerate(columns)]
    labels = _spread([y_of(values[-1]) for values in series.values()])
    for number, (name, values) in enumerate(series.items()):
        points = " ".join(f"{x_of(at):.1f},{y_of(value):.1f}" for at, value in enumerate(values))
        parts.append(f'<polyline points="{points}" class="stroke{number}"/>')
        parts.append(_text(right + 10, labels[number] + 4, name, kind=f"fill{number}"))
    return _svg(title, TOP + HEIGHT + 30, parts)


def _spread(heights: Sequence[float], distance: float = 15) -> list[float]:
    """Return heights for labels that do not overlap."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    placed = list(heights)
    for above, below in pairwise(order):
        placed[below] = max(placed[below], placed[above] + distance)
    return placed


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _colors(colors: Sequence[str], indent: str) -> str:
    return "".join(
        f"{indent}.fill{at} {{ fill: #{color} }}\n"
        f"{indent}.stroke{at} {{ stroke: #{color}; stroke-width: 2; fill: none }}\n"
        for at, color in enumerate(colors)
    )


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    body = "\n  ".join(parts)
    dark = DARK_STYLE + _colors(DARK, "      ")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'font-family="sans-serif" font-size="12">\n  <title>{escape(title)}</title>\n  <style>\n'
        f"{STYLE}{_colors(COLORS, '    ')}    @media (prefers-color-scheme: dark) {{\n{dark}    }}\n"
        f'  </style>\n  <text x="0" y="14" class="title">{escape(title)}</text>\n  {body}\n</svg>\n'
    )
