"""Progress of a lookup: it never reports zero chunks in flight before the end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from kvtier.memory.keys import ChunkKey
from kvtier.pipeline.found import FoundChunk, Lookup
from kvtier.pipeline.query import Query

pytestmark = pytest.mark.anyio


def flight(*, arrived: bool) -> Any:
    return SimpleNamespace(done=anyio.Event(), arrived=arrived, source=1)


def look_up(*flights: Any) -> Lookup:
    """Return a lookup whose pools were queried."""
    found = Lookup(Query(()))
    lease: Any = SimpleNamespace(release=lambda: None)
    found.unknown = 1
    found.add(
        [FoundChunk(ChunkKey(bytes([number]) * 32), lease, item) for number, item in enumerate(flights)]
    )
    return found


async def settle(found: Lookup) -> list[int]:
    """Settle a lookup, and return the number of chunks in flight of each progress report."""
    reported: list[int] = []

    async def progress() -> None:
        reported.append(found.in_flight)
        for chunk in found.chunks:
            if chunk.flight is not None:
                chunk.flight.arrived = True
                chunk.flight.done.set()

    found.answered.set()
    await found.settle(1.0, progress)
    return reported


async def test_pool_reply_is_progress_while_chunks_are_in_flight() -> None:
    found = look_up(flight(arrived=False), flight(arrived=False))
    assert await settle(found) == [3]
    assert found.ready == 2


async def test_nothing_is_reported_if_all_chunks_have_arrived() -> None:
    """The caller takes zero chunks in flight for the final result, before the chunks are granted."""
    assert await settle(look_up(flight(arrived=True))) == []
