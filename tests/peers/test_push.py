"""Chunks that one instance pushes to another while they are computed, and lookups that wait for them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from xxhash import xxh3_128_digest

from kvtier import native
from kvtier.errors import ChannelClosed, PeerError
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, is_sealed
from kvtier.peers.push import Pusher, PushOutcome
from kvtier.peers.remote_leases import RemoteLease
from kvtier.peers.source import Read, Source, Written
from kvtier.pipeline.query import Expected, Query
from kvtier.testing.backend import make_key
from tests.rigs.peer_server import corrupt
from tests.rigs.pushing import CHUNK, Host, hosts, keys_of
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio

OK, HELD, FULL, FAILED, ABSENT = PushOutcome
BOTH = ["tcp", pytest.param("nixl", marks=pytest.mark.slow)]


def lose_connection(host: Host) -> None:
    """End its only push connection."""
    (client,) = host.peers.clients
    assert client.source is not None
    client.source.endpoint.end(ChannelClosed("the connection was lost"))


def send_wrong_checksums(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Commit chunk 2 with a checksum that what has arrived does not match, as often as that."""
    commit_all, left = Pusher.commit, iter(range(times))

    async def commit(
        self: Pusher, leases: Sequence[RemoteLease], checksums: Sequence[bytes]
    ) -> Sequence[bool]:
        sent = [
            bytes(16) if lease.key == make_key(2) and next(left, None) is not None else checksum
            for lease, checksum in zip(leases, checksums, strict=True)
        ]
        return await commit_all(self, leases, sent)

    monkeypatch.setattr(Pusher, "commit", commit)


# Outcomes.


@pytest.mark.parametrize("kind", ["tcp", "nixl"])
async def test_chunks_are_pushed_while_others_are_computed_and_lookups_wait(kind: str) -> None:
    async with hosts(kind, 64, 64) as (sender, receiver):
        found = receiver.look_up(range(1, 21))
        assert (found.ready, found.in_flight) == (0, 20)
        sender.compute(range(1, 6))
        transfer = sender.transfer_kv(receiver, range(1, 21))
        for number in range(6, 20):
            await until(lambda number=number: receiver.held([number - 1]))  # type: ignore[misc]
            sender.compute([number])
        sender.compute([20], payload=1_000)  # A tail, shorter than the others.
        assert await receiver.settle(found) == 20
        result = await transfer.finish()
        assert result.leading == 20
        assert result.last_error == ""
        assert set(result.outcomes.values()) == {OK}
        assert result.pushed_bytes == 19 * CHUNK + 4096
        assert receiver.counts["committed"] == 20


async def test_pushed_chunk_object_is_identical() -> None:
    async with hosts("tcp", 8, 8) as (sender, receiver):
        sender.compute([1])
        await sender.transfer_kv(receiver, [1]).finish()
        (ours,), (theirs,) = sender.look_up([1]).chunks, receiver.look_up([1]).chunks
        payload = HEADER_BYTES + 20_000
        assert ours.lease.view[:payload] == theirs.lease.view[:payload], "header and checksum included"
        header = ChunkHeader.parse(theirs.lease.view)
        assert (header.block_hashes, header.tokens) == (make_key(1), 37)
        for chunk in (ours, theirs):
            chunk.lease.release()


async def test_without_checksums_pushes_are_verified_and_sender_headers_unchanged() -> None:
    async with hosts("tcp", 8, 8, checksum=False) as (sender, receiver):
        sender.compute([1, 2])
        result = await sender.transfer_kv(receiver, [1, 2]).finish()
        assert list(result.outcomes.values()) == [OK, OK]
        found = sender.look_up([1, 2]).chunks
        assert not any(is_sealed(chunk.lease.view) for chunk in found)
        for chunk in found:
            chunk.lease.release()


@pytest.mark.parametrize("checksum", [True, False])
async def test_chunk_corrupt_in_memory_is_not_pushed(checksum: bool) -> None:
    async with hosts("tcp", 8, 8, checksum=checksum) as (sender, receiver):
        sender.compute(range(1, 4))
        corrupt(sender.cache, make_key(2))
        result = await sender.transfer_kv(receiver, range(1, 4)).finish()
        assert list(result.outcomes.values()) == [OK, FAILED, OK]
        assert sender.held(range(1, 4)) == [1, 3]
        assert sender.cache.memory.sealer.corrupt == 1


