"""Grants of ``PeerServer``: what is granted, when it is readable, and when it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

from kvtier.memory.header import ChunkHeader, is_sealed
from kvtier.memory.keys import ChunkKey, join_keys
from kvtier.peers import session as session_module
from kvtier.peers.protocol import (
    NO_GRANT,
    VERSION,
    Await,
    Contained,
    Contains,
    Granted,
    Hello,
    Readable,
    Release,
    Released,
)
from kvtier.rpc.frames import Ping, Pong, Refused
from kvtier.testing.backend import make_key
from kvtier.testing.faults import SlowBackend
from kvtier.tiers.seal import Seal
from kvtier.transports.base import Access, RemoteSpan
from tests.rigs.peer_server import CHUNK, RawClient, ServedCache, corrupt, held, serving
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio


def spans(granted: Granted) -> list[RemoteSpan]:
    return [
        RemoteSpan(granted.grant, offset, length)
        for offset, length in zip(granted.offsets, granted.lengths, strict=True)
    ]


async def readable(client: RawClient, granted: Granted, chunks: list[int]) -> list[bool]:
    answer = await client.request(Await(9, granted.grant, chunks))
    assert isinstance(answer, Readable)
    return answer.readable


async def test_prefix_is_granted_sealed_and_released() -> None:
    async with serving() as served:
        keys = served.store(1, 2, 3)
        client = await served.client()
        granted = await client.look_up([*keys, make_key(4)])
        assert granted.positions == [0, 1, 2]
        assert granted.lengths == [CHUNK] * 3
        assert granted.ready == 0, "they have no checksums yet"
        assert await readable(client, granted, [0, 1, 2]) == [True] * 3
        for key, span in zip(keys, spans(granted), strict=True):
            with held(served.grants, span) as lease:
                assert ChunkHeader.verify(lease.view, key)
                assert is_sealed(lease.view)
        assert served.grants.granted_bytes == 3 * CHUNK
        assert await client.release(granted, [0])
        assert served.grants.granted_bytes == 2 * CHUNK
        assert await client.release(granted, [1, 2])
        assert served.grants.open == 0
        second = await client.look_up(keys)
        assert second.ready == 3, "the checksums stay"


async def test_without_checksums_chunks_are_ready_immediately() -> None:
    async with serving(checksum=False) as served:
        keys = served.store(1, 2)
        client = await served.client()
        granted = await client.look_up(keys)
        assert granted.ready == 2
        with held(served.grants, spans(granted)[0]) as lease:
            assert not is_sealed(lease.view)


async def test_unsealed_chunk_is_not_readable() -> None:
    async with serving() as served:
        (key,) = served.store(1)
        client = await served.client()
        may_fail = anyio.Event()

        async def fail_later(chunks: Sequence[object]) -> list[None]:
            await may_fail.wait()
            return [None] * len(chunks)

        served.cache.memory.sealer.seal = fail_later  # type: ignore[assignment, method-assign]
        granted = await client.look_up([key])
        (span,) = spans(granted)
        assert served.grants.hold(span, Access.READ) is None
        await client.send(Await(9, granted.grant, [0]))
        assert await client.request(Ping(3)) == Pong(3), "an await does not block other requests"
        may_fail.set()
        assert await client.receive() == Readable(9, [False])
        assert served.grants.hold(span, Access.READ) is None


async def test_corrupt_chunk_is_not_readable() -> None:
    async with serving() as served:
        keys = served.store(1, 2, 3)
        client = await served.client()
        corrupt(served.cache, keys[1])
        granted = await client.look_up(keys)
        assert await readable(client, granted, [2, 1, 0]) == [True, False, True]
        catalog = served.cache.catalog
        assert [catalog.tiers(key) for key in keys] == [[0], [], [0]], "it is not served locally, either"
        assert served.cache.memory.sealer.corrupt == 1


async def test_prefix_ends_at_first_gap_and_selection_does_not() -> None:
    async with serving() as served:
        one, two, three = served.store(1, 2, 3)
        missing = make_key(9)
        client = await served.client()
        assert (await client.look_up([one, missing, two])).positions == [0]
        granted = await client.look_up([missing, one, missing, three, two], prefix=False)
        assert granted.positions == [1, 3, 4]
        assert (await client.look_up([missing, one])).grant == NO_GRANT
        assert (await client.look_up([])).grant == NO_GRANT
        answer = await client.request(Contains(5, join_keys([one, missing, three])))
        assert answer == Contained(5, [True, False, True])
        assert await client.request(Contains(6, b"")) == Contained(6, [])


async def test_lookup_of_many_keys() -> None:
    count = 2000
    async with serving(ram=2 * count, share=1, checksum=False) as served:
        keys = await served.store_many(count)
        client = await served.client()
        granted = await client.look_up([*keys, make_key(0)])
        assert granted.positions == list(range(count))
        assert len(set(granted.offsets)) == count
        odd = [key if index % 2 else make_key(10**6 + index) for index, key in enumerate(keys)]
        selected = await client.look_up(odd, prefix=False)
        assert selected.positions == list(range(1, count, 2))
        answer = await client.request(Contains(5, join_keys(odd)))
        assert answer.held == [bool(index % 2) for index in range(count)]
        assert served.grants.granted_bytes == count * CHUNK, "a chunk granted twice counts once"


async def test_chunks_on_disk_are_promoted_and_can_be_awaited(tmp_path: Path) -> None:
    async with serving(disk=tmp_path / "ssd") as served:
        keys = await store_on_disk_only(served, 1, 2, 3)
        client = await served.client()
        granted = await client.look_up(keys)
        assert granted.positions == [0, 1, 2]
        assert granted.ready == 0
        assert await readable(client, granted, [0, 1, 2]) == [True] * 3
        for key, span in zip(keys, spans(granted), strict=True):
            with held(served.grants, span) as lease:
                assert ChunkHeader.verify(lease.view, key)


async def store_on_disk_only(served: ServedCache, *numbers: int) -> list[ChunkKey]:
    keys = served.store(*numbers)
    assert await served.cache.drain(10)
    served.cache.memory.drop(keys)
    return keys


class Loading(NamedTuple):
    """A client that was granted chunks which are on a disk that hangs."""

    served: ServedCache
    disk: SlowBackend
    client: RawClient
    granted: Granted


@asynccontextmanager
async def loading(
    folder: Path, on_disk: Sequence[int] = (1,), in_memory: Sequence[int] = (), **more: Any
) -> AsyncIterator[Loading]:
    async with serving(disk=folder / "ssd", **more) as served:
        keys = await store_on_disk_only(served, *on_disk) + served.store(*in_memory)
        tier = served.cache.tiers[1]
        disk = SlowBackend(tier.backend)
        tier.seal = Seal(disk, served.cache.memory.sealer)
        disk.hang()
        client = await served.client()
        yield Loading(served, disk, client, await client.look_up(keys))
        disk.resume()


async def test_chunk_in_flight_is_readable_once_loaded(tmp_path: Path) -> None:
    async with loading(tmp_path, [1, 2], in_memory=[3]) as (served, disk, client, granted):
        assert granted.ready == 0
        assert await readable(client, granted, [2]) == [True], "it does not wait for other chunks"
        assert [served.grants.hold(span, Access.READ) for span in spans(granted)[:2]] == [None, None]
        await client.send(Await(9, granted.grant, [0, 1]))
        assert await client.request(Ping(3)) == Pong(3)
        disk.resume()
        assert await client.receive() == Readable(9, [True, True])


async def test_chunk_that_fails_to_load_is_not_readable(tmp_path: Path) -> None:
    async with serving(disk=tmp_path / "ssd") as served:
        keys = await store_on_disk_only(served, 1, 2)
        for path in (tmp_path / "ssd").rglob("*"):
            if path.is_file() and path.stat().st_size == CHUNK:
                path.write_bytes(bytes(CHUNK))
        client = await served.client()
        granted = await client.look_up(keys)
        assert await readable(client, granted, [0, 1]) == [False, False]
        assert [served.grants.hold(span, Access.READ) for span in spans(granted)] == [None, None]


async def test_await_ends_with_the_lease(tmp_path: Path) -> None:
    async with loading(tmp_path, lease="200ms") as (served, _, client, granted):
        assert await readable(client, granted, [0]) == [False]
        assert served.grants.open == 0
        assert not await client.release(granted)


async def test_await_ends_with_the_release(tmp_path: Path) -> None:
    async with loading(tmp_path) as (_, _, client, granted):
        await client.send(Await(9, granted.grant, [0]), Release(10, granted.grant, [0]))
        answers = [await client.receive(), await client.receive()]
        assert Released(10, True) in answers
        assert Readable(9, [False]) in answers


async def test_awaits_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_AWAITS", 3)
    async with loading(tmp_path) as (_, disk, client, granted):
        await client.send(*(Await(number, granted.grant, [0]) for number in range(4)))
        assert await client.receive() == Readable(3, [False])
        disk.resume()
        answers = [await client.receive() for _ in range(3)]
        assert sorted(answer.ticket for answer in answers) == [0, 1, 2]
        assert all(answer.readable == [True] for answer in answers)


async def test_client_that_disconnects_leaks_nothing(tmp_path: Path) -> None:
    async with loading(tmp_path, [1, 2]) as (served, _, client, granted):
        await client.send(Await(9, granted.grant, [0, 1]))
        await until(lambda: served.server.status()["requests"].get("Await"))  # type: ignore[attr-defined]
        client.close()
        await until(lambda: not served.server.status()["connections"])
        assert served.grants.open == 0


async def test_transfer_outlives_its_lease_and_its_connection() -> None:
    async with serving(lease="100ms", checksum=False, ram=4) as served:
        keys = served.store(1, 2)
        client = await served.client()
        granted = await client.look_up(keys)
        with held(served.grants, spans(granted)[0]) as lease:
            expected = bytes(lease.view)
            await until(lambda: served.grants.open == 0)
            assert served.grants.expired == 1
            assert served.grants.hold(spans(granted)[0], Access.READ) is None
            client.close()
            await until(lambda: not served.server.status()["connections"])
            served.store(11, 12, 13)  # All the remaining room.
            assert bytes(lease.view) == expected


async def test_evicted_or_cleared_chunk_stays_readable_but_is_not_granted_again() -> None:
    async with serving(ram=4, share=1, checksum=False) as served:
        keys = served.store(1, 2)
        client = await served.client()
        granted = await client.look_up(keys)
        before = [bytes(served.cache.arena.view(span.offset, span.length)) for span in spans(granted)]
        await served.cache.clear(keys[:1])
        served.cache.memory.drop(keys[1:])
        served.store(11, 12)  # All the remaining room.
        for span, content in zip(spans(granted), before, strict=True):
            with held(served.grants, span) as lease:
                assert bytes(lease.view) == content
        assert (await client.look_up(keys)).grant == NO_GRANT
        assert await client.release(granted)


async def test_eviction_races_grants() -> None:
    """A memory of eight chunks, six of which are repeatedly stored and leased."""
    async with serving(ram=8, share=0.75, checksum=False) as served:
        client = await served.client()
        for round_number in range(60):
            keys = served.store(*range(round_number * 2 + 1, round_number * 2 + 3))
            granted = await client.look_up(keys)
            assert len(granted.positions) == 2
            for key, span in zip(keys, spans(granted), strict=True):
                with held(served.grants, span) as lease:
                    ChunkHeader.verify(lease.view, key)
            if round_number % 3 == 2:
                assert await client.release(granted)
                await client.send(Hello(VERSION, "again", "control"))
                assert isinstance(await client.receive(), Refused)
                await until(lambda: not served.grants.open)
                client = await served.client()


async def test_promised_bytes_are_bounded_by_share() -> None:
    async with serving(ram=10, share=0.3, checksum=False) as served:
        keys = served.store(1, 2, 3, 4, 5)
        first, second = await served.client(), await served.client()
        granted = await first.look_up(keys)
        assert granted.positions == [0, 1, 2]
        assert served.grants.granted_bytes == 3 * CHUNK
        assert (await second.look_up(keys[3:])).grant == NO_GRANT
        assert (await second.look_up(keys[1:])).positions == [0, 1], "they are leased already"
        assert await first.release(granted, [0, 1])
        assert served.grants.granted_bytes == 2 * CHUNK, "one of them is also leased to the other client"
        assert (await first.look_up(keys[3:])).positions == [0]
        assert await first.release(granted, [2])


async def test_grants_per_client_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_GRANTS", 2)
    async with serving(checksum=False) as served:
        keys = served.store(1)
        client = await served.client()
        granted = [await client.look_up(keys) for _ in range(3)]
        assert [bool(reply.grant) for reply in granted] == [True, True, False]
        assert await client.release(granted[0])
        assert (await client.look_up(keys)).grant


async def test_grant_belongs_to_its_owner() -> None:
    async with serving(checksum=False) as served:
        keys = served.store(1)
        owner, other = await served.client(), await served.client()
        granted = await owner.look_up(keys)
        assert not await other.release(granted)
        assert await readable(other, granted, [0]) == [False]
        assert await readable(owner, granted, [0]) == [True]
        assert await owner.release(granted)


@pytest.mark.parametrize("chunks", [[0, 0], [-1], [1], [1 << 62], [0, 5]])
async def test_ungranted_chunks_are_not_released(chunks: list[int]) -> None:
    async with serving(checksum=False) as served:
        keys = served.store(1, 2)
        client = await served.client()
        granted = await client.look_up(keys[:1])
        if len(chunks) > 1:
            granted = await client.look_up(keys[:2])
        assert not await client.release(granted, chunks) or chunks == [1]
        assert await readable(client, granted, [-1]) == [False]


async def test_unknown_grant_is_invalid() -> None:
    async with serving() as served:
        client = await served.client()
        assert await client.request(Release(1, 77, [0, 1])) == Released(1, False)
        assert await client.request(Await(2, 77, [0, 1])) == Readable(2, [False, False])
