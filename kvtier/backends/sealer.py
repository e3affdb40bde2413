"""Checksums for chunk objects in memory: each payload is hashed once, each header written once.

Several tiers, peers and pushes may want the same chunk of the arena sealed at the same moment. All of them
share one :class:`Sealer`. Worker threads only read; the event loop is the one writer of headers, and a header
that is sealed is never written again. So the event loop may look at any header at any time, and a medium or
a peer that was given a chunk after it was sealed reads bytes that do not change.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import NamedTuple

from kvtier.arena import address_of
from kvtier.backends.base import PutItem
from kvtier.backends.logs import RareWarning
from kvtier.errors import CorruptChunk
from kvtier.header import HEADER_BYTES, ChunkHeader
from kvtier.keys import ChunkKey
from kvtier.threads import WorkerThreads, all_done, spread

logger = logging.getLogger("kvtier")

SEALED_AT_ONCE = 4
"""Worker threads that compute checksums. One does some 20 GB/s, more than any medium takes."""

_Place = tuple[ChunkKey, int]
"""A chunk object by its key and its address."""


class Seal(NamedTuple):
    """What a valid header says."""

    header: ChunkHeader
    checksum: bytes | None
    """Of the payload; ``None`` where none was wanted and the header has none."""


class _Examined(NamedTuple):
    seal: Seal | None
    """``None`` for a corrupt chunk."""
    fault: str = ""
    head: bytes | None = None
    """The sealed header that is yet to be written."""


class _Job:
    """One batch in one executor call."""

    def __init__(self, chunks: dict[_Place, PutItem]) -> None:
        self.chunks = chunks
        self.examined: list[_Examined] = []
        self.waiting = 0
        """Calls that want the result. Without one the job ends early, and no header is written."""
        self.error: BaseException | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set once the headers are written."""

    def run(self) -> None:
        for item in self.chunks.values():
            if not self.waiting:
                return
            self.examined.append(_examine(item, hashes=True))

    def seal_of(self, number: int) -> Seal | None:
        if self.error is not None:
            raise self.error
        return self.examined[number].seal


class Sealer:
    """Computes checksums and writes them into the headers that chunk objects begin with.

    Belongs to one event loop; every method is called from there. Memory must stay valid until a call has
    ended, also when it is cancelled: a cancelled call ends once no worker thread reads its memory.
    """

    def __init__(self, checksum: bool = True) -> None:
        self.checksum = checksum
        """Whether headers get checksums. If not, no header is ever written."""
        self.corrupt = 0
        """Chunk objects that were not valid when they were to be sealed."""
        self.on_corrupt: Callable[[ChunkKey, memoryview], None] = _ignore
        """Called in the event loop with each of them."""
        self._in_flight: dict[_Place, tuple[_Job, int]] = {}
        self._hop = WorkerThreads(SEALED_AT_ONCE)
        self._warn = RareWarning(logger)

    async def seal(self, items: Sequence[PutItem]) -> list[Seal | None]:
        """Check each header, and seal those that are not sealed yet; ``None`` for each corrupt chunk object.

        A payload that another call is hashing is not hashed again: this call waits for that one, and gets the
        result also when that one is cancelled. Views must be writable.
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
            self._hop(started.run).add_done_callback(partial(self._finish, started))
        await self._wait_for(jobs)
        return [job.seal_of(number) for job, number in found]

    async def checksums(self, items: Sequence[PutItem]) -> list[Seal | None]:
        """As :meth:`seal`, with checksums also where headers get none; then they are not written."""
        if self.checksum:
            return await self.seal(items)
        return await self._examine(items, hashes=True)

    async def _examine(self, items: Sequence[PutItem], *, hashes: bool) -> list[Seal | None]:
        examined = await spread(partial(_examine, hashes=hashes), items, parts=1, hop=self._hop)
        self._report(items, examined)
        return [one.seal for one in examined]

    async def _wait_for(self, jobs: Set[_Job]) -> None:
        """Wait for them all, also when cancelled: until then threads read the caller's memory."""
        done = [job.done for job in jobs]
        try:
            if done:
                await asyncio.wait(done)
        except asyncio.CancelledError:
            for job in jobs:
                job.waiting -= 1
                if not job.waiting:
                    self._forget(job)
            await all_done(done)
            raise

    def _forget(self, job: _Job) -> None:
        """No further call may join it."""
        for place in job.chunks:
            del self._in_flight[place]

    def _finish(self, job: _Job, hop: asyncio.Future[None]) -> None:
        """Write the headers, in the event loop, then let those who wait go on."""
        job.error = hop.exception()
        chunks: list[PutItem] = []
        examined: list[_Examined] = []
        if job.waiting:
            self._forget(job)
            if job.error is None:
                chunks, examined = list(job.chunks.values()), job.examined
        for (_, chunk), one in zip(chunks, examined, strict=True):
            if one.head is not None:
                chunk[:HEADER_BYTES] = one.head
        job.chunks.clear()  # What refers to the job must not keep the arena mapped.
        job.done.set_result(None)
        self._report(chunks, examined)  # Last: whatever it raises, nobody waits for ever.

    def _report(self, items: Sequence[PutItem], examined: Sequence[_Examined]) -> None:
        for (key, chunk), one in zip(items, examined, strict=True):
            if one.seal is None:
                self.corrupt += 1
                self._warn("chunk %s in memory is corrupt: it %s", key.hex()[:16], one.fault)
                self.on_corrupt(key, chunk)


def _examine(item: PutItem, *, hashes: bool) -> _Examined:
    """In a worker thread: read a header, and with ``hashes`` the payload of what is not sealed."""
    key, chunk = item
    try:
        header, checksum = ChunkHeader.read(chunk, key)
    except CorruptChunk as error:
        return _Examined(None, str(error))
    if checksum is not None or not hashes:
        return _Examined(Seal(header, checksum))
    checksum = header.checksum(chunk)
    return _Examined(Seal(header, checksum), head=header.packed(checksum))


def _place(item: PutItem) -> _Place:
    key, chunk = item
    # What is too short for a header is found corrupt wherever it is.
    return key, address_of(chunk) if len(chunk) >= HEADER_BYTES else 0


def _ignore(key: ChunkKey, chunk: memoryview) -> None:
    """A sealer of its own has nobody to report to."""