async def test_chunks_held_by_receiver_are_not_pushed() -> None:
    async with hosts("tcp", 64, 64) as (sender, receiver):
        receiver.compute(range(1, 6))
        sender.compute(range(1, 9))
        result = await sender.transfer_kv(receiver, range(1, 9)).finish()
        assert list(result.outcomes.values()) == [HELD] * 5 + [OK] * 3
        assert (result.leading, result.pushed_bytes) == (8, 3 * CHUNK)


async def test_chunks_never_computed_are_reported_absent() -> None:
    async with hosts("tcp", 64, 64) as (sender, receiver):
        receiver.compute([1, 2])
        sender.compute([3, 4])
        transfer = sender.transfer_kv(receiver, range(1, 6))
        result = await transfer.finish()
        assert list(result.outcomes.values()) == [ABSENT, ABSENT, OK, OK, ABSENT]
        assert result.leading == 0
        assert await receiver.settle(receiver.look_up(range(1, 6))) == 4


async def test_pushed_chunks_are_written_to_lower_tiers(tmp_path: Path) -> None:
    async with hosts("tcp", 64, 64, folder=tmp_path) as (sender, receiver):
        sender.compute(range(1, 5))
        await sender.transfer_kv(receiver, range(1, 5)).finish()
        assert await receiver.cache.drain(10)
        assert all(receiver.cache.catalog.tiers(key) == [0, 1] for key in keys_of(range(1, 5)))
        assert await receiver.cache.prefetch(Query(keys_of(range(1, 5)))) == 4


async def test_push_to_configured_peer_reuses_its_client() -> None:
    async with hosts("tcp", 16) as (receiver,), hosts("tcp", 16, others=[receiver.address]) as (sender,):
        sender.compute([1])
        assert (await sender.transfer_kv(receiver, [1]).finish()).leading == 1
        assert len(sender.instance.peers.clients) == 1  # type: ignore[union-attr]


async def test_kv_transfer_ends_without_a_waiter() -> None:
    async with hosts("tcp", 16, 16) as (sender, receiver):
        transfer = sender.transfer_kv(receiver, [1, 2])
        sender.compute([1, 2])
        await transfer.ended.wait()
        assert receiver.held([1, 2]) == [1, 2]
        assert (await transfer.finish()).leading == 2


# Lookups that wait.


async def test_kv_transfer_that_ends_early_wakes_lookups() -> None:
    async with hosts("tcp", 64, 64) as (sender, receiver):
        sender.compute(range(1, 4))
        transfer = sender.transfer_kv(receiver, range(1, 9))
        found, other = receiver.look_up(range(1, 9)), receiver.look_up(range(1, 9))
        await until(lambda: len(found.chunks) == 3)
        other.release()
        await transfer.finish()
        assert await receiver.settle(found) == 3
        assert await receiver.settle(receiver.look_up(range(1, 9))) == 3, (
            "known to have ended: no second wait"
        )


async def test_aborted_kv_transfer_wakes_lookups() -> None:
    async with hosts("tcp", 64, 64) as (sender, receiver):
        transfer = sender.transfer_kv(receiver, range(1, 9))
        await transfer.announced.wait()
        found = receiver.look_up(range(1, 9))
        assert found.in_flight == 8
        transfer.abort()
        assert await receiver.settle(found) == 0
        await transfer.ended.wait()
        assert set(transfer.result.outcomes.values()) == {ABSENT}


async def test_lookup_waits_for_second_kv_transfer_after_first_ended() -> None:
    async with hosts("tcp", 64, 64) as (sender, receiver):
        await sender.transfer_kv(receiver, [1, 2]).finish()
        transfer = sender.transfer_kv(receiver, [1, 2])
        await transfer.announced.wait()
        found = receiver.look_up([1, 2])
        sender.compute([1, 2])
        assert await receiver.settle(found) == 2


