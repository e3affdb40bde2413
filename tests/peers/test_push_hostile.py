"""Authenticated peers that push invalid or corrupt chunks, or chunks of other clients."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio
import pytest
from msgspec import structs
from xxhash import xxh3_128_digest

from kvtier.memory.header import HEADER_BYTES, ChunkHeader
from kvtier.memory.keys import join_keys
from kvtier.peers.protocol import (
    MAX_IN_ONE,
    MAX_RESERVED,
    NO_GRANT,
    Announce,
    Announced,
    Commit,
    Committed,
    Lookup,
    Release,
    Released,
    Reserve,
    Reserved,
    Withdraw,
)
from kvtier.pipeline.query import Query
from kvtier.rpc.frames import Message, Refused
from kvtier.testing.backend import make_key, noise
from kvtier.transports.base import Access, RemoteSpan
from tests.rigs.peer_server import CHUNK, PAYLOAD, NoTransport, RawClient, ServedCache, held, serving
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio

NAMESPACE = bytes(32)


@pytest.fixture
async def served() -> AsyncIterator[ServedCache]:
    async with serving() as opened:
        yield opened


def reserve_message(*numbers: int, length: int = PAYLOAD) -> Reserve:
    keys = join_keys([make_key(number) for number in numbers])
    parents = join_keys([make_key(number - 1) for number in numbers])
    return Reserve(1, NAMESPACE, keys, parents, [length] * len(numbers))


def changed(*numbers: int, **fields: Any) -> Reserve:
    return structs.replace(reserve_message(*numbers), **fields)


def payload(number: int, length: int = PAYLOAD) -> bytes:
    return noise(b"pushed" + make_key(number), length)


async def reserve(client: RawClient, *numbers: int) -> Reserved:
    answer = await client.request(reserve_message(*numbers))
    assert isinstance(answer, Reserved)
    return answer


def write(served: ServedCache, room: Reserved, at: int, content: bytes) -> None:
    """Write to a reservation as a transport does."""
    span = RemoteSpan(room.grant, room.offsets[at], len(content))
    with held(served.grants, span, Access.WRITE) as lease:
        start = room.offsets[at] - lease.offset
        lease.view[start : start + len(content)] = content


async def commit(
    client: RawClient, grant: int, chunks: Sequence[int], contents: Sequence[bytes], ticket: int = 9
) -> list[bool]:
    checksums = b"".join(map(xxh3_128_digest, contents))
    answer = await client.request(Commit(ticket, grant, list(chunks), checksums))
    assert isinstance(answer, Committed)
    assert answer.ticket == ticket
    return answer.valid


def is_held(served: ServedCache, number: int) -> bool:
    return 0 in served.cache.catalog.tiers(make_key(number))


async def refusal_of(served: ServedCache, *messages: Message) -> str:
    """Return why the server refuses these messages, and check that it still serves other clients."""
    client = await served.client()
    await client.send(*messages)
    while not isinstance(answer := await client.receive(), Refused):
        pass
    assert not await client.read_to_end()
    other = await served.client()
    assert (await reserve(other, 77)).positions == [0]
    other.close()
    await until(lambda: not served.grants.open)
    return answer.reason


async def test_chunk_is_reserved_written_committed_and_served(served: ServedCache) -> None:
    client = await served.client()
    room = await reserve(client, 1, 2, 3)
    assert (room.positions, room.held, room.pending, room.seconds) == ([0, 1, 2], [], [], 10.0)
    assert not is_held(served, 1)
    assert not served.cache.look_up(Query([make_key(1)])).chunks, "a reserved chunk is not visible"
    for at in range(3):
        write(served, room, at, payload(at + 1))
        assert not is_held(served, at + 1), "nor is a written one"
    assert await commit(client, room.grant, [2, 0], [payload(3), payload(1)]) == [True, True]
    (chunk,) = served.cache.look_up(Query([make_key(1)])).chunks
    expected = ChunkHeader(make_key(1), make_key(0), NAMESPACE, PAYLOAD)
    assert ChunkHeader.verify(chunk.lease.view, make_key(1)) == expected
    chunk.lease.release()
    assert [is_held(served, number) for number in (1, 2, 3)] == [True, False, True]
    again = await reserve(client, 1, 2, 3)
    assert (again.positions, again.held, again.pending) == ([], [0, 2], [1])
    assert await client.release(again, []) is False
    assert (await client.request(Release(2, room.grant, [1]))).valid
    assert (await reserve(client, 2)).positions == [0], "released, and free to be reserved again"


async def test_overwritten_header_is_restored_on_commit(served: ServedCache) -> None:
    client = await served.client()
    room = await reserve(client, 1)
    write(served, room, 0, payload(1))
    span = RemoteSpan(room.grant, room.offsets[0] - HEADER_BYTES, 10)
    with held(served.grants, span, Access.WRITE) as lease:
        ChunkHeader(make_key(66), make_key(65), bytes(range(32)), PAYLOAD).seal(lease.view)
    assert await commit(client, room.grant, [0], [payload(1)]) == [True]
    (chunk,) = served.cache.look_up(Query([make_key(1)])).chunks
    assert ChunkHeader.verify(chunk.lease.view, make_key(1)).namespace == NAMESPACE
    chunk.lease.release()
    assert not is_held(served, 66)


@pytest.mark.parametrize("wrong", ["never_written", "flipped", "other_checksum", "half"])
async def test_checksum_mismatch_is_never_served(served: ServedCache, wrong: str) -> None:
    client = await served.client()
    room = await reserve(client, 1, 2)
    content, checksummed = bytearray(payload(1)), payload(1)
    if wrong == "flipped":
        content[PAYLOAD // 2] ^= 1
    if wrong == "other_checksum":
        checksummed = payload(5)
    if wrong != "never_written":
        write(served, room, 0, bytes(content[: PAYLOAD // 2 if wrong == "half" else PAYLOAD]))
    write(served, room, 1, payload(2))
    assert await commit(client, room.grant, [0, 1], [checksummed, payload(2)]) == [False, True]
    assert not is_held(served, 1)
    assert is_held(served, 2)
    assert (await reserve(client, 1)).positions == [0], "its room is free again"


async def test_committed_chunk_cannot_be_written_or_committed_again(served: ServedCache) -> None:
    client = await served.client()
    room = await reserve(client, 1)
    span = RemoteSpan(room.grant, room.offsets[0], PAYLOAD)
    assert served.grants.hold(span, Access.READ) is None, "a write grant does not allow reads"
    write(served, room, 0, payload(1))
    assert await commit(client, room.grant, [0], [payload(1)]) == [True]
    assert served.grants.hold(span, Access.WRITE) is None
    assert await commit(client, room.grant, [0], [payload(1)]) == [False], "it cannot be committed twice"
    assert is_held(served, 1)


@pytest.mark.parametrize("completes", [True, False])
async def test_commit_waits_for_write_in_flight(
    served: ServedCache, completes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that commits during a write must not change verified bytes."""
    monkeypatch.setattr("kvtier.peers.reservations.STRAGGLER_SECONDS", 60.0 if completes else 0.05)
    client = await served.client()
    room = await reserve(client, 1, 2)
    write(served, room, 0, payload(1))
    straggler = served.grants.hold(RemoteSpan(room.grant, room.offsets[0], PAYLOAD), Access.WRITE)
    assert straggler is not None
    await client.send(Commit(5, room.grant, [0], xxh3_128_digest(payload(1))))
    assert isinstance(await client.request(Release(6, room.grant, [1])), Released), (
        "other requests are not delayed"
    )
    assert not is_held(served, 1)
    if completes:
        straggler.release()
    answer = await client.receive()
    assert (answer.ticket, answer.valid) == (5, [completes])
    assert is_held(served, 1) is completes
    straggler.release()


