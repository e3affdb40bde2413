"""The seal of a tier with a codec: objects are encoded in scratch memory, and their length varies."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvtier.backends.base import Backend, GetItem, Outcome, PutItem
from kvtier.catalog.catalog import Catalog
from kvtier.concurrency.threads import spread
from kvtier.errors import CorruptChunk, TierError, UnreadableChunk
from kvtier.logs import RateLimitedLog
from kvtier.memory.header import HEADER_BYTES, IDENTITY, ChunkHeader, StoredHeader, object_bytes
from kvtier.memory.keys import ChunkKey
from kvtier.memory.layout import ChunkLayout
from kvtier.settings import TierSettings
from kvtier.tiers.codec import Codec, CodecSettings, IdentityCodec
from kvtier.tiers.seal import PARTS_AT_ONCE, Seal
from kvtier.tiers.sealer import Sealer

if TYPE_CHECKING:
    from kvtier.tiers.encryption import Keys

logger = logging.getLogger("kvtier")

KEPT_BUFFERS = 4
"""Buffers to keep for reuse, so that their pages are not faulted in again for each batch."""

MAX_LAYOUTS = 1024

MIN_GAIN = 0.05
"""Chunks that gain less are stored as they are, and are read without being decoded."""


class Layouts:
    """The layouts of the models whose engines have connected, by namespace."""

    def __init__(self) -> None:
        self._layouts: dict[bytes, ChunkLayout] = {}

    def add(self, namespace: bytes, layout: ChunkLayout) -> None:
        """Remember a layout. Beyond :data:`MAX_LAYOUTS`, the oldest is forgotten."""
        self._layouts[namespace] = layout
        if len(self._layouts) > MAX_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]

    def get(self, namespace: bytes) -> ChunkLayout | None:
        """Return the layout of a namespace, if it is known."""
        return self._layouts.get(namespace)


class Codecs(NamedTuple):
    """The codec of a tier, and all codecs that its chunks may have been encoded with."""

    own: Codec
    known: Mapping[int, Codec]
    """By code. Chunks of earlier settings may have another codec than the tier's."""


def keys_of(tier: TierSettings) -> Keys | None:
    """Return the keys of a tier; ``None`` if it is not encrypted. Raises :class:`TierError`."""
    return None if tier.encrypt is None else load_keys(tier.encrypt.key_file, f"tier {tier.name!r}: encrypt")


def load_keys(path: Path, place: str) -> Keys:
    """Read a key file, named at ``place``. Raises :class:`TierError`, also without the library for it."""
    try:
        from kvtier.tiers.encryption import Keys
    except ImportError as error:
        raise TierError(
            f"{place}: needs cryptography ({error})", "pip install 'kvtier[encryption]'"
        ) from error
    return Keys.load(path, place)


