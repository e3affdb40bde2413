"""Metric values after known work, with a real server and a real cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

import kvtier
from kvtier.settings import TierSettings
from kvtier.testing.faults import Fault, FaultyBackend
from kvtier.tiers.breaker import CircuitBreaker
from tests.cache.conftest import CHUNK_OBJECT_BYTES, rows
from tests.observability.metrics.scraping import ScrapedCache, scraped_cache, settings
from tests.rigs.chunks import DictBackend

pytestmark = pytest.mark.anyio

TOKENS = list(range(4 * 256))
UP = {"source": "ssd", "target": "ram", "event": "prefetch"}
DOWN = {"source": "ram", "target": "ssd", "event": "store"}


async def test_counts_of_stored_found_and_transferred_chunks(scraped: ScrapedCache) -> None:
    await scraped.store(TOKENS)
    assert await scraped.retrieve(TOKENS) == 4
    scraped.drop_from_memory(TOKENS)
    assert await scraped.retrieve([*TOKENS, *range(1024)]) == 4
    scrape = await scraped.scrape()
    assert scrape("build_info", version=kvtier.__version__) == 1
    assert scrape("tier_info", tier="ssd", type="disk") == 1
    assert scrape("stored_chunks_total") == 4
    assert scrape("lookup_tokens_total") == 1024 + 2048
    assert scrape.by("lookup_hit_tokens_total", "tier") == {"ram": 1024, "ssd": 1024}
    for route in (UP, DOWN):
        assert scrape("transferred_bytes_total", **route) == 4 * CHUNK_OBJECT_BYTES
        assert scrape("transfer_outcomes_total", **route, outcome="ok") == 4
        assert scrape("transfer_outcomes_total", **route, outcome="failed") == 0
        batches = scrape("transfer_seconds_count", **route)
        assert 1 <= batches <= 4
        assert scrape("transfer_seconds_bucket", **route, le="+Inf") == batches
        assert scrape("transfer_seconds_bucket", **route, le="10.0") == batches
        assert 0 < scrape("transfer_seconds_sum", **route) < 10 * batches
    assert scrape.by("tier_chunks", "tier") == {"ram": 4, "ssd": 4}
    assert scrape.by("tier_capacity_bytes", "tier") == {
        "ram": 64 * CHUNK_OBJECT_BYTES,
        "ssd": 512 * CHUNK_OBJECT_BYTES,
    }
    assert scrape("tier_used_bytes", tier="ssd") == 4 * CHUNK_OBJECT_BYTES
    assert scrape("arena_used_bytes") == scraped.cache.arena.used >= 4 * CHUNK_OBJECT_BYTES
    assert scrape("arena_leases") == 4
    assert scrape("pending_bytes") == scrape("prefetching_chunks") == scrape("engines") == 0
    assert scrape.by("tier_available", "tier") == {"ram": 1, "ssd": 1}


async def test_counts_of_pinned_refused_and_evicted_chunks(tmp_path: Path) -> None:
    async with scraped_cache(settings(tmp_path, ram=8)) as scraped:
        await scraped.store(TOKENS)
        await scraped.model.store(TOKENS, bytearray(len(TOKENS) * 64))
        assert scraped.model.pin(TOKENS) == 1024
        scrape = await scraped.scrape()
        assert scrape.by("refused_chunks_total", "reason") == {"held": 4}
        assert scrape("pinned_chunks") == 4
        scraped.model.unpin(TOKENS)
        for seed in range(1, 5):
            await scraped.store(list(range(seed, seed + 1024)))
        scrape = await scraped.scrape()
        evicted = scraped.cache.counts["evicted"]
        assert scrape("evicted_chunks_total") == evicted >= 5 * 4 - 8
        assert scrape("pinned_chunks") == 0
        assert scrape("stored_chunks_total") + scrape.by("refused_chunks_total", "reason")["held"] >= 20


async def test_demotions_are_counted_as_demoted_and_as_transfers(tmp_path: Path) -> None:
    configured = settings(tmp_path, ram=8)
    configured.tiers[1]["write"] = "on_evict"
    async with scraped_cache(configured) as scraped:
        for seed in range(8):
            tokens = list(range(seed * 1024, seed * 1024 + 1024))
            await scraped.model.store(tokens, rows(tokens))
            await scraped.cache.drain(10)
        scrape = await scraped.wait_until(lambda scrape: scrape("demoted_chunks_total"))
        demoted, route = scrape("demoted_chunks_total"), {"source": "ram", "target": "ssd", "event": "evict"}
        scrape = await scraped.scrape()
        assert scrape("transfer_outcomes_total", **route, outcome="ok") >= demoted
        assert scrape("write_dropped_chunks_total") == 0


async def test_what_a_codec_makes_smaller(tmp_path: Path) -> None:
    configured = settings(tmp_path)
    configured.tiers[1]["codec"] = "lossless"
    async with scraped_cache(configured) as scraped:
        assert await scraped.model.store(TOKENS, bytearray(len(TOKENS) * 64)) == len(TOKENS)
        assert await scraped.cache.drain(10)
        scrape = await scraped.scrape()
        assert scrape.by("tier_encoded_bytes_total", "tier") == {"ssd": 4 * CHUNK_OBJECT_BYTES}
        stored = scrape("tier_encoded_stored_bytes_total", tier="ssd")
        assert stored == scrape("tier_used_bytes", tier="ssd") < 4 * CHUNK_OBJECT_BYTES


async def test_corrupt_chunks_are_counted(scraped: ScrapedCache, tmp_path: Path) -> None:
    await scraped.store(TOKENS)
    damaged = next((tmp_path / "ssd").rglob(f"{scraped.model.keys(TOKENS)[2].hex()}*"))
    content = bytearray(damaged.read_bytes())
    content[5000] ^= 1
    damaged.write_bytes(content)
    scraped.drop_from_memory(TOKENS)
    assert await scraped.retrieve(TOKENS) == 2
    scrape = await scraped.scrape()
    assert scrape.by("tier_corrupt_chunks_total", "tier") == {"ssd": 1}
    assert scrape("transfer_outcomes_total", **UP, outcome="miss") == 1


async def test_outages_are_visible_while_they_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = FaultyBackend(DictBackend())
    pool = TierSettings(name="pool", type="shelf", write="through", deadline=60.0)
    async with scraped_cache(settings(tmp_path), pools=[(pool, faulty)]) as scraped:
        faulty.fault = Fault.RAISE
        now = 0.0
        # With a clock that stands still, so that the cooldown of 1 s does not end meanwhile.
        breaker = CircuitBreaker("pool", clock=lambda: now)
        monkeypatch.setattr(scraped.cache.lower[-1], "breaker", breaker)
        for seed in range(6):
            await scraped.store(list(range(seed * 256, seed * 256 + 256)))
        scrape = await scraped.scrape()
        assert scrape("tier_available", tier="pool") == 0
        assert scrape.by("tier_outages_total", "tier") == {"pool": 1}
        route = {"source": "ram", "target": "pool", "event": "store"}
        assert scrape("transfer_outcomes_total", **route, outcome="failed") == 5, (
            "the pool was called during the outage"
        )
        assert scrape("transferred_bytes_total", **route) == 0
        assert "pool" not in scrape.by("tier_capacity_bytes", "tier")
        faulty.fault = None
        now = 1.0
        scrape = await scraped.wait_until(lambda scrape: scrape("tier_available", tier="pool"))
        assert scrape.by("tier_outages_total", "tier") == {"pool": 1}


async def test_each_cache_has_its_own_registry(tmp_path: Path) -> None:
    global_metrics = len(list(REGISTRY.collect()))
    async with (
        scraped_cache(settings(tmp_path / "one")) as scraped,
        scraped_cache(settings(tmp_path / "other", ram=16)) as other,
    ):
        await scraped.store(TOKENS)
        assert (await scraped.scrape())("stored_chunks_total") == 4
        assert (await other.scrape())("stored_chunks_total") == 0
        assert len(list(REGISTRY.collect())) == global_metrics
        observers = scraped.cache.observers
        assert scraped.metrics.transfers in observers
    assert scraped.metrics.transfers not in observers


async def test_every_series_exists_from_the_start(scraped: ScrapedCache) -> None:
    """A series that appears late hides its first increase."""
    before = await scraped.scrape()
    await scraped.store(TOKENS)
    scraped.drop_from_memory(TOKENS)
    await scraped.retrieve(TOKENS)
    assert (await scraped.scrape()).series.keys() == before.series.keys()


async def test_number_of_series_is_independent_of_chunks(scraped: ScrapedCache) -> None:
    await scraped.store(TOKENS)
    text = (await scraped.client.get("/metrics")).text
    assert len(text.splitlines()) < 400
    assert not [key for key in scraped.model.keys(TOKENS) if key.hex()[:8] in text]


async def test_openmetrics_is_served_on_request(scraped: ScrapedCache) -> None:
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    response = await scraped.client.get("/metrics", headers={"Accept": accept})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    families = {family.name: family for family in parse_openmetrics(response.text)}
    assert families["kvtier_build"].type == "info"
    assert families["kvtier_transfer_seconds"].type == "histogram"
    plain = await scraped.client.get("/metrics", headers={"Accept": "*/*"})
    assert plain.headers["content-type"].startswith("text/plain")


def test_heavy_modules_are_not_imported_by_default() -> None:
    heavy = {"prometheus_client", "uvicorn", "starlette", "fastapi", "websockets", "httpx"}
    code = f"import sys, kvtier.bridge.serve as _; print({heavy!r} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
