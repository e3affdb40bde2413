"""Many scrapes, malformed requests, and scrapes of a very large cache."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import anyio
import anyio.lowlevel
import httpx
import pytest

from kvtier.catalog.catalog import State
from kvtier.testing.backend import make_key
from tests.observability.metrics.scraping import ScrapedCache, scraped_cache, settings
from tests.rigs.open_files import open_files

pytestmark = pytest.mark.anyio

CHUNKS = 1_000_000
SLICE = 1000


def new_client(scraped: ScrapedCache) -> httpx.AsyncClient:
    """Return a client with its own connections. Loads no CA certificates, which takes long."""
    return httpx.AsyncClient(base_url=scraped.client.base_url, trust_env=False, verify=False)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/healthz", 200),
        ("HEAD", "/metrics", 200),
        ("POST", "/metrics", 405),
        ("DELETE", "/metrics", 405),
        ("GET", "/", 404),
        ("GET", "/metrics/../../etc/passwd", 404),
        ("GET", "/" + "x" * 8000, 404),
        ("GET", "/metrics?name[]=" + "x" * 8000, 200),
        ("GET", "/%00%ff%2e%2e/", 404),
        ("BREW", "/metrics", 405),
    ],
)
async def test_any_request_gets_a_response(
    scraped: ScrapedCache, method: str, path: str, status: int
) -> None:
    assert (await scraped.client.request(method, path)).status_code == status
    assert (await scraped.scrape())("engines") == 0


@pytest.mark.parametrize("accept", ["", ";;;,,,", "application/openmetrics-text;version=x;q=y", "ä" * 100])
async def test_any_accept_header_gets_a_response(scraped: ScrapedCache, accept: str) -> None:
    response = await scraped.client.get("/metrics", headers=[(b"Accept", accept.encode())])
    assert response.status_code == 200
    assert "kvtier_engines" in response.text


async def test_request_body_is_not_read(scraped: ScrapedCache) -> None:
    try:
        response = await scraped.client.post("/metrics", content=bytes(32 << 20))
        assert response.status_code == 405
    except httpx.TransportError:
        pass  # The server responded and closed before the body was sent.
    assert (await scraped.scrape())("engines") == 0


async def test_thousand_concurrent_scrapes_succeed(scraped: ScrapedCache) -> None:
    statuses: list[int] = []

    async def scrape_repeatedly(times: int) -> None:
        async with new_client(scraped) as client:
            statuses.extend([(await client.get("/metrics")).status_code for _ in range(times)])

    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(scrape_repeatedly, 100)
    assert statuses == [200] * 1000


@pytest.mark.slow
async def test_scraping_ten_thousand_times_leaks_nothing(scraped: ScrapedCache) -> None:
    await scrape_times(scraped, 200)
    before = resources()
    await scrape_times(scraped, 10_000)
    with anyio.fail_after(30):
        while (after := resources())[1:] != before[1:]:  # The server has not noticed all disconnects yet.
            await anyio.sleep(0.05)
    assert after[0] - before[0] < 500, "objects leak"


async def scrape_times(scraped: ScrapedCache, times: int) -> None:
    """Scrape on one connection, and every 20th time also on a new one."""
    for number in range(times):
        assert (await scraped.client.get("/metrics")).status_code == 200
        if number % 20 == 0:
            async with new_client(scraped) as client:
                await client.get("/metrics", headers={"Connection": "close"})


def resources() -> tuple[int, int, int]:
    gc.collect()
    return len(gc.get_objects()), len(asyncio.all_tasks()), len(open_files())


async def test_scrape_of_a_million_chunks_does_not_block_the_loop(tmp_path: Path) -> None:
    """The loop watch, active in every test, fails if the loop is blocked for 200 ms."""
    async with scraped_cache(settings(tmp_path, eviction="lru")) as scraped:
        catalog = scraped.cache.catalog
        for start in range(0, CHUNKS, SLICE):
            for number in range(start, start + SLICE):
                catalog.add(make_key(number), 1, 4096, State.READY)
            await anyio.lowlevel.checkpoint()
        for _ in range(20):
            assert (await scraped.scrape())("tier_chunks", tier="ssd") == CHUNKS