class Encoder:
    """Encodes and decodes in worker threads; :meth:`scratch` is for the event loop only."""

    def __init__(self, codecs: Codecs, layouts: Layouts, *, checksum: bool, keys: Keys | None = None) -> None:
        """``keys``: to encrypt with; nothing else is decoded then."""
        self.keys = keys
        self._codec = codecs.own
        self._known = {**codecs.known, codecs.own.code: codecs.own}
        self._layouts = layouts
        self._checksum = checksum
        self._kept: list[memoryview] = []
        self._warn = RateLimitedLog(logger)
        self._told = False

    @property
    def encodes(self) -> bool:
        """Whether it does not only decode what the tier holds from earlier settings."""
        return self._codec.code != IDENTITY or self.keys is not None

    def knows(self, code: int) -> bool:
        """Whether payloads with this code can be decoded."""
        return code == IDENTITY or code in self._known

    def max_bytes(self, header: ChunkHeader) -> int:
        """Return the upper bound of the encoded size of a chunk object."""
        layout = self._layouts.get(header.namespace)
        return object_bytes(max(header.payload_bytes, self._codec.max_encoded_bytes(header, layout)))

    def encode(
        self, header: ChunkHeader, chunk: memoryview, target: memoryview, tenant: bytes = b""
    ) -> memoryview | None:
        """Encode, encrypt and seal a chunk object of a tenant. Return the part of ``target`` to store.

        ``None`` if it would be hardly smaller, or cannot be encoded: it is then stored as it is.
        """
        codec, stored_bytes = self._codec.code, self._encode(header, chunk, target)
        source = target[HEADER_BYTES:]
        if stored_bytes is None:
            if self.keys is None:
                return None
            codec, stored_bytes, source = IDENTITY, header.payload_bytes, chunk[HEADER_BYTES:]
        encryption = None
        if self.keys is not None:
            payload = target[HEADER_BYTES : HEADER_BYTES + stored_bytes]
            encryption = self.keys.encrypt(header, codec, tenant, source[:stored_bytes], payload)
        stored = target[: object_bytes(stored_bytes)]
        padding = stored[HEADER_BYTES + stored_bytes :]
        padding[:] = bytes(len(padding))
        StoredHeader.seal(stored, header, codec, stored_bytes, checksum=self._checksum, encryption=encryption)
        return stored

    def _encode(self, header: ChunkHeader, chunk: memoryview, target: memoryview) -> int | None:
        """Encode a payload. Return its length, or ``None`` if it is to be stored as it is."""
        if self._codec.code == IDENTITY:
            return None
        layout, payload = self._layouts.get(header.namespace), _payload(chunk, header.payload_bytes)
        if self._codec.lossy and (layout is None or not layout.accepts_loss):
            if layout is not None and not self._told:
                self._told = True
                logger.warning(
                    "%s loses precision: chunks of engines without `accept_lossy: true` stay as they are",
                    type(self._codec).__name__,
                )
            return None
        try:
            stored_bytes = self._codec.encode(header, layout, payload, target[HEADER_BYTES:])
        except Exception as error:
            self._warn("codec %d cannot encode a chunk: %r; storing it as it is", self._codec.code, error)
            return None
        if not 0 <= stored_bytes <= len(target) - HEADER_BYTES:
            self._warn("codec %d exceeds its bound; storing chunks as they are", self._codec.code)
            return None
        if object_bytes(stored_bytes) > (1 - MIN_GAIN) * len(chunk):
            return None
        return stored_bytes

    def decode(self, key: ChunkKey, stored: memoryview, target: memoryview, *, hashed: bool) -> None:
        """Verify a stored chunk object and decode it into ``target``. Raises :class:`CorruptChunk`.

        ``hashed``: its payload has been.
        """
        found = StoredHeader.verify(stored, key, hashed=hashed)
        header, codec = found.chunk, self._known.get(found.codec, _IDENTITY)
        if object_bytes(header.payload_bytes) != len(target):
            raise CorruptChunk("has a payload of {} bytes", header.payload_bytes)
        if not self.knows(found.codec):
            raise UnreadableChunk("is encoded by codec {}, which is not installed", found.codec)
        source, payload = _payload(stored, found.stored_bytes), _payload(target, header.payload_bytes)
        if self.keys is not None:
            self.keys.decrypt(found, source, source)
        elif found.encryption is not None:
            raise UnreadableChunk("is encrypted, but the tier has no `encrypt`")
        try:
            codec.decode(header, self._layouts.get(header.namespace), source, payload)
        except Exception as error:
            raise CorruptChunk("cannot be decoded: {!r}", error) from error
        target[:HEADER_BYTES] = header.packed()

    @contextmanager
    def scratch(self, lengths: Sequence[int]) -> Iterator[list[memoryview]]:
        """Yield page-aligned memory for each length, for the duration of the block."""
        total = sum(lengths)
        buffer = next((kept for kept in self._kept if len(kept) >= total), None)
        if buffer is None:
            memory = mmap.mmap(-1, max(total, mmap.PAGESIZE))
            memory.madvise(mmap.MADV_DONTDUMP)
            buffer = memoryview(memory)
        else:
            self._kept.remove(buffer)
        ends = [0]
        for length in lengths:
            ends.append(ends[-1] + length)
        try:
            yield [buffer[start:stop] for start, stop in pairwise(ends)]
        finally:
            self._kept = [buffer, *self._kept][:KEPT_BUFFERS]


