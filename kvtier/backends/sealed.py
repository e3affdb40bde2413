"""A header and a checksum around any medium: what does not match them is a miss and is deleted."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import chain

import anyio

from kvtier.backends.base import Backend, GetItem, Outcome, PutItem, StoredObject
from kvtier.backends.logs import RareWarning
from kvtier.backends.sealer import Sealer
from kvtier.backends.wrapper import WrapperBackend
from kvtier.errors import CorruptChunk
from kvtier.header import ChunkHeader, object_bytes
from kvtier.keys import ChunkKey
from kvtier.threads import WorkerThreads, spread
from kvtier.units import MIB

logger = logging.getLogger("kvtier")

PARTS_AT_ONCE = 4
"""Parts whose checksums are computed at once. One thread does some 20 GB/s, more than any medium below."""
PART_BYTES, PART_OBJECTS = 16 * MIB, 4
"""A batch is cut into parts of at least so much: one is checksummed while another is on its way."""
PARTS_UNDER_WAY = 2
"""More calls at once gain no medium anything, and cost some of them half of what they do with one."""


class SealedBackend(WrapperBackend):
    """Seals whole chunk objects on their way into ``inner`` and verifies them on their way out.

    The views given to ``put`` and ``get`` are whole chunk objects (:mod:`kvtier.header`), writable, and
    ``put`` has the checksum written into the header that they begin with, unless it is there already. A
    ``put`` whose header is corrupt, or names another key or length, is a ``MISS``: the medium is not asked,
    and is not at fault. Checksums are computed in worker threads, in one executor call for each
    :data:`PART_BYTES`; ``checksum=False`` leaves them out, and the header alone is checked, which finds
    neither a payload that was flipped nor one that a power failure has torn.

    All media that store chunks of the same memory must share one ``sealer``, whose ``checksum`` then counts.
    ``verify=False`` is for media that are memory: nothing is checked on the way out.
    """

    def __init__(
        self, inner: Backend, checksum: bool = True, *, sealer: Sealer | None = None, verify: bool = True
    ) -> None:
        super().__init__(inner)
        self.corrupt = 0
        """Objects found since it was made that did not match their header, and were deleted."""
        self._sealer = sealer or Sealer(checksum)
        self._verify = verify
        self._hop = WorkerThreads(PARTS_AT_ONCE)
        self._warn = RareWarning(logger)

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Seal each chunk object and store it. See :meth:`Backend.put`."""
        return await _in_parts(self._put_part, items)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Fill each view with a chunk object that matches its header. See :meth:`Backend.get`."""
        if not self._verify:
            return await self._inner.get(items)
        return await _in_parts(self._get_part, items)

    async def _put_part(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        seals = await self._sealer.seal(items)
        valid = [item for item, seal in zip(items, seals, strict=True) if seal is not None]
        stored = iter(await self._inner.put(valid))
        return [Outcome.MISS if seal is None else next(stored) for seal in seals]

    async def _get_part(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        outcomes = list(await self._inner.get(items))
        fetched = [index for index, outcome in enumerate(outcomes) if outcome is Outcome.OK]
        faults = await spread(_fault, [items[index] for index in fetched], parts=1, hop=self._hop)
        corrupt = [(index, fault) for index, fault in zip(fetched, faults, strict=True) if fault]
        for index, _ in corrupt:
            outcomes[index] = Outcome.MISS
        await self._remove([(items[index][0], fault) for index, fault in corrupt])
        return outcomes

    async def scan_inner(self) -> AsyncIterator[Sequence[StoredObject]]:
        """What the medium held, without what cannot be a chunk object, which is deleted."""
        async for batch in super().scan_inner():
            faults = [(stored, _head_fault(stored)) for stored in batch]
            await self._remove([(stored.key, fault) for stored, fault in faults if fault])
            yield [stored for stored, fault in faults if not fault]

    async def _remove(self, corrupt: Sequence[tuple[ChunkKey, str]]) -> None:
        if not corrupt:
            return
        self.corrupt += len(corrupt)
        for key, fault in corrupt:
            self._warn("chunk %s is corrupt and is deleted: it %s", key.hex()[:16], fault)
        try:
            await self._inner.delete([key for key, _ in corrupt])
        except Exception as error:
            # It stays a miss as often as it is read; the others of its batch are none.
            self._warn("%d corrupt chunks could not be deleted: %r", len(corrupt), error)


async def _in_parts(
    carry: Callable[[Sequence[GetItem]], Awaitable[Sequence[Outcome]]], items: Sequence[GetItem]
) -> Sequence[Outcome]:
    """Carry a batch in parts, a few of them under way together; the outcomes in the items' order."""
    parts = _cut(items)
    if len(parts) <= 1:
        return await carry(items)
    outcomes: list[Sequence[Outcome]] = [()] * len(parts)

    slots = anyio.Semaphore(PARTS_UNDER_WAY)

    async def run(index: int) -> None:
        async with slots:
            outcomes[index] = await carry(parts[index])

    async with anyio.create_task_group() as tasks:
        for index in range(len(parts)):
            tasks.start_soon(run, index)
    return list(chain.from_iterable(outcomes))


def _cut(items: Sequence[GetItem]) -> list[list[GetItem]]:
    parts: list[list[GetItem]] = []
    length = 0
    for item in items:
        if not parts or (length >= PART_BYTES and len(parts[-1]) >= PART_OBJECTS):
            parts.append([])
            length = 0
        parts[-1].append(item)
        length += len(item[1])
    return parts


def _fault(item: GetItem) -> str | None:
    key, chunk = item
    try:
        ChunkHeader.verify(chunk, key)
    except CorruptChunk as error:
        return str(error)
    return None


def _head_fault(stored: StoredObject) -> str | None:
    try:
        header = ChunkHeader.parse(stored.head)
    except CorruptChunk as error:
        return str(error)
    if header.key != stored.key:
        return f"holds chunk {header.key.hex()[:16]}"
    if object_bytes(header.payload_bytes) != stored.length:
        return f"is {stored.length} bytes for a payload of {header.payload_bytes}"
    return None
