"""The seal of a tier with a codec: objects are encoded into scratch memory, and their length varies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvtier.backends.base import Backend, GetItem, Outcome, PutItem
from kvtier.catalog.catalog import Catalog
from kvtier.concurrency.threads import spread
from kvtier.memory.header import ChunkHeader
from kvtier.memory.keys import ChunkKey
from kvtier.tiers.encoder import Encoder
from kvtier.tiers.seal import PARTS_AT_ONCE, Seal
from kvtier.tiers.sealer import Sealer


class StoredLengths:
    """The lengths of a tier's objects, as the catalog has them."""

    def __init__(self, catalog: Catalog, tier: int) -> None:
        self._catalog = catalog
        self._tier = tier

    def get(self, key: ChunkKey, default: int, /) -> int:
        """Return a length, or ``default`` for a chunk that is not in the tier."""
        return self._catalog.stored_length(key, self._tier, default)

    def __setitem__(self, key: ChunkKey, length: int, /) -> None:
        """Record the length of a stored object."""
        self._catalog.resize(key, self._tier, length)


class _Read(NamedTuple):
    """An object to read: into the chunk's memory, or into ``encoded`` and from there."""

    key: ChunkKey
    chunk: memoryview
    encoded: memoryview | None


class EncodedSeal(Seal):
    """Encodes the payloads of chunk objects, unless that makes them no smaller.

    The checksum is that of the encoded payload. Objects that are as long as the chunk object are not encoded,
    and transferred without a copy.
    """

    def __init__(self, backend: Backend, sealer: Sealer, encoder: Encoder, lengths: StoredLengths) -> None:
        super().__init__(backend, sealer)
        self._encoder = encoder
        self._lengths = lengths

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Encode and seal each chunk object, and store it. See :meth:`Backend.put`."""
        headers = await self._sealer.headers(items)
        outcomes = [Outcome.MISS] * len(items)
        valid = [(at, header) for at, header in enumerate(headers) if header is not None]
        with self._encoder.scratch([self._encoder.max_bytes(header) for _, header in valid]) as buffers:
            encoded = await self._encode(items, valid, buffers)
            stored = {at: view for (at, _), view in zip(valid, encoded, strict=True)}
            plain = [at for at, view in stored.items() if view is None]
            for at, seal in zip(plain, await self._sealer.seal([items[at] for at in plain]), strict=True):
                stored[at] = items[at][1] if seal is not None else None
            views = [(at, view) for at, view in stored.items() if view is not None]
            results = await self._backend.put([(items[at][0], view) for at, view in views])
        for (at, view), outcome in zip(views, results, strict=True):
            outcomes[at] = outcome
            if outcome is Outcome.OK:
                self._lengths[items[at][0]] = len(view)
        return outcomes

    async def _encode(
        self,
        items: Sequence[PutItem],
        valid: Sequence[tuple[int, ChunkHeader]],
        buffers: Sequence[memoryview],
    ) -> list[memoryview | None]:
        """Return the encoded object of each item, or ``None`` if it is to be stored as it is."""
        work = [(header, items[at][1], buffer) for (at, header), buffer in zip(valid, buffers, strict=True)]
        encode = self._encoder.encode
        return await spread(lambda one: encode(*one), work, parts=PARTS_AT_ONCE, executor=self._executor)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Fill each view with a verified and decoded chunk object. See :meth:`Backend.get`."""
        lengths = [self._lengths.get(key, len(view)) for key, view in items]
        encoded = [at for at, (_, view) in enumerate(items) if lengths[at] != len(view)]
        with self._encoder.scratch([lengths[at] for at in encoded]) as buffers:
            places = dict(zip(encoded, buffers, strict=True))
            reads = [_Read(key, view, places.get(at)) for at, (key, view) in enumerate(items)]
            found = await self._backend.get(
                [(read.key, read.chunk if read.encoded is None else read.encoded) for read in reads]
            )
            return await self._checked(reads, found, self._decode, parts=PARTS_AT_ONCE)

    def _decode(self, read: _Read) -> None:
        if read.encoded is None:
            ChunkHeader.verify(read.chunk, read.key)
        else:
            self._encoder.decode(read.key, read.encoded, read.chunk)

    def _can_read(self, codec: int) -> bool:
        return self._encoder.knows(codec)