@pytest.mark.parametrize(
    "chunks", [[-1], [2], [1 << 62], [(1 << 64) - 1], [-(1 << 63)], [0, 0]], ids=lambda chunks: str(chunks)
)
async def test_commit_of_invalid_chunk_numbers_is_refused(served: ServedCache, chunks: list[int]) -> None:
    client = await served.client()
    room = await reserve(client, 1, 2)
    write(served, room, 0, payload(1))
    valid = await commit(client, room.grant, chunks, [payload(1)] * len(chunks))
    assert valid == [chunk == 0 for chunk in chunks]


@pytest.mark.parametrize("grant", [0, -1, 1, 1 << 63, (1 << 64) - 1, -(1 << 63)])
async def test_invalid_grant_numbers_are_refused(served: ServedCache, grant: int) -> None:
    client = await served.client()
    await reserve(client, 1)
    assert await commit(client, grant, [0], [payload(1)]) == [False]
    assert not (await client.request(Release(3, grant, [0]))).valid
    assert served.grants.hold(RemoteSpan(grant, 0, 16), Access.WRITE) is None


async def test_grant_of_another_client_cannot_be_committed_or_released(served: ServedCache) -> None:
    owner, other = await served.client(), await served.client()
    room = await reserve(owner, 1)
    write(served, room, 0, payload(1))
    assert await commit(other, room.grant, [0], [payload(1)]) == [False]
    assert not (await other.request(Release(1, room.grant, [0]))).valid
    assert (await reserve(other, 1)).pending == [0]
    other.close()
    assert await commit(owner, room.grant, [0], [payload(1)]) == [True]


