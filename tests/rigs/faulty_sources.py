"""A test cache with tiers that fail, hang and lose chunks on demand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kvtier import ModelCache, TieredCache
from kvtier.backends.base import Backend
from kvtier.catalog.catalog import State
from kvtier.events import Observer, Prefetch, Report
from kvtier.memory.header import ChunkHeader, object_bytes
from kvtier.pipeline.query import Expected
from kvtier.plugins import Plugins
from kvtier.settings import LocalTierSettings, TierSettings
from kvtier.testing.faults import FaultyBackend, SlowBackend
from kvtier.tiers.costs import ReadCost
from kvtier.tiers.tier import Tier
from tests.cache.conftest import CHUNK_OBJECT_BYTES, CHUNK_TOKENS, TOKEN_BYTES, MakeSettings, retrieve, rows
from tests.rigs.chunks import DictBackend
from tests.rigs.waiting import until

BUILT_IN = Plugins.load([])
"""Loaded at import, because importing every backend takes longer than the loop watch allows."""


@dataclass
class Source:
    """A tier: a dictionary behind a wrapper that fails and one that hangs, on demand."""

    name: str
    shared: bool = True
    """Whether it is a pool that this cache never writes; else it belongs to it, and is written through."""
    pool: DictBackend = field(default_factory=DictBackend)

    def __post_init__(self) -> None:
        self.faults = FaultyBackend(self.pool)
        self.delays = SlowBackend(self.faults, stubborn=True)

    @property
    def tier(self) -> tuple[TierSettings, Backend]:
        if self.shared:
            return TierSettings(name=self.name, type="shelf", write="never", deadline=60), self.delays
        return LocalTierSettings(name=self.name, type="shelf", capacity=2**30, deadline=60), self.delays


class CacheHarness(Observer):
    """An open cache with a memory tier, optionally a disk tier, and sources."""

    def __init__(self, cache: TieredCache, sources: Sequence[Source]) -> None:
        self.cache = cache
        self.model: ModelCache = cache.model("llama", token_bytes=TOKEN_BYTES)
        self.sources = {source.name: source for source in sources}
        self.reads: list[tuple[str, int]] = []
        """The source and number of chunks of each prefetch read, in order of completion."""
        cache.add_observer(self)

    def observe(self, report: Report) -> None:
        if isinstance(report.event, Prefetch):
            self.reads.append((report.source or "", len(report.keys)))

    def tier(self, name: str) -> Tier:
        return next(tier for tier in self.cache.tiers if tier.name == name)

    def expected(self, tokens: list[int]) -> Expected:
        """What a lookup of a prompt expects to find."""
        sizes = [min(CHUNK_TOKENS, len(tokens) - at) for at in range(0, len(tokens), CHUNK_TOKENS)]
        return Expected(self.model.namespace, [object_bytes(size * TOKEN_BYTES) for size in sizes])

    def held_chunks(self, tokens: list[int], name: str) -> list[int]:
        """Return the numbers of the chunks of a prompt that are READY in a tier."""
        catalog, tier = self.cache.catalog, self.tier(name).index
        keys = self.model.keys(tokens)
        return [at for at, key in enumerate(keys) if catalog.state(key, tier) is State.READY]

    async def fill(self, tokens: list[int], *names: str) -> None:
        """Store a prompt in the given tiers, but not in memory."""
        cache, catalog = self.cache, self.cache.catalog
        keys = self.model.keys(tokens)
        assert await self.model.store(tokens, rows(tokens)) == len(tokens)
        assert await cache.drain(60)
        for name in names:
            tier = self.tier(name).index
            if name not in self.sources:
                assert await cache.move(keys, "ram", name, copy=True) == len(keys)
                continue
            for key in keys:
                lease = cache.memory.lease(key)
                assert lease is not None
                sealed = bytearray(lease.view)
                lease.release()
                ChunkHeader.parse(memoryview(sealed)).seal(memoryview(sealed))
                self.sources[name].pool.held[key] = bytes(sealed)
                if catalog.state(key, tier) is State.ABSENT:
                    catalog.add(key, tier, CHUNK_OBJECT_BYTES, State.READY)
        cache.memory.drop(keys)
        self.reads.clear()

    def lose_chunks(self, tokens: list[int], name: str, chunks: Sequence[int]) -> None:
        """Remove chunks of a prompt from a source and from the catalog."""
        keys = self.model.keys(tokens)
        for at in chunks:
            self.sources[name].pool.held.pop(keys[at])
            self.cache.catalog.remove(keys[at], self.tier(name).index)

    def hang(self, name: str) -> None:
        """Make calls to a source hang, with a short deadline."""
        self.sources[name].delays.hang()
        self._set_deadline(name, 0.3)

    def resume(self, name: str) -> None:
        """Resume calls to a source, with a deadline that suits a busy machine."""
        self.sources[name].delays.resume()
        self._set_deadline(name, 60)

    def _set_deadline(self, name: str, seconds: float) -> None:
        tier = self.tier(name)
        tier.settings = tier.settings.model_copy(update={"deadline": seconds})

    async def retrieve(self, tokens: list[int]) -> int:
        """Retrieve a prompt, check the bytes, and return the number of tokens found."""
        return await retrieve(self.model, tokens)

    async def wait_until_idle(self) -> None:
        """Wait until nothing is in flight, and only the chunks in memory are leased."""
        cache, catalog = self.cache, self.cache.catalog
        await until(
            lambda: (
                not (
                    cache.pending_bytes
                    or any(catalog.state(key, 0) is State.PENDING for key in catalog.keys(0))
                    or cache.arena.leases != catalog.count(0)
                )
            )
        )
        assert not cache.status()["flights"]


@asynccontextmanager
async def opened(
    settings: MakeSettings, *names: str, ssd: int = 0, shared: bool = True, **more: Any
) -> AsyncIterator[CacheHarness]:
    """Open a cache with a memory tier and sources. At the end, check for leaked leases."""
    sources = [Source(name, shared) for name in names]
    configured = settings(ssd=ssd, **more)
    pools = [source.tier for source in sources]
    async with TieredCache.open(configured, plugins=BUILT_IN, pools=pools) as cache:
        harness = CacheHarness(cache, sources)
        try:
            yield harness
        finally:
            for source in sources:
                source.faults.fault = None
                source.delays.resume()
        await harness.wait_until_idle()


def set_costs(harness: CacheHarness, **seconds: float) -> None:
    """Set the measured seconds for reading a chunk from each source."""
    for name, value in seconds.items():
        harness.tier(name).reading = reading = ReadCost()
        reading.succeeded(CHUNK_OBJECT_BYTES, value)
