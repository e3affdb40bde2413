"""Lookups of which a part is taken before the pools have answered, as an engine takes what is in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier import Settings
from kvtier.catalog.partial_matches import PromptTags, block_tags_of
from kvtier.memory.keys import block_hashes
from kvtier.pipeline.found import Lookup
from kvtier.pipeline.query import Query
from tests.rigs.faulty_sources import CacheHarness, opened

pytestmark = pytest.mark.anyio
MakeSettings = Callable[..., Settings]
Prompt = Callable[..., list[int]]


async def looked_up(harness: CacheHarness, tokens: list[int]) -> tuple[Lookup, int]:
    """Return a lookup after the answer of the pools, and how many chunks were taken before."""
    keys = harness.model.keys(tokens)
    expected = harness.model._expected(len(tokens))
    block_tags = block_tags_of(block_hashes(tokens, 16))
    found = harness.cache.look_up(
        Query(keys, len(tokens), block_tags=PromptTags(harness.model._root, block_tags, 16)), expected
    )
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
