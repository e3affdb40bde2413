"""What a real cache does with new chunks that its eviction policy finds worth less than those it holds."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import anyio
import pytest

from kvtier import Settings, TieredCache
from kvtier.catalog.eviction import IncomingPrompt
from kvtier.catalog.hints import ChunkHints
from kvtier.memory.header import ChunkHeader
from kvtier.memory.keys import ChunkKey
from kvtier.pipeline.query import Query
from kvtier.testing.eviction import prompt_of
from tests.rigs.faulty_sources import BUILT_IN

from .conftest import CHUNK_OBJECT_BYTES, headers

pytestmark = pytest.mark.anyio
CHUNKS = 8
WORTHY, WORTHLESS = ChunkHints(priority=100), ChunkHints(priority=-100)


def store(
    cache: TieredCache, new: list[ChunkHeader], hints: ChunkHints, *, declining: bool = True
) -> list[bool]:
    """Store chunks as an engine does. Return which of them had room."""
    reserved = cache.reserve_all(new, [hints] * len(new), declining=declining)
    cache.commit([reservation for reservation in reserved if reservation is not None])
    return [reservation is not None for reservation in reserved]


def memory(**more: Any) -> dict[str, Any]:
    return {"eviction": "resume", "high_watermark": 1.0, "low_watermark": 1.0, **more}


@pytest.fixture
async def cache(settings: Callable[..., Settings]) -> AsyncIterator[TieredCache]:
    """A memory tier that is full of chunks of high priority."""
    async with TieredCache.open(settings(ram=CHUNKS, ssd=0, memory=memory()), plugins=BUILT_IN) as cache:
        assert all(store(cache, headers(prompt_of(1, CHUNKS)), WORTHY))
        yield cache


@pytest.fixture
def declined(cache: TieredCache, monkeypatch: pytest.MonkeyPatch) -> list[IncomingPrompt]:
    """What the policy is told to remember."""
    found: list[IncomingPrompt] = []
    monkeypatch.setattr(cache.catalog.policies[0], "declined", found.append)
    return found


def held(cache: TieredCache) -> int:
    return len(cache.catalog.prefix(prompt_of(1, CHUNKS)))


async def test_declined_chunks_are_counted_and_do_not_warn(
    cache: TieredCache, declined: list[IncomingPrompt], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert store(cache, headers(prompt_of(2, 3)), WORTHLESS) == [False] * 3
    assert held(cache) == CHUNKS
    assert cache.counts["store_declined"] == 3
    assert cache.counts["store_dropped"] == 0
    assert not caplog.records
    assert [prompt.keys for prompt in declined] == [prompt_of(2, 3)]


async def test_chunks_that_are_worth_more_replace_the_others(cache: TieredCache) -> None:
    assert store(cache, headers(prompt_of(2, 3)), WORTHY) == [True] * 3
    assert held(cache) == CHUNKS - 3


async def test_nothing_is_declined_unless_the_caller_allows_it(cache: TieredCache) -> None:
    """Such as what a peer pushes, or a user of the library stores."""
    assert store(cache, headers(prompt_of(2, 3)), WORTHLESS, declining=False) == [True] * 3


async def test_what_continues_declined_chunks_is_declined_even_if_there_is_room(cache: TieredCache) -> None:
    """An engine stores a long prompt in parts. Without the first one, the others would never be hits."""
    keys = prompt_of(2, 6)
    assert store(cache, headers(keys[:2]), WORTHLESS) == [False] * 2
    victims = cache.catalog.victims(0, 4 * CHUNK_OBJECT_BYTES)
    cache.memory.drop(victims)
    assert store(cache, headers(keys[2:4], keys[1]), WORTHLESS) == [False] * 2
    assert store(cache, headers(keys[4:], keys[3]), WORTHY) == [False] * 2
    assert cache.counts["store_declined"] == 6
    assert store(cache, headers(keys[:2]), WORTHLESS) == [True] * 2, "there is room for it now"
    assert store(cache, headers(keys[2:4], keys[1]), WORTHLESS) == [True] * 2


async def test_whole_chunk_in_place_of_a_declined_partial_one_is_declined(cache: TieredCache) -> None:
    """Both have the same parent: decoding completes the chunk at the end of the prompt."""
    keys = prompt_of(2, 4)
    [partial], [whole] = prompt_of(3, 1), prompt_of(4, 1)
    assert store(cache, headers([*keys, partial]), WORTHLESS) == [False] * 5
    cache.memory.drop(cache.catalog.victims(0, 4 * CHUNK_OBJECT_BYTES))
    assert store(cache, headers([whole], keys[-1]), WORTHLESS) == [False]


async def test_what_continues_declined_chunks_that_a_peer_has_pushed_since_is_stored(
    cache: TieredCache,
) -> None:
    keys = prompt_of(2, 3)
    assert store(cache, headers(keys[:2]), WORTHLESS) == [False] * 2
    assert store(cache, headers(keys[:2]), WORTHY, declining=False) == [True] * 2
    assert store(cache, headers(keys[2:], keys[1]), WORTHY) == [True]


async def test_prompt_that_was_declined_before_is_continued_by_another_one(cache: TieredCache) -> None:
    """Both in one reservation: the second one continues chunks that are not in the catalog yet."""
    keys, more = prompt_of(2, 2), prompt_of(3, 1)
    assert store(cache, headers(keys), WORTHLESS) == [False] * 2
    both = headers(keys) + headers(more, keys[-1])
    hints = [WORTHY, WORTHY, ChunkHints(priority=100)]
    reserved = cache.reserve_all(both, hints, declining=True)
    assert all(reservation is not None for reservation in reserved)
    cache.abandon([reservation for reservation in reserved if reservation is not None])


async def test_other_prompts_of_the_same_reservation_are_stored(cache: TieredCache) -> None:
    """A step of an engine reserves for all of its requests at once."""
    new = headers(prompt_of(2, 2)) + headers(prompt_of(3, 2))
    hints = [WORTHLESS] * 2 + [WORTHY] * 2
    reserved = cache.reserve_all(new, hints, declining=True)
    assert [reservation is not None for reservation in reserved] == [False, False, True, True]
    cache.abandon([reservation for reservation in reserved if reservation is not None])


async def test_policy_knows_what_a_prompt_misses(cache: TieredCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first lookup of an engine on. Others store nothing, or not soon."""
    missed: list[Sequence[ChunkKey]] = []
    monkeypatch.setattr(cache.catalog.policies[0], "missed", lambda keys, _: missed.append(keys))
    new = prompt_of(2, 3)
    for keys in (prompt_of(1, CHUNKS), prompt_of(1, CHUNKS) + new, new):
        cache.look_up(Query(keys)).release()
    assert missed == []
    while len(missed) < 2:  # Later, when the lookups have been answered.
        await anyio.sleep(0.01)
    assert missed == [new, new]
    cache.look_up(Query(new, local=True)).release()
    cache.look_up(Query(new, repeated=True)).release()
    assert cache.catalog.policies
    assert len(missed) == 2


