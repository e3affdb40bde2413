"""Shared by the benchmarks: interleaved measurements, a table of results, and blocking bridge calls."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from kvtier.bench.timing import filled, interleave, ratio, speed
from kvtier.bridge.bridge import Bridge
from kvtier.bridge.client import SchedulerBridge, Slots, WorkerBridge
from kvtier.bridge.protocol import Run
from kvtier.memory.keys import ChunkKey, join_keys
from kvtier.rpc.calls import Call
from kvtier.units import MIB

__all__ = ["MIB", "confirm", "filled", "interleave", "ratio", "reserve", "show", "speed"]

ANSWER_SECONDS = 60.0

ResultT = TypeVar("ResultT")


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table, with text left-aligned and figures right-aligned."""
    table = Table(title=title, title_justify="left")
    for column, example in zip(columns, rows[0], strict=True):
        text = isinstance(example, str)
        table.add_column(column, justify="left" if text else "right", no_wrap=text)
    for row in rows:
        table.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=120).print(table)


def reserve(
    scheduler: SchedulerBridge, parent: ChunkKey, keys: Sequence[ChunkKey], last_tokens: int
) -> Slots:
    """Reserve room for consecutive chunks. Blocks until the cache process answers."""
    answer = _answer(scheduler, scheduler.reserve([Run(parent, join_keys(keys), last_tokens)]))
    return answer[0]


def confirm(worker: WorkerBridge, leases: Sequence[int]) -> bool:
    """Whether the leases are still valid. Blocks until the cache process answers."""
    return _answer(worker, worker.confirm(leases))


def _answer(bridge: Bridge, call: Call[ResultT] | None) -> ResultT:
    assert call is not None, "the cache process is not connected"
    deadline = time.monotonic() + ANSWER_SECONDS
    while not call.settled and time.monotonic() < deadline:
        bridge.poll(1.0)
    assert call.result is not None, "the cache process did not answer"
    return call.result
