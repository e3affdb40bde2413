"""Chunks are fetched from other tiers and instances; an incomplete fetch reports the reason."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvtier.fleet.member import session as session_module
from kvtier.fleet.member.protocol import Cancel, Failed
from kvtier.memory.keys import ChunkKey, split_keys
from kvtier.pipeline import move as move_module
from kvtier.pipeline.query import Query
from kvtier.testing.backend import make_key
from tests.cache.conftest import CHUNK_OBJECT_BYTES
from tests.fleet.member.conftest import SECRET, BothRegistered, Node, OpenNode, Registered, address_of, fetch
from tests.rigs.scripted_controller import scripted_controller
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio
RAM, SSD = 0, 1
SERVING: dict[str, Any] = {"peer": {"listen": "127.0.0.1:0", "secret": SECRET}}
FETCHING: dict[str, Any] = {"peer": {"secret": SECRET}}


@pytest.fixture(autouse=True)
def _short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move_module, "TIMEOUT_SECONDS", 0.5)


# Fetch within one instance.


async def test_fetch_copies_from_disk_to_memory_and_back(registered: Registered) -> None:
    async with registered(ssd=128) as (conversation, one):
        keys = await one.store(4)
        await one.cache.clear(keys, tiers=["ram"])
        done = await conversation.done(fetch(keys, RAM))
        assert (split_keys(done.keys), done.chunks, done.reason) == (keys, 4, None)
        assert done.bytes == 4 * CHUNK_OBJECT_BYTES
        # Its changes were reported before its answer.
        assert conversation.held == {RAM: set(keys), SSD: set(keys)}
        await one.cache.clear(keys[:2], tiers=["ssd"])
        done = await conversation.done(fetch(keys, SSD))
        assert (split_keys(done.keys), done.bytes, done.reason) == (keys, 2 * CHUNK_OBJECT_BYTES, None)
        assert conversation.held == {RAM: set(keys), SSD: set(keys)}
        assert await one.is_intact(4)


async def test_fetch_again_transfers_nothing(registered: Registered) -> None:
    async with registered(ssd=128) as (conversation, one):
        keys = await one.store(4)
        done = await conversation.done(fetch(keys, SSD))
        assert (done.chunks, done.bytes, done.reason) == (4, 0, None)
        assert (await conversation.done(fetch([], SSD))).reason is None


async def test_fetch_ends_at_the_first_missing_chunk(registered: Registered) -> None:
    async with registered(ssd=128) as (conversation, one):
        keys = await one.store(4)
        await one.cache.clear(keys, tiers=["ram"])
        await one.cache.clear(keys[2:3])
        done = await conversation.done(fetch(keys, RAM))
        assert split_keys(done.keys) == keys[:2]
        assert done.reason == "no other tier of this instance holds the rest"


async def test_fetch_into_full_memory_evicts_others_but_not_fetched_chunks(registered: Registered) -> None:
    async with registered(ram=8, ssd=128) as (conversation, one):
        keys = await one.store(12, seed=1)
        await one.store(6, seed=2)
        done = await conversation.done(fetch(keys, RAM))
        assert 6 <= done.chunks <= 8
        assert split_keys(done.keys) == keys[: done.chunks], "the first chunks, without a gap"
        assert done.reason == "tier ram has no room for the rest"


async def test_fetch_into_leased_memory_names_the_tier(registered: Registered) -> None:
    async with registered(ram=8, ssd=128) as (conversation, one):
        keys = await one.store(4, seed=1)
        others = await one.store(8, seed=2)
        found = one.cache.look_up(Query(others))
        assert len(found.chunks) > 4
        await one.cache.clear(keys, tiers=["ram"])
        done = await conversation.done(fetch(keys, RAM))
        assert (done.keys, done.chunks, done.reason) == (b"", 0, "tier ram has no room for the rest")
        found.release()
        assert (await conversation.done(fetch(keys, RAM))).chunks == 4


async def test_fetch_into_a_small_disk_keeps_the_first_chunks(open_node: OpenNode) -> None:
    async with (
        scripted_controller() as controller,
        open_node(controller, ram=64, ssd=10, disk={"write": "never"}) as one,
    ):
        conversation = await controller.up_to_date()
        await conversation.done(fetch(await one.store(8, seed=2), SSD))
        keys = await one.store(20, seed=1)
        done = await conversation.done(fetch(keys, SSD))
        assert split_keys(done.keys) == keys[:9]
        assert done.reason == "tier ssd has no room for the rest"
        assert one.holds(keys, SSD) == list(range(9))


async def test_fetch_waits_for_pending_evictions(registered: Registered) -> None:
    """All cold chunks have yet to be written to disk."""
    disk = {"write": "on_evict"}
    async with registered(ram=8, ssd=128, disk=disk) as (conversation, one):
        keys = await one.store(6, seed=1)
        await conversation.done(fetch(keys, SSD))
        await one.cache.clear(keys, tiers=["ram"])
        others = await one.store(7, seed=2)
        done = await conversation.done(fetch(keys, RAM))
        assert (done.chunks, done.reason) == (6, None)
        catalog = one.cache.catalog
        assert all(catalog.tiers(key) for key in others), "nothing was lost"


# Fetch from another instance.


async def test_fetch_from_a_peer_into_memory_and_onto_disk(both_registered: BothRegistered) -> None:
    async with both_registered(
        FETCHING | {"ssd": 128, "disk": {"write": "never"}}, SERVING | {"ssd": 128}
    ) as (conversation, one, two):
        keys = await two.store(8)
        await two.cache.clear(keys[4:], tiers=["ram"])
        done = await conversation.done(fetch(keys, RAM, address_of(two), node=one))
        assert (split_keys(done.keys), done.reason) == (keys, None)
        assert done.bytes == 8 * CHUNK_OBJECT_BYTES
        assert conversation.held == {RAM: set(keys)}
        assert await one.is_intact(8)
        assert two.holds(keys, SSD) == list(range(8)), "the peer keeps its chunks"
        other = await two.store(4, seed=2)
        done = await conversation.done(fetch(other, SSD, address_of(two), node=one))
        assert (split_keys(done.keys), done.reason) == (other, None)
        assert one.cache.catalog.tiers(other[0]) == [SSD], "memory was only a stage on the way"
        await until(lambda: not two.instance.status()["serving"]["grants"])  # type: ignore[index]
        assert await one.is_intact(4, seed=2)


async def test_fetch_reads_only_missing_chunks_from_a_peer(both_registered: BothRegistered) -> None:
    async with both_registered(FETCHING | {"ssd": 128}, SERVING) as (conversation, one, two):
        keys = await two.store(8)
        await one.store(8)
        await one.cache.clear(keys, tiers=["ram"])
        await one.cache.clear(keys[6:])
        done = await conversation.done(fetch(keys, RAM, address_of(two), node=one))
        assert (done.chunks, done.reason) == (8, None)
        assert two.instance.status()["serving"]["granted"] == 1  # type: ignore[index]
        assert one.cache.counts["get_ok"] == 8
        assert await one.is_intact(8)


async def test_fetch_of_a_chunk_that_the_peer_has_evicted(both_registered: BothRegistered) -> None:
    async with both_registered(FETCHING, SERVING) as (conversation, one, two):
        keys = await two.store(8)
        await two.cache.clear(keys[5:6])
        done = await conversation.done(fetch(keys, RAM, address_of(two), node=one))
        assert split_keys(done.keys)[:5] == keys[:5]
        assert keys[5] not in split_keys(done.keys)
        assert done.reason == f"neither this instance nor peer {address_of(two)} holds the rest"
        assert one.cache.catalog.count(1) == 0, "the peer's entries are invalidated"


async def test_fetch_from_an_unreachable_peer(registered: Registered) -> None:
    async with registered(**FETCHING, ssd=128) as (conversation, one):
        keys = await one.store(4)
        await one.cache.clear(keys, tiers=["ram"])
        await one.cache.clear(keys[2:])
        done = await conversation.done(fetch(keys, RAM, "127.0.0.1:1", node=one))
        assert split_keys(done.keys) == keys[:2], "local chunks are fetched anyway"
        assert done.reason is not None
        assert "peer 127.0.0.1:1" in done.reason


async def test_fetch_from_a_peer_with_another_secret(both_registered: BothRegistered) -> None:
    async with both_registered({"peer": {"secret": "another secret than theirs"}}, SERVING) as (
        conversation,
        one,
        two,
    ):
        keys = await two.store(4)
        done = await conversation.done(fetch(keys, RAM, address_of(two), node=one))
        assert done.chunks == 0
        assert done.reason is not None
        assert address_of(two) in done.reason


async def test_fetch_by_an_instance_without_peer_settings(registered: Registered) -> None:
    async with registered() as (conversation, one):
        done = await conversation.done(fetch([make_key(1)], RAM, "127.0.0.1:1", node=one))
        assert done.reason == "this instance cannot fetch from others: set peer.secret or peer.tls"


async def test_fetch_of_more_than_fits_into_memory_on_either_side(both_registered: BothRegistered) -> None:
    """Both have memory for a few chunks: they are fetched in batches, and promoted chunks are evicted."""
    first = FETCHING | {"ram": 8, "ssd": 256, "disk": {"write": "never"}}
    async with both_registered(first, SERVING | {"ram": 8, "ssd": 256}) as (conversation, one, two):
        keys = await two.store(8, seed=3)
        for seed in (1, 2):
            await two.store(8, seed=seed)
        done = await conversation.done(fetch(keys, SSD, address_of(two), node=one))
        assert (done.chunks, done.reason) == (8, None)
        assert await one.is_intact(8, seed=3)


async def test_chunks_of_a_reset_model_are_not_fetched_from_others(both_registered: BothRegistered) -> None:
    async with both_registered(FETCHING, SERVING) as (conversation, one, two):
        keys = await two.store(4)
        await one.model.clear()
        done = await conversation.done(fetch(keys, RAM, address_of(two), node=one))
        assert (done.chunks, done.reason) == (
            0,
            "this model was reset here, so chunks of other hosts are not trusted",
        )


async def test_peer_ends_during_a_fetch(open_node: OpenNode) -> None:
    async with scripted_controller() as controller, open_node(controller, ram=256, **FETCHING) as one:
        conversation = await controller.up_to_date()
        async with open_node(controller, name="two", ram=256, **SERVING) as two:
            await controller.up_to_date(1)
            keys = await two.store(200)
            ticket = await conversation.start_command(fetch(keys, RAM, address_of(two), node=one))
            await until(lambda: one.holds(keys, RAM))
        done = await conversation.wait_for_answer(ticket)
        assert not isinstance(done, Failed)
        assert split_keys(done.keys) == [keys[index] for index in one.holds(keys, RAM)]
        assert done.chunks == 200 or done.reason


# Fetch: deadline and cancellation.


@asynccontextmanager
async def half_of_memory_in_use(node: Node, keys: list[ChunkKey]) -> AsyncIterator[None]:
    """Keep ``keys`` on disk only, and half of 16 chunks of memory in use."""
    await node.cache.drain(30)
    await node.cache.clear(keys, tiers=["ram"])
    leases = node.cache.arena.allocate_all(CHUNK_OBJECT_BYTES, 8)
    assert len(leases) == 8
    try:
        yield
    finally:
        for lease in leases:
            lease.release()


async def test_fetch_ends_at_its_deadline(registered: Registered, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move_module, "TIMEOUT_SECONDS", 60.0)
    async with registered(ram=16, ssd=128) as (conversation, one):
        keys = await one.store(12)
        async with half_of_memory_in_use(one, keys):
            done = await conversation.done(fetch(keys, RAM, seconds=0.3))
        assert 0 < done.chunks < 12
        assert done.reason == "its deadline of 0.3 s has expired"


async def test_fetch_is_cancelled_and_answered(
    registered: Registered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(move_module, "TIMEOUT_SECONDS", 60.0)
    monkeypatch.setattr(session_module, "PROGRESS_SECONDS", 0.02)
    async with registered(ram=16, ssd=128) as (conversation, one):
        keys = await one.store(12)
        async with half_of_memory_in_use(one, keys):
            ticket = await conversation.start_command(fetch(keys, RAM))
            await until(lambda: conversation.progress)
            assert conversation.progress[-1].ticket == ticket
            assert 0 < conversation.progress[-1].chunks < 12
            await conversation.send(Cancel(ticket))
            done = await conversation.wait_for_answer(ticket)
        assert not isinstance(done, Failed)
        assert 0 < done.chunks < 12
        assert done.reason == "it was cancelled"
        await conversation.send(Cancel(ticket))  # Ignored: the command has ended.
        assert one.status["commands"] == 0


async def test_fetch_cancelled_immediately_is_answered(registered: Registered) -> None:
    async with registered(ssd=128) as (conversation, one):
        keys = await one.store(4)
        await one.cache.clear(keys, tiers=["ram"])
        ticket = await conversation.start_command(fetch(keys, RAM))
        await conversation.send(Cancel(ticket))
        assert not isinstance(await conversation.wait_for_answer(ticket), Failed)


async def test_commands_end_with_the_connection(open_node: OpenNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move_module, "TIMEOUT_SECONDS", 60.0)
    async with scripted_controller() as controller, open_node(controller, ram=8, ssd=128) as one:
        conversation = await controller.up_to_date()
        keys = await one.store(12)
        await conversation.start_command(fetch(keys, RAM))
        await until(lambda: one.holds(keys, RAM))
        await controller.kill()
        await one.wait_until_idle()
        await controller.start()
        again = await controller.up_to_date(1)
        assert again.held == one.held()
