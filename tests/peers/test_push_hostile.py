"""Peers that were let in and push what they must not: what was never theirs, or is wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import anyio
import pytest
from xxhash import xxh3_128_digest

from kvtier.header import HEADER_BYTES, ChunkHeader
from kvtier.keys import join_keys
from kvtier.peers.protocol import (
    MOST_IN_ONE,
    MOST_RESERVED,
    NO_GRANT,
    Announce,
    Announced,
    Commit,
    Committed,
    LookUp,
    Refused,
    Release,
    Released,
    Reserve,
    Reserved,
    Withdraw,
    Withdrawn,
)
from kvtier.sockets.frames import Message
from kvtier.testing.backend import make_key, noise
from kvtier.transports.base import Access, RemoteSpan

from .serving import CHUNK, PAYLOAD, Door, NoTransport, RawClient, serving, until

pytestmark = pytest.mark.anyio

SPACE = bytes(32)


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    async with serving() as opened:
        yield opened


def reserving(*numbers: int, ticket: int = 1, length: int = PAYLOAD) -> Reserve:
    keys = join_keys([make_key(number) for number in numbers])
    parents = join_keys([make_key(number - 1) for number in numbers])
    return Reserve(ticket, SPACE, keys, parents, [length] * len(numbers))


def payload(number: int, length: int = PAYLOAD) -> bytes:
    return noise(b"pushed" + make_key(number), length)


async def reserved(client: RawClient, *numbers: int) -> Reserved:
    answer = await client.ask(reserving(*numbers))
    assert isinstance(answer, Reserved)
    return answer


def write(door: Door, room: Reserved, at: int, content: bytes) -> None:
    """As a transport does."""
    lease = door.grants.hold(RemoteSpan(room.grant, room.offsets[at], len(content)), Access.WRITE)
    assert lease is not None
    start = room.offsets[at] - lease.offset
    lease.view[start : start + len(content)] = content
    lease.release()


async def commit(
    client: RawClient, grant: int, chunks: Sequence[int], contents: Sequence[bytes], ticket: int = 9
) -> list[bool]:
    checksums = b"".join(map(xxh3_128_digest, contents))
    answer = await client.ask(Commit(ticket, grant, list(chunks), checksums))
    assert isinstance(answer, Committed)
    assert answer.ticket == ticket
    return answer.whole


def is_held(door: Door, number: int) -> bool:
    return 0 in door.cache.hierarchy.catalog.tiers(make_key(number))


async def is_refused(door: Door, *messages: Message) -> str:
    """What it says to one who says this; it still serves others."""
    client = await door.client()
    await client.say(*messages)
    while not isinstance(answer := await client.hear(), Refused):
        pass
    assert not await client.closed()
    other = await door.client()
    assert (await reserved(other, 77)).positions == [0]
    other.close()
    await until(lambda: not door.grants.open)
    return answer.reason


async def test_reserved_written_committed_served(door: Door) -> None:
    client = await door.client()
    room = await reserved(client, 1, 2, 3)
    assert (room.positions, room.held, room.coming, room.seconds) == ([0, 1, 2], [], [], 10.0)
    assert not is_held(door, 1)
    assert not door.cache.look_up([make_key(1)]).chunks, "what is reserved is not visible"
    for at in range(3):
        write(door, room, at, payload(at + 1))
        assert not is_held(door, at + 1), "nor what is written"
    assert await commit(client, room.grant, [2, 0], [payload(3), payload(1)]) == [True, True]
    (chunk,) = door.cache.look_up([make_key(1)]).chunks
    assert ChunkHeader.verify(chunk.lease.view, make_key(1)) == (make_key(1), make_key(0), SPACE, PAYLOAD)
    chunk.lease.release()
    assert [is_held(door, number) for number in (1, 2, 3)] == [True, False, True]
    again = await reserved(client, 1, 2, 3)
    assert (again.positions, again.held, again.coming) == ([], [0, 2], [1])
    assert await client.release(again, []) is False
    assert (await client.ask(Release(2, room.grant, [1]))).stood
    assert (await reserved(client, 2)).positions == [0], "given back, and to be had again"


async def test_a_header_that_was_written_over_is_written_anew(door: Door) -> None:
    client = await door.client()
    room = await reserved(client, 1)
    write(door, room, 0, payload(1))
    lease = door.grants.hold(RemoteSpan(room.grant, room.offsets[0] - HEADER_BYTES, 10), Access.WRITE)
    assert lease is not None
    ChunkHeader(make_key(66), make_key(65), bytes(range(32)), PAYLOAD).seal(lease.view)
    lease.release()
    assert await commit(client, room.grant, [0], [payload(1)]) == [True]
    (chunk,) = door.cache.look_up([make_key(1)]).chunks
    assert ChunkHeader.verify(chunk.lease.view, make_key(1)).namespace == SPACE
    chunk.lease.release()
    assert not is_held(door, 66)


@pytest.mark.parametrize("wrong", ["never_written", "flipped", "other_checksum", "half"])
async def test_what_does_not_match_its_checksum_is_never_served(door: Door, wrong: str) -> None:
    client = await door.client()
    room = await reserved(client, 1, 2)
    content, claimed = bytearray(payload(1)), payload(1)
    if wrong == "flipped":
        content[PAYLOAD // 2] ^= 1
    if wrong == "other_checksum":
        claimed = payload(5)
    if wrong != "never_written":
        write(door, room, 0, bytes(content[: PAYLOAD // 2 if wrong == "half" else PAYLOAD]))
    write(door, room, 1, payload(2))
    assert await commit(client, room.grant, [0, 1], [claimed, payload(2)]) == [False, True]
    assert not is_held(door, 1)
    assert is_held(door, 2)
    assert (await reserved(client, 1)).positions == [0], "its room is free again"


async def test_nobody_writes_once_it_is_committed(door: Door) -> None:
    client = await door.client()
    room = await reserved(client, 1)
    span = RemoteSpan(room.grant, room.offsets[0], PAYLOAD)
    assert door.grants.hold(span, Access.READ) is None, "nor does it read"
    write(door, room, 0, payload(1))
    assert await commit(client, room.grant, [0], [payload(1)]) == [True]
    assert door.grants.hold(span, Access.WRITE) is None
    assert await commit(client, room.grant, [0], [payload(1)]) == [False], "nor commits it twice"
    assert is_held(door, 1)


@pytest.mark.parametrize("ends", [True, False])
async def test_a_write_that_is_still_under_way_is_waited_for(
    door: Door, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who commits and goes on writing must not change what was verified."""
    monkeypatch.setattr("kvtier.peers.reservations.STRAGGLER_SECONDS", 60.0 if ends else 0.05)
    client = await door.client()
    room = await reserved(client, 1, 2)
    write(door, room, 0, payload(1))
    straggler = door.grants.hold(RemoteSpan(room.grant, room.offsets[0], PAYLOAD), Access.WRITE)
    assert straggler is not None
    await client.say(Commit(5, room.grant, [0], xxh3_128_digest(payload(1))))
    assert isinstance(await client.ask(Release(6, room.grant, [1])), Released), "others need not wait"
    assert not is_held(door, 1)
    if ends:
        straggler.release()
    answer = await client.hear()
    assert (answer.ticket, answer.whole) == (5, [ends])
    assert is_held(door, 1) is ends
    straggler.release()


