"""What the benchmarks share: contestants that take turns, and a table of what came out."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from kvtier.bench.timing import filled, ratio, speed, take_turns
from kvtier.units import MIB

__all__ = ["MIB", "filled", "ratio", "show", "speed", "take_turns"]


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table: text to the left, figures to the right."""
    table = Table(title=title, title_justify="left")
    for column, example in zip(columns, rows[0], strict=True):
        text = isinstance(example, str)
        table.add_column(column, justify="left" if text else "right", no_wrap=text)
    for row in rows:
        table.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=120).print(table)
