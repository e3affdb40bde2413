"""KV transfers that are cancelled at every await leak nothing on either side."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest
from anyio import CancelScope, fail_after
from anyio.lowlevel import checkpoint

from kvtier.peers.protocol import Reserved
from kvtier.peers.push import Pusher, PushOutcome
from kvtier.pipeline.query import Query
from kvtier.rpc.calls import Call
from kvtier.rpc.frames import Reply
from kvtier.testing.cancelling import Through, cancelled_at
from kvtier.tiers.sealer import Sealer
from tests.rigs.pushing import Host, hosts, keys_of
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio

Pair = list[Host]
COUNT = 4
NUMBERS = range(1, COUNT + 1)


@pytest.fixture(params=["tcp", pytest.param("nixl", marks=pytest.mark.slow)])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with hosts(request.param, 32, 32) as pair:
        pair[0].compute(NUMBERS)
        yield pair


async def until_empty(receiver: Host, numbers: Sequence[int] = NUMBERS) -> None:
    """Wait until nothing is reserved or granted, then clear the receiver."""
    await until(lambda: not receiver.reserving["reservations"] and not receiver.serving["grants"])
    await receiver.cache.clear(keys_of(numbers))
    await until(lambda: not receiver.cache.arena.leases)


@pytest.mark.parametrize("through", ["scope", "task"])
async def test_push_cancelled_at_every_await(pair: Pair, through: Through) -> None:
    sender, receiver = pair
    async with sender.peers.checkout(receiver.address) as source:
        target = Pusher(source, Sealer())
        await source.prepare()
        for lag in (0, 1, 3):
            step = 1
            while True:
                chunks = sender.cache.memory.lease_ready(keys_of(NUMBERS))
                try:
                    cancelled = await cancelled_at(
                        step, lambda chunks=chunks: target.push(chunks, 30), through=through, lag=lag
                    )
                finally:
                    for chunk in chunks:
                        chunk.lease.release()
                held = receiver.held(NUMBERS)
                assert await receiver.settle(receiver.cache.look_up(Query(keys_of(held)))) == len(held)
                await until_empty(receiver)
                if not cancelled:
                    break
                step += 1
            assert step > 3, "a push waits for the checksum, the reservation, the write and the commit"
        assert not source.over


async def test_push_cancelled_while_its_reservation_arrives(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one iteration of the event loop: after the cancellation, before the push learns of it."""
    sender, receiver = pair
    settle = Call.settle

    def cancel_and_settle(call: Call[object], reply: Reply) -> None:
        if isinstance(reply, Reserved):
            scope.cancel()
        settle(call, reply)

    monkeypatch.setattr(Call, "settle", cancel_and_settle)
    async with sender.peers.checkout(receiver.address) as source:
        chunks = sender.cache.memory.lease_ready(keys_of(NUMBERS))
        with CancelScope() as scope:
            await Pusher(source, Sealer()).push(chunks, 30)
        assert scope.cancelled_caught
        for chunk in chunks:
            chunk.lease.release()
        await until(lambda: receiver.counts["reserved"] == COUNT)
        with fail_after(receiver.cache.settings.kv_transfer.reserve / 2):
            await until_empty(receiver)


@pytest.mark.parametrize("through", ["scope", "task"])
async def test_finish_cancelled_at_every_await(pair: Pair, through: Through) -> None:
    sender, receiver = pair
    step = 1
    while True:
        transfer = sender.transfer_kv(receiver, range(1, COUNT + 2))
        cancelled = await cancelled_at(step, transfer.finish, through=through)
        await transfer.ended.wait()
        outcomes = set(transfer.result.outcomes.values())
        assert outcomes <= {PushOutcome.OK, PushOutcome.ABSENT, PushOutcome.HELD}
        await until(lambda: not receiver.cache.expecting.announced)
        await until_empty(receiver)
        if not cancelled:
            break
        step += 1


async def test_kv_transfer_aborted_at_any_time(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    # Long enough for the announcement to arrive; short, because some are never sent.
    monkeypatch.setattr("kvtier.pipeline.expect.UNANNOUNCED_SECONDS", 0.3)
    sender, receiver = pair
    for steps in range(60):
        # No lookup waits for chunks whose transfer was aborted before.
        numbers = range((steps + 2) * COUNT, (steps + 3) * COUNT)
        sender.compute(numbers)
        transfer = sender.transfer_kv(receiver, numbers)
        found = receiver.look_up(numbers, expect=30)
        for _ in range(steps):
            await checkpoint()
        transfer.abort()
        await transfer.ended.wait()
        arrived = await receiver.settle(found)
        assert arrived >= sum(outcome is PushOutcome.OK for outcome in transfer.result.outcomes.values())
        await until(lambda: not receiver.cache.expecting.announced)
        await until_empty(receiver, numbers)


async def test_waiting_lookup_cancelled_at_every_await(pair: Pair) -> None:
    sender, receiver = pair
    transfer = sender.transfer_kv(receiver, [1, 2, 90])
    await until(lambda: receiver.held([1, 2]) == [1, 2])
    for step in range(1, 4):
        found = receiver.look_up([1, 2, 90], expect=0.3)
        if await cancelled_at(step, lambda found=found: receiver.cache.settle(found), through="scope"):
            found.release()
        else:
            assert await receiver.settle(found) == 2
    transfer.abort()
    await transfer.ended.wait()
