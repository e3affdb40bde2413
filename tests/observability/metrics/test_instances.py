"""Metrics of instances about their peers and their controller."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvtier.instance import Instance
from tests.cache.conftest import CHUNK_OBJECT_BYTES, TOKEN_BYTES
from tests.observability.metrics.scraping import BUILT_IN, ScrapedCache, serving_metrics, settings
from tests.rigs.scripted_controller import TOKEN, scripted_controller

# Imported here, because these imports take longer than the loop watch allows.
import kvtier.fleet.member.controller_client  # isort: skip
import kvtier.peers.backend  # isort: skip
import kvtier.peers.server  # noqa: F401 # isort: skip

pytestmark = pytest.mark.anyio

SECRET = "a secret that these tests share"
TOKENS = list(range(4 * 256))


@asynccontextmanager
async def instance(folder: Path, **more: object) -> AsyncIterator[tuple[Instance, ScrapedCache]]:
    async with (
        Instance.open(settings(folder, **more), plugins=BUILT_IN) as opened,
        serving_metrics(opened.cache, opened.status) as scraped,
    ):
        yield opened, scraped


async def test_peer_metrics_of_both_sides(tmp_path: Path) -> None:
    listen = {"listen": "127.0.0.1:0", "secret": SECRET}
    async with instance(tmp_path / "one", peer=listen) as (first, serving):
        assert first.server is not None
        host, port = first.server.address
        await serving.store(TOKENS)
        other = {"others": [f"{host}:{port}", "127.0.0.1:1"], "secret": SECRET}
        wrong_secret = {"others": [f"{host}:{port}"], "secret": "a secret that no other instance has"}
        async with (
            instance(tmp_path / "two", peer=other) as (_, fetching),
            instance(tmp_path / "three", peer=wrong_secret) as (_, refused),
        ):
            await fetching.wait_until(lambda scrape: scrape("peers", state="connected") == 1)
            scrape = await fetching.wait_until(lambda scrape: scrape("peers", state="not connected") == 1)
            assert sum(scrape.by("peers", "state").values()) == 2
            model = fetching.cache.model("llama", token_bytes=TOKEN_BYTES)
            assert await model.retrieve(TOKENS, bytearray(len(TOKENS) * TOKEN_BYTES)) == len(TOKENS)
            scrape = await fetching.scrape()
            route = {"source": "peers", "target": "ram", "event": "prefetch"}
            assert scrape("transferred_bytes_total", **route) == 4 * CHUNK_OBJECT_BYTES
            assert scrape("pool_found_chunks_total") == 4
            assert scrape.by("lookup_hit_tokens_total", "tier") == {"peers": len(TOKENS)}
            scrape = await serving.wait_until(lambda scrape: scrape("serving_grants") == 0)
            assert scrape("serving_issued_grants_total") == first.server.status()["granted"]
            assert scrape("serving_granted_bytes") == 0
            assert scrape("serving_connections", purpose="control") == 1
            await refused.wait_until(lambda scrape: scrape("peers", state="not connected") == 1)
            refusals = "serving_refused_connections_total"
            scrape = await serving.wait_until(lambda scrape: scrape.by(refusals, "reason"))
            assert len(scrape.by(refusals, "reason")) == 1


async def test_controller_metrics_exist_only_with_a_controller(tmp_path: Path) -> None:
    async with scripted_controller() as controller:
        controller_settings = {"url": controller.url, "instance_id": "one", "token": TOKEN}
        async with instance(tmp_path / "one", controller=controller_settings) as (_, scraped):
            scrape = await scraped.wait_until(lambda scrape: scrape("agent_up_to_date") == 1)
            assert scrape("agent_connected") == 1
            await controller.conversations[-1].socket.close()
            await scraped.wait_until(lambda scrape: scrape("agent_lost_connections_total") == 1)
            await scraped.wait_until(lambda scrape: scrape("agent_up_to_date") == 1)
    async with instance(tmp_path / "two") as (_, alone):
        assert ("kvtier_agent_connected", frozenset()) not in (await alone.scrape()).series