async def test_read_grant_cannot_be_committed(served: ServedCache) -> None:
    served.store(1)
    client = await served.client()
    granted = await client.look_up([make_key(1)])
    assert await commit(client, granted.grant, [0], [payload(1)]) == [False]
    assert await client.release(granted)


@pytest.mark.parametrize("offset", [-(1 << 63), -4096, -1, 1 << 20, (1 << 63) - 1, 1 << 63])
async def test_only_reserved_memory_can_be_written(served: ServedCache, offset: int) -> None:
    client = await served.client()
    room = await reserve(client, 1, 2)
    for length in (1, CHUNK, 1 << 62):
        assert served.grants.hold(RemoteSpan(room.grant, offset, length), Access.WRITE) is None
    for length in (CHUNK, 1 << 62, -1, 0):
        assert served.grants.hold(RemoteSpan(room.grant, room.offsets[0], length), Access.WRITE) is None


INVALID_MESSAGES: dict[str, tuple[Message, str]] = {
    "no_length": (reserve_message(1, length=0), "invalid length"),
    "negative_length": (reserve_message(1, length=-1), "invalid length"),
    "length_of_63_bits": (reserve_message(1, length=1 << 63), "invalid length"),
    "length_of_64_bits": (reserve_message(1, length=(1 << 64) - 1), "invalid length"),
    "too_many": (reserve_message(*range(MAX_RESERVED + 1)), "more than"),
    "half_a_key": (changed(1, keys=b"half", parents=b"half"), "malformed keys"),
    "fewer_parents": (changed(1, 2, parents=bytes(32)), "inconsistent"),
    "fewer_lengths": (changed(1, 2, payload_lengths=[PAYLOAD]), "inconsistent"),
    "more_lengths": (changed(1, payload_lengths=[PAYLOAD] * 100_000), "inconsistent"),
    "fewer_hashes": (changed(1, 2, block_hashes=[b""]), "block hashes"),
    "half_a_hash": (changed(1, block_hashes=[bytes(8)]), "block hashes"),
    "too_many_hashes": (changed(1, block_hashes=[bytes(272)]), "block hashes"),
    "fewer_tokens": (changed(1, 2, tokens=[256]), "numbers of tokens"),
    "negative_tokens": (changed(1, tokens=[-1]), "numbers of tokens"),
    "tokens_of_33_bits": (changed(1, tokens=[1 << 32]), "numbers of tokens"),
    "no_namespace": (changed(1, namespace=b""), "inconsistent"),
    "half_a_checksum": (Commit(1, 5, [0], bytes(15)), "checksums"),
    "no_checksums": (Commit(1, 5, [0] * 1000, b""), "checksums"),
    "announces_half_a_key": (Announce(1, 1, b"half"), "malformed keys"),
    "announces_too_many": (Announce(1, 1, bytes(32 * (MAX_IN_ONE + 1))), "more than"),
}