async def test_lookup_waits_only_briefly_for_unannounced_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.pipeline.expect.UNANNOUNCED_SECONDS", 0.05)
    async with hosts("tcp", 16) as (receiver,):
        receiver.compute([1])
        assert await receiver.settle(receiver.look_up([1, 2])) == 1


async def test_lookup_waits_until_its_deadline() -> None:
    async with hosts("tcp", 16, 16) as (sender, receiver):
        sender.compute([1])
        transfer = sender.transfer_kv(receiver, [1, 2])
        await transfer.announced.wait()
        assert await receiver.settle(receiver.look_up([1, 2], expect=0.2)) == 1
        assert receiver.cache.status()["pushed"] == {"announced": 2, "waiting": 0}
        transfer.abort()


async def test_lookup_waits_only_for_expected_chunks() -> None:
    async with hosts("tcp", 16, 16) as (sender, receiver):
        transfer = sender.transfer_kv(receiver, [1, 2, 3])
        sender.compute([1])
        found = receiver.look_up([1, 2, 3], expect_chunks=1)
        assert await receiver.settle(found) == 1
        transfer.abort()


async def test_chunks_in_lower_tiers_are_promoted_among_pushed_ones(tmp_path: Path) -> None:
    async with hosts("tcp", 16, 8, folder=tmp_path) as (sender, receiver):
        receiver.compute([2, 3])
        assert await receiver.cache.drain(10)
        await receiver.cache.clear(keys_of([2, 3]), tiers=["ram"])
        transfer = sender.transfer_kv(receiver, [1, 4])
        found = receiver.look_up([1, 2, 3, 4])
        sender.compute([1, 4])
        assert await receiver.settle(found) == 4
        assert (await transfer.finish()).leading == 2


async def test_released_lookup_stops_waiting() -> None:
    async with hosts("tcp", 16, 16) as (sender, receiver):
        transfer = sender.transfer_kv(receiver, [1, 2])
        await transfer.announced.wait()
        found = receiver.look_up([1, 2])
        assert receiver.cache.status()["pushed"] == {"announced": 2, "waiting": 1}
        found.release()
        assert receiver.cache.status()["pushed"] == {"announced": 2, "waiting": 0}
        sender.compute([1, 2])
        assert (await transfer.finish()).leading == 2
        assert not found.chunks


async def test_lookup_without_expect_does_not_wait() -> None:
    async with hosts("tcp", 16, 16) as (sender, receiver):
        transfer = sender.transfer_kv(receiver, [1, 2])
        await transfer.announced.wait()
        assert not receiver.cache.look_up(Query(keys_of([1, 2]))).in_flight
        transfer.abort()


async def test_missing_chunks_are_fetched_from_peers_after_the_push() -> None:
    async with hosts("tcp", 16) as (sender,), hosts("tcp", 16, others=[sender.address]) as (receiver,):
        await until(lambda: receiver.instance.peers.clients[0].source)  # type: ignore[union-attr]
        transfer = sender.transfer_kv(receiver, [1, 2])
        await transfer.announced.wait()
        found = receiver.look_up([1, 2], expected=Expected(bytes(32), [CHUNK] * 2))
        transfer.abort()
        await transfer.ended.wait()
        sender.compute([1, 2])  # Too late for the KV transfer, in time for a fetch.
        assert await receiver.settle(found) == 2


# No room.


@pytest.fixture
def short_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.peers.push.FULL_SECONDS", 0.05)


@pytest.mark.usefixtures("short_wait_for_room")
async def test_full_receiver_takes_what_fits() -> None:
    async with hosts("tcp", 64, 8, share=1) as (sender, receiver):
        receiver.compute(range(101, 106))
        in_use = receiver.cache.look_up(Query(keys_of(range(101, 106))))
        sender.compute(range(1, 9))
        found = receiver.look_up(range(1, 9))
        result = await sender.transfer_kv(receiver, range(1, 9)).finish()
        assert list(result.outcomes.values()) == [OK] * 3 + [FULL] * 5
        assert result.leading == 3
        assert await receiver.settle(found) == 3
        in_use.release()
        assert (await sender.transfer_kv(receiver, range(1, 5)).finish()).leading == 4, "room is free again"