@pytest.mark.parametrize(("policy", "left"), [("resume", CHUNKS), ("lru", 2)])
async def test_no_room_is_made_in_advance_for_what_may_be_declined(
    settings: Callable[..., Settings], policy: str, left: int
) -> None:
    """Whatever comes next would be stored there, and the better chunks that were evicted for it are gone."""
    tier = {"eviction": policy, "high_watermark": 0.5, "low_watermark": 0.25}
    async with TieredCache.open(settings(ram=CHUNKS, ssd=0, memory=tier), plugins=BUILT_IN) as cache:
        assert all(store(cache, headers(prompt_of(1, CHUNKS)), WORTHY))
        await anyio.wait_all_tasks_blocked()
        assert held(cache) == left
        assert any(store(cache, headers(prompt_of(2, 1)), WORTHLESS)) == (policy == "lru")


async def test_prompt_that_is_held_already_is_neither_stored_nor_declined(cache: TieredCache) -> None:
    """As when two requests with the same prompt are computed at once."""
    assert store(cache, headers(prompt_of(1, CHUNKS)), WORTHLESS) == [False] * CHUNKS
    assert store(cache, [], WORTHLESS) == []
    assert cache.counts["store_declined"] == 0


async def test_only_the_end_of_a_prompt_is_declined(
    cache: TieredCache, declined: list[IncomingPrompt]
) -> None:
    """As much is stored as there is room for, and what is declined continues it."""
    keys = prompt_of(2, 5)
    cache.memory.drop(cache.catalog.victims(0, 2 * CHUNK_OBJECT_BYTES))
    assert store(cache, headers(keys), WORTHLESS) == [True, True, False, False, False]
    assert held(cache) == CHUNKS - 2
    assert len(cache.catalog.prefix(keys)) == 2
    [end] = declined
    assert (end.keys, end.parent, end.parent_key) == (keys[2:], cache.catalog.row(keys[1]), keys[1])


