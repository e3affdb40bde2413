"""The transport conformance suite. Subclass :class:`TransportConformance` to run it with pytest.

::

    class TestMyTransport(TransportConformance):
        transport = MyTransport
        settings = {"type": "mine"}

Transfers run between the arenas of the test process and of a second Python process, which imports the
transport by its module name. A test needs at most about 400 MiB of memory. The tests run on asyncio with
anyio's pytest plugin. Transports that implement ``SupportsConnections`` get unauthenticated connections, over
loopback or through a relay that can hold bytes back and break connections.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from xxhash import xxh3_128_hexdigest

from kvtier.backends.base import Outcome
from kvtier.concurrency.tasks import DetachedTask
from kvtier.errors import PeerError
from kvtier.testing.cancelling import Through, cancelled_at
from kvtier.testing.noise import is_poisoned, poison, same
from kvtier.testing.relay import Relay
from kvtier.testing.transport_sides import (
    TIMEOUT_SECONDS,
    Certificate,
    Linked,
    Method,
    OtherProcess,
    Side,
    dial_nowhere,
    dial_to,
    fill,
    holds,
    none_greater,
    part,
    pattern,
    resources,
    until,
)
from kvtier.transports.base import Access, RemoteSpan, Transport
from kvtier.units import KIB, MIB

OK, MISS, FAILED = Outcome.OK, Outcome.MISS, Outcome.FAILED

SHORT_DEADLINE = 1.0
GRACE_SECONDS = 10.0
"""How long after its deadline a call may return on a busy machine."""


class TransportConformance:
    """Tests of the contract of :class:`~kvtier.transports.base.Transport`. Name your subclass ``Test...``."""

    pytestmark = pytest.mark.anyio

    transport: ClassVar[type[Transport]]
    """The class to test."""
    settings: ClassVar[Mapping[str, Any]]
    """The transport's settings, as in the configuration, without ``deadline``."""
    counts_files: ClassVar[bool] = True
    """Whether closing the transport closes all its file descriptors. False if a library keeps some open."""
    counts_threads: ClassVar[bool] = True
    """Whether closing the transport stops all its threads."""

    def certificate(self, path: Path) -> Certificate | None:
        """Create a certificate in ``path`` to run the suite over TLS; ``None``, the default: without TLS."""
        return None

    @property
    def over_connections(self) -> bool:
        """Whether the transport uses the connections that it is given."""
        # Not issubclass(), which checks more than the method.
        return hasattr(self.transport, "serve")

    @pytest.fixture
    def anyio_backend(self) -> str:
        """The cache process runs on asyncio."""
        return "asyncio"

    @pytest.fixture(scope="class")
    @classmethod
    def process(cls) -> Iterator[OtherProcess]:
        """The other process. It may not be running: a test that kills it does not restart it."""
        process = OtherProcess()
        yield process
        process.kill()

    @pytest.fixture
    def other(self, process: OtherProcess) -> OtherProcess:
        """The other process, running."""
        process.start()
        return process

    @pytest.fixture
    def tls(self, tmp_path: Path) -> Certificate | None:
        """The certificate for this test's connections."""
        return self.certificate(tmp_path / "certificate")

    @asynccontextmanager
    async def linked(
        self,
        other: OtherProcess,
        tls: Certificate | None = None,
        *,
        deadline: float = TIMEOUT_SECONDS,
        capacity: int = 24 * MIB,
        relayed: bool = False,
    ) -> AsyncIterator[Linked]:
        """Open both sides, and link this one to the other. Fails if either has open leases at the end."""
        settings = {**self.settings, "deadline": deadline}
        endpoint, port = await other.open(self.transport, settings, capacity, tls)
        async with AsyncExitStack() as stack:
            here = await stack.enter_async_context(Side.open(self.transport, settings, capacity, tls))
            relay = stack.enter_context(Relay.to(port)) if relayed else None
            dial = dial_to(relay.port if relay else port, tls) if port else dial_nowhere
            link = await here.transport.connect(endpoint, dial)
            linked = Linked(here, other, endpoint, link, relay)
            try:
                yield linked
            except BaseException:
                # Its state is unknown, and must not affect the next test.
                other.kill()
                raise
            finally:
                await link.close()
                for lease in linked.leases:
                    lease.release()
        if other.is_running:
            await other.do("close")

    @pytest.fixture
    async def pair(self, other: OtherProcess, tls: Certificate | None) -> AsyncIterator[Linked]:
        """Both sides, linked directly."""
        async with self.linked(other, tls) as linked:
            yield linked

    async def assert_reads(self, pair: Linked, spans: Sequence[RemoteSpan], seed: int = 0) -> None:
        """Read whole slices that were granted with ``seed``, and check their bytes."""
        outcomes, views = await pair.read(spans)
        assert outcomes == [OK] * len(spans)
        for index, view in enumerate(views):
            assert await holds(view, seed + index), f"item {index} has wrong bytes"

    async def until_reads(self, pair: Linked, spans: Sequence[RemoteSpan], seed: int = 0) -> None:
        """Like :meth:`assert_reads`, over a link whose deadline a read may exceed on a busy machine."""
        views = pair.views([span.length for span in spans])
        outcomes: set[Outcome] = set()
        with anyio.fail_after(TIMEOUT_SECONDS):
            while outcomes != {OK}:
                outcomes = set(await pair.transfer("read", spans, views))
                assert outcomes <= {OK, FAILED}
        for index, view in enumerate(views):
            assert await holds(view, seed + index), f"item {index} has wrong bytes"

    async def held_back(
        self, pair: Linked, transfer: Callable[[], Coroutine[Any, Any, Sequence[Outcome]]]
    ) -> DetachedTask[Sequence[Outcome]]:
        """Start a transfer of more than 1 MiB, and return it when the relay holds back the rest.

        On a busy machine, a short deadline may pass before. The transfer is then started again.
        """
        assert pair.relay is not None
        relay = pair.relay
        relay.hold_after(MIB)
        with anyio.fail_after(TIMEOUT_SECONDS):
            while True:
                call = DetachedTask(transfer())
                while not relay.is_holding and not await call.wait(0.005):
                    pass
                if relay.is_holding:
                    return call
                assert FAILED in call.result()

    def require_connections(self) -> None:
        """Skip the test if the transport does not use connections that the suite can control."""
        if not self.over_connections:
            pytest.skip("the transport does not use connections")

    # Data.

    @pytest.mark.parametrize("count", [0, 1, 7, 300])
    async def test_reads(self, pair: Linked, count: int) -> None:
        """Zero, one and many spans."""
        spans = await pair.other.grant([1000 + index for index in range(count)]) if count else []
        await self.assert_reads(pair, spans)

    @pytest.mark.parametrize("count", [0, 1, 7, 300])
    async def test_writes(self, pair: Linked, count: int) -> None:
        """Zero, one and many spans."""
        lengths = [1000 + index for index in range(count)]
        spans = await pair.other.grant(lengths, access=Access.WRITE) if count else []
        views = pair.views(lengths)
        for index, view in enumerate(views):
            view[:] = pattern(1000 + index, len(view))
        assert await pair.write(views, spans) == [OK] * count
        for span, view in zip(spans, views, strict=True):
            assert await pair.there(span, view)

    @pytest.mark.parametrize("size", [1, 2, 4095, 4096, 4097, MIB - 1, 5 * MIB + 3, 64 * MIB])
    async def test_every_size(self, other: OtherProcess, tls: Certificate | None, size: int) -> None:
        """Reads and writes from 1 byte to 64 MiB."""
        async with self.linked(other, tls, capacity=2 * size + 4 * MIB) as pair:
            (span,) = await pair.other.grant([size], seed=1)
            (target,) = await pair.other.grant([size], access=Access.WRITE, seed=2)
            (view,) = pair.views([size])
            assert list(await pair.link.read([(span, view)])) == [OK]
            assert await holds(view, 1)
            assert await pair.write([view], [target]) == [OK]
            assert await pair.there(target, view)

    @pytest.mark.parametrize(("start", "length"), [(1, 1), (4095, 2), (0, 9999), (777, 5000), (9999, 1)])
    async def test_a_part_of_a_slice(self, pair: Linked, start: int, length: int) -> None:
        """Spans may lie anywhere within a slice, and views anywhere in memory. Other bytes do not change."""
        span, other = await pair.other.grant([10_000, 10_000], seed=1)
        (memory,) = pair.views([30_000])
        view = memory[4097 : 4097 + length]
        assert list(await pair.link.read([(part(span, start, length), view)])) == [OK]
        assert view == pattern(1, 10_000)[start : start + length]
        assert is_poisoned(memory[:4097])
        assert is_poisoned(memory[4097 + length :])
        assert await pair.there(other, pattern(2, 10_000))

    @pytest.mark.parametrize(("start", "length"), [(1, 1), (4095, 2), (0, 9999), (777, 5000), (9999, 1)])
    async def test_writing_a_part_of_a_slice(self, pair: Linked, start: int, length: int) -> None:
        """Bytes next to the span, and adjacent slices, do not change."""
        spans = await pair.other.grant([10_000] * 3, access=Access.WRITE, seed=1)
        (view,) = pair.views([length])
        view[:] = pattern(9, length)
        assert await pair.write([view], [part(spans[1], start, length)]) == [OK]
        expected = [bytearray(pattern(seed, 10_000)) for seed in (1, 2, 3)]
        expected[1][start : start + length] = view
        for span, content in zip(spans, expected, strict=True):
            assert await pair.there(span, content)

    async def test_a_batch_of_a_thousand(self, pair: Linked) -> None:
        """Spans of many lengths, in random order, some of them repeated."""
        chosen = random.Random(4)  # noqa: S311 - the same each time
        granted = await pair.other.grant([9000] * 50, seed=0)
        cuts = [(slice_, chosen.randrange(4500), chosen.randrange(1, 4500)) for slice_ in range(50)] * 20
        chosen.shuffle(cuts)
        spans = [part(granted[slice_], start, length) for slice_, start, length in cuts]
        outcomes, views = await pair.read(spans)
        assert outcomes == [OK] * 1000
        patterns = [pattern(seed, 9000) for seed in range(50)]
        for view, (slice_, start, length) in zip(views, cuts, strict=True):
            assert view == patterns[slice_][start : start + length]

    async def test_batches_at_once(self, other: OtherProcess, tls: Certificate | None) -> None:
        """Concurrent large and small reads and writes do not affect each other."""
        sizes = [100, 5000, 300 * KIB, 3 * MIB]
        async with self.linked(other, tls, capacity=64 * MIB) as pair:

            async def read(seed: int) -> None:
                spans = await pair.other.grant(sizes, seed=seed)
                for _ in range(3):
                    await self.assert_reads(pair, spans, seed)

            async def write(seed: int) -> None:
                spans = await pair.other.grant(sizes, access=Access.WRITE, seed=seed)
                views = pair.views(sizes)
                for view in views:
                    await fill(view, seed + 1000)
                for _ in range(3):
                    assert await pair.write(views, spans) == [OK] * 4
                for span, view in zip(spans, views, strict=True):
                    assert await pair.there(span, view)

            async with anyio.create_task_group() as tasks:
                for seed in range(4):
                    tasks.start_soon(read, 10 * seed)
                    tasks.start_soon(write, 10 * seed + 5)
            await pair.assert_no_leases()

    async def test_both_ways(self, pair: Linked, tls: Certificate | None) -> None:
        """Both sides read from each other at the same time."""
        await pair.other.do("connect", endpoint=pair.here.transport.endpoint.hex(), port=pair.here.port)
        mine = pair.here.grants.grant([MIB, 70_000], Access.READ, 50)
        theirs = await pair.other.grant([MIB, 70_000], seed=60)
        answers: list[Any] = []

        async def read_back() -> None:
            answers.append(await pair.other.do("read", spans=mine))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read_back)
            await self.assert_reads(pair, theirs, 60)
        assert answers[0]["outcomes"] == ["ok", "ok"]
        expected = [xxh3_128_hexdigest(pattern(50, MIB)), xxh3_128_hexdigest(pattern(51, 70_000))]
        assert answers[0]["digests"] == expected
        await until(lambda: pair.here.transfer_leases == len(pair.leases))

    # Access control.

    async def test_what_is_not_granted_is_a_miss(self, pair: Linked) -> None:
        """Unknown or ended grants, wrong access and spans beyond a slice are misses; other spans are read."""
        if self.transport.one_sided:
            pytest.skip("a one-sided transport cannot refuse transfers")
        good, beside = await pair.other.grant([5000, 5000], seed=1)
        (ended,) = await pair.other.grant([5000])
        await pair.other.do("revoke", grant=ended.grant)
        (writable,) = await pair.other.grant([5000], access=Access.WRITE)
        bad = [
            RemoteSpan(good.grant ^ 1, good.offset, 5000),
            RemoteSpan(0, good.offset, 5000),
            ended,
            writable,
            part(good, 1, 5000),
            part(good, -1, 5000),
            part(good, 5000, 1),
            RemoteSpan(writable.grant, good.offset, 5000),
            RemoteSpan(good.grant, ended.offset, 5000),
            *(RemoteSpan(good.grant, offset, 5000) for offset in (1 << 62, (1 << 63) - 1, 1 << 63)),
            *(RemoteSpan(good.grant, offset, 5000) for offset in ((1 << 64) - 2500, 1 << 64, -(1 << 63), -1)),
            *(RemoteSpan(number, good.offset, 5000) for number in (1 << 63, (1 << 64) - 1, 1 << 80, -1)),
        ]
        spans = [good, *(span for each in bad for span in (each, beside))]
        outcomes, views = await pair.read(spans)
        assert outcomes == [OK, *([MISS, OK] * len(bad))]
        assert same(views[0], pattern(1, 5000))
        assert all(same(view, pattern(2, 5000)) for view in views[2::2])
        await pair.assert_no_leases()

    async def test_what_is_not_granted_is_not_written(self, pair: Linked) -> None:
        """Writes without a grant are misses, and change no byte."""
        if self.transport.one_sided:
            pytest.skip("a one-sided transport cannot refuse transfers")
        good, beside = await pair.other.grant([5000, 5000], access=Access.WRITE, seed=1)
        (readable,) = await pair.other.grant([5000], seed=7)
        bad = [readable, part(good, 3000, 5000), RemoteSpan(5, good.offset, 5000), part(beside, -1, 5000)]
        spans = [bad[0], good, *bad[1:], beside]
        views = pair.views([5000] * len(spans))
        for index, view in enumerate(views):
            view[:] = pattern(100 + index, 5000)
        assert await pair.write(views, spans) == [MISS, OK, MISS, MISS, MISS, OK]
        for span, seed in ((good, 101), (beside, 105), (readable, 7)):
            assert await pair.there(span, pattern(seed, 5000))
        await pair.assert_no_leases()

    async def test_offsets_beyond_the_arena(self, pair: Linked) -> None:
        """Offsets up to and over 2^63 are never ``OK``, and do not affect other spans."""
        (good,) = await pair.other.grant([5000], seed=1)
        offsets = (1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 2500, 1 << 64, -1)
        bad = [RemoteSpan(good.grant, offset, 5000) for offset in offsets]
        outcomes, views = await pair.read([good, *bad, good])
        assert OK not in outcomes[1:-1]
        assert (outcomes[0], outcomes[-1]) == (OK, OK)
        assert all(same(view, pattern(1, 5000)) for view in (views[0], views[-1]))
        assert OK not in await pair.write(views[1:-1], bad)
        await self.assert_reads(pair, [good], 1)

    # Endpoints and closing.

    async def test_invalid_endpoints(self, pair: Linked) -> None:
        """An empty, truncated, longer or random endpoint raises :class:`PeerError` without side effects."""
        endpoint = pair.endpoint
        wrong = [
            b"",
            b"\0",
            endpoint[: len(endpoint) // 2],
            endpoint[:-1],
            bytes(len(endpoint)),
            b"\xff" * len(endpoint),
            pattern(1, len(endpoint)),
            pattern(2, MIB),
            bytes(reversed(endpoint)),
        ]
        for invalid in wrong:
            with pytest.raises(PeerError):
                await pair.here.transport.connect(invalid, dial_nowhere)
        (span,) = await pair.other.grant([1000])
        await self.assert_reads(pair, [span])

    async def test_opening_and_closing_leaves_nothing(
        self, other: OtherProcess, tls: Certificate | None
    ) -> None:
        """Opening and closing repeatedly leaks no file descriptors, threads or tasks on either side."""

        async def once() -> None:
            async with self.linked(other, tls) as pair:
                await self.assert_reads(pair, await pair.other.grant([MIB, 10]))

        async def counted() -> list[list[int]]:
            return [self._counted(resources()), self._counted(await other.do("resources"))]

        # Warm up, so that resources created once per process, such as a library's threads, do not count.
        for _ in range(2):
            await once()
        before = await counted()
        for _ in range(4):
            await once()
        with anyio.move_on_after(TIMEOUT_SECONDS):
            while not none_greater(await counted(), before):  # noqa: ASYNC110 - of another process
                await anyio.sleep(0.05)
        after = await counted()
        assert none_greater(after, before), (
            f"descriptors, threads and tasks of both processes: {before} before, {after} after"
        )

    def _counted(self, found: Sequence[int]) -> list[int]:
        files, threads, tasks = found
        return [files if self.counts_files else 0, threads if self.counts_threads else 0, tasks]

    # Cancellation, peers that fail, and networks that fail: they corrupt and leak nothing.

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
            call = await self.held_back(pair, partial(pair.transfer, "read", [span], [view]))
            await pair.other.do("revoke", grant=span.grant)
            assert await pair.other.do("transfer_leases") > 0
            pair.relay.release()
            # Parts whose transfer had not started may be misses.
            assert (outcomes := list(await call.join())) in ([OK], [MISS])
            assert outcomes != [OK] or await holds(view, 0)
            await pair.assert_no_leases()
            (again,) = await pair.other.grant([1000], seed=5)
            await self.assert_reads(pair, [again], 5)

    # Cancellation.

    @pytest.mark.parametrize("lag", [0, 1])
    @pytest.mark.parametrize("through", ["scope", "task"])
    @pytest.mark.parametrize("method", ["read", "write"])
    async def test_cancelling_at_every_step(
        self, pair: Linked, method: Method, through: Through, lag: int
    ) -> None:
        """A cancelled call does not write to memory afterwards, and the link stays usable."""
        sizes = [300 * KIB, 20, 2 * MIB]
        granted = await pair.other.grant(sizes, access=Access(method), seed=1)
        checked = await pair.other.grant([1000], seed=9)
        views = pair.views(sizes)
        operation = partial(pair.transfer, method, granted, views)
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
            await anyio.to_thread.run_sync(pair.other.pause)
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
        self, other: OtherProcess, tls: Certificate | None, method: Method
    ) -> None:
        """The call is ``FAILED`` within the deadline and leaks nothing. Later calls fail as well."""
        size = 32 * MIB
        async with self.linked(
            other, tls, deadline=SHORT_DEADLINE, capacity=size + 4 * MIB, relayed=self.over_connections
        ) as pair:
            (span,) = await pair.other.grant([size], access=Access(method))
            (view,) = pair.views([size])

            transfer = partial(pair.transfer, method, [span], [view])
            if pair.relay is not None:
                call = await self.held_back(pair, transfer)
            else:
                call = DetachedTask(transfer())
                await anyio.sleep(0.001)
            began = time.monotonic()
            await anyio.to_thread.run_sync(pair.other.kill)
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
                await anyio.to_thread.run_sync(pair.other.kill)
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
            await anyio.to_thread.run_sync(pair.other.pause)
            try:
                began = time.monotonic()
                outcomes = list(await pair.transfer("read", spans, views))
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
        self, other: OtherProcess, tls: Certificate | None, method: Method
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
            call = DetachedTask(pair.transfer(method, [span], [view]))
            await until(lambda: pair.relay is not None and pair.relay.is_holding)
            pair.relay.cut()
            await anyio.sleep(0.3)
            pair.relay.release()
            pair.relay.heal()
            assert list(await call.join()) == [OK]
            if method == "read":
                assert await holds(view, 1)
            assert await pair.there(span, view)
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
            views = pair.views([8 * MIB, 1])
            call = await self.held_back(pair, partial(pair.transfer, "read", spans, views))
            began = time.monotonic()
            pair.relay.cut()
            assert FAILED in await call.join()
            assert time.monotonic() - began < SHORT_DEADLINE + GRACE_SECONDS
            pair.relay.release()
            pair.relay.heal()
            await self.until_reads(pair, spans[1:], 2)
            await pair.assert_no_leases()