async def test_push_waits_briefly_for_room() -> None:
    async with hosts("tcp", 64, 8, share=1) as (sender, receiver):
        receiver.compute(range(101, 109))
        in_use = receiver.cache.look_up(Query(keys_of(range(101, 109))))
        sender.compute([1])
        transfer = sender.transfer_kv(receiver, [1])
        await until(lambda: receiver.counts.get("no_room"))
        in_use.release()
        assert (await transfer.finish()).leading == 1


async def test_small_buffer_is_sufficient() -> None:
    async with hosts("tcp", 64, 64, kv_transfer={"buffer": 2 * CHUNK}) as (sender, receiver):
        sender.compute(range(1, 31))
        assert (await sender.transfer_kv(receiver, range(1, 31)).finish(30)).leading == 30


async def test_receiver_refuses_push_of_reset_namespace() -> None:
    async with hosts("tcp", 16, 16) as (sender, receiver):
        await receiver.cache.clear(namespace=bytes(32))
        sender.compute([1])
        result = await sender.transfer_kv(receiver, [1]).finish()
        assert list(result.outcomes.values()) == [FAILED]
        assert "reset" in result.last_error


async def test_chunk_cleared_during_push_is_not_kept() -> None:
    async with hosts("tcp", 16, 16) as (sender, receiver):
        sender.compute([1])
        async with sender.peers.checkout(receiver.address) as source:
            write = source.write_hashed

            async def clear_first(writes: list[Read]) -> Any:
                await receiver.cache.clear(keys_of([1]))
                return await write(writes)

            source.write_hashed = clear_first  # type: ignore[assignment, method-assign]
            await sender.transfer_kv(receiver, [1]).finish()
        assert receiver.held([1]) == []


# Concurrency.


@pytest.mark.parametrize("kind", BOTH)
async def test_two_senders_push_the_same_prompt_concurrently(kind: str) -> None:
    async with hosts(kind, 64, 64, 64) as (first, second, receiver):
        found = receiver.look_up(range(1, 31))
        transfers = [host.transfer_kv(receiver, range(1, 31)) for host in (first, second)]
        for number in range(1, 31):
            first.compute([number])
            second.compute([number])
            await checkpoint()
        results = [await transfer.finish(30) for transfer in transfers]
        assert [result.leading for result in results] == [30, 30]
        assert await receiver.settle(found) == 30
        assert receiver.counts["committed"] == 30, "each chunk is committed once"


async def test_concurrent_kv_transfers_of_one_prompt_commit_once() -> None:
    async with hosts("tcp", 64, 64) as (sender, receiver):
        transfers = [sender.transfer_kv(receiver, range(1, 21)) for _ in range(3)]
        sender.compute(range(1, 21))
        assert [(await transfer.finish()).leading for transfer in transfers] == [20, 20, 20]
        assert receiver.counts["committed"] == 20


async def test_two_instances_push_to_each_other_concurrently() -> None:
    async with hosts("tcp", 64, 64) as (first, second):
        transfers = [first.transfer_kv(second, range(1, 21)), second.transfer_kv(first, range(31, 51))]
        found = [second.look_up(range(1, 21)), first.look_up(range(31, 51))]
        first.compute(range(1, 21))
        second.compute(range(31, 51))
        assert await second.settle(found[0]) == 20
        assert await first.settle(found[1]) == 20
        assert [(await transfer.finish()).leading for transfer in transfers] == [20, 20]


async def test_chunk_computed_by_receiver_is_held_once_committed() -> None:
    async with hosts("tcp", 64, 64) as (sender, receiver):
        reservation = receiver.cache.reserve(ChunkHeader(make_key(1), make_key(0), bytes(32), 20_000))
        assert reservation is not None
        sender.compute([1])
        transfer = sender.transfer_kv(receiver, [1])
        await until(lambda: receiver.serving["requests"].get("Reserve"))
        receiver.cache.commit([reservation])
        assert list((await transfer.finish()).outcomes.values()) == [HELD]


