"""Engines whose weights change, and the chunks of some weights removed from a host."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvtier.bridge.client import SchedulerBridge
from kvtier.bridge.protocol import (
    VERSION,
    Cleared,
    ClearWeights,
    Found,
    Hello,
    UseWeights,
    Weights,
)
from kvtier.memory.keys import ChunkKey, chunk_keys, root_key
from kvtier.memory.layout import has_weights, namespace
from kvtier.rpc.frames import Refused
from tests.rigs.bridges import hello
from tests.rigs.scripted_engine import CHUNK_TOKENS, LAYOUT, TOKENS, Host, Peer, open_host
from tests.rigs.scripted_server import ScriptedCache
from tests.rigs.waiting import wait_until


def weights(weights_id: str, model: str = "llama") -> Weights:
    return Weights(namespace(model, LAYOUT, weights_id), weights_id)


STARTUP, FIRST, SECOND = weights(""), weights("step-1"), weights("step-2")


def keys(of: Weights) -> list[ChunkKey]:
    return chunk_keys(root_key(of.namespace), list(range(TOKENS)), CHUNK_TOKENS)


@asynccontextmanager
async def workers_of(host: Host) -> AsyncIterator[list[Peer]]:
    async with (
        host.peer("worker", 0, namespace=STARTUP.namespace) as worker0,
        host.peer("worker", 1, namespace=STARTUP.namespace) as worker1,
    ):
        yield [worker0, worker1]


async def store(host: Host, of: Weights, engine: Peer) -> None:
    """Store a prompt's chunks, in memory and on disk, while the engine has these weights."""
    async with workers_of(host) as workers:
        await engine.send(UseWeights(of))
        reserved = await engine.reserve(keys(of), root_key(of.namespace))
        assert all(reserved.leases)
        for worker in workers:
            await worker.commit(reserved.leases)
    await host.server.cache.drain(5)


async def found(of: Weights, engine: Peer) -> int:
    """Return how many chunks of a prompt are found."""
    answer = await engine.look_up(keys(of), 2)
    leases = len(answer.leases)
    while answer.fetching:
        answer = await engine.receive(Found)
        leases += len(answer.leases)
    return leases


def test_namespaces_of_weights() -> None:
    assert namespace("llama", LAYOUT) == STARTUP.namespace != FIRST.namespace
    assert has_weights(FIRST.namespace, "step-1")
    assert has_weights(weights("step-1", "qwen").namespace, "step-1")
    assert not has_weights(FIRST.namespace, "step-2")


@pytest.mark.anyio
async def test_chunks_belong_to_the_weights_at_the_time_of_their_reservation(tmp_path: Path) -> None:
    async with (
        open_host(tmp_path) as host,
        host.peer("scheduler", namespace=STARTUP.namespace) as engine,
        workers_of(host) as workers,
    ):
        reserved = await engine.reserve(keys(STARTUP), root_key(STARTUP.namespace))
        await engine.send(UseWeights(FIRST))
        assert (await engine.status())["engines"][0]["weights_id"] == "step-1"
        for worker in workers:
            await worker.commit(reserved.leases)
        catalog = host.server.cache.catalog
        assert len(catalog.keys(0, STARTUP.namespace)) == 6
        await store(host, FIRST, engine)
        assert len(catalog.keys(0, FIRST.namespace)) == 6
        assert host.instance.served.refusal(FIRST.namespace) == ""
        assert "other weights" in host.instance.served.refusal(SECOND.namespace)


@pytest.mark.anyio
async def test_reconnecting_scheduler_keeps_its_weights_and_workers_need_not_know_them(
    tmp_path: Path,
) -> None:
    async with open_host(tmp_path) as host:
        async with (
            host.peer("worker", namespace=STARTUP.namespace),
            host.peer("scheduler", namespace=STARTUP.namespace, weights=FIRST),
        ):
            assert host.engine_status()["weights_id"] == FIRST.id
            async with host.peer("worker", 1, namespace=STARTUP.namespace):
                assert host.engine_status()["weights_id"] == FIRST.id
        async with (
            host.peer() as another_model,
            host.peer("scheduler", namespace=STARTUP.namespace),
        ):
            refused = await another_model.request(
                Hello(VERSION, "engine", "worker", 0, LAYOUT, weights("", "qwen").namespace)
            )
            assert isinstance(refused, Refused)


@pytest.mark.anyio
async def test_clear_removes_some_weights_from_some_tiers(tmp_path: Path) -> None:
    async with (
        open_host(tmp_path) as host,
        host.peer("scheduler", namespace=STARTUP.namespace) as engine,
        host.peer("observer") as observer,
    ):
        for each in (FIRST, SECOND, weights("step-1", "qwen")):
            await store(host, each, engine)
        catalog, size = host.server.cache.catalog, catalog_bytes(host, FIRST)
        assert await observer.request(ClearWeights(1, "step-1", ["ssd"])) == Cleared(1, 12, 2 * size)
        assert [catalog.count(tier) for tier in (0, 1)] == [18, 6]
        assert await found(FIRST, engine) == 6
        assert await observer.request(ClearWeights(2, "step-1")) == Cleared(2, 12, 2 * size)
        assert [catalog.count(tier) for tier in (0, 1)] == [6, 6]
        assert [await found(each, engine) for each in (FIRST, SECOND)] == [0, 6]
        assert await observer.request(ClearWeights(3, "step-3")) == Cleared(3, 0, 0)
        refused = await observer.request(ClearWeights(4, "step-2", ["disk"]), Refused)
        assert "unknown tier 'disk': use one of ram, ssd" in refused.reason


def catalog_bytes(host: Host, of: Weights) -> int:
    catalog = host.server.cache.catalog
    return sum(catalog.length(key) for key in catalog.keys(0, of.namespace))


@pytest.mark.anyio
async def test_clear_finds_weights_after_a_restart(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host, host.peer("scheduler", namespace=STARTUP.namespace) as engine:
        for each in (FIRST, SECOND):
            await store(host, each, engine)
    async with open_host(tmp_path) as host, host.peer("observer") as observer:
        cleared = await observer.request(ClearWeights(1, "step-1"), Cleared)
        assert cleared.chunks == 6
        assert host.server.cache.catalog.count(1) == 6


@pytest.mark.parametrize("when", ["connected", "greeting", "disconnected"])
def test_new_weights_reach_the_cache_process_whenever_they_change(tmp_path: Path, when: str) -> None:
    cache = ScriptedCache(tmp_path / "socket")
    bridge = SchedulerBridge(hello("scheduler"), tmp_path / "socket")
    try:
        if when == "disconnected":
            bridge.use_weights(FIRST)
        bridge.ready()
        cache.accept()
        greeting = cache.receive(Hello)
        if when == "greeting":
            bridge.use_weights(FIRST)
        cache.welcome()
        wait_until(bridge.ready)
        if when == "connected":
            bridge.use_weights(FIRST)
        if when == "disconnected":
            assert greeting.weights == FIRST
            assert cache.nothing_received()
        else:
            assert greeting.weights is None
            assert cache.receive(UseWeights) == UseWeights(FIRST)
    finally:
        bridge.close()
        cache.close()
