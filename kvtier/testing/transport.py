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

import random
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from xxhash import xxh3_128_hexdigest

from kvtier.errors import PeerError
from kvtier.testing.backend import is_stained, same
from kvtier.testing.transport_faults import TransportFaults
from kvtier.testing.transport_pair import (
    KIB,
    MISS,
    OK,
    PATIENCE_SECONDS,
    Linked,
    fill,
    holds,
    no_more,
    part,
    until,
)
from kvtier.testing.transport_process import OtherProcess, resources
from kvtier.testing.transport_side import (
    MIB,
    Certificate,
    dial_nowhere,
    pattern,
)
from kvtier.transports.base import Access, RemoteSpan


class TransportConformance(TransportFaults):
    """The contract of :class:`~kvtier.transports.base.Transport`. Call your subclass ``Test...``."""

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
            assert list(await pair.link.read([(span, view)])) == [OK]
            assert await holds(view, 1)
            assert list(await pair.link.write([(view, target)])) == [OK]
            assert await pair.other.digest(target.offset, size) == xxh3_128_hexdigest(view)

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
                    await fill(view, seed + 1000)
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
        assert same(views[0], pattern(1, 5000))
        assert all(same(view, pattern(2, 5000)) for view in views[2::2])
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
        assert all(same(view, pattern(1, 5000)) for view in (views[0], views[-1]))
        outcomes = list(await pair.link.write(list(zip(views[1:-1], bad, strict=True))))
        assert OK not in outcomes
        await self.assert_reads(pair, [good], 1)

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