async def test_chunks_queued_for_push_are_not_evicted() -> None:
    async with (
        hosts("tcp", 8, 64) as (sender, receiver),
        sender.peers.checkout(receiver.address) as source,
    ):
        for _ in range(8):
            await source.pushing.acquire()
        transfer = sender.transfer_kv(receiver, range(1, 4))
        sender.compute(range(1, 4))
        for number in range(101, 121):
            sender.compute([number])
        assert sender.held(range(1, 4)) == [1, 2, 3]
        for _ in range(8):
            source.pushing.release()
        assert (await transfer.finish()).leading == 3


async def test_leases_of_queued_chunks_are_bounded() -> None:
    """Beyond a share of memory, queued chunks are not leased, and not pushed if evicted in the meantime."""
    async with hosts("tcp", 8, 64) as (sender, receiver):
        async with sender.peers.checkout(receiver.address) as source:
            for _ in range(8):
                await source.pushing.acquire()
            transfer = sender.transfer_kv(receiver, range(1, 31))
            for number in range(1, 31):
                sender.compute([number])
            for _ in range(8):
                source.pushing.release()
            result = await transfer.finish()
        assert list(result.outcomes.values())[:4] == [OK] * 4
        assert ABSENT in result.outcomes.values()


# Corruption.


@pytest.mark.parametrize("kind", BOTH)
async def test_bytes_that_do_not_match_their_checksum_are_refused_and_retried(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosts(kind, 64, 64) as (sender, receiver):
        sender.compute(range(1, 4))
        send_wrong_checksums(monkeypatch, 1)
        found = receiver.look_up(range(1, 4))
        result = await sender.transfer_kv(receiver, range(1, 4)).finish()
        assert list(result.outcomes.values()) == [OK, OK, OK]
        assert receiver.counts["refused"] == 1
        assert await receiver.settle(found) == 3


@pytest.mark.parametrize("checksum", [True, False])
async def test_persistently_corrupt_chunk_is_never_served(
    checksum: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosts("tcp", 64, 64, checksum=checksum) as (sender, receiver):
        sender.compute(range(1, 4))
        send_wrong_checksums(monkeypatch, 2)
        found = receiver.look_up(range(1, 4))
        result = await sender.transfer_kv(receiver, range(1, 4)).finish()
        assert result.outcomes[make_key(2)] is FAILED
        assert receiver.held([2]) == []
        assert receiver.counts["refused"] == 2
        assert await receiver.settle(found) == 1


async def test_sealed_chunk_that_changed_in_memory_is_refused() -> None:
    async with hosts("tcp", 64, 64) as (sender, receiver):
        sender.compute(range(1, 4))
        found = sender.cache.look_up(Query(keys_of(range(1, 4))))
        items = [(chunk.key, chunk.lease.view) for chunk in found.chunks]
        await sender.cache.memory.sealer.seal(items)
        items[1][1][777] ^= 1
        items.clear()
        found.release()
        result = await sender.transfer_kv(receiver, range(1, 4)).finish()
        assert result.outcomes[make_key(2)] is FAILED
        assert receiver.counts["refused"] == 2


async def test_header_that_changed_during_the_push_costs_its_chunk_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engines map the memory writable."""
    async with hosts("tcp", 64, 64) as (sender, receiver):
        sender.compute(range(1, 4))
        found = sender.cache.look_up(Query(keys_of(range(1, 4))))
        views = [chunk.lease.view for chunk in found.chunks]
        damaged, real = views[1][200] ^ 1, Source.write_hashed

        async def write(self: Source, writes: Sequence[Read]) -> Written:
            written = await real(self, writes)
            views[1][200] = damaged
            return written

        monkeypatch.setattr(Source, "write_hashed", write)
        result = await sender.transfer_kv(receiver, range(1, 4)).finish()
        assert list(result.outcomes.values()) == [OK, FAILED, OK]
        await until(lambda: make_key(2) not in receiver.cache.catalog)
        views.clear()
        found.release()


async def test_what_is_hashed_on_the_way_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.available():
        pytest.skip("only native code hashes what it moves")
    hashed: list[int] = []
    monkeypatch.setattr(ChunkHeader, "checksum", lambda header, chunk: hashed.append(len(chunk)))
    async with hosts("tcp", 64, 64) as (sender, receiver):
        sender.compute(range(1, 4))
        result = await sender.transfer_kv(receiver, range(1, 4)).finish()
        assert list(result.outcomes.values()) == [OK, OK, OK]
        for host in sender, receiver:
            found = host.cache.look_up(Query(keys_of(range(1, 4))))
            for chunk in found.chunks:
                header, checksum = ChunkHeader.read(chunk.lease.view, chunk.key)
                payload = chunk.lease.view[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
                assert checksum == xxh3_128_digest(payload)
            payload = memoryview(b"")
            found.release()
    assert hashed == []


# Connection loss.


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("when", ["announced", "written"])
async def test_push_resumes_over_a_new_connection_after_a_loss(
    kind: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosts(kind, 64, 64) as (sender, receiver):
        transfer = sender.transfer_kv(receiver, range(1, 11))
        await transfer.announced.wait()
        sender.compute(range(1, 6))
        await until(lambda: receiver.held([5]))
        if when == "written":
            write_all, losses = Source.write_hashed, iter([True])

            async def write(self: Source, writes: Sequence[Read]) -> Written:
                outcomes = await write_all(self, writes)
                if next(losses, False):
                    lose_connection(sender)
                return outcomes

            monkeypatch.setattr(Source, "write_hashed", write)
        else:
            lose_connection(sender)
        sender.compute(range(6, 11))
        result = await transfer.finish(30)
        assert result.leading == 10
        assert result.last_error == ""
        assert await receiver.settle(receiver.look_up(range(1, 11))) == 10


async def test_second_connection_loss_ends_kv_transfer_and_wakes_lookups() -> None:
    async with hosts("tcp", 64, 64) as (sender, receiver):
        transfer = sender.transfer_kv(receiver, range(1, 11))
        await transfer.announced.wait()
        lose_connection(sender)
        sender.compute([1])
        await until(lambda: transfer.result.leading == 1)  # The receiver has it before the sender knows.
        found = receiver.look_up(range(1, 11))
        lose_connection(sender)
        await transfer.ended.wait()
        assert transfer.result.leading == 1
        assert "lost" in transfer.result.last_error
        assert await receiver.settle(found) == 1


async def test_unreachable_receiver_is_reported_in_the_result() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with hosts("tcp", 16) as (sender,):
        sender.compute([1])
        transfer = sender.instance.transfer_kv(f"127.0.0.1:{port}", keys_of([1, 2]))
        result = await transfer.finish()
        assert (result.leading, result.pushed_bytes) == (0, 0)
        assert "unreachable" in result.last_error


async def test_push_to_own_instance_is_reported() -> None:
    async with hosts("tcp", 16) as (sender,):
        sender.compute([1])
        assert "this instance itself" in (await sender.transfer_kv(sender, [1]).finish()).last_error


@pytest.mark.parametrize("address", ["", "nowhere", "a:b:1", "host:99999", "\x00:1"])
async def test_invalid_address_is_refused(address: str) -> None:
    async with hosts("tcp", 16) as (sender,):
        if address == "\x00:1":
            assert "not an address" in (await sender.instance.transfer_kv(address, []).finish()).last_error
            return
        with pytest.raises(PeerError, match="cannot start a KV transfer"):
            sender.instance.transfer_kv(address, keys_of([1]))


async def test_closing_instance_ends_its_kv_transfers() -> None:
    async with hosts("tcp", 16) as (receiver,):
        async with hosts("tcp", 16) as (sender,):
            transfer = sender.transfer_kv(receiver, [1, 2])
            await transfer.announced.wait()
            found = receiver.look_up([1, 2])
            transfer.abort()
        assert transfer.ended.is_set()
        assert await receiver.settle(found) == 0


async def test_cancelled_finish_ends_kv_transfer() -> None:
    async with hosts("tcp", 16, 16) as (sender, receiver):
        transfer = sender.transfer_kv(receiver, [1, 2])
        sender.compute([1])
        with anyio.move_on_after(0):
            await transfer.finish()
        await transfer.ended.wait()
