"""A real cache, and a client that scrapes its metrics the way Prometheus does: over HTTP, as text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx

from kvtier import ModelCache, Settings, TieredCache
from kvtier.backends.base import Backend
from kvtier.http import serving
from kvtier.observability.metrics import MAX_REQUESTS, CacheMetrics, application
from kvtier.observability.whatif.report import Report
from kvtier.plugins import Plugins
from kvtier.settings import DEFAULT_EVICTION, TierSettings
from tests.cache.conftest import CHUNK_OBJECT_BYTES, CHUNK_TOKENS, TOKEN_BYTES, rows
from tests.rigs.scrape import Scrape

BUILT_IN = Plugins.load([])
"""Loaded at import, because importing every backend blocks."""


class ScrapedCache:
    """An open cache, its metrics, and an HTTP client that scrapes them."""

    def __init__(self, cache: TieredCache, metrics: CacheMetrics, client: httpx.AsyncClient) -> None:
        self.cache = cache
        self.metrics = metrics
        self.client = client
        self.model: ModelCache = cache.model("llama", token_bytes=TOKEN_BYTES)

    async def scrape(self) -> Scrape:
        response = await self.client.get("/metrics")
        assert response.status_code == 200
        return Scrape(response.text)

    async def wait_until(self, condition: Callable[[Scrape], object]) -> Scrape:
        """Return the first scrape that fulfils the condition."""
        with anyio.fail_after(30):
            while not condition(scrape := await self.scrape()):
                await anyio.sleep(0.02)
        return scrape

    async def store(self, tokens: Sequence[int]) -> None:
        """Store a prompt, and wait until it is written to all tiers."""
        assert await self.model.store(tokens, rows(list(tokens))) == len(tokens)
        assert await self.cache.drain(60)

    async def retrieve(self, tokens: Sequence[int]) -> int:
        """Retrieve a prompt, and return the number of chunks found."""
        return await self.model.retrieve(tokens, bytearray(len(tokens) * TOKEN_BYTES)) // CHUNK_TOKENS

    def drop_from_memory(self, tokens: Sequence[int]) -> None:
        """Drop a prompt from memory, so that only lower tiers hold it."""
        self.cache.memory.drop(self.model.keys(tokens))


def settings(
    folder: Path, ram: int = 64, ssd: int = 512, *, eviction: str = DEFAULT_EVICTION, **more: Any
) -> Settings:
    """Return settings with a memory and a disk tier of the given numbers of chunks."""
    tiers = [
        {"name": "ram", "type": "cpu", "capacity": ram * CHUNK_OBJECT_BYTES},
        {"name": "ssd", "type": "disk", "path": str(folder / "ssd"), "capacity": ssd * CHUNK_OBJECT_BYTES},
    ]
    tiers = [{**tier, "eviction": eviction} for tier in tiers]
    return Settings(chunk_tokens=CHUNK_TOKENS, tiers=tiers, **more)


@asynccontextmanager
async def serving_metrics(
    cache: TieredCache,
    status: Callable[[], Mapping[str, Any]] | None = None,
    what_if: Callable[[], Report | None] = lambda: None,
) -> AsyncIterator[ScrapedCache]:
    with CacheMetrics.of(cache, status, what_if) as metrics:
        async with (
            serving(application(metrics), "127.0.0.1:0", limit_concurrency=MAX_REQUESTS) as (host, port),
            httpx.AsyncClient(
                base_url=f"http://{host}:{port}", trust_env=False, verify=False, timeout=30
            ) as client,
        ):
            yield ScrapedCache(cache, metrics, client)


@asynccontextmanager
async def scraped_cache(
    settings: Settings,
    pools: Sequence[tuple[TierSettings, Backend]] = (),
    what_if: Callable[[], Report | None] = lambda: None,
) -> AsyncIterator[ScrapedCache]:
    async with (
        TieredCache.open(settings, plugins=BUILT_IN, pools=pools) as cache,
        serving_metrics(cache, what_if=what_if) as scraped,
    ):
        yield scraped
