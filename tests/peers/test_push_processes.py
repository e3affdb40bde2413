"""KV transfers whose sender or receiver process is killed, stopped or resumed."""

from __future__ import annotations

import signal

import anyio
import pytest

from kvtier.peers.kv_transfer import KVTransfer
from kvtier.peers.push import PushOutcome
from tests.rigs.instance_process import InstanceProcess
from tests.rigs.pushing import Host, hosts, keys_of
from tests.rigs.waiting import until

from .test_backend_processes import started

pytestmark = pytest.mark.anyio

MIB = 1 << 20
BOTH = ["tcp", pytest.param("nixl", marks=pytest.mark.slow)]
FITS = 256 * MIB // 24_576
"""Capacity in chunks of the size that :func:`hosts` counts in."""


def pushing(kind: str, blocks_after: int | None = None) -> InstanceProcess:
    """A process that pushes chunks of 2 MiB, and blocks in the middle of the batch after so many."""
    return InstanceProcess(payload=2 * MIB, capacity=256 * MIB, blocks_after=blocks_after, transport=kind)


async def until_half_written(receiver: Host) -> None:
    """Wait until some chunks are committed and others half written."""
    await until(lambda: receiver.counts.get("committed") and receiver.reserving["reservations"] > 1)


@pytest.mark.parametrize("kind", BOTH)
async def test_sender_killed_during_push(kind: str) -> None:
    async with hosts(kind, FITS) as (receiver,):
        async with pushing(kind, blocks_after=1) as pusher:
            await pusher.transfer_kv(receiver.address, range(1, 61))
            found = receiver.look_up(range(1, 61))
            await pusher.compute(range(1, 51))
            await until_half_written(receiver)
            await pusher.kill()
        arrived = await receiver.settle(found)
        held = receiver.held(range(1, 61))
        assert 0 < len(held) < 60
        # Batches are written concurrently: the second may arrive before the first.
        assert held[:arrived] == list(range(1, arrived + 1))
        assert arrived + 1 not in held
        # What it left does not hinder the next sender.
        async with pushing(kind) as next_pusher:
            await next_pusher.compute(range(1, 61))
            await next_pusher.transfer_kv(receiver.address, range(1, 61))
            assert await next_pusher.finish() == 60
        assert await receiver.settle(receiver.look_up(range(1, 61))) == 60


@pytest.mark.parametrize("kind", BOTH)
async def test_sender_stopped_until_its_lease_expires(kind: str) -> None:
    async with (
        pushing(kind, blocks_after=1) as pusher,
        hosts(kind, FITS, kv_transfer={"reserve": 3}) as (receiver,),
    ):
        await pusher.transfer_kv(receiver.address, range(1, 61))
        await pusher.compute(range(1, 51))
        await until_half_written(receiver)
        pusher.signal(signal.SIGSTOP)
        await until(lambda: not receiver.reserving["reservations"])
        found = receiver.look_up(range(1, 61), expect=0.5)
        assert await receiver.settle(found) < 60, "a lookup waits no longer than its timeout"
        pusher.signal(signal.SIGCONT)
        await pusher.resume()
        assert await pusher.finish() == 50, "expired chunks are pushed again"
        await until(lambda: not receiver.cache.expecting.announced)
        await until(lambda: not receiver.serving["grants"])


@pytest.mark.parametrize("kind", BOTH)
async def test_receiver_killed_during_push_and_restarted(kind: str) -> None:
    target = InstanceProcess(payload=100 * MIB, transport={"type": kind, "deadline": 5})
    async with started(target), hosts(kind, FITS) as (sender,):
        transfer = sender.instance.transfer_kv(target.address, keys_of(range(1, 61)))
        await sender.compute_many(range(1, 51), 2 * MIB)
        await until(lambda: pushed(transfer) >= 4)
        await target.kill()
        with anyio.fail_after(60):
            await transfer.ended.wait()
        assert transfer.result.last_error
        assert transfer.result.leading < 60
        await target.start()
        again = sender.instance.transfer_kv(target.address, keys_of(range(1, 51)))
        assert (await again.finish(60)).leading == 50


@pytest.mark.parametrize("kind", BOTH)
async def test_receiver_stopped_and_resumed_during_push(kind: str) -> None:
    target = InstanceProcess(payload=100 * MIB, transport=kind)
    async with started(target), hosts(kind, FITS) as (sender,):
        transfer = sender.instance.transfer_kv(target.address, keys_of(range(1, 51)))
        await sender.compute_many(range(1, 41), 2 * MIB)
        await until(lambda: pushed(transfer) >= 4)
        target.signal(signal.SIGSTOP)
        await sender.compute_many(range(41, 51), 2 * MIB)
        await until(lambda: any(client.source is None for client in sender.peers.clients))
        target.signal(signal.SIGCONT)
        assert (await transfer.finish(60)).leading == 50
        await until_nothing_reserved(target)


@pytest.mark.parametrize("kind", BOTH)
async def test_receiver_stopped_for_good_during_push(kind: str) -> None:
    target = InstanceProcess(payload=100 * MIB, transport={"type": kind, "deadline": 2})
    async with started(target), hosts(kind, FITS) as (sender,):
        transfer = sender.instance.transfer_kv(target.address, keys_of(range(1, 51)))
        await sender.compute_many(range(1, 41), 2 * MIB)
        await until(lambda: pushed(transfer) >= 4)
        target.signal(signal.SIGSTOP)
        with anyio.fail_after(60):
            result = await transfer.finish(1)
            assert result.leading < 50
            assert set(result.outcomes.values()) <= {PushOutcome.OK, PushOutcome.ABSENT, PushOutcome.FAILED}
            await transfer.ended.wait()
        target.signal(signal.SIGKILL)


@pytest.mark.slow
async def test_late_nixl_write_never_reaches_reused_memory() -> None:
    """The writer is stopped when its lease expires; its memory is reused only after it is cut off."""
    async with hosts("nixl", FITS, kv_transfer={"reserve": 1}) as (receiver,):
        async with pushing("nixl", blocks_after=1) as pusher:
            await pusher.transfer_kv(receiver.address, range(1, 61))
            await pusher.compute(range(1, 51))
            await until_half_written(receiver)
            pusher.signal(signal.SIGSTOP)
            await until(lambda: not receiver.reserving["reservations"])
            assert receiver.serving["grants"], "its memory is kept"
            await pusher.kill()
            await until(lambda: not receiver.serving["grants"])
        await receiver.compute_many(range(101, 151), 2 * MIB)
        assert await receiver.settle(receiver.look_up(range(101, 151))) == 50


def pushed(transfer: KVTransfer) -> int:
    return list(transfer.result.outcomes.values()).count(PushOutcome.OK)


async def until_nothing_reserved(target: InstanceProcess) -> None:
    with anyio.fail_after(30):
        while True:
            serving = (await target.status())["serving"]
            if not serving["grants"] and not serving["reserving"]["announcements"]:
                return
            await anyio.sleep(0.05)
