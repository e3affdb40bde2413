"""What the cache process keeps of an engine, without a connection: its session over a real cache."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvtier import Settings
from kvtier.bridge import protocol
from kvtier.bridge.protocol import Hello
from kvtier.bridge.session import EngineSession
from kvtier.cache import TieredCache
from kvtier.memory.keys import root_key
from kvtier.memory.layout import ChunkLayout
from kvtier.plugins import Plugins

BUILT_IN = Plugins.load([])
"""Loaded at import time: loading would block the event loop for too long."""
NAMESPACE = bytes(range(32))
ROOT = root_key(NAMESPACE)


def session(cache: TieredCache, layout: ChunkLayout, first_lease: int = 1) -> EngineSession:
    """Return the session of a new engine."""
    hello = Hello(protocol.VERSION, "engine", "scheduler", 0, layout, NAMESPACE)
    return EngineSession(cache, hello, itertools.count(first_lease))


@asynccontextmanager
async def engine_of(
    layout: ChunkLayout,
    capacity: str = "4MiB",
    *,
    plugins: Plugins = BUILT_IN,
    reserve_share: float = 1.0,
    **tier: Any,
) -> AsyncIterator[tuple[EngineSession, TieredCache]]:
    """Open a cache of one tier, and an engine. At its end only the chunks of that tier are leased."""
    settings = Settings(
        chunk_tokens=layout.chunk_tokens,
        tiers=[{"name": "ram", "type": "cpu", "capacity": capacity, **tier}],
        reserve_share=reserve_share,
    )
    async with TieredCache.open(settings, plugins=plugins) as cache:
        engine = session(cache, layout)
        yield engine, cache
        engine.close()
        assert cache.arena.leases == cache.catalog.count(0)