_IDENTITY = IdentityCodec(CodecSettings(type="identity"))


def _payload(chunk: memoryview, length: int) -> memoryview:
    return chunk[HEADER_BYTES : HEADER_BYTES + length]


@dataclass
class Written:
    """What a tier with a codec has written since it was opened."""

    chunk_bytes: int = 0
    """Before encoding."""
    stored_bytes: int = 0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were stored; 1.0 before the first."""
        return self.chunk_bytes / self.stored_bytes if self.stored_bytes else 1.0


class _Read(NamedTuple):
    """An object to read: into the chunk's memory, or into ``encoded`` and from there."""

    key: ChunkKey
    chunk: memoryview
    encoded: memoryview | None


class EncodedSeal(Seal):
    """Encodes the payloads of chunk objects, unless that makes them hardly smaller, or there is no codec.

    The checksum is that of the encoded payload. Objects that are as long as the chunk object are not encoded,
    and transferred without a copy.
    """

    def __init__(
        self, backend: Backend, sealer: Sealer, encoder: Encoder, catalog: Catalog, tier: int
    ) -> None:
        """``catalog``: knows the length of each object in the tier."""
        super().__init__(backend, sealer)
        self.written = Written() if encoder.encodes else None
        """What its codec made of what was written; ``None`` without one."""
        self._encoder = encoder
        self._catalog = catalog
        self._tier = tier

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Encode and seal each chunk object, and store it. See :meth:`Backend.put`."""
        if self.written is None:
            return await super().put(items)
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
                key, chunk = items[at]
                self.written.chunk_bytes += len(chunk)
                self.written.stored_bytes += len(view)
                self._catalog.resize(key, self._tier, len(view))
        return outcomes

    async def _encode(
        self,
        items: Sequence[PutItem],
        valid: Sequence[tuple[int, ChunkHeader]],
        buffers: Sequence[memoryview],
    ) -> list[memoryview | None]:
        """Return the encoded object of each item, or ``None`` if it is to be stored as it is."""
        keys = self._encoder.keys
        work = [
            (header, items[at][1], buffer, keys.mark_of(self._catalog.tenant(header.key)) if keys else b"")
            for (at, header), buffer in zip(valid, buffers, strict=True)
        ]
        encode = self._encoder.encode
        return await spread(lambda one: encode(*one), work, parts=PARTS_AT_ONCE, executor=self._executor)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Fill each view with a verified and decoded chunk object. See :meth:`Backend.get`."""
        lengths = await self._lengths(items)
        every = self._encoder.keys is not None
        encoded = [at for at, (_, view) in enumerate(items) if every or lengths[at] != len(view)]
        if not encoded:
            return await super().get(items)
        with self._encoder.scratch([lengths[at] for at in encoded]) as buffers:
            places = dict(zip(encoded, buffers, strict=True))
            reads = [_Read(key, view, places.get(at)) for at, (key, view) in enumerate(items)]
            found = await self._backend.get(
                [(read.key, read.chunk if read.encoded is None else read.encoded) for read in reads]
            )
            return await self._checked(reads, found, self._decode, parts=PARTS_AT_ONCE)

    async def _lengths(self, items: Sequence[GetItem]) -> list[int]:
        """Return the length of each object in the medium. A shared pool is asked: others write to it, too."""
        if (pool := self._backend.capabilities().lengths) is None:
            return [self._catalog.stored_length(key, self._tier, len(view)) for key, view in items]
        held = await pool.lengths([key for key, _ in items])
        # What is not held, or has a length that it cannot have, is a miss of the chunk's own length.
        return [
            length if 0 < length <= len(view) else len(view)
            for length, (_, view) in zip(held, items, strict=True)
        ]

    def _decode(self, read: _Read, hashed: bool) -> None:
        if read.encoded is None:
            ChunkHeader.verify(read.chunk, read.key, hashed=hashed)
        else:
            self._encoder.decode(read.key, read.encoded, read.chunk, hashed=hashed)

    def _can_read(self, codec: int) -> bool:
        return self._encoder.knows(codec)