@pytest.mark.parametrize(
    "chunks", [[-1], [2], [1 << 62], [(1 << 64) - 1], [-(1 << 63)], [0, 0]], ids=lambda chunks: str(chunks)
)
async def test_numbers_that_are_none(door: Door, chunks: list[int]) -> None:
    client = await door.client()
    room = await reserved(client, 1, 2)
    write(door, room, 0, payload(1))
    whole = await commit(client, room.grant, chunks, [payload(1)] * len(chunks))
    assert whole == [chunk == 0 for chunk in chunks]


@pytest.mark.parametrize("grant", [0, -1, 1, 1 << 63, (1 << 64) - 1, -(1 << 63)])
async def test_grants_that_are_none(door: Door, grant: int) -> None:
    client = await door.client()
    await reserved(client, 1)
    assert await commit(client, grant, [0], [payload(1)]) == [False]
    assert not (await client.ask(Release(3, grant, [0]))).stood
    assert door.grants.hold(RemoteSpan(grant, 0, 16), Access.WRITE) is None


async def test_what_was_granted_to_another_is_not_to_be_committed_nor_given_back(door: Door) -> None:
    owner, thief = await door.client(), await door.client()
    room = await reserved(owner, 1)
    write(door, room, 0, payload(1))
    assert await commit(thief, room.grant, [0], [payload(1)]) == [False]
    assert not (await thief.ask(Release(1, room.grant, [0]))).stood
    assert (await reserved(thief, 1)).coming == [0]
    thief.close()
    assert await commit(owner, room.grant, [0], [payload(1)]) == [True]


async def test_what_may_be_read_may_not_be_committed(door: Door) -> None:
    door.store(1)
    client = await door.client()
    granted = await client.look_up([make_key(1)])
    assert await commit(client, granted.grant, [0], [payload(1)]) == [False]
    assert await client.release(granted)


