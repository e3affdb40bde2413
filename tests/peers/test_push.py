"""Chunks that one instance pushes into another while they are computed, and look-ups that wait for them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from kvtier.errors import PeerError
from kvtier.header import HEADER_BYTES, is_sealed
from kvtier.peers.push import Pushed
from kvtier.peers.source import Read, Source
from kvtier.pipeline.discover import Expected
from kvtier.testing.backend import make_key

from .pushing import CHUNK, Host, hosts, keys_of
from .scripted import until

pytestmark = pytest.mark.anyio

OK, HELD, FULL, FAILED, ABSENT = Pushed
BOTH = ["tcp", pytest.param("nixl", marks=pytest.mark.slow)]


def control_socket(host: Host) -> socket.socket:
    """Of the one connection over which it pushes."""
    assert host.instance._handing is not None
    (client,) = host.instance._handing.peers.clients
    assert client.source is not None
    return client.source.conversation._channel._socket


# Pushed.


@pytest.mark.parametrize("kind", ["tcp", "nixl"])
async def test_chunks_arrive_while_others_are_computed_and_look_ups_wait_for_them(kind: str) -> None:
    async with hosts(kind, 64, 64) as (here, there):
        found = there.look_up(range(1, 21))
        assert (found.ready, found.under_way) == (0, 20)
        here.compute(range(1, 6))
        handing = here.hand_over(there, range(1, 21))
        for number in range(6, 20):
            await until(lambda number=number: there.held([number - 1]))  # type: ignore[misc]
            here.compute([number])
        here.compute([20], payload=1_000)  # A tail, shorter than the others.
        assert await there.settled(found) == 20
        handed = await handing.finish()
        assert handed.leading == 20
        assert handed.trouble == ""
        assert set(handed.outcomes.values()) == {OK}
        assert handed.pushed_bytes == 19 * CHUNK + 4096
        assert handing.progress == (20, 0, 0, 20, 0, 0, handed.pushed_bytes)
        assert there.counts["committed"] == 20


async def test_every_bit_of_a_chunk_object_is_as_if_it_had_been_stored_there() -> None:
    async with hosts("tcp", 8, 8) as (here, there):
        here.compute([1])
        await here.hand_over(there, [1]).finish()
        (ours,), (theirs,) = here.look_up([1]).chunks, there.look_up([1]).chunks
        payload = HEADER_BYTES + 20_000
        assert ours.lease.view[:payload] == theirs.lease.view[:payload], "header and checksum, too"
        for chunk in (ours, theirs):
            chunk.lease.release()


async def test_without_checksums_what_is_pushed_is_verified_and_no_header_here_changes() -> None:
    async with hosts("tcp", 8, 8, checksum=False) as (here, there):
        here.compute([1, 2])
        handed = await here.hand_over(there, [1, 2]).finish()
        assert list(handed.outcomes.values()) == [OK, OK]
        found = here.look_up([1, 2]).chunks
        assert not any(is_sealed(chunk.lease.view) for chunk in found)
        for chunk in found:
            chunk.lease.release()


@pytest.mark.parametrize("checksum", [True, False])
async def test_what_is_corrupt_in_memory_is_not_pushed_and_the_rest_is(checksum: bool) -> None:
    async with hosts("tcp", 8, 8, checksum=checksum) as (here, there):
        here.compute(range(1, 4))
        lease = here.cache.hierarchy.share(make_key(2))
        assert lease is not None
        lease.view[30] ^= 1
        lease.release()
        handed = await here.hand_over(there, range(1, 4)).finish()
        assert list(handed.outcomes.values()) == [OK, FAILED, OK]
        assert here.held(range(1, 4)) == [1, 3]
        assert here.cache.hierarchy.sealer.corrupt == 1


async def test_what_is_there_already_is_not_pushed() -> None:
    async with hosts("tcp", 64, 64) as (here, there):
        there.compute(range(1, 6))
        here.compute(range(1, 9))
        handed = await here.hand_over(there, range(1, 9)).finish()
        assert list(handed.outcomes.values()) == [HELD] * 5 + [OK] * 3
        assert (handed.leading, handed.pushed_bytes) == (8, 3 * CHUNK)


async def test_what_is_never_computed_here_is_not_pushed_and_the_rest_is() -> None:
    async with hosts("tcp", 64, 64) as (here, there):
        there.compute([1, 2])
        here.compute([3, 4])
        handing = here.hand_over(there, range(1, 6))
        handed = await handing.finish()
        assert list(handed.outcomes.values()) == [ABSENT, ABSENT, OK, OK, ABSENT]
        assert handed.leading == 0
        assert await there.settled(there.look_up(range(1, 6))) == 4


async def test_pushed_chunks_are_written_to_the_tiers_below(tmp_path: Path) -> None:
    async with hosts("tcp", 64, 64, folder=tmp_path) as (here, there):
        here.compute(range(1, 5))
        await here.hand_over(there, range(1, 5)).finish()
        assert await there.cache.drain(10)
        assert all(there.cache.hierarchy.catalog.tiers(key) == [0, 1] for key in keys_of(range(1, 5)))
        assert await there.cache.prefetch(keys_of(range(1, 5))) == 4


async def test_a_peer_of_the_settings_is_pushed_to_as_well() -> None:
    async with hosts("tcp", 16) as (there,), hosts("tcp", 16, others=[there.address]) as (here,):
        here.compute([1])
        assert (await here.hand_over(there, [1]).finish()).leading == 1
        assert len(here.instance.peers.clients) == 1  # type: ignore[union-attr]


async def test_nothing_is_left_of_a_hand_over_whose_end_nobody_waits_for() -> None:
    async with hosts("tcp", 16, 16) as (here, there):
        handing = here.hand_over(there, [1, 2])
        here.compute([1, 2])
        await handing.ended.wait()
        assert there.held([1, 2]) == [1, 2]
        assert (await handing.finish()).leading == 2


# Look-ups that wait.


async def test_a_hand_over_that_ends_early_wakes_the_look_ups_at_once() -> None:
    async with hosts("tcp", 64, 64) as (here, there):
        here.compute(range(1, 4))
        handing = here.hand_over(there, range(1, 9))
        found, other = there.look_up(range(1, 9)), there.look_up(range(1, 9))
        await until(lambda: len(found.chunks) == 3)
        other.release()
        await handing.finish()
        assert await there.settled(found) == 3
        assert await there.settled(there.look_up(range(1, 9))) == 3, "known to be over: nobody waits again"


async def test_a_hand_over_that_is_aborted_wakes_the_look_ups_at_once() -> None:
    async with hosts("tcp", 64, 64) as (here, there):
        handing = here.hand_over(there, range(1, 9))
        await handing.announced.wait()
        found = there.look_up(range(1, 9))
        assert found.under_way == 8
        handing.abort()
        assert await there.settled(found) == 0
        await handing.ended.wait()
        assert set(handing.result.outcomes.values()) == {ABSENT}


async def test_a_second_hand_over_is_waited_for_where_a_first_has_ended() -> None:
    async with hosts("tcp", 64, 64) as (here, there):
        await here.hand_over(there, [1, 2]).finish()
        handing = here.hand_over(there, [1, 2])
        await handing.announced.wait()
        found = there.look_up([1, 2])
        here.compute([1, 2])
        assert await there.settled(found) == 2


async def test_what_nobody_announces_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.pipeline.expect.UNANNOUNCED_SECONDS", 0.05)
    async with hosts("tcp", 16) as (there,):
        there.compute([1])
        assert await there.settled(there.look_up([1, 2])) == 1


async def test_a_look_up_waits_until_its_deadline_and_no_longer() -> None:
    async with hosts("tcp", 16, 16) as (here, there):
        here.compute([1])
        handing = here.hand_over(there, [1, 2])
        await handing.announced.wait()
        assert await there.settled(there.look_up([1, 2], expect=0.2)) == 1
        assert there.cache.status()["pushed"] == {"coming": 2, "waiting": 0}
        handing.abort()


async def test_only_the_chunks_that_are_expected_are_waited_for() -> None:
    async with hosts("tcp", 16, 16) as (here, there):
        handing = here.hand_over(there, [1, 2, 3])
        here.compute([1])
        found = there.look_up([1, 2, 3], expect_chunks=1)
        assert await there.settled(found) == 1
        handing.abort()


async def test_what_lies_below_among_pushed_chunks_is_brought_up(tmp_path: Path) -> None:
    async with hosts("tcp", 16, 8, folder=tmp_path) as (here, there):
        there.compute([2, 3])
        assert await there.cache.drain(10)
        await there.cache.clear(keys_of([2, 3]), tiers=["ram"])
        handing = here.hand_over(there, [1, 4])
        found = there.look_up([1, 2, 3, 4])
        here.compute([1, 4])
        assert await there.settled(found) == 4
        assert (await handing.finish()).leading == 2


async def test_a_look_up_that_is_given_up_waits_for_nothing() -> None:
    async with hosts("tcp", 16, 16) as (here, there):
        handing = here.hand_over(there, [1, 2])
        await handing.announced.wait()
        found = there.look_up([1, 2])
        assert there.cache.status()["pushed"] == {"coming": 2, "waiting": 1}
        found.release()
        assert there.cache.status()["pushed"] == {"coming": 2, "waiting": 0}
        here.compute([1, 2])
        assert (await handing.finish()).leading == 2
        assert not found.chunks


async def test_without_a_hint_only_what_is_there_counts() -> None:
    async with hosts("tcp", 16, 16) as (here, there):
        handing = here.hand_over(there, [1, 2])
        await handing.announced.wait()
        assert not there.cache.look_up(keys_of([1, 2])).under_way
        handing.abort()


async def test_the_rest_is_asked_of_pools_when_the_push_is_over() -> None:
    async with hosts("tcp", 16) as (here,), hosts("tcp", 16, others=[here.address]) as (there,):
        await until(lambda: there.instance.peers.clients[0].source)  # type: ignore[union-attr]
        handing = here.hand_over(there, [1, 2])
        await handing.announced.wait()
        found = there.look_up([1, 2], expected=Expected(bytes(32), [CHUNK] * 2))
        handing.abort()
        await handing.ended.wait()
        here.compute([1, 2])  # Too late for the hand-over, in time to be fetched.
        assert await there.settled(found) == 2


# No room.


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.peers.push.FULL_SECONDS", 0.05)


@pytest.mark.usefixtures("impatient")
async def test_a_target_whose_memory_is_in_use_takes_what_it_can_and_the_rest_is_not_sent() -> None:
    async with hosts("tcp", 64, 8, share=1) as (here, there):
        there.compute(range(101, 106))
        in_use = there.cache.look_up(keys_of(range(101, 106)))
        here.compute(range(1, 9))
        found = there.look_up(range(1, 9))
        handed = await here.hand_over(there, range(1, 9)).finish()
        assert list(handed.outcomes.values()) == [OK] * 3 + [FULL] * 5
        assert handed.leading == 3
        assert await there.settled(found) == 3
        in_use.release()
        assert (await here.hand_over(there, range(1, 5)).finish()).leading == 4, "now there is room"


async def test_room_that_comes_free_soon_is_waited_for() -> None:
    async with hosts("tcp", 64, 8, share=1) as (here, there):
        there.compute(range(101, 109))
        in_use = there.cache.look_up(keys_of(range(101, 109)))
        here.compute([1])
        handing = here.hand_over(there, [1])
        await until(lambda: there.counts.get("no_room"))
        in_use.release()
        assert (await handing.finish()).leading == 1


async def test_a_small_buffer_makes_it_slow_but_not_fail() -> None:
    async with hosts("tcp", 64, 64, hand_over={"buffer": 2 * CHUNK}) as (here, there):
        here.compute(range(1, 31))
        assert (await here.hand_over(there, range(1, 31)).finish(30)).leading == 30


async def test_a_model_that_was_reset_there_is_not_taken_from_others() -> None:
    async with hosts("tcp", 16, 16) as (here, there):
        await there.cache.clear(namespace=bytes(32))
        here.compute([1])
        handed = await here.hand_over(there, [1]).finish()
        assert list(handed.outcomes.values()) == [FAILED]
        assert "reset" in handed.trouble


async def test_what_was_cleared_on_its_way_is_not_kept() -> None:
    async with hosts("tcp", 16, 16) as (here, there):
        here.compute([1])
        assert here.instance._handing is not None
        async with here.instance._handing.peers.lend(there.address) as source:
            write = source.write

            async def clear_first(writes: list[Read]) -> Any:
                await there.cache.clear(keys_of([1]))
                return await write(writes)

            source.write = clear_first  # type: ignore[assignment, method-assign]
            await here.hand_over(there, [1]).finish()
        assert there.held([1]) == []


# Several at once.


@pytest.mark.parametrize("kind", BOTH)
async def test_two_instances_push_the_same_prompt_at_once(kind: str) -> None:
    async with hosts(kind, 64, 64, 64) as (one, other, there):
        found = there.look_up(range(1, 31))
        handings = [host.hand_over(there, range(1, 31)) for host in (one, other)]
        for number in range(1, 31):
            one.compute([number])
            other.compute([number])
            await checkpoint()
        results = [await handing.finish(30) for handing in handings]
        assert [handed.leading for handed in results] == [30, 30]
        assert await there.settled(found) == 30
        assert there.counts["committed"] == 30, "each was sent once"


async def test_the_same_prompt_twice_from_one_instance() -> None:
    async with hosts("tcp", 64, 64) as (here, there):
        handings = [here.hand_over(there, range(1, 21)) for _ in range(3)]
        here.compute(range(1, 21))
        assert [(await handing.finish()).leading for handing in handings] == [20, 20, 20]
        assert there.counts["committed"] == 20


async def test_two_instances_push_to_each_other_at_once() -> None:
    async with hosts("tcp", 64, 64) as (one, other):
        handings = [one.hand_over(other, range(1, 21)), other.hand_over(one, range(31, 51))]
        found = [other.look_up(range(1, 21)), one.look_up(range(31, 51))]
        one.compute(range(1, 21))
        other.compute(range(31, 51))
        assert await other.settled(found[0]) == 20
        assert await one.settled(found[1]) == 20
        assert [(await handing.finish()).leading for handing in handings] == [20, 20]


async def test_who_wants_a_chunk_that_its_own_engine_computes_gets_it_once_it_is_there() -> None:
    async with hosts("tcp", 64, 64) as (here, there):
        from kvtier.header import ChunkHeader

        reservation = there.cache.reserve(ChunkHeader(make_key(1), make_key(0), bytes(32), 20_000))
        assert reservation is not None
        here.compute([1])
        handing = here.hand_over(there, [1])
        await until(lambda: handing.progress.under_way)
        there.cache.commit([reservation])
        assert list((await handing.finish()).outcomes.values()) == [HELD]


async def test_what_waits_to_be_pushed_is_not_evicted() -> None:
    async with hosts("tcp", 8, 64) as (here, there):
        assert here.instance._handing is not None
        async with here.instance._handing.peers.lend(there.address) as source:
            for _ in range(8):
                await source.pushing.acquire()
            handing = here.hand_over(there, range(1, 4))
            here.compute(range(1, 4))
            for number in range(101, 121):
                here.compute([number])
            assert here.held(range(1, 4)) == [1, 2, 3]
            for _ in range(8):
                source.pushing.release()
            assert (await handing.finish()).leading == 3


async def test_what_waits_to_be_pushed_does_not_take_all_memory() -> None:
    """Beyond a share of it, what waits is not leased, and not pushed where it has gone meanwhile."""
    async with hosts("tcp", 8, 64) as (here, there):
        assert here.instance._handing is not None
        async with here.instance._handing.peers.lend(there.address) as source:
            for _ in range(8):
                await source.pushing.acquire()
            handing = here.hand_over(there, range(1, 31))
            for number in range(1, 31):
                here.compute([number])
            for _ in range(8):
                source.pushing.release()
            handed = await handing.finish()
        assert list(handed.outcomes.values())[:4] == [OK] * 4
        assert ABSENT in handed.outcomes.values()


# Corrupt.


@pytest.mark.parametrize("kind", BOTH)
async def test_bytes_that_change_between_checksum_and_write_are_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosts(kind, 64, 64) as (here, there):
        here.compute(range(1, 4))
        honest = Source.write

        async def flipped(self: Source, writes: list[Read]) -> Any:
            for promise, view in writes:
                if promise.key == make_key(2):
                    view[777] ^= 1
            return await honest(self, writes)

        monkeypatch.setattr(Source, "write", flipped)
        found = there.look_up(range(1, 4))
        handed = await here.hand_over(there, range(1, 4)).finish()
        # The second attempt flips it back: it is right then, and taken.
        assert list(handed.outcomes.values()) == [OK, OK, OK]
        assert there.counts["refused"] == 1
        assert await there.settled(found) == 3


async def test_what_is_corrupt_for_good_is_never_served(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hosts("tcp", 64, 64) as (here, there):
        here.compute(range(1, 4))
        honest = Source.write

        async def flipped(self: Source, writes: list[Read]) -> Any:
            for promise, view in writes:
                if promise.key == make_key(2):
                    view[777] |= 0x80
                    view[778] = (view[778] + 1) % 256
            return await honest(self, writes)

        monkeypatch.setattr(Source, "write", flipped)
        found = there.look_up(range(1, 4))
        handed = await here.hand_over(there, range(1, 4)).finish()
        assert handed.outcomes[make_key(2)] is FAILED
        assert there.held([2]) == []
        assert there.counts["refused"] == 2
        assert await there.settled(found) == 1


# Cut.


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("when", ["announced", "written"])
async def test_after_a_cut_the_rest_is_pushed_over_another_connection(
    kind: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosts(kind, 64, 64) as (here, there):
        handing = here.hand_over(there, range(1, 11))
        await handing.announced.wait()
        here.compute(range(1, 6))
        await until(lambda: there.held([5]))
        if when == "written":
            honest, cuts = Source.write, iter([True])

            async def cut(self: Source, writes: list[Read]) -> Any:
                outcomes = await honest(self, writes)
                if next(cuts, False):
                    control_socket(here).shutdown(socket.SHUT_RDWR)
                return outcomes

            monkeypatch.setattr(Source, "write", cut)
        else:
            control_socket(here).shutdown(socket.SHUT_RDWR)
        here.compute(range(6, 11))
        handed = await handing.finish(30)
        assert handed.leading == 10
        assert handed.trouble == ""
        assert await there.settled(there.look_up(range(1, 11))) == 10


async def test_after_a_second_cut_it_ends_and_who_waits_is_told() -> None:
    async with hosts("tcp", 64, 64) as (here, there):
        handing = here.hand_over(there, range(1, 11))
        await handing.announced.wait()
        control_socket(here).shutdown(socket.SHUT_RDWR)
        here.compute([1])
        await until(lambda: there.held([1]))
        found = there.look_up(range(1, 11))
        control_socket(here).shutdown(socket.SHUT_RDWR)
        await handing.ended.wait()
        assert handing.result.leading == 1
        assert "lost" in handing.result.trouble or "closed" in handing.result.trouble
        assert await there.settled(found) == 1


async def test_nobody_there_is_no_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with hosts("tcp", 16) as (here,):
        here.compute([1])
        handing = here.instance.hand_over(f"127.0.0.1:{port}", keys_of([1, 2]))
        handed = await handing.finish()
        assert (handed.leading, handed.pushed_bytes) == (0, 0)
        assert "cannot be reached" in handed.trouble


async def test_pushing_to_oneself_is_said_to_be_so() -> None:
    async with hosts("tcp", 16) as (here,):
        here.compute([1])
        assert "this very instance" in (await here.hand_over(here, [1]).finish()).trouble


@pytest.mark.parametrize("address", ["", "nowhere", "a:b:1", "host:99999", "\x00:1"])
async def test_what_is_no_address_is_refused_in_words(address: str) -> None:
    async with hosts("tcp", 16) as (here,):
        if address == "\x00:1":
            assert "no address" in (await here.instance.hand_over(address, []).finish()).trouble
            return
        with pytest.raises(PeerError, match="cannot hand over"):
            here.instance.hand_over(address, keys_of([1]))


async def test_an_instance_that_closes_ends_its_hand_overs() -> None:
    async with hosts("tcp", 16) as (there,):
        async with hosts("tcp", 16) as (here,):
            handing = here.hand_over(there, [1, 2])
            await handing.announced.wait()
            found = there.look_up([1, 2])
            handing.abort()
        assert handing.ended.is_set()
        assert await there.settled(found) == 0


async def test_a_finish_that_is_cancelled_ends_it() -> None:
    async with hosts("tcp", 16, 16) as (here, there):
        handing = here.hand_over(there, [1, 2])
        here.compute([1])
        with anyio.move_on_after(0):
            await handing.finish()
        await handing.ended.wait()
