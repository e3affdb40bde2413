"""The backend conformance suite. Subclass :class:`BackendConformance` to run it with pytest.

::

    class TestMyBackend(BackendConformance):
        persistent = True

        def make_backend(self, path):
            return MyBackend(MySettings(name="mine", type="mine", capacity="256MiB", path=path))

The backend needs a capacity of about 200 MiB. The tests run on asyncio with anyio's pytest plugin.
"""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from xxhash import xxh3_128_digest

from kvtier.backends.base import Backend, Outcome
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, object_bytes
from kvtier.memory.keys import KEY_BYTES, ChunkKey
from kvtier.testing.cancelling import Through, cancelled_at
from kvtier.testing.noise import is_poisoned, noise, poison, same
from kvtier.testing.plugin import recorded_arenas
from kvtier.tiers.seal import Seal
from kvtier.units import KIB, MIB

OK, MISS = Outcome.OK, Outcome.MISS


def make_key(number: int) -> ChunkKey:
    """Return a pseudo-random key that depends on the number only."""
    return ChunkKey(noise(b"key %d" % number, KEY_BYTES))


def blank(length: int) -> memoryview:
    """Allocate writable, page-aligned memory, like a slice of the arena, filled with the sentinel byte."""
    view = memoryview(mmap.mmap(-1, length))
    poison(view)
    return view


