"""Checksums for chunk objects in memory: each payload is hashed once, each header is written once.

Several tiers, peers and KV transfers may need the same chunk of the arena sealed at the same time. They share
one :class:`Sealer`. Worker threads only read; only the event loop writes headers, and never rewrites a sealed
one. So the event loop may read any header at any time, and a medium or peer that reads a sealed chunk sees
stable bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import NamedTuple

import anyio

from kvtier.backends.base import PutItem
from kvtier.concurrency.tasks import wait_shielded
from kvtier.concurrency.threads import Call, WorkerThreads, spread
from kvtier.errors import CorruptChunk
from kvtier.logs import RateLimitedLogs
from kvtier.memory.arena import address_of
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, is_sealed
from kvtier.memory.keys import ChunkKey

logger = logging.getLogger("kvtier")

HASHED_AT_ONCE = 4
"""Threads that compute checksums. One thread reaches 20 to 30 GB/s, more than any medium."""

_Place = tuple[ChunkKey, int]
"""Key and address of a chunk object."""


class SealedHeader(NamedTuple):
    """A valid header and its checksum."""

    header: ChunkHeader
    checksum: bytes | None
    """Checksum of the payload; ``None`` if not requested and not in the header."""


class _Examined(NamedTuple):
    seal: SealedHeader | None
    """``None`` for a corrupt chunk."""
    kind: str = ""
    """The kind of fault."""
    fault: str = ""
    head: bytes | None = None
    """The sealed header to write."""


class _Job:
    """A batch that is hashed in one executor call."""

    def __init__(self, chunks: dict[_Place, PutItem]) -> None:
        self.chunks = chunks
        self.examined: list[_Examined] = []
        self.waiting = 0
        """Number of calls waiting for the result. At zero the job stops early and writes no header."""
        self.error: BaseException | None = None
        self.done = anyio.Event()
        """Set when the headers are written."""

    def run(self) -> None:
        for item in self.chunks.values():
            if not self.waiting:
                return
            self.examined.append(_examine(item, hashes=True))

    def seal_of(self, number: int) -> SealedHeader | None:
        if self.error is not None:
            raise self.error
        return self.examined[number].seal


class Sealer:
    """Computes checksums and writes them into the headers of chunk objects.

    All methods must be called from one event loop. Memory must stay valid until a call ends, also if it is
    cancelled: a cancelled call ends when no worker thread reads its memory.
    """

    def __init__(self, checksum: bool = True) -> None:
        self.checksum = checksum
        """Whether headers get checksums. If not, headers are never written."""
        self.corrupt = 0
        """Number of chunk objects found corrupt in memory."""
        self.on_corrupt: Callable[[ChunkKey, memoryview], None] = _ignore
        """Called in the event loop for each corrupt chunk object."""
        self._in_flight: dict[_Place, tuple[_Job, int]] = {}
        self._executor = WorkerThreads(HASHED_AT_ONCE)
        self._warn = RateLimitedLogs(logger)

    async def seal(self, items: Sequence[PutItem]) -> list[SealedHeader | None]:
        """Validate each header and seal it if necessary. The result is ``None`` for a corrupt chunk object.

        If another call is already hashing a payload, this call waits for its result, which it also gets if
        the other call is cancelled. Views must be writable.
        """
        if not self.checksum:
            return await self._examine(items, hashes=False)
        places = [_place(item) for item in items]
        fresh = {
            place: item for place, item in zip(places, items, strict=True) if place not in self._in_flight
        }
        started = _Job(fresh)
        self._in_flight.update({place: (started, number) for number, place in enumerate(fresh)})
        found = [self._in_flight[place] for place in places]
        jobs = {job for job, _ in found}
        for job in jobs:
            job.waiting += 1
        if fresh:
            self._executor(started.run).add_done_callback(partial(self._finish, started))
        await self._wait_for(jobs)
        return [job.seal_of(number) for job, number in found]

    def known(self, items: Sequence[PutItem]) -> list[SealedHeader | None]:
        """Like :meth:`headers`, at once, in 5 µs per item, with the checksums that headers have already."""
        examined = [_examine(item, hashes=False) for item in items]
        self._report(items, examined)
        return [result.seal for result in examined]

    def adopt(self, item: PutItem, checksum: bytes) -> bool:
        """Seal a chunk object whose payload was hashed elsewhere. Return ``False`` if it is corrupt now."""
        [seal] = self.known([item])
        if seal and self.checksum and not is_sealed(item[1]) and _place(item) not in self._in_flight:
            item[1][:HEADER_BYTES] = seal.header.packed(checksum)
        return seal is not None

    def damaged(self, item: PutItem, kind: str, fault: str) -> None:
        """Report a chunk object whose payload does not match the checksum that its header has."""
        self._report([item], [_Examined(None, kind, fault)])

    async def headers(self, items: Sequence[PutItem]) -> list[ChunkHeader | None]:
        """Validate each header, without hashing payloads. ``None`` for a corrupt chunk object."""
        return [None if seal is None else seal.header for seal in await self._examine(items, hashes=False)]

    async def checksums(self, items: Sequence[PutItem]) -> list[SealedHeader | None]:
        """Like :meth:`seal`, but also compute checksums if headers get none; these are not written."""
        if self.checksum:
            return await self.seal(items)
        return await self._examine(items, hashes=True)

    async def _examine(self, items: Sequence[PutItem], *, hashes: bool) -> list[SealedHeader | None]:
        examined = await spread(partial(_examine, hashes=hashes), items, parts=1, executor=self._executor)
        self._report(items, examined)
        return [result.seal for result in examined]

    async def _wait_for(self, jobs: Set[_Job]) -> None:
        """Wait for all jobs, even if cancelled: until then threads read the caller's memory."""
        done = [job.done for job in jobs]
        try:
            for event in done:
                if not event.is_set():
                    await event.wait()
        except anyio.get_cancelled_exc_class():
            for job in jobs:
                job.waiting -= 1
                if not job.waiting:
                    self._forget(job)
            await wait_shielded(done)
            raise

    def _forget(self, job: _Job) -> None:
        """Remove a job from the index, so that no further call joins it."""
        for place in job.chunks:
            del self._in_flight[place]

    def _finish(self, job: _Job, call: Call) -> None:
        """Write the headers, in the event loop, then wake the waiting calls."""
        job.error = call.exception()
        chunks: list[PutItem] = []
        examined: list[_Examined] = []
        if job.waiting:
            self._forget(job)
            if job.error is None:
                chunks, examined = list(job.chunks.values()), job.examined
        for (_, chunk), result in zip(chunks, examined, strict=True):
            if result.head is not None:
                chunk[:HEADER_BYTES] = result.head
        job.chunks.clear()  # References to the job must not keep the arena mapped.
        job.done.set()
        self._report(chunks, examined)  # Last: the waiting calls are woken even if it raises.

    def _report(self, items: Sequence[PutItem], examined: Sequence[_Examined]) -> None:
        for (key, chunk), result in zip(items, examined, strict=True):
            if result.seal is None:
                self.corrupt += 1
                self._warn(result.kind, "chunk %s in memory is corrupt: it %s", key.hex()[:16], result.fault)
                self.on_corrupt(key, chunk)


def _examine(item: PutItem, *, hashes: bool) -> _Examined:
    """Validate a header, and with ``hashes`` hash an unsealed payload. Runs in a worker thread."""
    key, chunk = item
    try:
        header, checksum = ChunkHeader.read(chunk, key)
    except CorruptChunk as error:
        return _Examined(None, error.kind, str(error))
    if checksum is not None or not hashes:
        return _Examined(SealedHeader(header, checksum))
    checksum = header.checksum(chunk)
    return _Examined(SealedHeader(header, checksum), head=header.packed(checksum))


def _place(item: PutItem) -> _Place:
    key, chunk = item
    # A view shorter than a header is corrupt at any address.
    return key, address_of(chunk) if len(chunk) >= HEADER_BYTES else 0


def _ignore(key: ChunkKey, chunk: memoryview) -> None:
    """Do nothing, the default of ``on_corrupt``."""
