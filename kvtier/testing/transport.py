"""What every transport must do, as tests: subclass :class:`TransportConformance` and pytest runs them all.

::

    class TestMyTransport(TransportConformance):
        transport = MyTransport
        settings = {"type": "mine"}

Bytes move between the arena of the tests' process and that of a second one, which is started with Python and
imports the transport by its module's name. A test needs room for about 400 MiB at most. The tests run on
asyncio through anyio's pytest plugin. Transports that ``SupportsConnections`` get connections without any
authentication, over loopback or over a relay that holds bytes back and cuts.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from xxhash import xxh3_128_hexdigest

from kvtier.arena import Lease
from kvtier.backends.base import Outcome
from kvtier.errors import PeerError
from kvtier.testing.backend import is_stained, stain
from kvtier.testing.cancelling import Through, cancelled_at
from kvtier.testing.relay import Relay
from kvtier.testing.transport_process import OtherProcess, resources
from kvtier.testing.transport_side import (
    MIB,
    Certificate,
    Side,
    dial_nowhere,
    dial_to,
    pattern,
)
from kvtier.transports.base import Access, Link, RemoteSpan, Transport

KIB = 1 << 10
OK, MISS, FAILED = Outcome.OK, Outcome.MISS, Outcome.FAILED

SHORT_DEADLINE = 1.0
GRACE_SECONDS = 3.0
"""How much later than its deadline a call may end on a machine that is busy."""
PATIENCE_SECONDS = 30.0
"""How long a condition that must come may take to come."""


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; fail where it does not come."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - of another process or thread
            await anyio.sleep(0.005)


def no_more(now: Sequence[Sequence[int]], before: Sequence[Sequence[int]]) -> bool:
    """Whether no number is greater than it was."""
    return all(
        count <= earlier
        for row, row_before in zip(now, before, strict=True)
        for count, earlier in zip(row, row_before, strict=True)
    )


def part(span: RemoteSpan, start: int, length: int) -> RemoteSpan:
    """Some bytes of a span."""
    return RemoteSpan(span.grant, span.offset + start, length)


@dataclass
class Linked:
    """This process's side, the other process, and the link there."""

    here: Side
    other: OtherProcess
    endpoint: bytes
    link: Link
    relay: Relay | None
    room: list[Lease] = field(default_factory=list)

    def views(self, lengths: Sequence[int]) -> list[memoryview]:
        """Memory of this process's arena, until the test ends; stained."""
        leases = [self.here.arena.allocate(length) for length in lengths]
        for lease in leases:
            assert lease is not None, "the arena of a test is too small"
            self.room.append(lease)
        return [lease.view for lease in leases if lease is not None]

    async def read(self, spans: Sequence[RemoteSpan]) -> tuple[list[Outcome], list[memoryview]]:
        """Read spans into memory of its own each."""
        views = self.views([span.length for span in spans])
        return list(await self.link.read(list(zip(spans, views, strict=True)))), views

    async def nothing_is_lent(self) -> None:
        """Wait until no transfer holds a lease over there; fail where one stays."""
        with anyio.fail_after(PATIENCE_SECONDS):
            while await self.other.do("lent"):  # noqa: ASYNC110 - of another process
                await anyio.sleep(0.01)