class BackendConformance:
    """Tests of the contract of :class:`~kvtier.backends.base.Backend`. Name your subclass ``Test...``."""

    pytestmark = pytest.mark.anyio

    persistent: bool = False
    """Whether stored values survive ``close`` and another ``open``."""

    chunk_objects: bool = False
    """Whether the backend accepts whole chunk objects only, like a medium behind a :class:`Seal`."""

    def make_backend(self, path: Path) -> Backend:
        """Create a backend without opening it. The same ``path`` means the same stored values.

        ``path`` is an empty folder of the test.
        """
        raise NotImplementedError

    def corrupt(self, path: Path, key: ChunkKey) -> bool:
        """Corrupt the stored value of ``key``, bypassing the backend. ``False``: not supported."""
        return False

    def seal(self, backend: Backend) -> Seal:
        """Return the seal through which corruption must be detected."""
        return Seal(backend)

    def value(self, key: ChunkKey, size: int, seed: int = 0) -> memoryview:
        """Return a value of ``size`` bytes for ``key``, or a chunk object with a payload of that size."""
        offset = HEADER_BYTES if self.chunk_objects else 0
        view = blank(object_bytes(size) if self.chunk_objects else size)
        # Not a multiple of any page or part size, so that bytes at a wrong offset differ.
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
        """Open a backend within the block. Fails if the backend's arena has open leases after ``close``."""
        backend = self.make_backend(path)
        with recorded_arenas() as arenas:
            await backend.open()
            try:
                yield backend
            finally:
                await backend.close()
        assert all(arena.leases == 0 for arena in arenas), "leases are still open after close"

    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[Backend]:
        """An open, empty backend."""
        async with self.opened(tmp_path) as backend:
            yield backend

    async def store(self, backend: Backend, keys: Sequence[ChunkKey], size: int, seed: int = 0) -> None:
        """Store a value of ``size`` bytes under each key."""
        outcomes = await backend.put([(key, self.value(key, size, seed)) for key in keys])
        assert list(outcomes) == [OK] * len(keys)

    async def found(self, backend: Backend, key: ChunkKey, size: int) -> memoryview | None:
        """Return the stored value of ``key``, or ``None``."""
        view = blank(len(self.value(key, size)))
        (outcome,) = await backend.get([(key, view)])
        assert outcome in (OK, MISS)
        return view if outcome is OK else None

    async def assert_holds(self, backend: Backend, key: ChunkKey, size: int, *seeds: int) -> None:
        """Fail unless the backend has the whole value of one of the seeds under ``key``."""
        found = await self.found(backend, key, size)
        assert found is not None, "the key is missing"
        assert any(same(found, self.value(key, size, seed)) for seed in seeds), "the key has another value"

    # Storing and finding.

    async def test_holds_what_was_put(self, backend: Backend) -> None:
        """After ``put``, ``contains`` and ``get`` find the key with its value."""
        key = make_key(1)
        assert list(await backend.contains([key])) == [False]
        await self.store(backend, [key], 10 * KIB)
        assert list(await backend.contains([key])) == [True]
        await self.assert_holds(backend, key, 10 * KIB, 0)

    async def test_answers_come_in_the_order_of_the_question(self, backend: Backend) -> None:
        """There is one result per item, in the order of the items, for any number of items."""
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
        """Empty batches are allowed."""
        assert list(await backend.contains([])) == []
        assert list(await backend.put([])) == []
        assert list(await backend.get([])) == []
        await backend.delete([])

    async def test_lengths(self, backend: Backend) -> None:
        """A shared pool that has this capability returns the length of what it holds, and 0 otherwise."""
        lengths = backend.capabilities().lengths
        if lengths is None:
            pytest.skip("the backend does not return lengths")
        keys, sizes = [make_key(number) for number in range(5)], [1, 4000, 5000, MIB]
        for key, size in zip(keys, sizes, strict=False):
            await self.store(backend, [key], size)
        expected = [len(self.value(key, size)) for key, size in zip(keys, sizes, strict=False)]
        assert list(await lengths.lengths(keys)) == [*expected, 0]
        assert list(await lengths.lengths([keys[4], keys[1]])) == [0, expected[1]]
        assert list(await lengths.lengths([])) == []

    async def test_a_batch_that_succeeds_in_part(self, backend: Backend) -> None:
        """A missing key, or a wrong length, does not affect the other items of a batch."""
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
        """A second ``put`` of a key replaces the value, even with another length."""
        key = make_key(1)
        await self.store(backend, [key], 6000, seed=1)
        await self.store(backend, [key], size, seed=2)
        await self.assert_holds(backend, key, size, 2)

    @pytest.mark.parametrize("size", [1, 3 * KIB, 5 * KIB, 20 * KIB])
    async def test_a_value_of_another_length_is_a_miss(self, backend: Backend, size: int) -> None:
        """A view that is longer or shorter than the value is a miss, not a partial read."""
        key = make_key(1)
        await self.store(backend, [key], 10 * KIB)
        view = blank(size)
        assert list(await backend.get([(key, view)])) == [MISS]
        await self.assert_holds(backend, key, 10 * KIB, 0)

    @pytest.mark.parametrize("size", [1, 255, 4095, 4096, 4097, MIB - HEADER_BYTES, MIB + 1, 64 * MIB])
    async def test_every_size(self, backend: Backend, size: int) -> None:
        """Values from 1 byte to 64 MiB, page-aligned or not."""
        key = make_key(1)
        value = await anyio.to_thread.run_sync(self.value, key, size)
        assert list(await backend.put([(key, value)])) == [OK]
        view = await anyio.to_thread.run_sync(blank, len(value))
        assert list(await backend.get([(key, view)])) == [OK]
        assert same(view, value)

    @pytest.mark.parametrize("shift", [1, 64])
    async def test_memory_that_is_not_aligned(self, backend: Backend, shift: int) -> None:
        """Views need no alignment."""
        key = make_key(1)
        value = self.value(key, 8000)
        source, target = memoryview(bytearray(len(value) + shift)), memoryview(bytearray(len(value) + shift))
        source[shift:] = value
        assert list(await backend.put([(key, source[shift:])])) == [OK]
        assert list(await backend.get([(key, target[shift:])])) == [OK]
        assert same(target[shift:], value)
        assert bytes(target[:shift]) == bytes(shift), "bytes before the view were written"

    async def test_put_of_memory_that_cannot_be_written(self, backend: Backend) -> None:
        """``put`` accepts read-only memory."""
        if self.chunk_objects:
            pytest.skip("a chunk object is sealed in place")
        key = make_key(1)
        for size in (4096, MIB):
            assert list(await backend.put([(key, memoryview(bytes(self.value(key, size))))])) == [OK]
            await self.assert_holds(backend, key, size, 0)

    async def test_put_takes_a_copy(self, backend: Backend) -> None:
        """The caller may reuse the memory when ``put`` has returned."""
        key = make_key(1)
        value = self.value(key, MIB)
        assert list(await backend.put([(key, value)])) == [OK]
        poison(value)
        await self.assert_holds(backend, key, MIB, 0)

    async def test_delete(self, backend: Backend) -> None:
        """A deleted key is missing, and can be deleted and stored again. Other keys are not affected."""
        deleted, kept = make_key(1), make_key(2)
        await self.store(backend, [deleted, kept], 4000)
        await backend.delete([deleted, make_key(3)])
        await backend.delete([deleted])
        assert list(await backend.contains([deleted, kept])) == [False, True]
        assert await self.found(backend, deleted, 4000) is None
        await self.assert_holds(backend, kept, 4000, 0)
        await self.store(backend, [deleted], 4000, seed=3)
        await self.assert_holds(backend, deleted, 4000, 3)

    # Concurrency.

    async def test_many_batches_at_once(self, backend: Backend) -> None:
        """Concurrent batches with different keys do not affect each other."""

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
        """With a key twice in a batch, one of the two values is stored completely."""
        key = make_key(1)
        values = [self.value(key, 512 * KIB, seed) for seed in (1, 2)]
        assert list(await backend.put([(key, value) for value in values])) == [OK, OK]
        await self.assert_holds(backend, key, 512 * KIB, 1, 2)
        views = [blank(len(values[0])) for _ in range(2)]
        assert list(await backend.get([(key, view) for view in views])) == [OK, OK]
        assert same(views[0], views[1])

    @pytest.mark.parametrize("size", [4000, 700_000])
    async def test_equal_keys_at_once_are_never_a_mix(self, backend: Backend, size: int) -> None:
        """With concurrent writers, readers and deleters, a read is one writer's whole value or a miss."""
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
        """A cancelled call does not write to memory afterwards, and leaves the backend usable.

        After a cancelled ``put`` each key has its old or its new value, complete.
        """
        size = 300 * KIB
        keys = [make_key(number) for number in range(3)]
        for step in itertools.count(1):
            await self.store(backend, keys, size, seed=1)
            views = [
                self.value(key, size, seed=2) if method == "put" else blank(len(self.value(key, size)))
                for key in keys
            ]
            items = list(zip(keys, views, strict=True))
            batch = keys if method in ("contains", "delete") else items
            cancelled = await cancelled_at(
                step, partial(getattr(backend, method), batch), through=through, lag=lag
            )
            for view in views:
                poison(view)
            for key in keys:
                found = await self.found(backend, key, size)
                assert found is not None or method == "delete", "a value was lost"
                if found is not None:
                    seeds = (1, 2) if method == "put" else (1,)
                    assert any(same(found, self.value(key, size, seed)) for seed in seeds)
            assert all(is_poisoned(view) for view in views), "memory was written after the call had returned"
            if not cancelled:
                return

    # Persistence and corruption.

    async def test_reopening(self, tmp_path: Path) -> None:
        """Stored values survive any number of ``close`` and ``open``."""
        if not self.persistent:
            pytest.skip("the backend is not persistent")
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
        """``scan`` returns each object once, with its key, length, first bytes and time of last use."""
        began = time.time()
        sizes = {make_key(number): 300 + number * 1000 for number in range(30)}
        async with self.opened(tmp_path) as backend:
            medium = backend.capabilities().scan
            if medium is None:
                pytest.skip("the backend has no scan")
            assert [stored async for batch in medium.scan() for stored in batch] == []
            for key, size in sizes.items():
                await self.store(backend, [key], size)
        async with self.opened(tmp_path) as backend:
            medium = backend.capabilities().scan
            assert medium is not None
            found = [stored async for batch in medium.scan() for stored in batch]
        assert sorted(stored.key for stored in found) == sorted(sizes)
        for stored in found:
            value = self.value(stored.key, sizes[stored.key])
            assert stored.length == len(value)
            assert stored.head[:HEADER_BYTES] == bytes(value[:HEADER_BYTES])
            assert began - 2 < stored.last_used < time.time() + 2

    async def test_corruption_is_a_miss(self, tmp_path: Path) -> None:
        """Through a :class:`Seal`, a corrupt object is a miss, is counted, and is deleted."""
        backend = self.make_backend(tmp_path)
        damaged, sound = make_key(1), make_key(2)
        await backend.open()
        sealed = self.seal(backend)
        try:
            for key in (damaged, sound):
                view = blank(object_bytes(20_000))
                ChunkHeader(key, make_key(0), bytes(32), 20_000).seal(view, checksum=False)
                assert list(await sealed.put([(key, view)])) == [OK]
            if not self.corrupt(tmp_path, damaged):
                pytest.skip("the suite does not implement corrupt()")
            views = [blank(object_bytes(20_000)) for _ in range(2)]
            outcomes = await sealed.get([(damaged, views[0]), (sound, views[1])])
            assert list(outcomes) == [MISS, OK]
            assert sealed.corrupt == 1
            assert list(await backend.contains([damaged, sound])) == [False, True]
        finally:
            await backend.close()

    # Arena.

    async def test_memory_can_be_the_first_tier(self, tmp_path: Path) -> None:
        """``create_arena`` works without ``open`` and has room for the tier's capacity."""
        backend = self.make_backend(tmp_path)
        memory = backend.capabilities().arena
        if memory is None:
            pytest.skip("the backend is not memory")
        with closing(memory.create_arena()) as arena:
            lease = arena.allocate(10_000)
            assert lease is not None
            lease.view[:] = noise(b"1", 10_000)
            assert bytes(lease.view) == noise(b"1", 10_000)
            lease.release()
            assert (arena.leases, arena.used) == (0, 0)
