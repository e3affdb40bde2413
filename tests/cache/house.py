"""A cache over shared sources that fail, hang and forget as a test tells them to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio

from kvtier import ModelCache, Settings, TieredCache
from kvtier.backends.base import Backend, GetItem, Outcome, PutItem
from kvtier.catalog import State
from kvtier.costs import ReadCost
from kvtier.events import Prefetch, Report
from kvtier.header import ChunkHeader
from kvtier.keys import ChunkKey
from kvtier.plugins import Plugins
from kvtier.settings import TierSettings
from kvtier.testing.faults import FaultyBackend, SlowBackend
from kvtier.tier import Tier

from .conftest import CHUNK_OBJECT_BYTES, TOKEN_BYTES, rows

MakeSettings = Callable[..., Settings]
BUILT_IN = Plugins.load([])
"""Loaded here because it imports every backend, which takes longer than a loop may be blocked."""


class Shelf(Backend):
    """What other hosts have: a dictionary that the test fills."""

    def __init__(self) -> None:
        self.held: dict[ChunkKey, bytes] = {}

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return [key in self.held for key in keys]

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        self.held.update((key, bytes(view)) for key, view in items)
        return [Outcome.OK] * len(items)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        return [self._get(key, view) for key, view in items]

    def _get(self, key: ChunkKey, view: memoryview) -> Outcome:
        if key not in self.held:
            return Outcome.MISS
        view[:] = self.held[key]
        return Outcome.OK

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self.held.pop(key, None)


@dataclass
class Source:
    """One tier of what others hold: its shelf behind a wrapper that fails and one that hangs, as told."""

    name: str
    shelf: Shelf = field(default_factory=Shelf)

    def __post_init__(self) -> None:
        self.faults = FaultyBackend(self.shelf)
        self.delays = SlowBackend(self.faults, stubborn=True)

    @property
    def tier(self) -> tuple[TierSettings, Backend]:
        settings = TierSettings(name=self.name, type="shelf", write="never", deadline=60)
        return settings, self.delays


class House:
    """An open cache over memory, a disk where the test wants one, and shared sources."""

    def __init__(self, cache: TieredCache, sources: Sequence[Source]) -> None:
        self.cache = cache
        self.model: ModelCache = cache.model("llama", token_bytes=TOKEN_BYTES)
        self.sources = {source.name: source for source in sources}
        self.reads: list[tuple[str, int]] = []
        """The source and number of chunks of each read of a prefetch, in the order in which they ended."""
        cache.add_observer(self)

    def observe(self, report: Report) -> None:
        if isinstance(report.event, Prefetch):
            self.reads.append((report.source or "", len(report.keys)))

    def changed(self, tier: int, stored: Sequence[ChunkKey], removed: Sequence[ChunkKey]) -> None: ...

    def tier(self, name: str) -> Tier:
        return next(tier for tier in self.cache.hierarchy.tiers if tier.name == name)

    def holds(self, tokens: list[int], name: str) -> list[int]:
        """Which chunks of a prompt a tier is known to hold."""
        catalog, tier = self.cache.hierarchy.catalog, self.tier(name).index
        keys = self.model.keys(tokens)
        return [at for at, key in enumerate(keys) if catalog.state(key, tier) is State.READY]

    async def fill(self, tokens: list[int], *names: str) -> None:
        """Let the tiers named hold a prompt, and memory not."""
        cache, catalog = self.cache, self.cache.hierarchy.catalog
        keys = self.model.keys(tokens)
        assert await self.model.store(tokens, rows(tokens)) == len(tokens)
        assert await cache.drain(60)
        for name in names:
            tier = self.tier(name).index
            if name not in self.sources:
                assert await cache.move(keys, "ram", name, copy=True) == len(keys)
                continue
            for key in keys:
                lease = cache.hierarchy.share(key)
                assert lease is not None
                sealed = bytearray(lease.view)
                lease.release()
                ChunkHeader.parse(memoryview(sealed)).seal(memoryview(sealed))
                self.sources[name].shelf.held[key] = bytes(sealed)
                if catalog.state(key, tier) is State.ABSENT:
                    catalog.add(key, tier, CHUNK_OBJECT_BYTES, State.READY)
        cache.hierarchy.drop(keys)
        self.reads.clear()

    def lose(self, tokens: list[int], name: str, chunks: Sequence[int]) -> None:
        """Let a source have lost some chunks of a prompt, and the cache know of it."""
        keys = self.model.keys(tokens)
        for at in chunks:
            self.sources[name].shelf.held.pop(keys[at])
            self.cache.hierarchy.catalog.remove(keys[at], self.tier(name).index)

    def hang(self, name: str) -> None:
        """Let calls to a source hang from now on, and its tier give them up soon."""
        self.sources[name].delays.hang()
        self._limit_calls(name, 0.3)

    def resume(self, name: str) -> None:
        """Let calls to a source go on, and from now on take as long as a busy machine makes them."""
        self.sources[name].delays.resume()
        self._limit_calls(name, 60)

    def _limit_calls(self, name: str, seconds: float) -> None:
        tier = self.tier(name)
        tier.settings = tier.settings.model_copy(update={"deadline": seconds})

    async def retrieve(self, tokens: list[int]) -> int:
        """How many tokens come back; every one of them right."""
        out = bytearray(len(tokens) * TOKEN_BYTES)
        count = await self.model.retrieve(tokens, out)
        assert out[: count * TOKEN_BYTES] == rows(tokens)[: count * TOKEN_BYTES]
        return count

    async def at_rest(self) -> None:
        """Wait until nothing is on its way, and nothing is leased but what memory holds."""
        cache, catalog = self.cache, self.cache.hierarchy.catalog
        with anyio.fail_after(60):
            while (
                cache.pending_bytes
                or any(catalog.state(key, 0) is State.PENDING for key in catalog.keys(0))
                or cache.arena.leases != catalog.count(0)
            ):
                await anyio.sleep(0.01)
        assert not cache.status()["flights"]


@asynccontextmanager
async def opened(settings: MakeSettings, *names: str, ssd: int = 0, **more: Any) -> AsyncIterator[House]:
    """A cache over memory and shared sources of these names; at the end nothing may be leased."""
    sources = [Source(name) for name in names]
    chosen = settings(ssd=ssd, **more)
    pools = [source.tier for source in sources]
    async with TieredCache.open(chosen, plugins=BUILT_IN, pools=pools) as cache:
        house = House(cache, sources)
        try:
            yield house
        finally:
            for source in sources:
                source.faults.fault = None
                source.delays.resume()
        await house.at_rest()


def costs(house: House, **seconds: float) -> None:
    """Let it be known what reading a chunk from each source costs."""
    for name, value in seconds.items():
        house.tier(name).reading = reading = ReadCost()
        reading.succeeded(CHUNK_OBJECT_BYTES, value)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not condition():
            await anyio.sleep(0.005)
