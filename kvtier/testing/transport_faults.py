"""The part of the transport conformance suite with cancelled calls and failing peers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Coroutine, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from xxhash import xxh3_128_hexdigest

from kvtier.backends.base import Outcome
from kvtier.concurrency.tasks import DetachedTask
from kvtier.testing.backend import is_poisoned
from kvtier.testing.cancelling import Through, cancelled_at
from kvtier.testing.noise import poison
from kvtier.testing.relay import Relay
from kvtier.testing.transport_pair import (
    FAILED,
    GRACE_SECONDS,
    KIB,
    MISS,
    OK,
    SHORT_DEADLINE,
    TIMEOUT_SECONDS,
    Linked,
    TransportSuite,
    fill,
    holds,
    until,
)
from kvtier.testing.transport_process import OtherProcess
from kvtier.testing.transport_side import (
    MIB,
    Certificate,
    pattern,
)
from kvtier.transports.base import Access


class TransportFaults(TransportSuite):
    """Tests that cancellation, peer failures and network failures corrupt and leak nothing."""

    async def test_a_grant_that_ends_in_mid_transfer(
        self, other: OtherProcess, tls: Certificate | None
    ) -> None:
        """Memory in use by a transfer stays leased until the transfer has ended, and is released then."""
        self.require_connections()
        size = 32 * MIB
        async with self.linked(other, tls, capacity=size + 4 * MIB, relayed=True) as pair:
            assert pair.relay is not None
            (span,) = await pair.other.grant([size])
            (view,) = pair.views([size])
            pair.relay.hold_after(MIB)
            outcomes: list[Outcome] = []

            async def read() -> None:
                outcomes.extend(await pair.link.read([(span, view)]))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read)
                await until(lambda: pair.relay is not None and pair.relay.is_holding)
                await pair.other.do("revoke", grant=span.grant)
                assert await pair.other.do("transfer_leases") > 0
                pair.relay.release()
            # Parts whose transfer had not started may be misses.
            assert outcomes in ([OK], [MISS])
            assert outcomes != [OK] or await holds(view, 0)
            await pair.assert_no_leases()
            (again,) = await pair.other.grant([1000], seed=5)
            await self.assert_reads(pair, [again], 5)

    # Cancellation.

    @pytest.mark.parametrize("lag", [0, 1])
    @pytest.mark.parametrize("through", ["scope", "task"])
    @pytest.mark.parametrize("method", ["read", "write"])
    async def test_cancelling_at_every_step(
        self, pair: Linked, method: str, through: Through, lag: int
    ) -> None:
        """A cancelled call does not write to memory afterwards, and the link stays usable."""
        sizes = [300 * KIB, 20, 2 * MIB]
        granted = await pair.other.grant(sizes, access=Access(method), seed=1)
        checked = await pair.other.grant([1000], seed=9)
        views = pair.views(sizes)
        if method == "read":
            operation = partial(pair.link.read, list(zip(granted, views, strict=True)))
        else:
            operation = partial(pair.link.write, list(zip(views, granted, strict=True)))
        for step in itertools.count(1):
            cancelled = await cancelled_at(step, operation, through=through, lag=lag)
            for view in views:
                poison(view)
            await self.assert_reads(pair, checked, 9)
            assert all(is_poisoned(view) for view in views), "memory was written after the call had returned"
            if not cancelled:
                break
        await pair.assert_no_leases()

    async def test_many_at_once_and_a_quarter_cancelled(
        self, other: OtherProcess, tls: Certificate | None
    ) -> None:
        """Of 64 concurrent transfers, the cancelled ones do not affect the others."""
        size = 700_000
        async with self.linked(other, tls, capacity=64 * 720_896) as pair:
            spans = await pair.other.grant([size] * 64)
            views = pair.views([size] * 64)
            calls = [
                DetachedTask(pair.link.read([(span, view)])) for span, view in zip(spans, views, strict=True)
            ]
            cancelled = calls[2::4]
            for call in cancelled:
                await anyio.lowlevel.checkpoint()
                call.cancel()
                await call.wait()
                poison(views[calls.index(call)])
            for call in calls:
                await call.wait()
            for index, (call, view) in enumerate(zip(calls, views, strict=True)):
                if call.cancelled:
                    assert is_poisoned(view), "memory was written after the call had returned"
                elif call not in cancelled:
                    assert list(call.result()) == [OK]
                    assert await holds(view, index)
            await pair.assert_no_leases()

    async def test_cancelling_a_stalled_call(self, other: OtherProcess, tls: Certificate | None) -> None:
        """A call to a stalled peer returns soon after it is cancelled."""
        async with self.linked(other, tls) as pair:
            (span,) = await pair.other.grant([8 * MIB])
            (view,) = pair.views([8 * MIB])
            pair.other.pause()
            try:
                call = DetachedTask(pair.link.read([(span, view)]))
                await anyio.sleep(0.1)
                began = time.monotonic()
                call.cancel()
                await call.wait()
                assert time.monotonic() - began < GRACE_SECONDS
                poison(view)
            finally:
                pair.other.resume()
            (checked,) = await pair.other.grant([1000], seed=3)
            await self.assert_reads(pair, [checked], 3)
            assert not call.cancelled or is_poisoned(view)
            await pair.assert_no_leases()

    # Failures of peers and networks.

    @pytest.mark.parametrize("method", ["read", "write"])
    async def test_a_peer_that_is_killed_in_mid_transfer(
        self, other: OtherProcess, tls: Certificate | None, method: str
    ) -> None:
        """The call is ``FAILED`` within the deadline and leaks nothing. Later calls fail as well."""
        size = 32 * MIB
        async with self.linked(
            other, tls, deadline=SHORT_DEADLINE, capacity=size + 4 * MIB, relayed=self.over_connections
        ) as pair:
            (span,) = await pair.other.grant([size], access=Access(method))
            (view,) = pair.views([size])

            def transfer() -> Coroutine[Any, Any, Sequence[Outcome]]:
                return pair.link.read([(span, view)]) if method == "read" else pair.link.write([(view, span)])

            if pair.relay is not None:
                call = await self.held_back(pair, transfer)
            else:
                call = DetachedTask(transfer())
                await anyio.sleep(0.001)
            began = time.monotonic()
            pair.other.kill()
            if pair.relay is not None:
                pair.relay.release()
            (outcome,) = await call.join()
            assert time.monotonic() - began < SHORT_DEADLINE + GRACE_SECONDS
            assert outcome is FAILED or (outcome is OK and pair.relay is None)
            poison(view)
            assert list(await pair.link.read([(span, view)])) == [FAILED]
            assert is_poisoned(view)

    async def test_a_reader_that_is_killed_in_mid_transfer(
        self, other: OtherProcess, tls: Certificate | None
    ) -> None:
        """The serving side releases the memory that the reader was reading, and serves other readers."""
        size = 32 * MIB
        async with self.linked(other, tls, capacity=2 * size) as pair:
            port = pair.here.port
            (span,) = await anyio.to_thread.run_sync(pair.here.grants.grant, [size], Access.READ, 1)
            with Relay.to(port) if self.over_connections else nullcontext() as relay:
                through = relay.port if isinstance(relay, Relay) else port
                endpoint = pair.here.transport.endpoint.hex()
                await pair.other.do("connect", endpoint=endpoint, port=through)
                if isinstance(relay, Relay):
                    relay.hold_after(MIB)
                await pair.other.do("read_repeatedly", spans=[span])
                if isinstance(relay, Relay):
                    await until(lambda: relay.is_holding and pair.here.transfer_leases > 0)
                pair.other.kill()
            await until(lambda: pair.here.transfer_leases == len(pair.leases))
            await anyio.to_thread.run_sync(pair.other.start)
            settings = {**self.settings, "deadline": TIMEOUT_SECONDS}
            await pair.other.open(self.transport, settings, 2 * size, tls)
            await pair.other.do("connect", endpoint=endpoint, port=port)
            answer = await pair.other.do("read", spans=[span])
            assert answer["outcomes"] == ["ok"]
            assert answer["digests"] == [xxh3_128_hexdigest(await anyio.to_thread.run_sync(pattern, 1, size))]
            await until(lambda: pair.here.transfer_leases == len(pair.leases))

    async def test_a_peer_that_is_paused(self, other: OtherProcess, tls: Certificate | None) -> None:
        """Calls to a peer paused beyond the deadline are ``FAILED``. The link works again when it resumes."""
        async with self.linked(other, tls, deadline=SHORT_DEADLINE) as pair:
            spans = await pair.other.grant([MIB, 5000], seed=1)
            await self.until_reads(pair, spans, 1)
            views = pair.views([MIB, 5000])
            pair.other.pause()
            try:
                began = time.monotonic()
                outcomes = list(await pair.link.read(list(zip(spans, views, strict=True))))
                assert time.monotonic() - began < SHORT_DEADLINE + GRACE_SECONDS
                # A one-sided transfer may not need the peer's CPU.
                assert outcomes == [FAILED, FAILED] or self.transport.one_sided
                for view in views:
                    poison(view)
            finally:
                pair.other.resume()
            await self.until_reads(pair, spans, 1)
            assert all(is_poisoned(view) for view in views), "memory was written after the call had returned"
            await pair.assert_no_leases()

    @pytest.mark.parametrize("method", ["read", "write"])
    async def test_a_connection_loss_that_heals(
        self, other: OtherProcess, tls: Certificate | None, method: str
    ) -> None:
        """The transfer resumes over new connections, and does not resend bytes that have arrived."""
        self.require_connections()
        size = 48 * MIB
        async with self.linked(other, tls, capacity=size + 4 * MIB, relayed=True) as pair:
            assert pair.relay is not None
            (span,) = await pair.other.grant([size], access=Access(method), seed=1)
            (view,) = pair.views([size])
            if method == "write":
                await fill(view, 5)
            pair.relay.hold_after(size // 2)
            call = DetachedTask(
                pair.link.read([(span, view)]) if method == "read" else pair.link.write([(view, span)])
            )
            await until(lambda: pair.relay is not None and pair.relay.is_holding)
            pair.relay.cut()
            await anyio.sleep(0.3)
            pair.relay.release()
            pair.relay.heal()
            assert list(await call.join()) == [OK]
            if method == "read":
                assert await holds(view, 1)
            assert await pair.other.digest(span.offset, size) == xxh3_128_hexdigest(view)
            assert pair.relay.forwarded < size * 3 // 2, "bytes that had arrived were sent again"
            await pair.assert_no_leases()

    async def test_a_connection_loss_that_does_not_heal_in_time(
        self, other: OtherProcess, tls: Certificate | None
    ) -> None:
        """The call is ``FAILED`` by the deadline, and the link works again when the network heals."""
        self.require_connections()
        async with self.linked(other, tls, deadline=SHORT_DEADLINE, relayed=True) as pair:
            assert pair.relay is not None
            spans = await pair.other.grant([8 * MIB, 1], seed=1)
            reads = list(zip(spans, pair.views([8 * MIB, 1]), strict=True))
            call = await self.held_back(pair, lambda: pair.link.read(reads))
            began = time.monotonic()
            pair.relay.cut()
            assert FAILED in await call.join()
            assert time.monotonic() - began < SHORT_DEADLINE + GRACE_SECONDS
            pair.relay.release()
            pair.relay.heal()
            await self.until_reads(pair, spans[1:], 2)
            await pair.assert_no_leases()
