"""A real cache whose metrics are read as Prometheus reads them: over HTTP, as text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvtier import ModelCache, Settings, TieredCache
from kvtier.backends.base import Backend
from kvtier.http import serving
from kvtier.metrics import MOST_REQUESTS, CacheMetrics, application
from kvtier.plugins import Plugins
from kvtier.settings import TierSettings
from tests.cache.conftest import CHUNK_OBJECT_BYTES, CHUNK_TOKENS, TOKEN_BYTES, rows

BUILT_IN = Plugins.load([])
"""Here, since importing every backend blocks."""


class Scrape:
    """What one answer says."""

    def __init__(self, text: str) -> None:
        self.families: dict[str, Metric] = {}
        for family in text_string_to_metric_families(text):
            assert family.name not in self.families, f"{family.name} is there twice"
            self.families[family.name] = family
        self.series = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        """The value of one series of kvtier's."""
        return self.series[f"kvtier_{name}", frozenset(labels.items())]

    def by(self, name: str, label: str) -> dict[str, float]:
        """The values that are not 0 of a metric with one label."""
        return {
            dict(labels)[label]: value
            for (series, labels), value in self.series.items()
            if series == f"kvtier_{name}" and value
        }


class Watched:
    """An open cache, its metrics, and who reads them."""

    def __init__(self, cache: TieredCache, metrics: CacheMetrics, client: httpx.AsyncClient) -> None:
        self.cache = cache
        self.metrics = metrics
        self.client = client
        self.model: ModelCache = cache.model("llama", token_bytes=TOKEN_BYTES)

    async def scrape(self) -> Scrape:
        answer = await self.client.get("/metrics")
        assert answer.status_code == 200
        return Scrape(answer.text)

    async def store(self, tokens: Sequence[int]) -> None:
        """Until it is in every tier that wants it."""
        assert await self.model.store(tokens, rows(list(tokens))) == len(tokens)
        assert await self.cache.drain(60)

    async def retrieve(self, tokens: Sequence[int]) -> int:
        """How many chunks came back."""
        return await self.model.retrieve(tokens, bytearray(len(tokens) * TOKEN_BYTES)) // CHUNK_TOKENS

    def forget(self, tokens: Sequence[int]) -> None:
        """Take a prompt out of memory: only lower tiers hold it now."""
        self.cache.hierarchy.drop(self.model.keys(tokens))


def settings(folder: Path, ram: int = 64, ssd: int = 512, **more: Any) -> Settings:
    """Memory and a disk with room for so many chunks."""
    tiers = [
        {"name": "ram", "type": "cpu", "capacity": ram * CHUNK_OBJECT_BYTES},
        {"name": "ssd", "type": "disk", "path": str(folder / "ssd"), "capacity": ssd * CHUNK_OBJECT_BYTES},
    ]
    return Settings(chunk_tokens=CHUNK_TOKENS, tiers=tiers, **more)


@asynccontextmanager
async def scraping(
    cache: TieredCache, status: Callable[[], Mapping[str, Any]] | None = None
) -> AsyncIterator[Watched]:
    with CacheMetrics.of(cache, status) as metrics:
        async with (
            serving(application(metrics), "127.0.0.1:0", limit_concurrency=MOST_REQUESTS) as (host, port),
            httpx.AsyncClient(
                base_url=f"http://{host}:{port}", trust_env=False, verify=False, timeout=30
            ) as client,
        ):
            yield Watched(cache, metrics, client)


@asynccontextmanager
async def watched(
    settings: Settings, pools: Sequence[tuple[TierSettings, Backend]] = ()
) -> AsyncIterator[Watched]:
    async with TieredCache.open(settings, plugins=BUILT_IN, pools=pools) as cache, scraping(cache) as one:
        yield one
