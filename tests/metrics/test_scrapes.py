"""Many scrapes, hostile ones, and those of a cache that holds very much."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import anyio
import anyio.lowlevel
import httpx
import pytest

from kvtier.catalog import State
from kvtier.testing.backend import make_key
from tests.metrics.scraping import Watched, settings, watched
from tests.open_files import open_files

pytestmark = pytest.mark.anyio

CHUNKS = 1_000_000
SLICE = 1000


def another(one: Watched) -> httpx.AsyncClient:
    """A client with connections of its own. Without certificates, which take long to read."""
    return httpx.AsyncClient(base_url=one.client.base_url, trust_env=False, verify=False)


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
async def test_any_request_has_its_answer(tmp_path: Path, method: str, path: str, status: int) -> None:
    async with watched(settings(tmp_path)) as one:
        assert (await one.client.request(method, path)).status_code == status
        assert (await one.scrape())("engines") == 0


@pytest.mark.parametrize("accept", ["", ";;;,,,", "application/openmetrics-text;version=x;q=y", "ä" * 100])
async def test_any_wish_has_its_answer(tmp_path: Path, accept: str) -> None:
    async with watched(settings(tmp_path)) as one:
        answer = await one.client.get("/metrics", headers=[(b"Accept", accept.encode())])
        assert answer.status_code == 200
        assert "kvtier_engines" in answer.text


async def test_a_body_is_not_read(tmp_path: Path) -> None:
    async with watched(settings(tmp_path)) as one:
        try:
            answer = await one.client.post("/metrics", content=bytes(32 << 20))
            assert answer.status_code == 405
        except httpx.TransportError:
            pass  # It has answered, and closed, before all of it was sent.
        assert (await one.scrape())("engines") == 0


async def test_a_thousand_at_once_have_an_answer_each(tmp_path: Path) -> None:
    async with watched(settings(tmp_path)) as one:
        answers: list[int] = []

        async def ask(times: int) -> None:
            async with another(one) as client:
                answers.extend([(await client.get("/metrics")).status_code for _ in range(times)])

        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(ask, 100)
        assert answers == [200] * 1000


@pytest.mark.slow
async def test_scraping_leaks_nothing(tmp_path: Path) -> None:
    await scrape_often(tmp_path, 1000)


@pytest.mark.slow
async def test_scraping_ten_thousand_times_leaks_nothing(tmp_path: Path) -> None:
    await scrape_often(tmp_path, 10_000)


async def scrape_often(folder: Path, times: int) -> None:
    async with watched(settings(folder)) as one:
        await some(one, 200)
        before = held()
        await some(one, times)
        with anyio.fail_after(30):
            while (after := held())[1:] != before[1:]:  # The server has yet to see who has hung up.
                await anyio.sleep(0.05)
    assert after[0] - before[0] < times / 20, "objects stay behind"


async def some(one: Watched, times: int) -> None:
    """Some on one connection, some on new ones."""
    for number in range(times):
        assert (await one.client.get("/metrics")).status_code == 200
        if number % 20 == 0:
            async with another(one) as client:
                await client.get("/metrics", headers={"Connection": "close"})


def held() -> tuple[int, int, int]:
    gc.collect()
    return len(gc.get_objects()), len(asyncio.all_tasks()), len(open_files())


async def test_a_million_chunks_do_not_make_it_slow(tmp_path: Path) -> None:
    """The loop may not be blocked for 200 ms, which is watched in every test."""
    async with watched(settings(tmp_path)) as one:
        catalog = one.cache.hierarchy.catalog
        for start in range(0, CHUNKS, SLICE):
            for number in range(start, start + SLICE):
                catalog.add(make_key(number), 1, 4096, State.READY)
            await anyio.lowlevel.checkpoint()
        for _ in range(20):
            assert (await one.scrape())("tier_chunks", tier="ssd") == CHUNKS
