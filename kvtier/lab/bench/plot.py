"""Plot the results. matplotlib is optional: ``pip install kvtier[bench]``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from kvtier.lab.bench.errors import BenchFailed
from kvtier.lab.bench.rows import Extent, Row
from kvtier.units import format_size

COLOURS = {"put": "#3366aa", "get": "#dd8833"}
BAR = 0.38


def expect_matplotlib() -> None:
    """Raise :class:`BenchFailed` with install instructions if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise BenchFailed("a plot needs matplotlib: pip install 'kvtier[bench]'")


def save_plot(rows: Sequence[Row], extent: Extent, path: Path) -> None:
    """Save a PNG with a bar of GB/s per row and direction, and its limit as a line. Blocks for a second.

    Omits failed rows. Raises :class:`BenchFailed` without matplotlib, and ``OSError``.
    """
    expect_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.put is not None and row.get is not None]
    figure = Figure(figsize=(8, 1.6 + 0.7 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for offset, name in ((-BAR / 2, "put"), (BAR / 2, "get")):
        directions = [row.put if name == "put" else row.get for row in shown]
        positions = [index + offset for index in range(len(shown))]
        speeds = [direction.gb_s if direction else 0.0 for direction in directions]
        axes.barh(positions, speeds, BAR, label=name, color=COLOURS[name])
        for position, direction in zip(positions, directions, strict=True):
            if direction is not None and direction.limit_gb_s is not None:
                ends = [position - BAR / 2, position + BAR / 2]
                axes.plot([direction.limit_gb_s] * 2, ends, color="black", linewidth=2)
    axes.plot([], [], color="black", linewidth=2, label="limit")
    axes.set_yticks(range(len(shown)), [f"{row.name} ({row.type})" for row in shown])
    axes.invert_yaxis()
    axes.set_xlabel("GB/s")
    axes.set_title(f"{extent.chunks} chunks of {format_size(extent.size)}, {extent.in_flight} in flight")
    figure.legend(loc="outside right upper")
    figure.savefig(path, format="png", dpi=120)