@pytest.mark.parametrize(("message", "reason"), INVALID_MESSAGES.values(), ids=INVALID_MESSAGES)
async def test_invalid_message_closes_only_its_connection(
    served: ServedCache, message: Message, reason: str
) -> None:
    assert reason in await refusal_of(served, reserve_message(1, 2), message)


async def test_duplicate_announcement_number_closes_connection(served: ServedCache) -> None:
    twice = Announce(1, 1, join_keys([make_key(1)]))
    assert "reuses the number" in await refusal_of(served, twice, twice)


async def test_chunks_larger_than_memory_get_no_room(served: ServedCache) -> None:
    client = await served.client()
    answer = await client.request(reserve_message(1, 2, length=1 << 40))
    assert (answer.grant, answer.positions, answer.held, answer.pending) == (NO_GRANT, [], [], [])


async def test_reservations_are_bounded_by_share(served: ServedCache) -> None:
    client, other = await served.client(), await served.client()
    room = await reserve(client, *range(1, 60))
    assert len(room.positions) == 32
    assert (await reserve(other, 101)).positions == []
    assert (await client.request(Release(2, room.grant, [31]))).valid
    assert (await reserve(other, 101)).positions == [0]


async def test_read_grants_count_against_reservations(served: ServedCache) -> None:
    keys = served.store(*range(1, 31))
    client = await served.client()
    granted = await client.look_up(keys)
    assert len((await reserve(client, *range(101, 120))).positions) == 2
    await client.release(granted)


async def test_duplicate_chunk_in_one_reservation_is_pending(served: ServedCache) -> None:
    client = await served.client()
    room = await reserve(client, 1, 1)
    assert (room.positions, room.pending) == ([0], [1])


