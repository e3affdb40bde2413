"""What every backend must do, as tests: subclass :class:`BackendConformance` and pytest runs them all.

::

    class TestMyBackend(BackendConformance):
        persistent = True

        def make_backend(self, path):
            return MyBackend(MySettings(name="mine", type="mine", capacity="256MiB", path=path))

A backend needs room for about 200 MiB. The tests run on asyncio through anyio's pytest plugin.
"""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from xxhash import xxh3_128_digest

from kvtier.backends.base import Backend, Outcome, SupportsArena, SupportsScan
from kvtier.backends.sealed import SealedBackend
from kvtier.header import HEADER_BYTES, ChunkHeader, object_bytes
from kvtier.keys import KEY_BYTES, ChunkKey
from kvtier.testing.cancelling import Through, cancelled_at
from kvtier.testing.noise import SENTINEL, noise, stain

KIB, MIB = 1 << 10, 1 << 20

OK, MISS = Outcome.OK, Outcome.MISS


def make_key(number: int) -> ChunkKey:
    """A key like any other, the same for the same number."""
    return ChunkKey(noise(b"key %d" % number, KEY_BYTES))


_STAINED = memoryview(bytes([SENTINEL]) * MIB)


def blank(length: int) -> memoryview:
    """Writable, page-aligned memory, as a slice of the arena is, filled with a byte that no test writes."""
    view = memoryview(mmap.mmap(-1, length))
    stain(view)
    return view


def is_stained(view: memoryview) -> bool:
    """Whether every byte is still that byte."""
    pieces = (view[start : start + MIB] for start in range(0, len(view), MIB))
    return all(same(piece, _STAINED[: len(piece)]) for piece in pieces)


def same(first: memoryview | bytes, second: memoryview | bytes) -> bool:
    """Whether two runs of bytes are equal, without holding the GIL for long."""
    return len(first) == len(second) and xxh3_128_digest(first) == xxh3_128_digest(second)


