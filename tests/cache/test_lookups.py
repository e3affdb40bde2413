"""Lookups whose chunks arrive, and are taken, bit by bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from kvtier.catalog.partial_matches import PromptTags, block_tags_of
from kvtier.memory.keys import ChunkKey, block_hashes, root_key
from kvtier.pipeline.found import FoundChunk, FoundPrefix
from kvtier.pipeline.query import Query
from tests.rigs.faulty_sources import CacheHarness, opened

from .conftest import MakeSettings, Prompt

pytestmark = pytest.mark.anyio


def flight(*, arrived: bool) -> Any:
    return SimpleNamespace(done=anyio.Event(), arrived=arrived, source=1)


def look_up(*flights: Any) -> FoundPrefix:
    """Return a lookup whose pools were queried."""
    found = FoundPrefix(Query(()))
    lease: Any = SimpleNamespace(release=lambda: None)
    found.unknown = 1
    found.add(
        [FoundChunk(ChunkKey(bytes([number]) * 32), lease, item) for number, item in enumerate(flights)]
    )
    return found


async def settle(found: FoundPrefix) -> list[int]:
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


async def looked_up(harness: CacheHarness, tokens: list[int]) -> tuple[FoundPrefix, int]:
    """Return a lookup after the answer of the pools, and how many chunks were taken before."""
    keys = harness.model.keys(tokens)
    root = root_key(harness.model.namespace, "")
    block_tags = PromptTags(root, block_tags_of(block_hashes(tokens, 16)), 16)
    query = Query(keys, len(tokens), block_tags=block_tags)
    found = harness.cache.look_up(query, harness.expected(tokens))
    before = found.take_ready()
    await harness.cache.settle(found)
    for ready in before:
        ready.release_all()
    return found, sum(len(ready.leases) for ready in before)


@pytest.mark.parametrize("rest", [0, 100, 256])
async def test_the_next_chunk_is_searched_where_the_prompt_goes_on(
    rest: int, settings: MakeSettings, prompt: Prompt
) -> None:
    """Not after what was found since the first answer."""
    tokens = prompt(3 * 256) + [7] * rest
    async with opened(settings, "near") as harness:
        await harness.fill(tokens, "near")
        assert await harness.cache.prefetch(Query(harness.model.keys(tokens)[:3])) == 3
        for key in harness.model.keys(tokens)[3:]:
            harness.cache.catalog.remove(key, harness.tier("near").index)
        found, taken = await looked_up(harness, tokens)
        assert taken == 3
        assert (found.total, found.partial) == (3 + bool(rest), None)
        found.release()