async def test_chunks_in_use_are_no_reason_to_decline(cache: TieredCache) -> None:
    """There is no room then, and that is what is counted."""
    leases = cache.memory.lease_ready(prompt_of(1, CHUNKS))
    assert store(cache, headers(prompt_of(2, 3)), WORTHY) == [False] * 3
    assert cache.counts["store_dropped"] == 3
    assert cache.counts["store_declined"] == 0
    for chunk in leases:
        chunk.lease.release()


@pytest.mark.parametrize(
    "more", [{"ssd": 64}, {"ssd": 0, "tenants": {"a": {"share": 0.5}}}], ids=["disk", "tenants"]
)
async def test_lower_tiers_get_every_chunk_and_tenants_are_not_compared(
    settings: Callable[..., Settings], more: dict[str, Any]
) -> None:
    tiers = settings(ram=CHUNKS, memory=memory(), **more)
    async with TieredCache.open(tiers, plugins=BUILT_IN) as cache:
        store(cache, headers(prompt_of(1, CHUNKS)), WORTHY)
        for number in range(2, 50):
            if any(store(cache, headers(prompt_of(number, 3)), WORTHLESS)):
                break
            await anyio.sleep(0.1)  # What is on its way to the disk is in use.
        else:
            pytest.fail("nothing was stored")
        assert cache.counts["store_declined"] == 0


async def test_what_is_offered_again_may_be_declined_above_a_disk(settings: Callable[..., Settings]) -> None:
    """New chunks may not: the disk gets them through memory."""
    async with TieredCache.open(settings(ram=CHUNKS, ssd=64, memory=memory()), plugins=BUILT_IN) as cache:
        assert all(store(cache, headers(prompt_of(1, CHUNKS)), WORTHY))
        assert not cache.wants_again
        await cache.drain(10)
        second = headers(prompt_of(2, 3))
        assert store(cache, second, WORTHLESS) == [True] * 3
        assert cache.wants_again
        await cache.drain(10)
        cache.memory.drop([header.key for header in second])
        refilled = headers(prompt_of(1, CHUNKS))[CHUNKS - 3 :]
        assert all(store(cache, refilled, WORTHY))
        await cache.drain(10)
        known = cache.counts["store_known"]
        offered = [*headers(prompt_of(1, CHUNKS)), *second, *headers(prompt_of(3, 2))]
        hints = [*[WORTHY] * CHUNKS, *[WORTHLESS] * 5]
        assert cache.reserve_all(offered, hints, declining=True, again=True) == [None] * len(offered)
        assert cache.counts["store_known"] == known, "they were counted when they were offered first"
        assert cache.counts["store_declined"] == 2, "the disk holds the others"
        assert held(cache) == CHUNKS


async def test_no_room_for_what_is_offered_again_is_no_loss(
    cache: TieredCache, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it was stored or not was counted before. A busy cache would log a warning for each answer."""
    found = cache.look_up(Query(prompt_of(1, CHUNKS)))
    assert cache.reserve_all(headers(prompt_of(2, 3)), again=True) == [None] * 3
    assert cache.counts["store_dropped"] == 0
    assert not caplog.records
    found.release()
