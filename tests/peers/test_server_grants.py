"""What a server grants, when it may be read, and when that ends: asked message by message."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from kvtier.backends.sealed import SealedBackend
from kvtier.header import ChunkHeader, is_sealed
from kvtier.keys import ChunkKey, join_keys
from kvtier.peers import session as session_module
from kvtier.peers.protocol import (
    NO_GRANT,
    VERSION,
    Await,
    Contained,
    Contains,
    Granted,
    Hello,
    Ping,
    Pong,
    Readable,
    Refused,
    Release,
    Released,
)
from kvtier.testing.backend import make_key
from kvtier.testing.faults import SlowBackend
from kvtier.transports.base import Access, RemoteSpan

from .serving import CHUNK, Door, RawClient, serving, until

pytestmark = pytest.mark.anyio


def spans(granted: Granted) -> list[RemoteSpan]:
    return [
        RemoteSpan(granted.grant, offset, length)
        for offset, length in zip(granted.offsets, granted.lengths, strict=True)
    ]


async def readable(client: RawClient, granted: Granted, chunks: list[int]) -> list[bool]:
    answer = await client.ask(Await(9, granted.grant, chunks))
    assert isinstance(answer, Readable)
    return answer.readable


async def test_a_prefix_is_granted_sealed_and_released() -> None:
    async with serving() as door:
        keys = door.store(1, 2, 3)
        client = await door.client()
        granted = await client.look_up([*keys, make_key(4)])
        assert granted.positions == [0, 1, 2]
        assert granted.lengths == [CHUNK] * 3
        assert granted.ready == 0, "they have no checksum yet"
        assert await readable(client, granted, [0, 1, 2]) == [True] * 3
        for key, span in zip(keys, spans(granted), strict=True):
            lease = door.grants.hold(span, Access.READ)
            assert lease is not None
            assert ChunkHeader.verify(lease.view, key)
            assert is_sealed(lease.view)
            lease.release()
        assert door.grants.promised == 3 * CHUNK
        assert await client.release(granted, [0])
        assert door.grants.promised == 2 * CHUNK
        assert await client.release(granted, [1, 2])
        assert door.grants.open == 0
        again = await client.look_up(keys)
        assert again.ready == 3, "the checksums stay"


async def test_without_checksums_all_is_ready_at_once() -> None:
    async with serving(checksum=False) as door:
        keys = door.store(1, 2)
        client = await door.client()
        granted = await client.look_up(keys)
        assert granted.ready == 2
        lease = door.grants.hold(spans(granted)[0], Access.READ)
        assert lease is not None
        assert not is_sealed(lease.view)
        lease.release()


async def test_what_has_no_checksum_yet_cannot_be_had() -> None:
    async with serving() as door:
        (key,) = door.store(1)
        client = await door.client()
        go_on = anyio.Event()

        async def fail_later(chunks: Sequence[object]) -> list[bool]:
            await go_on.wait()
            return [False] * len(chunks)

        door.server._holdings.seal = fail_later  # type: ignore[method-assign]
        granted = await client.look_up([key])
        (span,) = spans(granted)
        assert door.grants.hold(span, Access.READ) is None
        await client.say(Await(9, granted.grant, [0]))
        assert await client.ask(Ping(3)) == Pong(3), "who waits holds nobody up"
        go_on.set()
        assert await client.hear() == Readable(9, [False])
        assert door.grants.hold(span, Access.READ) is None


async def test_what_is_damaged_in_memory_is_not_readable() -> None:
    async with serving() as door:
        keys = door.store(1, 2, 3)
        client = await door.client()
        lease = door.cache.hierarchy.share(keys[1])
        assert lease is not None
        lease.view[30] ^= 1
        lease.release()
        granted = await client.look_up(keys)
        assert await readable(client, granted, [2, 1, 0]) == [True, False, True]
        catalog = door.cache.hierarchy.catalog
        assert [catalog.tiers(key) for key in keys] == [[0], [], [0]], "it is not served here, either"
        assert door.cache.hierarchy.sealer.corrupt == 1


async def test_a_prefix_ends_with_the_first_gap_and_a_selection_does_not() -> None:
    async with serving() as door:
        one, two, three = door.store(1, 2, 3)
        missing = make_key(9)
        client = await door.client()
        assert (await client.look_up([one, missing, two])).positions == [0]
        granted = await client.look_up([missing, one, missing, three, two], prefix=False)
        assert granted.positions == [1, 3, 4]
        assert (await client.look_up([missing, one])).grant == NO_GRANT
        assert (await client.look_up([])).grant == NO_GRANT
        answer = await client.ask(Contains(5, join_keys([one, missing, three])))
        assert answer == Contained(5, [True, False, True])
        assert await client.ask(Contains(6, b"")) == Contained(6, [])


async def test_many_keys_in_many_steps() -> None:
    count = 2000
    async with serving(ram=2 * count, share=1, checksum=False) as door:
        keys = await door.store_many(count)
        client = await door.client()
        granted = await client.look_up([*keys, make_key(0)])
        assert granted.positions == list(range(count))
        assert len(set(granted.offsets)) == count
        odd = [key if index % 2 else make_key(10**6 + index) for index, key in enumerate(keys)]
        some = await client.look_up(odd, prefix=False)
        assert some.positions == list(range(1, count, 2))
        answer = await client.ask(Contains(5, join_keys(odd)))
        assert answer.held == [bool(index % 2) for index in range(count)]
        assert door.grants.promised == count * CHUNK, "what is granted twice is kept once"


async def test_chunks_on_disk_take_off_and_can_be_awaited(tmp_path: Path) -> None:
    async with serving(disk=tmp_path / "ssd") as door:
        keys = door.store(1, 2, 3)
        assert await door.cache.drain(10)
        door.cache.hierarchy.drop(keys)
        client = await door.client()
        granted = await client.look_up(keys)
        assert granted.positions == [0, 1, 2]
        assert granted.ready == 0
        assert await readable(client, granted, [0, 1, 2]) == [True] * 3
        for key, span in zip(keys, spans(granted), strict=True):
            lease = door.grants.hold(span, Access.READ)
            assert lease is not None
            assert ChunkHeader.verify(lease.view, key)
            lease.release()


def slowed(door: Door) -> SlowBackend:
    """The disk, which from now on does as it is told."""
    sealed = door.cache.hierarchy.tiers[1].backend.inner
    assert isinstance(sealed, SealedBackend)
    sealed._inner = slow = SlowBackend(sealed._inner)
    return slow


async def on_disk_alone(door: Door, *numbers: int) -> list[ChunkKey]:
    keys = door.store(*numbers)
    assert await door.cache.drain(10)
    door.cache.hierarchy.drop(keys)
    return keys


async def test_what_flies_cannot_be_had_until_it_has_landed(tmp_path: Path) -> None:
    async with serving(disk=tmp_path / "ssd") as door:
        keys = await on_disk_alone(door, 1, 2)
        keys += door.store(3)
        disk = slowed(door)
        disk.hang()
        client = await door.client()
        granted = await client.look_up(keys)
        assert granted.ready == 0
        assert await readable(client, granted, [2]) == [True], "it waits for no other"
        assert [door.grants.hold(span, Access.READ) for span in spans(granted)[:2]] == [None, None]
        await client.say(Await(9, granted.grant, [0, 1]))
        assert await client.ask(Ping(3)) == Pong(3)
        disk.resume()
        assert await client.hear() == Readable(9, [True, True])


async def test_what_does_not_land_is_not_readable(tmp_path: Path) -> None:
    async with serving(disk=tmp_path / "ssd") as door:
        keys = await on_disk_alone(door, 1, 2)
        for path in (tmp_path / "ssd").rglob("*"):
            if path.is_file() and path.stat().st_size == CHUNK:
                path.write_bytes(bytes(CHUNK))
        client = await door.client()
        granted = await client.look_up(keys)
        assert await readable(client, granted, [0, 1]) == [False, False]
        assert [door.grants.hold(span, Access.READ) for span in spans(granted)] == [None, None]


async def test_an_await_ends_with_the_lease(tmp_path: Path) -> None:
    async with serving(disk=tmp_path / "ssd", lease="200ms") as door:
        keys = await on_disk_alone(door, 1)
        disk = slowed(door)
        disk.hang()
        client = await door.client()
        granted = await client.look_up(keys)
        assert await readable(client, granted, [0]) == [False]
        assert door.grants.open == 0
        assert not await client.release(granted)
        disk.resume()


async def test_an_await_ends_with_the_release(tmp_path: Path) -> None:
    async with serving(disk=tmp_path / "ssd") as door:
        keys = await on_disk_alone(door, 1)
        disk = slowed(door)
        disk.hang()
        client = await door.client()
        granted = await client.look_up(keys)
        await client.say(Await(9, granted.grant, [0]), Release(10, granted.grant, [0]))
        answers = [await client.hear(), await client.hear()]
        assert Released(10, True) in answers
        assert Readable(9, [False]) in answers
        disk.resume()


async def test_awaits_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MOST_AWAITS", 3)
    async with serving(disk=tmp_path / "ssd") as door:
        keys = await on_disk_alone(door, 1)
        disk = slowed(door)
        disk.hang()
        client = await door.client()
        granted = await client.look_up(keys)
        await client.say(*(Await(number, granted.grant, [0]) for number in range(4)))
        assert await client.hear() == Readable(3, [False])
        disk.resume()
        answers = [await client.hear() for _ in range(3)]
        assert sorted(answer.ticket for answer in answers) == [0, 1, 2]
        assert all(answer.readable == [True] for answer in answers)


async def test_a_client_that_vanishes_leaves_nothing(tmp_path: Path) -> None:
    async with serving(disk=tmp_path / "ssd") as door:
        keys = await on_disk_alone(door, 1, 2)
        disk = slowed(door)
        disk.hang()
        client = await door.client()
        granted = await client.look_up(keys)
        await client.say(Await(9, granted.grant, [0, 1]))
        await until(lambda: door.server.status()["asked"].get("Await"))  # type: ignore[attr-defined]
        client.close()
        await until(lambda: not door.server.status()["connections"])
        assert door.grants.open == 0
        disk.resume()


async def test_a_transfer_outlives_its_lease_and_its_connection() -> None:
    async with serving(lease="100ms", checksum=False, ram=4) as door:
        keys = door.store(1, 2)
        client = await door.client()
        granted = await client.look_up(keys)
        holding = door.grants.hold(spans(granted)[0], Access.READ)
        assert holding is not None
        expected = bytes(holding.view)
        await until(lambda: door.grants.open == 0)
        assert door.grants.expired == 1
        assert door.grants.hold(spans(granted)[0], Access.READ) is None
        client.close()
        await until(lambda: not door.server.status()["connections"])
        door.store(11, 12, 13)  # All that memory has besides.
        assert bytes(holding.view) == expected
        holding.release()


async def test_what_is_evicted_or_cleared_stays_readable_and_is_not_granted_anew() -> None:
    async with serving(ram=4, share=1, checksum=False) as door:
        keys = door.store(1, 2)
        client = await door.client()
        granted = await client.look_up(keys)
        held = [bytes(door.cache.arena.view(span.offset, span.length)) for span in spans(granted)]
        await door.cache.clear(keys[:1])
        door.cache.hierarchy.drop(keys[1:])
        door.store(11, 12)  # All the room that there is beside them.
        for span, before in zip(spans(granted), held, strict=True):
            lease = door.grants.hold(span, Access.READ)
            assert lease is not None
            assert bytes(lease.view) == before
            lease.release()
        assert (await client.look_up(keys)).grant == NO_GRANT
        assert await client.release(granted)


async def test_eviction_races_grants() -> None:
    """Memory of eight chunks, of which six are promised and stored anew over and over."""
    async with serving(ram=8, share=0.75, checksum=False) as door:
        client = await door.client()
        for turn in range(60):
            keys = door.store(*range(turn * 2 + 1, turn * 2 + 3))
            granted = await client.look_up(keys)
            assert len(granted.positions) == 2
            for key, span in zip(keys, spans(granted), strict=True):
                lease = door.grants.hold(span, Access.READ)
                assert lease is not None
                ChunkHeader.verify(lease.view, key)
                lease.release()
            if turn % 3 == 2:
                assert await client.release(granted)
                await client.say(Hello(VERSION, "again", "control"))
                assert isinstance(await client.hear(), Refused)
                await until(lambda: not door.grants.open)
                client = await door.client()


async def test_no_more_is_promised_than_the_share() -> None:
    async with serving(ram=10, share=0.3, checksum=False) as door:
        keys = door.store(1, 2, 3, 4, 5)
        first, second = await door.client(), await door.client()
        granted = await first.look_up(keys)
        assert granted.positions == [0, 1, 2]
        assert door.grants.promised == 3 * CHUNK
        assert (await second.look_up(keys[3:])).grant == NO_GRANT
        assert (await second.look_up(keys[1:])).positions == [0, 1], "they are promised anyway"
        assert await first.release(granted, [0, 1])
        assert door.grants.promised == 2 * CHUNK, "one of them is promised to another, too"
        assert (await first.look_up(keys[3:])).positions == [0]
        assert await first.release(granted, [2])


async def test_more_grants_than_one_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MOST_GRANTS", 2)
    async with serving(checksum=False) as door:
        keys = door.store(1)
        client = await door.client()
        granted = [await client.look_up(keys) for _ in range(3)]
        assert [bool(one.grant) for one in granted] == [True, True, False]
        assert await client.release(granted[0])
        assert (await client.look_up(keys)).grant


async def test_a_grant_is_its_owners_alone() -> None:
    async with serving(checksum=False) as door:
        keys = door.store(1)
        owner, other = await door.client(), await door.client()
        granted = await owner.look_up(keys)
        assert not await other.release(granted)
        assert await readable(other, granted, [0]) == [False]
        assert await readable(owner, granted, [0]) == [True]
        assert await owner.release(granted)


@pytest.mark.parametrize("chunks", [[0, 0], [-1], [1], [1 << 62], [0, 5]])
async def test_chunks_that_are_not_granted_are_not_released(chunks: list[int]) -> None:
    async with serving(checksum=False) as door:
        keys = door.store(1, 2)
        client = await door.client()
        granted = await client.look_up(keys[:1])
        if len(chunks) > 1:
            granted = await client.look_up(keys[:2])
        assert not await client.release(granted, chunks) or chunks == [1]
        assert await readable(client, granted, [-1]) == [False]


async def test_an_unknown_grant() -> None:
    async with serving() as door:
        client = await door.client()
        assert await client.ask(Release(1, 77, [0, 1])) == Released(1, False)
        assert await client.ask(Await(2, 77, [0, 1])) == Readable(2, [False, False])
