"""Chunks of several requests that are pushed together, and room that is reserved before they are complete."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio
import pytest

from kvtier.memory.header import HEADER_BYTES, ChunkHeader
from kvtier.peers import kv_transfer
from kvtier.peers.push import Pusher, PushOutcome, RemoteRoom
from kvtier.peers.source import Read, Source, Written
from kvtier.pipeline.query import Query
from kvtier.testing.backend import make_key
from kvtier.tiers.host_memory import Reservation
from tests.rigs.instance_process import InstanceProcess, payload_of
from tests.rigs.pushing import CHUNK, PAYLOAD, Host, hosts, keys_of
from tests.rigs.waiting import until

from .test_backend_processes import started

pytestmark = pytest.mark.anyio

PROMPTS = [range(1, 3), range(11, 13), range(21, 23), range(31, 33)]
CHUNKS = [number for prompt in PROMPTS for number in prompt]


def reserve(host: Host, numbers: Sequence[int], namespace: bytes = bytes(32)) -> list[Reservation]:
    """Reserve room for chunks, as a scheduler does for all requests of a step."""
    headers = [
        ChunkHeader(make_key(number), make_key(number - 1), namespace, PAYLOAD, make_key(number), 37)
        for number in numbers
    ]
    reservations = [reserved for reserved in host.cache.reserve_all(headers) if reserved is not None]
    assert len(reservations) == len(numbers)
    return reservations


def fill(host: Host, reservations: Sequence[Reservation]) -> None:
    """Make them READY, as the workers do at the end of the step."""
    for reservation in reservations:
        view = reservation.lease.view[HEADER_BYTES : HEADER_BYTES + PAYLOAD]
        view[:] = payload_of(reservation.key, PAYLOAD)
    host.cache.commit(reservations)


@pytest.fixture
async def sender() -> AsyncIterator[Host]:
    async with hosts("tcp", 64) as (host,):
        yield host


@pytest.fixture
async def target() -> AsyncIterator[InstanceProcess]:
    """A decode instance in a process of its own, with room for 64 chunks."""
    process = InstanceProcess(capacity=64 * CHUNK)
    async with started(process):
        yield process


async def serving(target: InstanceProcess) -> dict[str, Any]:
    return dict((await target.status())["serving"])


async def until_reserved(target: InstanceProcess, chunks: int) -> None:
    with anyio.fail_after(30):
        while (await serving(target))["reserving"]["reservations"] != chunks:
            await anyio.sleep(0.01)


# Together.


async def test_chunks_of_several_requests_are_reserved_and_committed_with_one_message(
    sender: Host, target: InstanceProcess
) -> None:
    transfers = [sender.instance.transfer_kv(target.address, keys_of(prompt)) for prompt in PROMPTS]
    reserved = reserve(sender, CHUNKS)
    await until_reserved(target, len(CHUNKS))
    fill(sender, reserved)
    assert [(await transfer.finish()).leading for transfer in transfers] == [2] * 4
    requests = (await serving(target))["requests"]
    assert (requests["Announce"], requests["Reserve"], requests["Commit"]) == (4, 1, 1)
    for prompt in PROMPTS:
        assert (await target._call("await_pushed", start=prompt[0], count=2, seconds=10))[0] == 2


async def test_chunks_that_are_ready_before_need_one_reservation_for_all_requests(
    sender: Host, target: InstanceProcess
) -> None:
    sender.compute(CHUNKS)
    await sender.instance.transfer_kv(target.address, keys_of([99])).finish(0.5)  # Connects.
    transfers = [sender.instance.transfer_kv(target.address, keys_of(prompt)) for prompt in PROMPTS]
    assert [(await transfer.finish()).leading for transfer in transfers] == [2] * 4
    requests = (await serving(target))["requests"]
    assert requests["Commit"] == requests["Reserve"] < len(PROMPTS)


@pytest.mark.parametrize("ahead", [False, True])
async def test_chunks_that_requests_share_are_pushed_once(
    sender: Host, target: InstanceProcess, ahead: bool
) -> None:
    await sender.instance.transfer_kv(target.address, keys_of([99])).finish(0.5)  # Connects.
    if not ahead:
        sender.compute([1, 2, 3, 4])
    prompts = ([1, 2, 3], [1, 2, 4])
    transfers = [sender.instance.transfer_kv(target.address, keys_of(prompt)) for prompt in prompts]
    if ahead:
        reserved = reserve(sender, [1, 2, 3, 4])
        await until_reserved(target, 4)
        fill(sender, reserved)
    results = [await transfer.finish() for transfer in transfers]
    assert [result.leading for result in results] == [3, 3]
    assert sum(result.pushed_bytes for result in results) == 4 * CHUNK
    assert (await serving(target))["reserving"]["reservations"] == 0


async def test_chunks_of_two_models_are_pushed_in_one_batch() -> None:
    async with hosts("tcp", 64, 64) as (sender, receiver):
        fill(sender, reserve(sender, [1, 2]) + reserve(sender, [11, 12], namespace=bytes(range(32))))
        transfers = [sender.transfer_kv(receiver, numbers) for numbers in ([1, 2], [11, 12])]
        assert [(await transfer.finish()).leading for transfer in transfers] == [2, 2]
        for numbers, namespace in (([1, 2], bytes(32)), ([11, 12], bytes(range(32)))):
            found = receiver.look_up(numbers)
            assert {ChunkHeader.parse(chunk.lease.view).namespace for chunk in found.chunks} == {namespace}
            assert await receiver.settle(found) == 2


async def test_request_aborted_amid_a_common_batch_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_all, writing, goes_on = Source.write_hashed, anyio.Event(), anyio.Event()

    async def write(self: Source, writes: Sequence[Read]) -> Written:
        writing.set()
        await goes_on.wait()
        return await write_all(self, writes)

    monkeypatch.setattr(Source, "write_hashed", write)
    async with hosts("tcp", 64, 64) as (sender, receiver):
        aborted, other = (sender.transfer_kv(receiver, prompt) for prompt in PROMPTS[:2])
        fill(sender, reserve(sender, [*PROMPTS[0], *PROMPTS[1]]))
        await writing.wait()
        aborted.abort()
        await aborted.ended.wait()
        for number in range(100, 160):
            sender.compute([number])
        assert sender.held(PROMPTS[0]) == list(PROMPTS[0]), "what is being written is not evicted"
        goes_on.set()
        assert (await other.finish()).leading == 2
        assert await receiver.settle(receiver.look_up(PROMPTS[1])) == 2


async def test_batch_that_no_request_waits_for_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    writing = anyio.Event()

    async def write(_self: Source, _writes: Sequence[Read]) -> Written:
        writing.set()
        await anyio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(Source, "write_hashed", write)
    async with hosts("tcp", 64, 64) as (sender, receiver):
        aborted, waiting = (sender.transfer_kv(receiver, prompt) for prompt in PROMPTS[:2])
        sender.compute(PROMPTS[0])
        await writing.wait()
        aborted.abort()
        with anyio.fail_after(10):
            await until(lambda: not sender.instance._kv_transfers.leased_bytes)  # type: ignore[union-attr]
            await until(lambda: not receiver.reserving["reservations"])
        waiting.abort()


# Ahead.


@pytest.mark.parametrize("kind", ["tcp", pytest.param("nixl", marks=pytest.mark.slow)])
async def test_room_of_cancelled_request_is_given_back(kind: str) -> None:
    async with hosts(kind, 64, 64) as (sender, receiver):
        cancelled, other = (sender.transfer_kv(receiver, prompt) for prompt in PROMPTS[:2])
        reserved = reserve(sender, [*PROMPTS[0], *PROMPTS[1]])
        await until(lambda: receiver.reserving["reservations"] == 4)
        cancelled.abort()
        await until(lambda: receiver.reserving["reservations"] == 2)
        fill(sender, reserved)
        assert (await other.finish()).leading == 2
        assert receiver.held(CHUNKS) == list(PROMPTS[1])
        assert receiver.serving["requests"]["Reserve"] == 1


async def test_request_cancelled_before_the_response_gives_the_room_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reserve_all, reserved, goes_on = Pusher.reserve, anyio.Event(), anyio.Event()

    async def reserve_late(self: Pusher, headers: Sequence[ChunkHeader], **more: Any) -> RemoteRoom:
        room = await reserve_all(self, headers, **more)
        reserved.set()
        await goes_on.wait()
        return room

    monkeypatch.setattr(Pusher, "reserve", reserve_late)
    async with hosts("tcp", 64, 64) as (sender, receiver):
        transfer = sender.transfer_kv(receiver, PROMPTS[0])
        reservations = reserve(sender, PROMPTS[0])
        await reserved.wait()
        transfer.abort()
        await transfer.ended.wait()
        goes_on.set()
        with anyio.fail_after(10):
            await until(lambda: not receiver.reserving["reservations"])
        sender.cache.abandon(reservations)


async def test_chunk_that_is_complete_before_the_response_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reserve_all = Pusher.reserve

    async def reserve_late(self: Pusher, headers: Sequence[ChunkHeader], **more: Any) -> RemoteRoom:
        room = await reserve_all(self, headers, **more)
        await anyio.sleep(0.1)
        return room

    monkeypatch.setattr(Pusher, "reserve", reserve_late)
    async with hosts("tcp", 64, 64) as (sender, receiver):
        transfer = sender.transfer_kv(receiver, PROMPTS[0])
        reservations = reserve(sender, PROMPTS[0])
        await until(lambda: receiver.reserving["reservations"] == 2)
        fill(sender, reservations)
        assert (await transfer.finish()).leading == 2
        assert receiver.serving["requests"]["Reserve"] == 1


async def test_peer_that_never_answers_a_reservation_ahead_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reserve_all, asked = Pusher.reserve, anyio.Event()

    async def reserve_never(self: Pusher, headers: Sequence[ChunkHeader], **more: Any) -> RemoteRoom:
        if more.get("ahead"):
            asked.set()
            await anyio.sleep_forever()
        return await reserve_all(self, headers, **more)

    monkeypatch.setattr(Pusher, "reserve", reserve_never)
    monkeypatch.setattr(kv_transfer, "PUSH_SECONDS", 0.5)
    async with hosts("tcp", 64, 64) as (sender, receiver):
        transfer = sender.transfer_kv(receiver, PROMPTS[0])
        reservations = reserve(sender, PROMPTS[0])
        await asked.wait()
        fill(sender, reservations)
        assert (await transfer.finish()).leading == 2


async def test_room_for_chunks_that_the_engine_gives_up_is_given_back() -> None:
    async with hosts("tcp", 64, 64) as (sender, receiver):
        transfer = sender.transfer_kv(receiver, PROMPTS[0])
        first, second = reserve(sender, PROMPTS[0])
        await until(lambda: receiver.reserving["reservations"] == 2)
        fill(sender, [first])
        sender.cache.abandon([second])
        result = await transfer.finish()
        assert list(result.outcomes.values()) == [PushOutcome.OK, PushOutcome.ABSENT]
        await until(lambda: not receiver.reserving["reservations"])


async def test_room_is_given_back_when_the_source_is_killed() -> None:
    async with hosts("tcp", 64) as (receiver,):
        async with InstanceProcess(capacity=64 * CHUNK) as source:
            await source.transfer_kv(receiver.address, CHUNKS)
            await source.reserve(CHUNKS)
            await until(lambda: receiver.reserving["reservations"] == len(CHUNKS))
            found = receiver.look_up(CHUNKS)
            await source.kill()
        await until(lambda: not receiver.reserving["reservations"])
        assert await receiver.settle(found) == 0


async def test_room_expires_and_is_reserved_again_when_the_source_goes_on() -> None:
    async with (
        InstanceProcess(capacity=64 * CHUNK) as source,
        hosts("tcp", 64, kv_transfer={"reserve": 2}) as (receiver,),
    ):
        await source.transfer_kv(receiver.address, CHUNKS)
        await source.reserve(CHUNKS)
        await until(lambda: receiver.reserving["reservations"] == len(CHUNKS))
        source.signal(signal.SIGSTOP)
        await until(lambda: not receiver.reserving["reservations"])
        source.signal(signal.SIGCONT)
        await source.commit()
        assert await source.finish() == len(CHUNKS)
        assert await receiver.settle(receiver.look_up(CHUNKS)) == len(CHUNKS)


async def test_engine_that_hangs_gives_the_room_back_before_it_expires() -> None:
    """The peer may be unable to reject a late write, and then waits for the release."""
    async with hosts("tcp", 64, 64, kv_transfer={"reserve": 3}) as (sender, receiver):
        transfer = sender.transfer_kv(receiver, PROMPTS[0])
        reserved = reserve(sender, PROMPTS[0])
        await until(lambda: receiver.serving["grants"])
        await until(lambda: not receiver.serving["grants"])
        assert not receiver.serving["expired"], "released"
        fill(sender, reserved)
        assert (await transfer.finish()).leading == 2


async def test_full_receiver_evicts_nothing_for_chunks_that_may_never_come() -> None:
    async with hosts("tcp", 64, 8, share=1) as (sender, receiver):
        receiver.compute(range(101, 108))
        transfer = sender.transfer_kv(receiver, PROMPTS[0])
        reserved = reserve(sender, PROMPTS[0])
        await until(lambda: receiver.counts.get("no_room_ahead"))
        assert receiver.held(range(101, 108)) == list(range(101, 108))
        assert not receiver.reserving["reservations"]
        fill(sender, reserved)
        assert (await transfer.finish()).leading == 2, "for what is complete, it does"


async def test_half_of_the_room_is_kept_for_complete_chunks() -> None:
    async with hosts("tcp", 64, 64, kv_transfer={"buffer": 4 * CHUNK}) as (sender, receiver):
        early = sender.transfer_kv(receiver, CHUNKS)
        reserved = reserve(sender, CHUNKS)
        await until(lambda: receiver.reserving["reservations"] == 2)
        sender.compute([51, 52])
        assert (await sender.transfer_kv(receiver, [51, 52]).finish(5)).leading == 2
        assert receiver.reserving["reservations"] == 2
        fill(sender, reserved)
        assert (await early.finish()).leading == len(CHUNKS)


async def test_receiver_without_room_is_not_asked_each_time() -> None:
    async with hosts("tcp", 64, 8, share=1) as (sender, receiver):
        receiver.compute(range(101, 109))
        in_use = receiver.cache.look_up(Query(keys_of(range(101, 109))))
        transfer = sender.transfer_kv(receiver, CHUNKS)
        reserved = []
        for number in CHUNKS:
            reserved += reserve(sender, [number])
            await until(lambda: receiver.counts.get("no_room_ahead"))
            await anyio.sleep(0.02)  # In which another message would arrive.
        assert receiver.serving["requests"]["Reserve"] == 1
        in_use.release()
        transfer.abort()
        sender.cache.abandon(reserved)
