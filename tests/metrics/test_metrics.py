"""What a scrape says after known work, over a real server and a real cache."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import anyio
import pytest
from prometheus_client import REGISTRY
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

import kvtier
from kvtier.settings import TierSettings
from kvtier.testing.faults import Fault, FaultyBackend
from tests.cache.conftest import CHUNK_OBJECT_BYTES, rows
from tests.cache.house import Shelf
from tests.metrics.scraping import settings, watched

pytestmark = pytest.mark.anyio

TOKENS = list(range(4 * 256))
UP = {"source": "ssd", "target": "ram", "event": "prefetch"}
DOWN = {"source": "ram", "target": "ssd", "event": "store"}


async def test_what_is_stored_found_and_moved_is_told_exactly(tmp_path: Path) -> None:
    async with watched(settings(tmp_path)) as one:
        await one.store(TOKENS)
        assert await one.retrieve(TOKENS) == 4
        one.forget(TOKENS)
        assert await one.retrieve([*TOKENS, *range(1024)]) == 4
        scrape = await one.scrape()
        assert scrape("build_info", version=kvtier.__version__) == 1
        assert scrape("tier_info", tier="ssd", type="disk") == 1
        assert scrape("stored_chunks_total") == 4
        assert scrape("looked_up_chunks_total") == 4 + 8
        assert scrape.by("found_chunks_total", "tier") == {"ram": 4, "ssd": 4}
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
        assert scrape("arena_used_bytes") == one.cache.arena.used >= 4 * CHUNK_OBJECT_BYTES
        assert scrape("arena_leases") == 4
        assert scrape("pending_bytes") == scrape("prefetching_chunks") == scrape("engines") == 0
        assert scrape.by("tier_available", "tier") == {"ram": 1, "ssd": 1}


async def test_what_is_pinned_refused_and_evicted_is_told(tmp_path: Path) -> None:
    async with watched(settings(tmp_path, ram=8)) as one:
        await one.store(TOKENS)
        await one.model.store(TOKENS, bytearray(len(TOKENS) * 64))
        assert one.model.pin(TOKENS) == 1024
        scrape = await one.scrape()
        assert scrape.by("refused_chunks_total", "reason") == {"held": 4}
        assert scrape("pinned_chunks") == 4
        one.model.unpin(TOKENS)
        for seed in range(1, 5):
            await one.store(list(range(seed, seed + 1024)))
        scrape = await one.scrape()
        evicted = one.cache.hierarchy.counts["evicted"]
        assert scrape("evicted_chunks_total") == evicted >= 5 * 4 - 8
        assert scrape("pinned_chunks") == 0
        assert scrape("stored_chunks_total") + scrape.by("refused_chunks_total", "reason")["held"] >= 20


async def test_what_has_to_leave_is_told_as_demoted_and_as_a_transfer(tmp_path: Path) -> None:
    made = settings(tmp_path, ram=8)
    made.tiers[1]["write"] = "on_evict"
    async with watched(made) as one:
        for seed in range(8):
            tokens = list(range(seed * 1024, seed * 1024 + 1024))
            await one.model.store(tokens, rows(tokens))
            await one.cache.drain(10)
        with anyio.fail_after(30):
            while not (demoted := (await one.scrape())("demoted_chunks_total")):
                await anyio.sleep(0.01)
        route = {"source": "ram", "target": "ssd", "event": "evict"}
        scrape = await one.scrape()
        assert scrape("transfer_outcomes_total", **route, outcome="ok") >= demoted
        assert scrape("write_dropped_chunks_total") == 0


async def test_damage_is_told(tmp_path: Path) -> None:
    async with watched(settings(tmp_path)) as one:
        await one.store(TOKENS)
        damaged = next((tmp_path / "ssd").rglob(f"{one.model.keys(TOKENS)[2].hex()}*"))
        content = bytearray(damaged.read_bytes())
        content[5000] ^= 1
        damaged.write_bytes(content)
        one.forget(TOKENS)
        assert await one.retrieve(TOKENS) == 2
        scrape = await one.scrape()
        assert scrape.by("tier_corrupt_chunks_total", "tier") == {"ssd": 1}
        assert scrape("transfer_outcomes_total", **UP, outcome="miss") == 1


async def test_outages_are_told_while_they_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = FaultyBackend(Shelf())
    pool = TierSettings(name="pool", type="shelf", write="through", deadline=60.0)
    async with watched(settings(tmp_path), pools=[(pool, faulty)]) as one:
        faulty.fault = Fault.RAISE
        backend = one.cache.hierarchy.tiers[-1].backend
        # However long this takes, the cooldown of a second does not end meanwhile.
        now = time.monotonic()
        monkeypatch.setattr(backend, "_clock", lambda: now)
        for seed in range(6):
            await one.store(list(range(seed * 256, seed * 256 + 256)))
        scrape = await one.scrape()
        assert scrape("tier_available", tier="pool") == 0
        assert scrape.by("tier_outages_total", "tier") == {"pool": 1}
        route = {"source": "ram", "target": "pool", "event": "store"}
        assert scrape("transfer_outcomes_total", **route, outcome="failed") == 5, "asked while it was down"
        assert scrape("transferred_bytes_total", **route) == 0
        assert "pool" not in scrape.by("tier_capacity_bytes", "tier")
        faulty.fault = None
        monkeypatch.setattr(backend, "_clock", time.monotonic)
        with anyio.fail_after(30):
            while not (await one.scrape())("tier_available", tier="pool"):
                await anyio.sleep(0.05)
        assert (await one.scrape()).by("tier_outages_total", "tier") == {"pool": 1}


async def test_each_cache_has_its_own(tmp_path: Path) -> None:
    everywhere = len(list(REGISTRY.collect()))
    async with (
        watched(settings(tmp_path / "one")) as one,
        watched(settings(tmp_path / "other", ram=16)) as other,
    ):
        await one.store(TOKENS)
        assert (await one.scrape())("stored_chunks_total") == 4
        assert (await other.scrape())("stored_chunks_total") == 0
        assert len(list(REGISTRY.collect())) == everywhere
        observers = one.cache.hierarchy.observers
        assert one.metrics in observers
    assert one.metrics not in observers


async def test_every_series_is_there_from_the_start(tmp_path: Path) -> None:
    """What appears late hides its first increase."""
    async with watched(settings(tmp_path)) as one:
        before = await one.scrape()
        await one.store(TOKENS)
        one.forget(TOKENS)
        await one.retrieve(TOKENS)
        assert (await one.scrape()).series.keys() == before.series.keys()


async def test_there_are_few_series_whatever_is_held(tmp_path: Path) -> None:
    async with watched(settings(tmp_path)) as one:
        await one.store(TOKENS)
        text = (await one.client.get("/metrics")).text
        assert len(text.splitlines()) < 300
        assert not [key for key in one.model.keys(TOKENS) if key.hex()[:8] in text]


async def test_it_speaks_openmetrics_with_who_asks_for_it(tmp_path: Path) -> None:
    async with watched(settings(tmp_path)) as one:
        accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
        answer = await one.client.get("/metrics", headers={"Accept": accept})
        assert answer.headers["content-type"].startswith("application/openmetrics-text")
        families = {family.name: family for family in parse_openmetrics(answer.text)}
        assert families["kvtier_build"].type == "info"
        assert families["kvtier_transfer_seconds"].type == "histogram"
        plain = await one.client.get("/metrics", headers={"Accept": "*/*"})
        assert plain.headers["content-type"].startswith("text/plain")


def test_nothing_of_it_is_loaded_where_nobody_asks() -> None:
    heavy = {"prometheus_client", "uvicorn", "starlette", "fastapi", "websockets", "httpx"}
    code = f"import sys, kvtier.bridge.serve as _; print({heavy!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
