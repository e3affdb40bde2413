"""What a look-up reports while it waits: never that nothing more will come, before the end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from kvtier.keys import ChunkKey
from kvtier.pipeline.found import FoundChunk, LookUp

pytestmark = pytest.mark.anyio


def flight(*, arrived: bool) -> Any:
    return SimpleNamespace(landed=anyio.Event(), arrived=arrived, source=1)


def look_up(*flights: Any) -> LookUp:
    """One whose pools have been asked."""
    found = LookUp()
    lease: Any = SimpleNamespace(release=lambda: None)
    found.unknown = 1
    found.add([FoundChunk(ChunkKey(bytes([number]) * 32), lease, one) for number, one in enumerate(flights)])
    return found


async def settled(found: LookUp) -> list[int]:
    """How many chunks were said to be under way, each time."""
    told: list[int] = []

    async def progress() -> None:
        told.append(found.under_way)
        for chunk in found.chunks:
            if chunk.flight is not None:
                chunk.flight.arrived = True
                chunk.flight.landed.set()

    found.answered.set()
    await found.settle(1.0, progress)
    return told


async def test_an_answer_of_the_pools_is_progress_while_chunks_are_in_flight() -> None:
    found = look_up(flight(arrived=False), flight(arrived=False))
    assert await settled(found) == [3]
    assert found.ready == 2


async def test_nothing_is_reported_where_all_has_arrived() -> None:
    """Zero chunks under way would be taken for the final answer, before the chunks are granted."""
    assert await settled(look_up(flight(arrived=True))) == []
