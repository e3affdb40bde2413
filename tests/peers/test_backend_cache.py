"""Peers as a tier: prompts that only peers hold are looked up, fetched, verified and served from memory."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from kvtier import Settings
from kvtier.cache import TieredCache
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, object_bytes
from kvtier.memory.keys import ChunkKey
from kvtier.peers.backend import PeersBackend
from kvtier.pipeline.query import Expected, Query
from kvtier.plugins import Plugins
from kvtier.settings import TierSettings
from kvtier.testing.backend import blank, make_key, noise
from tests.rigs.scripted_peer import ScriptedPeer, reading_from
from tests.rigs.waiting import until

from .test_backend import connected, keys_of, trio

pytestmark = pytest.mark.anyio

PAYLOAD = 20_000
LENGTH = object_bytes(PAYLOAD)
SPACE = bytes(32)
PLUGINS = Plugins.load(())
"""Loaded at import time, because importing the plugins blocks."""


def payload(key: ChunkKey) -> bytes:
    return noise(b"payload" + key, PAYLOAD)


def hold(peer: ScriptedPeer, numbers: Sequence[int]) -> None:
    """Give a peer whole chunk objects with checksums."""
    for number in numbers:
        key, view = make_key(number), blank(LENGTH)
        view[HEADER_BYTES : HEADER_BYTES + PAYLOAD] = payload(key)
        ChunkHeader(key, make_key(number - 1), SPACE, PAYLOAD).seal(view)
        peer.chunks[key] = bytes(view)


async def fetch(cache: TieredCache, count: int) -> int:
    """Look chunks up, check their bytes, and return the number of leading chunks."""
    keys = keys_of(range(count))
    found = cache.look_up(Query(keys), Expected(SPACE, [LENGTH] * count))
    await found.settle(20.0)
    for chunk in found.chunks:
        assert bytes(chunk.lease.view[HEADER_BYTES : HEADER_BYTES + PAYLOAD]) == payload(chunk.key)
    ready = found.ready
    found.release()
    return ready


class OpenCache:
    """A cache with a memory tier and a peers tier."""

    def __init__(self, backend: PeersBackend) -> None:
        tier = TierSettings(name="peers", type="peers", write="never", deadline=20.0, concurrency=16)
        settings = Settings(tiers=[{"name": "ram", "type": "cpu", "capacity": 400 * LENGTH}])
        self._backend = backend
        self._open = TieredCache.open(settings, plugins=PLUGINS, pools=[(tier, backend)])

    async def __aenter__(self) -> TieredCache:
        self.cache = await self._open.__aenter__()
        self._backend.connect()
        return self.cache

    async def __aexit__(self, *error: object) -> None:
        chunks = self.cache.catalog.count(0)
        await until(lambda: self.cache.arena.leases == chunks)
        await self._open.__aexit__(None, None, None)


async def test_prompt_is_fetched_from_several_peers() -> None:
    async with trio() as peers, reading_from(*peers, opened=False) as backend, OpenCache(backend) as cache:
        hold(peers[0], range(40))
        hold(peers[1], range(60))
        hold(peers[2], range(60, 100))
        await connected(backend)
        assert await fetch(cache, 120) == 100
        await until(lambda: not any(peer.open_chunks for peer in peers))
        reads = sum(peer.reads.total() for peer in peers)
        assert reads == 100, "a chunk was read twice"
        assert await fetch(cache, 100) == 100
        assert sum(peer.reads.total() for peer in peers) == reads, "not served from memory"


async def test_corrupt_chunk_is_a_miss_and_stays_at_peer() -> None:
    peer = ScriptedPeer()
    async with peer.serving(), reading_from(peer, opened=False) as backend, OpenCache(backend) as cache:
        hold(peer, range(10))
        corrupt = bytearray(peer.chunks[make_key(4)])
        corrupt[5000] ^= 1
        peer.chunks[make_key(4)] = bytes(corrupt)
        await connected(backend)
        assert await fetch(cache, 10) == 4
        assert make_key(4) in peer.chunks
        hold(peer, [4])
        assert await fetch(cache, 10) == 10


async def test_dead_peers_cause_misses_until_they_return() -> None:
    async with trio() as peers, reading_from(*peers, opened=False) as backend, OpenCache(backend) as cache:
        for peer in peers:
            hold(peer, range(100))
        await connected(backend)
        async with anyio.create_task_group() as tasks:

            async def kill_all() -> None:
                for peer in peers:
                    await until(lambda peer=peer: peer.reads.total() >= 2)  # type: ignore[misc]
                    peer.disconnect()

            tasks.start_soon(kill_all)
            ready = await fetch(cache, 100)
            tasks.cancel_scope.cancel()
        assert ready <= 100
        await connected(backend)
        with anyio.fail_after(30):
            while await fetch(cache, 100) < 100:
                await anyio.sleep(0.05)
        await until(lambda: not any(peer.open_chunks for peer in peers))