class TransportConformance:
    """The contract of :class:`~kvtier.transports.base.Transport`. Call your subclass ``Test...``."""

    pytestmark = pytest.mark.anyio

    transport: ClassVar[type[Transport]]
    settings: ClassVar[Mapping[str, Any]]
    """Of this transport, as an operator writes them, without ``deadline``."""
    counts_files: ClassVar[bool] = True
    """Whether all descriptors of a transport are closed with it: not so where a library keeps some."""
    counts_threads: ClassVar[bool] = True
    """The same of its threads."""

    def certificate(self, path: Path) -> Certificate | None:
        """One, made in that folder, to run all this over TLS."""
        return None

    @property
    def over_connections(self) -> bool:
        """Whether its bytes go over connections that it is given."""
        # Not issubclass(), which would ask for more than methods.
        return hasattr(self.transport, "serve")

    @pytest.fixture
    def anyio_backend(self) -> str:
        """The cache process runs on asyncio."""
        return "asyncio"

    @pytest.fixture(scope="class")
    def process(self) -> Iterator[OtherProcess]:
        """The other process; a test that ends it leaves it to the next to start it again."""
        process = OtherProcess()
        yield process
        process.kill()

    @pytest.fixture
    def other(self, process: OtherProcess) -> OtherProcess:
        """The other process, running."""
        process.start()
        return process

    @pytest.fixture
    def proof(self, tmp_path: Path) -> Certificate | None:
        """What this test's connections are secured with."""
        return self.certificate(tmp_path / "certificate")

    @asynccontextmanager
    async def linked(
        self,
        other: OtherProcess,
        proof: Certificate | None = None,
        *,
        deadline: float = 20.0,
        capacity: int = 24 * MIB,
        relayed: bool = False,
    ) -> AsyncIterator[Linked]:
        """Both sides open, and this one linked to the other. At the end nothing of either may be leased."""
        settings = {**self.settings, "deadline": deadline}
        endpoint, port = await other.open(self.transport, settings, capacity, proof)
        async with AsyncExitStack() as stack:
            here = await stack.enter_async_context(Side.open(self.transport, settings, capacity, proof))
            relay = stack.enter_context(Relay.to(port)) if relayed else None
            dial = dial_to(relay.port if relay else port, proof) if port else dial_nowhere
            link = await here.transport.connect(endpoint, dial)
            linked = Linked(here, other, endpoint, link, relay)
            try:
                yield linked
            finally:
                await link.close()
                for lease in linked.room:
                    lease.release()
        if other.is_running:
            await other.do("close")

    @pytest.fixture
    async def pair(self, other: OtherProcess, proof: Certificate | None) -> AsyncIterator[Linked]:
        """Both sides, linked directly."""
        async with self.linked(other, proof) as linked:
            yield linked

    async def assert_reads(self, pair: Linked, spans: Sequence[RemoteSpan], seed: int = 0) -> None:
        """Fail unless whole slices, granted with this seed, are read right."""
        outcomes, views = await pair.read(spans)
        assert outcomes == [OK] * len(spans)
        for index, view in enumerate(views):
            assert view == pattern(seed + index, len(view)), f"item {index} has other bytes"

    def only_over_connections(self) -> None:
        """Skip the test where the suite has no hand in how bytes travel."""
        if not self.over_connections:
            pytest.skip("needs connections that can be held back and cut")

    # Bytes.

    @pytest.mark.parametrize("count", [0, 1, 7, 300])
    async def test_reads(self, pair: Linked, count: int) -> None:
        """No, one and many spans."""
        spans = await pair.other.grant([1000 + index for index in range(count)]) if count else []
        await self.assert_reads(pair, spans)

    @pytest.mark.parametrize("count", [0, 1, 7, 300])
    async def test_writes(self, pair: Linked, count: int) -> None:
        """No, one and many spans."""
        lengths = [1000 + index for index in range(count)]
        spans = await pair.other.grant(lengths, access=Access.WRITE) if count else []
        views = pair.views(lengths)
        for index, view in enumerate(views):
            view[:] = pattern(1000 + index, len(view))
        assert list(await pair.link.write(list(zip(views, spans, strict=True)))) == [OK] * count
        for span, view in zip(spans, views, strict=True):
            assert await pair.other.digest(span.offset, span.length) == xxh3_128_hexdigest(view)

    @pytest.mark.parametrize("size", [1, 2, 4095, 4096, 4097, MIB - 1, 5 * MIB + 3, 64 * MIB])
    async def test_every_size(self, other: OtherProcess, proof: Certificate | None, size: int) -> None:
        """From one byte to 64 MiB, read and written."""
        async with self.linked(other, proof, capacity=2 * size + 4 * MIB) as pair:
            (span,) = await pair.other.grant([size], seed=1)
            (target,) = await pair.other.grant([size], access=Access.WRITE, seed=2)
            (view,) = pair.views([size])
            expected = await anyio.to_thread.run_sync(pattern, 1, size)
            assert list(await pair.link.read([(span, view)])) == [OK]
            assert view == expected
            assert list(await pair.link.write([(view, target)])) == [OK]
            assert await pair.other.digest(target.offset, size) == xxh3_128_hexdigest(expected)

    @pytest.mark.parametrize(("start", "length"), [(1, 1), (4095, 2), (0, 9999), (777, 5000), (9999, 1)])
    async def test_a_part_of_a_slice(self, pair: Linked, start: int, length: int) -> None:
        """A span may lie anywhere within a slice, and the view anywhere in memory; nothing else changes."""
        span, other = await pair.other.grant([10_000, 10_000], seed=1)
        (room,) = pair.views([30_000])
        view = room[4097 : 4097 + length]
        assert list(await pair.link.read([(part(span, start, length), view)])) == [OK]
        assert view == pattern(1, 10_000)[start : start + length]
        assert is_stained(room[:4097])
        assert is_stained(room[4097 + length :])
        assert await pair.other.digest(other.offset, 10_000) == xxh3_128_hexdigest(pattern(2, 10_000))

    @pytest.mark.parametrize(("start", "length"), [(1, 1), (4095, 2), (0, 9999), (777, 5000), (9999, 1)])
    async def test_writing_a_part_of_a_slice(self, pair: Linked, start: int, length: int) -> None:
        """Bytes beside the span, and the slices beside its slice, stay as they were."""
        spans = await pair.other.grant([10_000] * 3, access=Access.WRITE, seed=1)
        (view,) = pair.views([length])
        view[:] = pattern(9, length)
        assert list(await pair.link.write([(view, part(spans[1], start, length))])) == [OK]
        expected = [bytearray(pattern(seed, 10_000)) for seed in (1, 2, 3)]
        expected[1][start : start + length] = view
        for span, content in zip(spans, expected, strict=True):
            assert await pair.other.digest(span.offset, 10_000) == xxh3_128_hexdigest(content)

    async def test_a_batch_of_a_thousand(self, pair: Linked) -> None:
        """Spans of many lengths, out of order, some of them twice."""
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

    async def test_batches_at_once(self, other: OtherProcess, proof: Certificate | None) -> None:
        """Reads and writes of many tasks, large and small, do not disturb each other."""
        sizes = [100, 5000, 300 * KIB, 3 * MIB]
        async with self.linked(other, proof, capacity=64 * MIB) as pair:

            async def read(seed: int) -> None:
                spans = await pair.other.grant(sizes, seed=seed)
                for _ in range(3):
                    await self.assert_reads(pair, spans, seed)

            async def write(seed: int) -> None:
                spans = await pair.other.grant(sizes, access=Access.WRITE, seed=seed)
                views = pair.views(sizes)
                for view in views:
                    view[:] = await anyio.to_thread.run_sync(pattern, seed + 1000, len(view))
                for _ in range(3):
                    assert list(await pair.link.write(list(zip(views, spans, strict=True)))) == [OK] * 4
                for span, view in zip(spans, views, strict=True):
                    assert await pair.other.digest(span.offset, span.length) == xxh3_128_hexdigest(view)

            async with anyio.create_task_group() as tasks:
                for seed in range(4):
                    tasks.start_soon(read, 10 * seed)
                    tasks.start_soon(write, 10 * seed + 5)
            await pair.nothing_is_lent()

    async def test_both_ways(self, pair: Linked, proof: Certificate | None) -> None:
        """The other reads from here while this side reads from there."""
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
        await until(lambda: pair.here.lent == len(pair.room))

    # What is not granted.

    async def test_what_is_not_granted_is_a_miss(self, pair: Linked) -> None:
        """Unknown, ended, for another access, beyond its slice: a miss each, and the others are read."""
        if self.transport.one_sided:
            pytest.skip("what takes no part in a transfer cannot refuse it")
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
        assert views[0] == pattern(1, 5000)
        assert all(view == pattern(2, 5000) for view in views[2::2])
        await pair.nothing_is_lent()

    async def test_what_is_not_granted_is_not_written(self, pair: Linked) -> None:
        """As for reading; and not a byte of it is changed."""
        if self.transport.one_sided:
            pytest.skip("what takes no part in a transfer cannot refuse it")
        good, beside = await pair.other.grant([5000, 5000], access=Access.WRITE, seed=1)
        (readable,) = await pair.other.grant([5000], seed=7)
        bad = [readable, part(good, 3000, 5000), RemoteSpan(5, good.offset, 5000), part(beside, -1, 5000)]
        spans = [bad[0], good, *bad[1:], beside]
        views = pair.views([5000] * len(spans))
        for index, view in enumerate(views):
            view[:] = pattern(100 + index, 5000)
        outcomes = await pair.link.write(list(zip(views, spans, strict=True)))
        assert list(outcomes) == [MISS, OK, MISS, MISS, MISS, OK]
        for span, seed in ((good, 101), (beside, 105), (readable, 7)):
            assert await pair.other.digest(span.offset, 5000) == xxh3_128_hexdigest(pattern(seed, 5000))
        await pair.nothing_is_lent()

    async def test_offsets_that_cannot_be(self, pair: Linked) -> None:
        """Beyond the arena, up to 2^63 and over: never ``OK``, nothing breaks, and the others are moved."""
        (good,) = await pair.other.grant([5000], seed=1)
        offsets = (1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 2500, 1 << 64, -1)
        bad = [RemoteSpan(good.grant, offset, 5000) for offset in offsets]
        outcomes, views = await pair.read([good, *bad, good])
        assert OK not in outcomes[1:-1]
        assert (outcomes[0], outcomes[-1]) == (OK, OK)
        assert views[0] == views[-1] == pattern(1, 5000)
        outcomes = list(await pair.link.write(list(zip(views[1:-1], bad, strict=True))))
        assert OK not in outcomes
        await self.assert_reads(pair, [good], 1)

    async def test_a_grant_that_ends_in_mid_transfer(
        self, other: OtherProcess, proof: Certificate | None
    ) -> None:
        """What a transfer is using stays leased until it has ended; then all is as before."""
        self.only_over_connections()
        size = 32 * MIB
        async with self.linked(other, proof, capacity=size + 4 * MIB, relayed=True) as pair:
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
                assert await pair.other.do("lent") > 0
                pair.relay.let_go()
            # What was not yet being sent may have missed.
            assert outcomes in ([OK], [MISS])
            assert outcomes != [OK] or view == await anyio.to_thread.run_sync(pattern, 0, size)
            await pair.nothing_is_lent()
            (again,) = await pair.other.grant([1000], seed=5)
            await self.assert_reads(pair, [again], 5)

    # Cancelling.

    @pytest.mark.parametrize("lag", [0, 1])
    @pytest.mark.parametrize("through", ["scope", "task"])
    @pytest.mark.parametrize("method", ["read", "write"])
    async def test_cancelling_at_every_step(
        self, pair: Linked, method: str, through: Through, lag: int
    ) -> None:
        """A cancelled call leaves memory alone from then on, and the link usable."""
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
                stain(view)
            await self.assert_reads(pair, checked, 9)
            assert all(is_stained(view) for view in views), "memory was written to after the call had ended"
            if not cancelled:
                break
        await pair.nothing_is_lent()

    async def test_many_at_once_and_a_quarter_cancelled(
        self, other: OtherProcess, proof: Certificate | None
    ) -> None:
        """Of 64 transfers that go on at once, those that are cancelled do not disturb the others."""
        size = 700_000
        async with self.linked(other, proof, capacity=64 * 720_896) as pair:
            spans = await pair.other.grant([size] * 64)
            views = pair.views([size] * 64)
            calls = [
                asyncio.ensure_future(pair.link.read([(span, view)]))
                for span, view in zip(spans, views, strict=True)
            ]
            cancelled = calls[2::4]
            for call in cancelled:
                await anyio.lowlevel.checkpoint()
                call.cancel()
                await asyncio.wait([call])
                stain(views[calls.index(call)])
            await asyncio.wait(calls)
            for index, (call, view) in enumerate(zip(calls, views, strict=True)):
                if call.cancelled():
                    assert is_stained(view), "memory was written to after the call had ended"
                elif call not in cancelled:
                    assert list(call.result()) == [OK]
                    assert view == await anyio.to_thread.run_sync(pattern, index, size)
            await pair.nothing_is_lent()

    async def test_cancelling_what_stands_still(self, other: OtherProcess, proof: Certificate | None) -> None:
        """A call whose bytes do not come ends soon after it is cancelled."""
        async with self.linked(other, proof) as pair:
            (span,) = await pair.other.grant([8 * MIB])
            (view,) = pair.views([8 * MIB])
            pair.other.pause()
            try:
                call = asyncio.ensure_future(pair.link.read([(span, view)]))
                await anyio.sleep(0.1)
                began = time.monotonic()
                call.cancel()
                await asyncio.wait([call])
                assert time.monotonic() - began < GRACE_SECONDS
                stain(view)
            finally:
                pair.other.resume()
            (checked,) = await pair.other.grant([1000], seed=3)
            await self.assert_reads(pair, [checked], 3)
            assert call.cancelled() is False or is_stained(view)
            await pair.nothing_is_lent()

    # What befalls peers and networks.

    @pytest.mark.parametrize("method", ["read", "write"])
    async def test_a_peer_that_is_killed_in_mid_transfer(
        self, other: OtherProcess, proof: Certificate | None, method: str
    ) -> None:
        """``FAILED`` within the deadline, and nothing leaks; what is called afterwards fails, too."""
        size = 32 * MIB
        async with self.linked(
            other, proof, deadline=2.0, capacity=size + 4 * MIB, relayed=self.over_connections
        ) as pair:
            (span,) = await pair.other.grant([size], access=Access(method))
            (view,) = pair.views([size])
            if pair.relay is not None:
                pair.relay.hold_after(MIB)
            began = time.monotonic()
            call = asyncio.ensure_future(
                pair.link.read([(span, view)]) if method == "read" else pair.link.write([(view, span)])
            )
            if pair.relay is not None:
                await until(lambda: pair.relay is not None and pair.relay.is_holding)
            else:
                await anyio.sleep(0.001)
            pair.other.kill()
            if pair.relay is not None:
                pair.relay.let_go()
            (outcome,) = await call
            assert time.monotonic() - began < 2.0 + GRACE_SECONDS
            assert outcome is FAILED or (outcome is OK and pair.relay is None)
            stain(view)
            assert list(await pair.link.read([(span, view)])) == [FAILED]
            assert is_stained(view)

    async def test_a_reader_that_is_killed_in_mid_transfer(
        self, other: OtherProcess, proof: Certificate | None
    ) -> None:
        """Who serves it lets go of what it was reading, and serves others."""
        size = 16 * MIB
        async with self.linked(other, proof, capacity=2 * size) as pair:
            port = pair.here.port
            (span,) = pair.here.grants.grant([size], Access.READ, 1)
            with Relay.to(port) if port else nullcontext() as relay:
                through = relay.port if isinstance(relay, Relay) else 0
                endpoint = pair.here.transport.endpoint.hex()
                await pair.other.do("connect", endpoint=endpoint, port=through)
                if isinstance(relay, Relay):
                    relay.hold_after(MIB)
                await pair.other.do("read_on", spans=[span])
                if isinstance(relay, Relay):
                    await until(lambda: relay.is_holding and pair.here.lent > 0)
                pair.other.kill()
            await until(lambda: pair.here.lent == len(pair.room))
            pair.other.start()
            settings = {**self.settings, "deadline": 20.0}
            await pair.other.open(self.transport, settings, 2 * size, proof)
            await pair.other.do("connect", endpoint=endpoint, port=port)
            answer = await pair.other.do("read", spans=[span])
            assert answer["outcomes"] == ["ok"]
            expected = await anyio.to_thread.run_sync(pattern, 1, size)
            assert answer["digests"] == [xxh3_128_hexdigest(expected)]
            await until(lambda: pair.here.lent == len(pair.room))

    async def test_a_peer_that_is_paused(self, other: OtherProcess, proof: Certificate | None) -> None:
        """Longer than the deadline: ``FAILED``. When it goes on, so does the link."""
        async with self.linked(other, proof, deadline=SHORT_DEADLINE) as pair:
            spans = await pair.other.grant([MIB, 5000], seed=1)
            await self.assert_reads(pair, spans, 1)
            views = pair.views([MIB, 5000])
            pair.other.pause()
            try:
                began = time.monotonic()
                outcomes = list(await pair.link.read(list(zip(spans, views, strict=True))))
                assert time.monotonic() - began < SHORT_DEADLINE + GRACE_SECONDS
                # A device may need no help of that process.
                assert outcomes == [FAILED, FAILED] or self.transport.one_sided
                for view in views:
                    stain(view)
            finally:
                pair.other.resume()
            await self.assert_reads(pair, spans, 1)
            assert all(is_stained(view) for view in views), "memory was written to after the call had ended"
            await pair.nothing_is_lent()

    @pytest.mark.parametrize("method", ["read", "write"])
    async def test_a_cut_that_heals(
        self, other: OtherProcess, proof: Certificate | None, method: str
    ) -> None:
        """The transfer goes on over new connections, and what had arrived is not sent again."""
        self.only_over_connections()
        size = 48 * MIB
        async with self.linked(other, proof, capacity=size + 4 * MIB, relayed=True) as pair:
            assert pair.relay is not None
            (span,) = await pair.other.grant([size], access=Access(method), seed=1)
            (view,) = pair.views([size])
            if method == "write":
                view[:] = await anyio.to_thread.run_sync(pattern, 5, size)
            pair.relay.hold_after(size // 2)
            call = asyncio.ensure_future(
                pair.link.read([(span, view)]) if method == "read" else pair.link.write([(view, span)])
            )
            await until(lambda: pair.relay is not None and pair.relay.is_holding)
            pair.relay.cut()
            await anyio.sleep(0.3)
            pair.relay.let_go()
            pair.relay.heal()
            assert list(await call) == [OK]
            if method == "read":
                assert view == await anyio.to_thread.run_sync(pattern, 1, size)
            assert await pair.other.digest(span.offset, size) == xxh3_128_hexdigest(view)
            assert pair.relay.forwarded < size * 5 // 4, "what had arrived was sent again"
            await pair.nothing_is_lent()

    async def test_a_cut_that_does_not_heal_in_time(
        self, other: OtherProcess, proof: Certificate | None
    ) -> None:
        """``FAILED`` by the deadline; after it has healed the link works again."""
        self.only_over_connections()
        async with self.linked(other, proof, deadline=SHORT_DEADLINE, relayed=True) as pair:
            assert pair.relay is not None
            spans = await pair.other.grant([8 * MIB, 1], seed=1)
            pair.relay.hold_after(MIB)
            call = asyncio.ensure_future(pair.read(spans))
            await until(lambda: pair.relay is not None and pair.relay.is_holding)
            began = time.monotonic()
            pair.relay.cut()
            assert FAILED in (await call)[0]
            assert time.monotonic() - began < SHORT_DEADLINE + GRACE_SECONDS
            pair.relay.let_go()
            pair.relay.heal()
            await self.assert_reads(pair, spans, 1)
            await pair.nothing_is_lent()

    # Endpoints, and closing.

    async def test_an_endpoint_that_is_none(self, pair: Linked) -> None:
        """Empty, cut short, longer, or anything else: :class:`PeerError`, and nothing else breaks."""
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
        for one in wrong:
            with pytest.raises(PeerError):
                await pair.here.transport.connect(one, dial_nowhere)
        (span,) = await pair.other.grant([1000])
        await self.assert_reads(pair, [span])

    async def test_opening_and_closing_leaves_nothing(
        self, other: OtherProcess, proof: Certificate | None
    ) -> None:
        """As many descriptors, threads and tasks as before, on both sides, however often."""

        async def once() -> None:
            async with self.linked(other, proof) as pair:
                await self.assert_reads(pair, await pair.other.grant([MIB, 10]))

        async def counted() -> list[list[int]]:
            return [self._counted(resources()), self._counted(await other.do("resources"))]

        # What is made once and stays, such as a library's own threads, is made now.
        for _ in range(2):
            await once()
        before = await counted()
        for _ in range(4):
            await once()
        with anyio.move_on_after(PATIENCE_SECONDS):
            while not no_more(await counted(), before):  # noqa: ASYNC110 - of another process
                await anyio.sleep(0.05)
        after = await counted()
        assert no_more(after, before), (
            f"descriptors, threads and tasks, here and there: {before} before and {after} after"
        )

    def _counted(self, found: Sequence[int]) -> list[int]:
        files, threads, tasks = found
        return [files if self.counts_files else 0, threads if self.counts_threads else 0, tasks]