class BackendConformance:
    """The contract of :class:`~kvtier.backends.base.Backend`. Call your subclass ``Test...``."""

    pytestmark = pytest.mark.anyio

    persistent: bool = False
    """Whether what was put is still there after ``close`` and another ``open``."""

    chunk_objects: bool = False
    """Whether only whole chunk objects can be stored, as with :class:`SealedBackend` around a medium."""

    def make_backend(self, path: Path) -> Backend:
        """A backend that is not open yet; called again with the same ``path``, one that holds the same.

        ``path`` is an empty folder that is the test's own.
        """
        raise NotImplementedError

    def corrupt(self, path: Path, key: ChunkKey) -> bool:
        """Damage what is held under ``key``, behind the backend's back. ``False``: there is no way to."""
        return False

    def value(self, key: ChunkKey, size: int, seed: int = 0) -> memoryview:
        """Something to put under ``key``, of ``size`` bytes; of that payload where it is a chunk object."""
        offset = HEADER_BYTES if self.chunk_objects else 0
        view = blank(object_bytes(size) if self.chunk_objects else size)
        # No multiple of any page or part: bytes that end up at a wrong offset differ.
        pattern = noise(b"%d" % seed + key, min(size, MIB + 13))
        for start in range(offset, offset + size, len(pattern)):
            target = view[start : min(start + len(pattern), offset + size)]
            target[:] = pattern[: len(target)]
        if self.chunk_objects:
            ChunkHeader(key, make_key(0), bytes(32), size).seal(view)
        return view

    @pytest.fixture
    def anyio_backend(self) -> str:
        """The cache process runs on asyncio."""
        return "asyncio"

    @asynccontextmanager
    async def opened(self, path: Path) -> AsyncIterator[Backend]:
        """An open backend; at the end it is closed, and no memory of an arena of its own may be leased."""
        backend = self.make_backend(path)
        await backend.open()
        arena = backend.arena if isinstance(backend, SupportsArena) else None
        try:
            yield backend
        finally:
            await backend.close()
        assert arena is None or arena.leases == 0, "leases are open after close"

    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[Backend]:
        """An open backend that holds nothing."""
        async with self.opened(tmp_path) as backend:
            yield backend

    async def store(self, backend: Backend, keys: Sequence[ChunkKey], size: int, seed: int = 0) -> None:
        """Put a value of one size under each key."""
        outcomes = await backend.put([(key, self.value(key, size, seed)) for key in keys])
        assert list(outcomes) == [OK] * len(keys)

    async def found(self, backend: Backend, key: ChunkKey, size: int) -> memoryview | None:
        """What is held under ``key``, or ``None``."""
        view = blank(len(self.value(key, size)))
        (outcome,) = await backend.get([(key, view)])
        assert outcome in (OK, MISS)
        return view if outcome is OK else None

    async def assert_holds(self, backend: Backend, key: ChunkKey, size: int, *seeds: int) -> None:
        """Fail unless the whole value of one of the seeds is held under ``key``."""
        found = await self.found(backend, key, size)
        assert found is not None, "nothing is held"
        assert any(same(found, self.value(key, size, seed)) for seed in seeds), "another value is held"

    # What is put is there.

    async def test_holds_what_was_put(self, backend: Backend) -> None:
        """A key is held from ``put`` on, with the bytes that it was put with."""
        key = make_key(1)
        assert list(await backend.contains([key])) == [False]
        await self.store(backend, [key], 10 * KIB)
        assert list(await backend.contains([key])) == [True]
        await self.assert_holds(backend, key, 10 * KIB, 0)

    async def test_answers_come_in_the_order_of_the_question(self, backend: Backend) -> None:
        """One answer for each item, in its place, however many items there are."""
        keys = [make_key(number) for number in range(40)]
        held = keys[::3]
        await self.store(backend, held, 4000)
        assert list(await backend.contains(keys)) == [key in held for key in keys]
        shuffled = [keys[place * 7 % len(keys)] for place in range(len(keys))]
        views = [blank(len(self.value(key, 4000))) for key in shuffled]
        outcomes = await backend.get(list(zip(shuffled, views, strict=True)))
        assert list(outcomes) == [OK if key in held else MISS for key in shuffled]
        for key, view in zip(shuffled, views, strict=True):
            assert key not in held or same(view, self.value(key, 4000))

    async def test_empty_batches(self, backend: Backend) -> None:
        """A batch may be empty."""
        assert list(await backend.contains([])) == []
        assert list(await backend.put([])) == []
        assert list(await backend.get([])) == []
        await backend.delete([])

    async def test_a_batch_that_succeeds_in_part(self, backend: Backend) -> None:
        """A key that misses, or has another length, does not spoil the others of its batch."""
        first, missing, longer, last = (make_key(number) for number in range(4))
        await self.store(backend, [first, last], 4000)
        await self.store(backend, [longer], 9000)
        views = [blank(len(self.value(first, 4000))) for _ in range(4)]
        outcomes = await backend.get(list(zip([first, missing, longer, last], views, strict=True)))
        assert list(outcomes) == [OK, MISS, MISS, OK]
        assert same(views[0], self.value(first, 4000))
        assert same(views[3], self.value(last, 4000))

    @pytest.mark.parametrize("size", [6000, 1000, 20_000])
    async def test_put_replaces(self, backend: Backend, size: int) -> None:
        """A second ``put`` of a key takes the place of the first, also with another length."""
        key = make_key(1)
        await self.store(backend, [key], 6000, seed=1)
        await self.store(backend, [key], size, seed=2)
        await self.assert_holds(backend, key, size, 2)

    @pytest.mark.parametrize("size", [1, 3 * KIB, 5 * KIB, 20 * KIB])
    async def test_a_value_of_another_length_is_a_miss(self, backend: Backend, size: int) -> None:
        """A view that is longer or shorter than the value is not filled in part."""
        key = make_key(1)
        await self.store(backend, [key], 10 * KIB)
        view = blank(size)
        assert list(await backend.get([(key, view)])) == [MISS]
        await self.assert_holds(backend, key, 10 * KIB, 0)

    @pytest.mark.parametrize("size", [1, 255, 4095, 4096, 4097, MIB - 256, MIB + 1, 64 * MIB])
    async def test_every_size(self, backend: Backend, size: int) -> None:
        """From one byte to 64 MiB, whole pages or not."""
        key = make_key(1)
        value = await anyio.to_thread.run_sync(self.value, key, size)
        assert list(await backend.put([(key, value)])) == [OK]
        view = await anyio.to_thread.run_sync(blank, len(value))
        assert list(await backend.get([(key, view)])) == [OK]
        assert same(view, value)

    @pytest.mark.parametrize("shift", [1, 64])
    async def test_memory_that_is_not_aligned(self, backend: Backend, shift: int) -> None:
        """Any writable bytes will do, wherever they begin."""
        key = make_key(1)
        value = self.value(key, 8000)
        source, target = memoryview(bytearray(len(value) + shift)), memoryview(bytearray(len(value) + shift))
        source[shift:] = value
        assert list(await backend.put([(key, source[shift:])])) == [OK]
        assert list(await backend.get([(key, target[shift:])])) == [OK]
        assert same(target[shift:], value)
        assert bytes(target[:shift]) == bytes(shift), "bytes before the view were written"

    async def test_put_of_memory_that_cannot_be_written(self, backend: Backend) -> None:
        """``put`` only reads."""
        if self.chunk_objects:
            pytest.skip("a chunk object is sealed in place")
        key = make_key(1)
        for size in (4096, MIB):
            assert list(await backend.put([(key, memoryview(bytes(self.value(key, size))))])) == [OK]
            await self.assert_holds(backend, key, size, 0)

    async def test_put_takes_a_copy(self, backend: Backend) -> None:
        """The memory is the caller's again when ``put`` has ended."""
        key = make_key(1)
        value = self.value(key, MIB)
        assert list(await backend.put([(key, value)])) == [OK]
        stain(value)
        await self.assert_holds(backend, key, MIB, 0)

    async def test_delete(self, backend: Backend) -> None:
        """A deleted key is not held, can be deleted again, and be put again; others stay."""
        gone, stays = make_key(1), make_key(2)
        await self.store(backend, [gone, stays], 4000)
        await backend.delete([gone, make_key(3)])
        await backend.delete([gone])
        assert list(await backend.contains([gone, stays])) == [False, True]
        assert await self.found(backend, gone, 4000) is None
        await self.assert_holds(backend, stays, 4000, 0)
        await self.store(backend, [gone], 4000, seed=3)
        await self.assert_holds(backend, gone, 4000, 3)

    # Several at once.

    async def test_many_batches_at_once(self, backend: Backend) -> None:
        """Batches on different keys do not disturb each other."""

        async def work(worker: int) -> None:
            keys = [make_key(worker * 100 + number) for number in range(8)]
            await self.store(backend, keys, 50_000, seed=worker)
            await backend.delete(keys[::2])
            for key in keys[1::2]:
                await self.assert_holds(backend, key, 50_000, worker)
            assert list(await backend.contains(keys)) == [False, True] * 4

        async with anyio.create_task_group() as group:
            for worker in range(12):
                group.start_soon(work, worker)

    async def test_a_key_twice_in_one_batch(self, backend: Backend) -> None:
        """One of the two values is held, whole."""
        key = make_key(1)
        values = [self.value(key, 512 * KIB, seed) for seed in (1, 2)]
        assert list(await backend.put([(key, value) for value in values])) == [OK, OK]
        await self.assert_holds(backend, key, 512 * KIB, 1, 2)
        views = [blank(len(values[0])) for _ in range(2)]
        assert list(await backend.get([(key, view) for view in views])) == [OK, OK]
        assert same(views[0], views[1])

    @pytest.mark.parametrize("size", [4000, 700_000])
    async def test_equal_keys_at_once_are_never_a_mix(self, backend: Backend, size: int) -> None:
        """Writers, readers and deleters of the same keys: a read gives one writer's whole value, or none."""
        keys = [make_key(number) for number in range(3)]
        values = {key: [self.value(key, size, seed) for seed in range(4)] for key in keys}
        digests = {key: {xxh3_128_digest(value) for value in values[key]} for key in keys}
        reads = 0

        async def write(seed: int) -> None:
            for _ in range(8):
                outcomes = await backend.put([(key, values[key][seed]) for key in keys])
                assert list(outcomes) == [OK] * len(keys)

        async def delete() -> None:
            for _ in range(4):
                await backend.delete(keys)

        async def read() -> None:
            nonlocal reads
            views = [blank(len(values[key][0])) for key in keys]
            for _ in range(12):
                outcomes = await backend.get(list(zip(keys, views, strict=True)))
                for key, view, outcome in zip(keys, views, outcomes, strict=True):
                    assert outcome in (OK, MISS)
                    assert outcome is MISS or xxh3_128_digest(view) in digests[key], "a mix of two values"
                    reads += outcome is OK

        async with anyio.create_task_group() as group:
            for seed in range(4):
                group.start_soon(write, seed)
                group.start_soon(read)
            group.start_soon(delete)
        await write(0)
        await read()
        assert reads, "nothing was read"

    # Cancellation.

    @pytest.mark.parametrize("lag", [0, 25], ids=["at once", "later"])
    @pytest.mark.parametrize("through", ["scope", "task"])
    @pytest.mark.parametrize("method", ["contains", "put", "get", "delete"])
    async def test_cancelled_at_every_await(
        self, backend: Backend, method: str, through: Through, lag: int
    ) -> None:
        """A cancelled call leaves the memory alone, old or new values whole, and the backend usable."""
        size = 300 * KIB
        keys = [make_key(number) for number in range(3)]
        for step in itertools.count(1):
            await self.store(backend, keys, size, seed=1)
            views = [
                self.value(key, size, seed=2) if method == "put" else blank(len(self.value(key, size)))
                for key in keys
            ]
            items = list(zip(keys, views, strict=True))
            question = keys if method in ("contains", "delete") else items
            cancelled = await cancelled_at(
                step, partial(getattr(backend, method), question), through=through, lag=lag
            )
            for view in views:
                stain(view)
            for key in keys:
                found = await self.found(backend, key, size)
                assert found is not None or method == "delete", "a value is lost"
                if found is not None:
                    seeds = (1, 2) if method == "put" else (1,)
                    assert any(same(found, self.value(key, size, seed)) for seed in seeds)
            assert all(is_stained(view) for view in views), "memory was written to after the call had ended"
            if not cancelled:
                return

    # Outliving the process, and damage.

    async def test_reopening(self, tmp_path: Path) -> None:
        """What was put is there after another ``open``, as often as it is opened."""
        if not self.persistent:
            pytest.skip("not persistent")
        keys = [make_key(number) for number in range(5)]
        async with self.opened(tmp_path) as backend:
            await self.store(backend, keys, 9000)
            await backend.delete(keys[:1])
        for _ in range(2):
            async with self.opened(tmp_path) as backend:
                assert list(await backend.contains(keys)) == [False, True, True, True, True]
                for key in keys[1:]:
                    await self.assert_holds(backend, key, 9000, 0)

    async def test_scanning(self, tmp_path: Path) -> None:
        """``scan`` tells of each object once: key, length, first bytes and when it was used."""
        began = time.time()
        sizes = {make_key(number): 300 + number * 1000 for number in range(30)}
        async with self.opened(tmp_path) as backend:
            if not isinstance(backend, SupportsScan):
                pytest.skip("has no scan")
            assert [stored async for batch in backend.scan() for stored in batch] == []
            for key, size in sizes.items():
                await self.store(backend, [key], size)
        async with self.opened(tmp_path) as backend:
            assert isinstance(backend, SupportsScan)
            found = [stored async for batch in backend.scan() for stored in batch]
        assert sorted(stored.key for stored in found) == sorted(sizes)
        for stored in found:
            value = self.value(stored.key, sizes[stored.key])
            assert stored.length == len(value)
            assert stored.head[:HEADER_BYTES] == bytes(value[:HEADER_BYTES])
            assert began - 2 < stored.last_used < time.time() + 2

    async def test_corruption_is_a_miss(self, tmp_path: Path) -> None:
        """Through :class:`SealedBackend` a damaged object is a miss, is counted, and is deleted."""
        backend = self.make_backend(tmp_path)
        sealed = backend if isinstance(backend, SealedBackend) else SealedBackend(backend)
        damaged, sound = make_key(1), make_key(2)
        await sealed.open()
        try:
            for key in (damaged, sound):
                view = blank(object_bytes(20_000))
                ChunkHeader(key, make_key(0), bytes(32), 20_000).seal(view, checksum=False)
                assert list(await sealed.put([(key, view)])) == [OK]
            if not self.corrupt(tmp_path, damaged):
                pytest.skip("names no way to corrupt an object")
            views = [blank(object_bytes(20_000)) for _ in range(2)]
            outcomes = await sealed.get([(damaged, views[0]), (sound, views[1])])
            assert list(outcomes) == [MISS, OK]
            assert sealed.corrupt == 1
            assert list(await sealed.contains([damaged, sound])) == [False, True]
        finally:
            await sealed.close()

    # Being memory.

    async def test_memory_is_handed_over_without_a_copy(self, backend: Backend) -> None:
        """``adopt``, ``lease``, ``idle``, ``discard``, and bytes that live until their last lease is gone."""
        if not isinstance(backend, SupportsArena):
            pytest.skip("is no memory")
        key, arena = make_key(1), backend.arena
        assert backend.lease(key) is None
        assert not backend.idle(key)
        for seed in (1, 2):
            given = arena.allocate(10_000)
            assert given is not None
            given.view[:] = noise(b"%d" % seed, 10_000)
            backend.adopt(key, given)
        assert arena.leases == 1, "what was replaced is still leased"
        lease = backend.lease(key)
        assert lease is not None
        assert bytes(lease.view) == noise(b"2", 10_000)
        assert not backend.idle(key)
        backend.discard(key)
        assert list(await backend.contains([key])) == [False]
        assert bytes(lease.view) == noise(b"2", 10_000)
        lease.release()
        assert (arena.leases, arena.used) == (0, 0)
        backend.discard(key)
