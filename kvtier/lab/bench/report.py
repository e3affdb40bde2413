"""Report results as a table, as JSON and as a plot, which needs matplotlib: ``pip install kvtier[bench]``."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from kvtier.lab.bench.rows import Direction, Extent, Row
from kvtier.units import format_size
from kvtier.version import __version__

DASH = "—"
AIM = 0.95
"""Ratio to the limit below which a cell is highlighted. Noise alone can cause that."""
COLUMNS = ("limit", "put GB/s", "ratio", "p50 / p99 ms", "get GB/s", "ratio", "p50 / p99 ms", "lookups/s")
COLOURS = {"put": "#3366aa", "get": "#dd8833"}
BAR = 0.38


def table_of(rows: Sequence[Row], extent: Extent) -> Table:
    """Return a table of all rows; a failed row has no figures."""
    chunks = f"{extent.chunks} chunks of {format_size(extent.size)}, {extent.in_flight} in flight"
    table = Table(title=f"{chunks}, {extent.turns} turns", title_justify="left", box=None, pad_edge=False)
    table.add_column("tier", overflow="fold")
    table.add_column("type")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "limit" else "right")
    for row in rows:
        table.add_row(escape(row.name), escape(row.type), *_cells(row))
    return table


def remarks_of(rows: Sequence[Row]) -> list[str]:
    """Return lines to print below the table, in markup: errors of failed rows, then remarks."""
    return [
        f"[red]{escape(row.name)}[/red]: {escape(row.error)}" for row in rows if row.error is not None
    ] + [f"[dim]{escape(row.name)}: {escape(row.remark)}[/dim]" for row in rows if row.remark]


def json_of(rows: Sequence[Row], extent: Extent) -> dict[str, Any]:
    """Return all results and a description of the machine, ready for JSON."""
    return {
        "kvtier": __version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "system": platform.platform(),
            "processors": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "load": os.getloadavg()[0],
        },
        "extent": asdict(extent),
        "rows": [asdict(row) for row in rows],
    }


def _cells(row: Row) -> list[str]:
    if row.error is not None:
        return ["[red]failed[/red]", *[DASH] * (len(COLUMNS) - 1)]
    lookups = DASH if row.lookups_per_s is None else f"{row.lookups_per_s:,.0f}"
    return [row.limit or DASH, *_direction(row.put), *_direction(row.get), lookups]


def _direction(direction: Direction | None) -> list[str]:
    if direction is None:
        return [DASH] * 3
    latency = f"{_milliseconds(direction.p50_ms)} / {_milliseconds(direction.p99_ms)}"
    return [f"{direction.gb_s:.2f}", _ratio(direction), latency]


def _ratio(direction: Direction) -> str:
    if direction.ratio is None:
        return DASH
    text = f"{direction.ratio.median:.2f}"
    return text if direction.ratio.median >= AIM else f"[yellow]{text}[/yellow]"


def _milliseconds(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def save_plot(rows: Sequence[Row], extent: Extent, path: Path) -> None:
    """Save a PNG with a bar of GB/s per row and direction, and its limit as a line. Blocks for a second.

    Omits failed rows. Raises ``OSError``.
    """
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.put is not None and row.get is not None]
    figure = Figure(figsize=(8, 1.6 + 0.7 * len(shown)), layout="constrained")
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
