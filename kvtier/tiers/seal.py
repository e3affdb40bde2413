"""Headers and checksums of a backend's objects: one that does not match them is a miss and is deleted."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Container, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

from kvtier.backends.base import (
    Backend,
    GetItem,
    Outcome,
    PutItem,
    StoredObject,
    SupportsLengths,
    SupportsSealing,
)
from kvtier.bounded import remember
from kvtier.concurrency.threads import WorkerThreads, spread
from kvtier.errors import CorruptChunk, UnreadableChunk
from kvtier.logs import RateLimitedLogs
from kvtier.memory.header import IDENTITY, ChunkHeader, StoredHeader
from kvtier.memory.keys import ChunkKey
from kvtier.tiers.sealer import HASHED_AT_ONCE, Sealer

logger = logging.getLogger("kvtier")

OF_OTHERS_SECONDS = 600.0
"""For this long, an object of a pool that others can read is not replaced: they would replace it again."""
MAX_OF_OTHERS = 100_000
HEADERS_AT_ONCE = 64
"""Headers that are verified in the event loop, in 4 µs each, if no payload must be hashed."""

ItemT = TypeVar("ItemT", bound=tuple[Any, ...])


class Fault(NamedTuple):
    """Why a chunk is corrupt. Faults of one kind differ in their details."""

    kind: str
    text: str
    is_unreadable: bool = False
    """Stored with other settings: to others who use a pool, it may be of use."""


class Seal:
    """Seals chunk objects written to a backend and verifies chunk objects read from it.

    The views passed to ``put`` and ``get`` are whole chunk objects (:mod:`kvtier.memory.header`) and
    writable. ``put`` writes the checksum into their header, unless it is already set. A ``put`` whose header
    is corrupt or has another key or length is a ``MISS``: the medium is not called, and no failure is
    counted. Checksums are computed in worker threads, one executor call per batch. If the ``sealer``
    computes none, only the header is verified, which detects neither flipped bits nor torn writes in the
    payload.

    All seals of chunks in the same memory must share one ``sealer``. ``verify=False`` is for media that are
    memory: reads are not verified.
    """

    def __init__(self, backend: Backend, sealer: Sealer | None = None, *, verify: bool = True) -> None:
        self.corrupt = 0
        """Number of objects found corrupt, and deleted."""
        self.unreadable = 0
        """Number of objects found that were stored with other settings."""
        self.on_unreadable: Callable[[ChunkKey], None] = lambda _: None
        """Called with the key of each of them."""
        self._of_others: dict[ChunkKey, float] = {}
        """Those of them in a shared pool, with the time: other hosts can read them."""
        self._known: Container[int] = (IDENTITY,)
        """The codes of payloads that can be read."""
        self._backend = backend
        self._sealer = sealer or Sealer()
        self._verify = verify
        self._executor = WorkerThreads(HASHED_AT_ONCE)
        self._warn = RateLimitedLogs(logger)

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Seal each chunk object and store it. See :meth:`Backend.put`.

        A ``MISS`` also for what was found here a while ago, of use to others only: it is not replaced.
        """
        if not self._of_others:
            return await self._put(items)
        recent = time.monotonic() - OF_OTHERS_SECONDS
        ours = [item for item in items if self._of_others.get(item[0], -math.inf) < recent]
        stored = dict(zip((key for key, _ in ours), await self._put(ours) if ours else (), strict=True))
        return [stored.get(key, Outcome.MISS) for key, _ in items]

    async def _put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        sealing = self._sealing
        seals = await (self._sealer.headers(items) if sealing else self._sealer.seal(items))
        valid = [item for item, seal in zip(items, seals, strict=True) if seal is not None]
        checksums: dict[ChunkKey, bytes] = {}
        stored = iter(await (sealing.put_sealed(valid, checksums) if sealing else self._backend.put(valid)))
        for item in valid:
            if checksum := checksums.get(item[0]):
                self._sealer.adopt(item, checksum)
        return [Outcome.MISS if seal is None else next(stored) for seal in seals]

    @cached_property
    def _pool(self) -> SupportsLengths | None:
        """The medium, if other hosts store objects of other lengths there."""
        return self._backend.capabilities().lengths

    @cached_property
    def _sealing(self) -> SupportsSealing | None:
        return self._backend.capabilities().sealing if self._sealer.checksum else None

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Fill each view with a verified chunk object. See :meth:`Backend.get`."""
        found = await self._read(items)
        if not self._verify:
            return [Outcome.OK if outcome is Outcome.VERIFIED else outcome for outcome in found]
        at_once = Outcome.OK not in found and len(found) <= HEADERS_AT_ONCE
        return await self.checked(items, found, _verify, parts=0 if at_once else 1)

    async def _read(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        return await self._backend.get(items)

    async def checked(
        self,
        items: Sequence[ItemT],
        found: Sequence[Outcome],
        check: Callable[[ItemT, bool], None],
        *,
        parts: int,
    ) -> Sequence[Outcome]:
        """Check the objects that were found, in ``parts`` threads, or at once with 0 of them.

        Corrupt ones are a ``MISS`` and deleted.

        ``items`` begin with the key. ``check`` gets whether the backend has hashed the payload, and raises
        :class:`CorruptChunk`.
        """
        outcomes = list(found)
        fetched = [at for at, outcome in enumerate(outcomes) if outcome in (Outcome.OK, Outcome.VERIFIED)]
        checks = [partial(check, items[at], outcomes[at] is Outcome.VERIFIED) for at in fetched]
        if parts:
            faults = await spread(_fault, checks, parts=parts, executor=self._executor)
        else:
            faults = [_fault(check) for check in checks]
        for at in fetched:
            outcomes[at] = Outcome.OK
        corrupt = [(at, fault) for at, fault in zip(fetched, faults, strict=True) if fault]
        for at, _ in corrupt:
            outcomes[at] = Outcome.MISS
        await self._remove([(items[at][0], fault) for at, fault in corrupt])
        return outcomes

    async def scan(self) -> AsyncIterator[Sequence[StoredObject]]:
        """Yield the objects in a medium that can list them. Deletes those without a valid header."""
        medium = self._backend.capabilities().scan
        if medium is None:
            return
        async for batch in medium.scan():
            faults = [(stored, _fault(partial(self._check_head, stored))) for stored in batch]
            await self._remove([(stored.key, fault) for stored, fault in faults if fault])
            yield [stored for stored, fault in faults if not fault]

    def _check_head(self, stored: StoredObject) -> StoredHeader:
        header = StoredHeader.parse(stored.head)
        if header.chunk.key != stored.key:
            raise CorruptChunk("holds chunk {}", header.chunk.key.hex()[:16])
        if header.object_bytes != stored.length:
            raise CorruptChunk("is {} bytes for a payload of {}", stored.length, header.stored_bytes)
        if header.codec not in self._known:
            raise UnreadableChunk("is encoded by codec {}", header.codec)
        return header

    async def _remove(self, faulty: Sequence[tuple[ChunkKey, Fault]]) -> None:
        """Delete corrupt objects, and those that cannot be read, unless other hosts can."""
        removed = []
        for key, fault in faulty:
            if not fault.is_unreadable:
                self.corrupt += 1
                self._warn(fault.kind, "deleting corrupt chunk %s: it %s", key.hex()[:16], fault.text)
            else:
                self.unreadable += 1
                self.on_unreadable(key)
                self._warn(fault.kind, "chunk %s is a miss: it %s", key.hex()[:16], fault.text)
                if self._pool is not None:
                    remember(self._of_others, key, time.monotonic(), MAX_OF_OTHERS)
                    continue
            removed.append(key)
        if not removed:
            return
        try:
            await self._backend.delete(removed)
        except Exception as error:
            # Do not fail the batch: the corrupt chunks remain misses.
            self._warn("delete", "cannot delete %d corrupt chunks: %r", len(removed), error)


def _verify(item: GetItem, hashed: bool) -> None:
    key, chunk = item
    ChunkHeader.verify(chunk, key, hashed=hashed)


def _fault(check: Callable[[], object]) -> Fault | None:
    try:
        check()
    except CorruptChunk as error:  # It refers to memory that must not stay mapped.
        return Fault(error.kind, str(error), isinstance(error, UnreadableChunk))
    return None