@pytest.mark.parametrize("offset", [-(1 << 63), -4096, -1, 1 << 20, (1 << 63) - 1, 1 << 63])
async def test_only_what_was_reserved_may_be_written(door: Door, offset: int) -> None:
    client = await door.client()
    room = await reserved(client, 1, 2)
    for length in (1, CHUNK, 1 << 62):
        assert door.grants.hold(RemoteSpan(room.grant, offset, length), Access.WRITE) is None
    for length in (CHUNK, 1 << 62, -1, 0):
        assert door.grants.hold(RemoteSpan(room.grant, room.offsets[0], length), Access.WRITE) is None


HOSTILE: dict[str, Message] = {
    "no_length": reserving(1, length=0),
    "negative_length": reserving(1, length=-1),
    "length_of_63_bits": reserving(1, length=1 << 63),
    "length_of_64_bits": reserving(1, length=(1 << 64) - 1),
    "too_many": reserving(*range(MOST_RESERVED + 1)),
    "half_a_key": Reserve(1, SPACE, b"half", b"half", [PAYLOAD]),
    "fewer_parents": Reserve(1, SPACE, bytes(64), bytes(32), [PAYLOAD] * 2),
    "fewer_lengths": Reserve(1, SPACE, bytes(64), bytes(64), [PAYLOAD]),
    "more_lengths": Reserve(1, SPACE, bytes(32), bytes(32), [PAYLOAD] * 100_000),
    "no_namespace": Reserve(1, b"", bytes(32), bytes(32), [PAYLOAD]),
    "half_a_checksum": Commit(1, 5, [0], bytes(15)),
    "no_checksums": Commit(1, 5, [0] * 1000, b""),
    "announces_half_a_key": Announce(1, 1, b"half"),
    "announces_too_many": Announce(1, 1, bytes(32 * (MOST_IN_ONE + 1))),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_what_is_no_protocol_ends_the_connection_and_no_other(door: Door, name: str) -> None:
    assert "it" in await is_refused(door, reserving(1, 2), HOSTILE[name])


async def test_an_announcement_twice_under_one_number_ends_the_connection(door: Door) -> None:
    twice = Announce(1, 1, join_keys([make_key(1)]))
    assert "twice" in await is_refused(door, twice, twice)


async def test_chunks_that_no_memory_holds_find_no_room(door: Door) -> None:
    client = await door.client()
    answer = await client.ask(reserving(1, 2, length=1 << 40))
    assert (answer.grant, answer.positions, answer.held, answer.coming) == (NO_GRANT, [], [], [])


async def test_no_more_than_a_share_of_memory_is_reserved(door: Door) -> None:
    client, other = await door.client(), await door.client()
    room = await reserved(client, *range(1, 60))
    assert len(room.positions) == 32
    assert (await reserved(other, 101)).positions == []
    assert (await client.ask(Release(2, room.grant, [31]))).stood
    assert (await reserved(other, 101)).positions == [0]


async def test_what_is_promised_for_reading_leaves_less_to_reserve(door: Door) -> None:
    keys = door.store(*range(1, 31))
    client = await door.client()
    granted = await client.look_up(keys)
    assert len((await reserved(client, *range(101, 120))).positions) == 2
    await client.release(granted)


async def test_the_same_chunk_twice_in_one_question(door: Door) -> None:
    client = await door.client()
    room = await reserved(client, 1, 1)
    assert (room.positions, room.coming) == ([0], [1])


async def test_announcements_are_bounded(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.peers.reservations.MOST_ANNOUNCED", 5)
    monkeypatch.setattr("kvtier.peers.reservations.MOST_ANNOUNCEMENTS", 2)
    client = await door.client()
    keys = [make_key(number) for number in range(1, 9)]
    assert await client.ask(Announce(1, 1, join_keys(keys[:3]))) == Announced(1, True)
    assert await client.ask(Announce(2, 2, join_keys(keys[3:]))) == Announced(2, False)
    assert await client.ask(Announce(3, -(1 << 63), join_keys(keys[3:5]))) == Announced(3, True)
    assert await client.ask(Announce(4, 4, b"")) == Announced(4, False)
    assert door.cache.expecting.coming == 5
    for number in (1, 1, 7, (1 << 64) - 1, -(1 << 63)):
        assert await client.ask(Withdraw(5, number)) == Withdrawn(5)
    assert door.cache.expecting.coming == 0


async def test_what_was_announced_and_reserved_is_over_with_its_connection(door: Door) -> None:
    client = await door.client()
    found = door.cache.look_up([make_key(1), make_key(2)], expect=60)
    await client.ask(Announce(1, 1, join_keys([make_key(1), make_key(2)])))
    await reserved(client, 1)
    assert found.under_way == 2
    client.close()
    with anyio.fail_after(30):
        await door.cache.settle(found)
    assert not found.chunks


async def test_reservations_count_as_under_way_without_an_announcement(door: Door) -> None:
    client = await door.client()
    room = await reserved(client, 1)
    found = door.cache.look_up([make_key(1)], expect=60)
    write(door, room, 0, payload(1))
    assert await commit(client, room.grant, [0], [payload(1)]) == [True]
    with anyio.fail_after(30):
        await door.cache.settle(found)
    assert len(found.chunks) == 1
    found.release()


# Time.


@pytest.fixture
async def hasty() -> AsyncIterator[Door]:
    """Lets nobody reserve for longer than a moment."""
    async with serving(lease=0.2) as opened:
        yield opened


async def test_room_that_is_not_filled_in_time_goes_back_and_who_waits_is_told(hasty: Door) -> None:
    client = await hasty.client()
    found = hasty.cache.look_up([make_key(1)], expect=60)
    room = await reserved(client, 1, 2)
    with anyio.fail_after(30):
        await hasty.cache.settle(found)
    assert not found.chunks
    assert not hasty.grants.open
    assert not hasty.cache.arena.leases
    assert hasty.grants.hold(RemoteSpan(room.grant, room.offsets[0], PAYLOAD), Access.WRITE) is None
    assert await commit(client, room.grant, [0], [payload(1)]) == [False]
    assert (await reserved(client, 1, 2)).positions == [0, 1]


class OneSided(NoTransport):
    """One whose writers cannot be refused, and take their time to be cut off."""

    one_sided = True

    def __init__(self, may_end: anyio.Event) -> None:
        super().__init__()
        self.cuts = 0
        self._may_end = may_end

    async def cut_off(self) -> None:
        self.cuts += 1
        await self._may_end.wait()


async def test_memory_that_may_still_be_written_is_used_for_nothing_else() -> None:
    may_end = anyio.Event()
    transport = OneSided(may_end)
    async with serving(transport=transport, lease=0.2) as door:
        client = await door.client()
        found = door.cache.look_up([make_key(1)], expect=60)
        room = await reserved(client, 1, 2)
        with anyio.fail_after(30):
            await door.cache.settle(found)
        # Its time is over: the catalog has forgotten it, the memory is not free.
        assert make_key(1) not in door.cache.hierarchy.catalog
        assert (door.cache.arena.leases, door.grants.open) == (2, 1)
        await client.ask(Release(1, room.grant, [1]))
        assert door.cache.arena.leases == 1, "given back"
        client.close()
        await until(lambda: transport.cuts)
        assert door.cache.arena.leases == 1, "not before it is cut off"
        may_end.set()
        await until(lambda: not door.cache.arena.leases)


async def test_who_leaves_with_nothing_unfilled_is_not_cut_off() -> None:
    may_end = anyio.Event()
    transport = OneSided(may_end)
    async with serving(transport=transport) as door:
        client = await door.client()
        room = await reserved(client, 1, 2)
        write(door, room, 0, payload(1))
        assert await commit(client, room.grant, [0], [payload(1)]) == [True]
        await client.ask(Release(1, room.grant, [1]))
        client.close()
        await until(lambda: not door.server.status()["connections"])
        assert not transport.cuts


async def test_who_leaves_in_the_middle_of_a_verification_leaves_nothing(door: Door) -> None:
    for _ in range(20):
        client = await door.client()
        room = await reserved(client, *range(1, 11))
        for at in range(10):
            write(door, room, at, payload(at + 1))
        checksums = b"".join(xxh3_128_digest(payload(at + 1)) for at in range(10))
        await client.say(Commit(1, room.grant, list(range(10)), checksums))
        client.close()
        await until(lambda: not door.server.status()["connections"])
        await door.cache.clear([make_key(number) for number in range(1, 11)])


async def test_a_flood_of_commits_is_answered_one_after_the_other(door: Door) -> None:
    client = await door.client()
    room = await reserved(client, 1)
    await client.say(*(Commit(ticket, room.grant, [0], bytes(16)) for ticket in range(500)))
    assert {(await client.hear()).ticket for _ in range(500)} == set(range(500))


async def test_look_ups_go_on_beside_reservations(door: Door) -> None:
    keys = door.store(1)
    client = await door.client()
    await reserved(client, 2)
    granted = await client.ask(LookUp(1, join_keys([*keys, make_key(2)]), False))
    assert granted.positions == [0], "what is reserved is nobody's yet"
    await client.release(granted)
