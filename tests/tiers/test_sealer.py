"""Each payload is hashed once, and the event loop writes each header once, for any number of callers."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import anyio
import pytest

from kvtier.backends.base import Backend, PutItem
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, is_sealed
from kvtier.memory.keys import ChunkKey
from kvtier.testing.backend import make_key
from kvtier.tiers.sealer import Sealer
from tests.rigs.chunks import MISS, OK, blanks, chunk, chunks, memory, opened
from tests.rigs.composed_backends import SealedBackend
from tests.rigs.hashing import Hashing

pytestmark = pytest.mark.anyio


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hashing]:
    hashing = Hashing(monkeypatch)
    yield hashing
    hashing.resume.set()


def headers(items: list[PutItem]) -> list[bytes]:
    return [bytes(view[:HEADER_BYTES]) for _, view in items]


class Changing:
    """A header that is sealed directly after its first read."""

    def __init__(self, before: bytes, after: bytes) -> None:
        self._current, self._after = before, after

    def __len__(self) -> int:
        return HEADER_BYTES

    def __getitem__(self, part: slice) -> bytes:
        value, self._current = self._current[part], self._after
        return value


async def test_two_backends_share_one_hash_and_store_after_sealing(
    hashing: Hashing,
) -> None:
    sealer, backends = Sealer(), [memory(), memory()]
    items = chunks(range(3))
    unsealed = headers(items)
    async with opened(backends[0]), opened(backends[1]):
        hashing.resume.clear()
        async with anyio.create_task_group() as tasks:
            for backend in backends:
                tasks.start_soon(SealedBackend(backend, sealer=sealer).put, items)
            await hashing.wait_until_started(1)
            await anyio.wait_all_tasks_blocked()
            assert headers(items) == unsealed, "headers were written before all hashes were done"
            assert not any(await backends[0].contains([key for key, _ in items]))
            hashing.resume.set()
        assert hashing.count == 3
        for backend in backends:
            copies = blanks(range(3))
            assert list(await backend.get(copies)) == [OK] * 3
            for key, copy in copies:
                assert is_sealed(copy)
                ChunkHeader.verify(copy, key)


async def test_sealed_chunk_is_not_hashed_again(hashing: Hashing) -> None:
    sealer, items = Sealer(), chunks(range(2))
    first = await sealer.seal(items)
    assert first == await sealer.seal(items)
    assert first == await Sealer().seal(items), "sealing is recorded in the header, not in the sealer"
    assert hashing.count == 2


async def test_pending_hashes_are_shared(hashing: Hashing) -> None:
    sealer, items = Sealer(), chunks(range(4))
    hashing.resume.clear()
    results: list[object] = []

    async def seal(part: list[PutItem]) -> None:
        results.append(await sealer.seal(part))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(seal, items[:3])
        await hashing.wait_until_started(1)
        tasks.start_soon(seal, items[2:])
        await hashing.wait_until_started(2)
        hashing.resume.set()
    assert hashing.count == 4
    assert sorted(map(len, results)) == [2, 3]  # type: ignore[arg-type]
    for key, view in items:
        ChunkHeader.verify(view, key)
        assert is_sealed(view)


async def test_duplicate_in_a_batch_is_hashed_once(hashing: Hashing) -> None:
    (item,) = chunks([1])
    assert len(set(await Sealer().seal([item, item]))) == 1
    assert hashing.count == 1


async def test_no_header_is_written_without_checksums(hashing: Hashing) -> None:
    sealer, items = Sealer(checksum=False), chunks(range(2))
    unsealed = headers(items)
    seals = await sealer.seal(items)
    assert [seal and seal.checksum for seal in seals] == [None, None]
    assert hashing.count == 0
    computed = await sealer.checksums(items)
    assert hashing.count == 2
    assert headers(items) == unsealed
    assert [seal and seal.checksum for seal in computed] == [
        seal and seal.checksum for seal in await Sealer().seal(items)
    ]


@pytest.mark.parametrize("checksum", [True, False])
async def test_corrupt_chunk_is_reported_and_does_not_affect_others(checksum: bool) -> None:
    sealer, items = Sealer(checksum), chunks(range(3))
    items[1][1][30] ^= 1
    found: list[ChunkKey] = []
    sealer.on_corrupt = lambda key, _chunk: found.append(key)
    seals = await sealer.seal(items)
    assert [seal is None for seal in seals] == [False, True, False]
    assert (sealer.corrupt, found) == (1, [make_key(1)])


async def test_memory_shorter_than_a_header_is_corrupt() -> None:
    sealer = Sealer()
    assert await sealer.seal([(make_key(1), memoryview(bytearray(10))), (make_key(2), chunk(make_key(2)))])
    assert sealer.corrupt == 1


# Cancellation.


async def test_cancelled_call_waits_for_its_hash_and_others_get_it(
    hashing: Hashing,
) -> None:
    sealer, items = Sealer(), chunks(range(3))
    hashing.resume.clear()
    ended: list[str] = []

    async def first(scope: anyio.CancelScope) -> None:
        with scope:
            await sealer.seal(items)
            ended.append("sealed")
        ended.append("cancelled")

    async def second() -> None:
        assert None not in await sealer.seal(items)
        ended.append("shared")

    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()
        tasks.start_soon(first, scope)
        await hashing.wait_until_started(1)
        tasks.start_soon(second)
        await anyio.wait_all_tasks_blocked()
        scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert ended == [], "the call returned while a thread reads its memory"
        hashing.resume.set()
    assert sorted(ended) == ["cancelled", "shared"]
    assert hashing.count == 3
    assert all(is_sealed(view) for _, view in items)


async def test_hashing_stops_if_all_callers_are_cancelled(hashing: Hashing) -> None:
    sealer, items = Sealer(), chunks(range(3))
    unsealed = headers(items)
    hashing.resume.clear()
    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()

        async def seal() -> None:
            with scope:
                await sealer.seal(items)

        tasks.start_soon(seal)
        await hashing.wait_until_started(1)
        scope.cancel()
        await anyio.wait_all_tasks_blocked()
        hashing.resume.set()
    assert hashing.count == 1
    assert headers(items) == unsealed
    assert None not in await sealer.seal(items), "sealing after the cancellation failed"


# In a backend.


async def test_corrupt_chunk_is_not_stored() -> None:
    inner: Backend = memory()
    async with opened(SealedBackend(inner)) as sealed:
        items = chunks([1, 2])
        items[0][1][30] ^= 1
        assert list(await sealed.put(items)) == [MISS, OK]
        assert list(await inner.contains([make_key(1), make_key(2)])) == [False, True]


def test_header_is_parsed_from_a_single_read() -> None:
    """Two reads could combine an unsealed half with a sealed one."""
    view = chunk(make_key(1))
    before = bytes(view[:HEADER_BYTES])
    ChunkHeader.parse(view).seal(view)
    after = bytes(view[:HEADER_BYTES])
    assert before != after
    assert ChunkHeader.parse(Changing(before, after)).key == make_key(1)  # type: ignore[arg-type]


def test_header_is_parsed_while_a_thread_rewrites_it() -> None:
    view = chunk(make_key(1))
    header = ChunkHeader.parse(view)
    written = [header.packed(), header.packed(header.checksum(view))]
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            for head in written:
                view[:HEADER_BYTES] = head

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        for _ in range(20_000):
            assert ChunkHeader.parse(view) == header
    finally:
        ended.set()
        thread.join()