async def test_announcements_are_bounded(served: ServedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.peers.reservations.MAX_ANNOUNCED", 5)
    monkeypatch.setattr("kvtier.peers.reservations.MAX_ANNOUNCEMENTS", 2)
    client = await served.client()
    keys = [make_key(number) for number in range(1, 9)]
    assert await client.request(Announce(1, 1, join_keys(keys[:3]))) == Announced(1, True)
    assert await client.request(Announce(2, 2, join_keys(keys[3:]))) == Announced(2, False)
    assert await client.request(Announce(3, -(1 << 63), join_keys(keys[3:5]))) == Announced(3, True)
    assert await client.request(Announce(4, 4, b"")) == Announced(4, False)
    assert served.cache.expecting.announced == 5
    await client.send(*map(Withdraw, (1, 1, 7, (1 << 64) - 1, -(1 << 63))))
    await until(lambda: not served.cache.expecting.announced)


async def test_disconnect_withdraws_announcements_and_reservations(served: ServedCache) -> None:
    client = await served.client()
    found = served.cache.look_up(Query([make_key(1), make_key(2)], expect_seconds=60, expect_chunks=2))
    await client.request(Announce(1, 1, join_keys([make_key(1), make_key(2)])))
    await reserve(client, 1)
    assert found.in_flight == 2
    client.close()
    with anyio.fail_after(30):
        await served.cache.settle(found)
    assert not found.chunks


async def test_reservation_counts_as_pending_without_announcement(served: ServedCache) -> None:
    client = await served.client()
    room = await reserve(client, 1)
    found = served.cache.look_up(Query([make_key(1)], expect_seconds=60, expect_chunks=1))
    write(served, room, 0, payload(1))
    assert await commit(client, room.grant, [0], [payload(1)]) == [True]
    with anyio.fail_after(30):
        await served.cache.settle(found)
    assert len(found.chunks) == 1
    found.release()


# Time.


@pytest.fixture
async def short_lease() -> AsyncIterator[ServedCache]:
    """A served cache with a lease of 0.2 s."""
    async with serving(lease=0.2) as opened:
        yield opened


async def test_expired_reservation_is_freed_and_wakes_lookups(short_lease: ServedCache) -> None:
    client = await short_lease.client()
    found = short_lease.cache.look_up(Query([make_key(1)], expect_seconds=60, expect_chunks=1))
    room = await reserve(client, 1, 2)
    with anyio.fail_after(30):
        await short_lease.cache.settle(found)
    assert not found.chunks
    assert not short_lease.grants.open
    assert not short_lease.cache.arena.leases
    assert short_lease.grants.hold(RemoteSpan(room.grant, room.offsets[0], PAYLOAD), Access.WRITE) is None
    assert await commit(client, room.grant, [0], [payload(1)]) == [False]
    assert (await reserve(client, 1, 2)).positions == [0, 1]


class OneSided(NoTransport):
    """A one-sided transport whose ``cut_off`` blocks until an event."""

    one_sided = True

    def __init__(self, may_end: anyio.Event) -> None:
        super().__init__()
        self.cuts = 0
        self._may_end = may_end

    async def cut_off(self) -> None:
        self.cuts += 1
        await self._may_end.wait()


async def test_one_sided_memory_is_not_reused_before_cut_off() -> None:
    may_end = anyio.Event()
    transport = OneSided(may_end)
    async with serving(transport=transport, lease=0.2) as served:
        client = await served.client()
        found = served.cache.look_up(Query([make_key(1)], expect_seconds=60, expect_chunks=1))
        room = await reserve(client, 1, 2)
        with anyio.fail_after(30):
            await served.cache.settle(found)
        # The lease has expired: removed from the catalog, but the memory is not free.
        assert make_key(1) not in served.cache.catalog
        assert (served.cache.arena.leases, served.grants.open) == (2, 1)
        await client.request(Release(1, room.grant, [1]))
        assert served.cache.arena.leases == 1, "released"
        client.close()
        await until(lambda: transport.cuts)
        assert served.cache.arena.leases == 1, "kept until the writer is cut off"
        may_end.set()
        await until(lambda: not served.cache.arena.leases)


async def test_client_without_open_reservations_is_not_cut_off() -> None:
    may_end = anyio.Event()
    transport = OneSided(may_end)
    async with serving(transport=transport) as served:
        client = await served.client()
        room = await reserve(client, 1, 2)
        write(served, room, 0, payload(1))
        assert await commit(client, room.grant, [0], [payload(1)]) == [True]
        await client.request(Release(1, room.grant, [1]))
        client.close()
        await until(lambda: not served.server.status()["connections"])
        assert not transport.cuts


async def test_disconnect_during_verification_leaks_nothing(served: ServedCache) -> None:
    for _ in range(20):
        client = await served.client()
        room = await reserve(client, *range(1, 11))
        for at in range(10):
            write(served, room, at, payload(at + 1))
        checksums = b"".join(xxh3_128_digest(payload(at + 1)) for at in range(10))
        await client.send(Commit(1, room.grant, list(range(10)), checksums))
        client.close()
        await until(lambda: not served.server.status()["connections"])
        await served.cache.clear([make_key(number) for number in range(1, 11)])


async def test_flood_of_commits_is_answered(served: ServedCache) -> None:
    client = await served.client()
    room = await reserve(client, 1)
    await client.send(*(Commit(ticket, room.grant, [0], bytes(16)) for ticket in range(500)))
    assert {(await client.receive()).ticket for _ in range(500)} == set(range(500))


async def test_lookup_excludes_reserved_chunks(served: ServedCache) -> None:
    keys = served.store(1)
    client = await served.client()
    await reserve(client, 2)
    granted = await client.request(Lookup(1, join_keys([*keys, make_key(2)]), False))
    assert granted.positions == [0], "a reserved chunk is not granted"
    await client.release(granted)
