"""What instances tell of their peers and of their controller."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from kvtier.instance import Instance
from tests.agent.controlling import TOKEN, controlling
from tests.cache.conftest import CHUNK_OBJECT_BYTES, TOKEN_BYTES
from tests.metrics.scraping import BUILT_IN, Scrape, Watched, scraping, settings

# Imported here because that takes longer than an event loop may be blocked.
import kvtier.agent.agent  # isort: skip
import kvtier.peers.backend  # isort: skip
import kvtier.peers.server  # noqa: F401 # isort: skip

pytestmark = pytest.mark.anyio

SECRET = "a secret that these tests share"
TOKENS = list(range(4 * 256))


@asynccontextmanager
async def instance(folder: Path, **more: object) -> AsyncIterator[tuple[Instance, Watched]]:
    async with (
        Instance.open(settings(folder, **more), plugins=BUILT_IN) as opened,
        scraping(opened.cache, opened.status) as one,
    ):
        yield opened, one


async def until(one: Watched, condition: Callable[[Scrape], object]) -> Scrape:
    with anyio.fail_after(30):
        while not condition(scrape := await one.scrape()):
            await anyio.sleep(0.02)
    return scrape


async def test_peers_are_told_on_both_sides(tmp_path: Path) -> None:
    listen = {"listen": "127.0.0.1:0", "secret": SECRET}
    async with instance(tmp_path / "one", peer=listen) as (first, serving):
        assert first.server is not None
        host, port = first.server.address
        await serving.store(TOKENS)
        other = {"others": [f"{host}:{port}", "127.0.0.1:1"], "secret": SECRET}
        stranger = {"others": [f"{host}:{port}"], "secret": "a secret that nobody else has"}
        async with (
            instance(tmp_path / "two", peer=other) as (_, fetching),
            instance(tmp_path / "three", peer=stranger) as (_, refused),
        ):
            await until(fetching, lambda scrape: scrape("peers", state="connected") == 1)
            scrape = await until(fetching, lambda scrape: scrape("peers", state="not connected") == 1)
            assert sum(scrape.by("peers", "state").values()) == 2
            model = fetching.cache.model("llama", token_bytes=TOKEN_BYTES)
            assert await model.retrieve(TOKENS, bytearray(len(TOKENS) * TOKEN_BYTES)) == len(TOKENS)
            scrape = await fetching.scrape()
            route = {"source": "peers", "target": "ram", "event": "prefetch"}
            assert scrape("transferred_bytes_total", **route) == 4 * CHUNK_OBJECT_BYTES
            assert scrape("pool_found_chunks_total") == 4
            assert scrape.by("found_chunks_total", "tier") == {"peers": 4}
            told = await until(serving, lambda scrape: scrape("serving_grants") == 0)
            assert told("serving_granted_total") == first.server.status()["granted"]
            assert told("serving_promised_bytes") == 0
            assert told("serving_connections", purpose="control") == 1
            await until(refused, lambda scrape: scrape("peers", state="not connected") == 1)
            refusals = "serving_refused_connections_total"
            told = await until(serving, lambda scrape: scrape.by(refusals, "reason"))
            assert len(told.by(refusals, "reason")) == 1


async def test_the_controller_is_told_of_where_there_is_one(tmp_path: Path) -> None:
    async with controlling() as controller:
        registered = {"url": controller.url, "instance_id": "one", "token": TOKEN}
        async with instance(tmp_path / "one", controller=registered) as (_, one):
            scrape = await until(one, lambda scrape: scrape("agent_in_step") == 1)
            assert scrape("agent_connected") == 1
            await controller.conversations[-1].socket.close()
            await until(one, lambda scrape: scrape("agent_lost_connections_total") == 1)
            await until(one, lambda scrape: scrape("agent_in_step") == 1)
    async with instance(tmp_path / "two") as (_, alone):
        assert ("kvtier_agent_connected", frozenset()) not in (await alone.scrape()).series
