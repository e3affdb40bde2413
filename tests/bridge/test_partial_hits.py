"""Chunks that a prompt uses in part: what the engine is told of them, and what they replace."""

from __future__ import annotations

import pytest
from xxhash import xxh3_64_digest

from kvtier.bridge.protocol import Found, Lookup, Reserve, Run
from kvtier.bridge.session import EngineSession
from kvtier.cache import TieredCache
from kvtier.catalog.partial_matches import block_tags_of
from kvtier.errors import ProtocolError
from kvtier.memory.header import HEADER_BYTES, ChunkHeader
from kvtier.memory.keys import ChunkKey, block_hashes, chunk_keys, join_keys
from kvtier.memory.layout import ChunkLayout, GroupLayout
from tests.rigs.engine_sessions import NAMESPACE, ROOT, engine_of
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio

CHUNK_TOKENS, BLOCK, WINDOW = 256, 16, 128
FULL = ChunkLayout(CHUNK_TOKENS, (GroupLayout(BLOCK, (1024,)),))
WINDOWS = ChunkLayout(CHUNK_TOKENS, (GroupLayout(BLOCK, (1024,)), GroupLayout(BLOCK, (1024,), WINDOW)))


def keys_of(tokens: list[int]) -> list[ChunkKey]:
    return chunk_keys(ROOT, tokens, CHUNK_TOKENS, tail=True)


def store(engine: EngineSession, tokens: list[int]) -> int:
    """Store the chunks of a prompt; return the offset of the last one in the arena."""
    last = (len(tokens) - 1) % CHUNK_TOKENS + 1
    run = Run(ROOT, join_keys(keys_of(tokens)), last, block_hashes=block_hashes(tokens, BLOCK))
    reserved = engine.reserve(Reserve(1, [run]))
    engine.commit([lease for lease in reserved.leases if lease], 0)
    return reserved.offsets[-1]


def look_up(engine: EngineSession, tokens: list[int]) -> Found:
    marks = block_tags_of(block_hashes(tokens, BLOCK))
    request = Lookup(1, join_keys(keys_of(tokens)), len(tokens), root=ROOT, marks=marks)
    found, _ = engine.look_up(request)
    assert not found.fetching
    engine.reads.release(found.leases)
    return found


@pytest.mark.parametrize("layout", [FULL, WINDOWS], ids=["full", "windows"])
async def test_the_engine_learns_how_many_tokens_a_partial_hit_holds(layout: ChunkLayout) -> None:
    """They decide which blocks of a window are stored, and the length of the payload does not tell them."""
    async with engine_of(layout, "16MiB") as (engine, cache):
        for tail in range(BLOCK, CHUNK_TOKENS):
            stored = list(range(1000 * tail, 1000 * tail + tail))
            store(engine, stored)
            found = look_up(engine, stored + [7] * 30)
            assert (found.last_tokens, len(found.leases)) == (tail, 1)
            assert found.block_hashes == block_hashes(stored, BLOCK)
            await cache.clear()


def test_payloads_with_other_blocks_of_a_window_may_be_as_long() -> None:
    """Otherwise the number of tokens would not be needed."""
    short, whole = 238, CHUNK_TOKENS
    assert WINDOWS.payload_bytes(short) == WINDOWS.payload_bytes(whole)
    assert WINDOWS.groups[1].blocks(short) != WINDOWS.groups[1].blocks(whole)


def change(offset: int, cache: TieredCache, changes: dict[str, int]) -> None:
    head = cache.arena.view(offset, HEADER_BYTES)
    head[:] = ChunkHeader.parse(head)._replace(**changes).packed()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes", [{"tokens": 0}, {"tokens": 256}, {"tokens": 257}, {"tokens": 2**32 - 1}, {"payload_bytes": 1}]
)
async def test_a_header_that_does_not_fit_its_payload_is_not_used(changes: dict[str, int]) -> None:
    """Its chunk may come from a peer."""
    stored = list(range(100))
    async with engine_of(WINDOWS, "16MiB") as (engine, cache):
        change(store(engine, stored), cache, changes)
        found = look_up(engine, stored + [7] * 100)
        assert (found.last_tokens, found.block_hashes) == (CHUNK_TOKENS, b"")


async def test_a_corrupt_header_is_not_used() -> None:
    stored = list(range(100))
    async with engine_of(FULL, "16MiB") as (engine, cache):
        offset = store(engine, stored)
        head = cache.arena.view(offset, HEADER_BYTES)
        head[150] ^= 1
        assert bytes(head[404:412]) != xxh3_64_digest(head[:404])
        found = look_up(engine, stored + [7] * 100)
        assert (found.last_tokens, found.block_hashes) == (CHUNK_TOKENS, b"")


@pytest.mark.parametrize("root", [b"half", bytes(33)])
async def test_an_invalid_root_is_refused(root: bytes) -> None:
    async with engine_of(FULL, "16MiB") as (engine, _):
        with pytest.raises(ProtocolError, match="root key of"):
            engine.look_up(Lookup(1, join_keys(keys_of(list(range(300)))), 300, root=root, marks=b"mark"))


async def test_more_hashes_than_blocks_are_refused() -> None:
    async with engine_of(FULL, "16MiB") as (engine, _):
        run = Run(ROOT, join_keys(keys_of(list(range(256)))), 256, block_hashes=bytes(17 * 16))
        with pytest.raises(ProtocolError, match="block hashes"):
            engine.reserve(Reserve(1, [run]))


@pytest.mark.parametrize("layout", [FULL, WINDOWS], ids=["full", "windows"])
@pytest.mark.parametrize("longer", [33, 240, 255, 256])
async def test_a_longer_chunk_replaces_a_shorter_one(layout: ChunkLayout, longer: int) -> None:
    tokens = list(range(longer))
    async with engine_of(layout, "16MiB") as (engine, cache):
        store(engine, tokens[:32])
        store(engine, [9] * 50)
        store(engine, tokens)
        kept = {*keys_of(tokens), *keys_of([9] * 50)}
        await until(lambda: set(cache.catalog.keys(0, NAMESPACE)) == kept)
        assert len(look_up(engine, tokens).leases) == 1


@pytest.mark.parametrize("longer", [48, 255, 256])
async def test_a_shorter_chunk_stored_late_is_removed(longer: int) -> None:
    tokens = list(range(longer))
    async with engine_of(FULL, "16MiB") as (engine, cache):
        store(engine, tokens)
        store(engine, tokens[:32])
        await until(lambda: cache.catalog.keys(0, NAMESPACE) == keys_of(tokens))
        assert len(look_up(engine, tokens).leases) == 1


async def test_the_last_of_two_with_the_same_blocks_stays() -> None:
    async with engine_of(FULL, "16MiB") as (engine, cache):
        store(engine, list(range(33)))
        store(engine, list(range(32)))
        await until(lambda: cache.catalog.keys(0, NAMESPACE) == keys_of(list(range(32))))
        assert look_up(engine, list(range(33))).last_tokens == 32
