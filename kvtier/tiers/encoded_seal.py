"""The seal of a tier with a codec: objects are encoded in scratch memory, and their length varies."""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kvtier.backends.base import Backend, GetItem, Outcome, PutItem, StoredObject
from kvtier.bounded import remember
from kvtier.catalog.catalog import Catalog
from kvtier.concurrency.threads import spread
from kvtier.errors import CorruptChunk, TierError, UnreadableChunk
from kvtier.logs import RateLimitedLog
from kvtier.memory.header import (
    HEADER_BYTES,
    IDENTITY,
    OBJECT_ALIGNMENT,
    ChunkHeader,
    StoredHeader,
    is_sealed,
    object_bytes,
)
from kvtier.memory.keys import ChunkKey
from kvtier.memory.layout import ChunkLayout
from kvtier.settings import TierSettings
from kvtier.tiers.codec import Codec, CodecSettings, IdentityCodec
from kvtier.tiers.codec_choice import CodecChoice
from kvtier.tiers.seal import Fault, Seal
from kvtier.tiers.sealer import HASHED_AT_ONCE, Sealer
from kvtier.tiers.throughput import Throughput

if TYPE_CHECKING:
    from kvtier.tiers.encryption import Keys

logger = logging.getLogger("kvtier")

KEPT_BUFFERS = 4
"""Buffers to keep for reuse, so that their pages are not faulted in again for each batch."""

MAX_LAYOUTS = 1024

MIN_GAIN = 0.05
"""Chunks that gain less are stored as they are, and are read without being decoded."""
MIN_DENSER_GAIN = 0.02
"""Encoded chunks that gain less are not encoded once more, as that takes longer to decode."""

MAX_DENSEST = 1_000_000

ResultT = TypeVar("ResultT")


class Layouts(dict[bytes, ChunkLayout]):
    """The layouts of the models whose engines have connected, by namespace."""

    def add(self, namespace: bytes, layout: ChunkLayout) -> None:
        """Remember a layout. Beyond :data:`MAX_LAYOUTS`, the oldest is forgotten."""
        remember(self, namespace, layout, MAX_LAYOUTS)


class Codecs(NamedTuple):
    """The codec of a tier, and all codecs that its chunks may have been encoded with."""

    own: Codec
    known: Mapping[int, Codec]
    """By code. Chunks of earlier settings may have another codec than the tier's."""
    measured: bool = False
    """Whether chunks are encoded only while that pays."""


def keys_of(tier: TierSettings) -> Keys | None:
    """Return the keys of a tier; ``None`` if it is not encrypted. Raises :class:`TierError`."""
    if tier.encrypt is None:
        return None
    return load_keys(tier.encrypt.key_file, f"tier {tier.name!r}: encrypt.key_file")


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
        self.measured = codecs.measured
        self.known = {IDENTITY: _IDENTITY, **codecs.known, codecs.own.code: codecs.own}
        """The codecs that payloads can be decoded with, by code."""
        self.code = codecs.own.code
        """That of the codec that it encodes with."""
        self.has_codec = codecs.own.code != IDENTITY
        """Whether it may make chunks smaller."""
        self._codec = codecs.own
        self.denser = None if codecs.own.denser is None else self.known.get(codecs.own.denser)
        self._layouts = layouts
        self._checksum = checksum
        self._kept: list[memoryview] = []
        self._warn = RateLimitedLog(logger)
        self._warned_of_loss = False

    def max_bytes(self, header: ChunkHeader) -> int:
        """Return the upper bound of the encoded size of a chunk object."""
        bound = header.payload_bytes
        try:
            bound = max(bound, self._codec.max_encoded_bytes(header, self._layouts.get(header.namespace)))
        except Exception as error:
            self._warn("codec %d has no bound for a chunk: %r; storing it as it is", self._codec.code, error)
        return object_bytes(bound)

    def encode(
        self,
        header: ChunkHeader,
        chunk: memoryview,
        target: memoryview,
        tenant: bytes = b"",
        *,
        smaller: bool = True,
        denser: bool = False,
    ) -> memoryview | None:
        """Encode, encrypt and seal a chunk object of a tenant. Return the part of ``target`` to store.

        ``None`` if it would be hardly smaller, or cannot be encoded: it is then stored as it is. Unless
        ``smaller``, it is only encrypted. ``denser``: with the denser codec. Raises :class:`CorruptChunk` if
        it has another checksum already: what is stored gets a new one.
        """
        if is_sealed(chunk):
            ChunkHeader.verify(chunk, header.key)
        used = self.denser if denser else None
        codec = (used or self._codec).code
        stored_bytes = self.encode_payload(header, chunk, target, used) if smaller else None
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

    def encode_payload(
        self, header: ChunkHeader, chunk: memoryview, target: memoryview, codec: Codec | None = None
    ) -> int | None:
        """Encode a payload. Return its length, or ``None`` if it is to be stored as it is."""
        codec = codec or self._codec
        if not self.has_codec:
            return None
        layout, payload = self._layouts.get(header.namespace), _payload(chunk, header.payload_bytes)
        if codec.lossy and (layout is None or not layout.accepts_loss):
            if layout is not None and not self._warned_of_loss:
                self._warned_of_loss = True
                logger.warning(
                    "%s loses precision: chunks of engines without `accept_lossy: true` stay as they are",
                    type(codec).__name__,
                )
            return None
        try:
            stored_bytes = codec.encode(header, layout, payload, target[HEADER_BYTES:])
        except Exception as error:
            self._warn("codec %d cannot encode a chunk: %r; storing it as it is", codec.code, error)
            return None
        if not 0 <= stored_bytes <= len(target) - HEADER_BYTES:
            self._warn("codec %d exceeds its bound; storing chunks as they are", codec.code)
            return None
        if object_bytes(stored_bytes) > (1 - MIN_GAIN) * len(chunk):
            return None
        return stored_bytes

    def decode_payload(
        self, header: ChunkHeader, stored: memoryview, stored_bytes: int | None, target: memoryview
    ) -> None:
        """Decode what :meth:`encode_payload` has just written, if it has, to measure that."""
        if stored_bytes is not None:
            layout, payload = self._layouts.get(header.namespace), _payload(target, header.payload_bytes)
            self._codec.decode(header, layout, _payload(stored, stored_bytes), payload)

    def decode(self, key: ChunkKey, stored: memoryview, target: memoryview, *, hashed: bool) -> None:
        """Verify a stored chunk object and decode it into ``target``. ``hashed``: its payload has been.

        Raises :class:`CorruptChunk` for whatever the codec raises.
        """
        found = StoredHeader.verify(stored, key, hashed=hashed)
        header, codec = found.chunk, self.known.get(found.codec)
        if object_bytes(header.payload_bytes) != len(target):
            raise CorruptChunk("has a payload of {} bytes", header.payload_bytes)
        if codec is None:
            raise UnreadableChunk("is encoded by codec {}, which is not installed", found.codec)
        source, payload = _payload(stored, found.stored_bytes), _payload(target, header.payload_bytes)
        if self.keys is not None:
            decrypted = payload if found.codec == IDENTITY else source
            self.keys.decrypt(found, source, decrypted)
            source = decrypted
        elif found.encryption is not None:
            raise UnreadableChunk("is encrypted, but the tier has no `encrypt`")
        try:
            if source is not payload:
                codec.decode(header, self._layouts.get(header.namespace), source, payload)
        except CorruptChunk:
            raise
        except (MemoryError, OSError) as error:
            raise UnreadableChunk("cannot be decoded now: {!r}", error) from error
        except Exception as error:
            raise CorruptChunk("cannot be decoded: {!r}", error) from error
        target[:HEADER_BYTES] = header.packed()

    @contextmanager
    def scratch(self, lengths: Sequence[int]) -> Iterator[list[memoryview]]:
        """Yield page-aligned memory for each length, for the duration of the block."""
        total = sum(lengths)
        place = next((place for place, kept in enumerate(self._kept) if len(kept) >= total), None)
        if place is None:
            memory = mmap.mmap(-1, max(total, mmap.PAGESIZE))
            memory.madvise(mmap.MADV_DONTDUMP)
            buffer = memoryview(memory)
        else:
            buffer = self._kept.pop(place)
        try:
            yield [buffer[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0))]
        finally:
            self._kept = [buffer, *self._kept][:KEPT_BUFFERS]


_IDENTITY = IdentityCodec(CodecSettings(type="identity"))


def _payload(chunk: memoryview, length: int) -> memoryview:
    return chunk[HEADER_BYTES : HEADER_BYTES + length]


@dataclass
class Written:
    """What a tier with a codec or encryption has written, or peers have sent, since it was opened."""

    chunk_bytes: int = 0
    """Before encoding."""
    stored_bytes: int = 0


class EncodedSeal(Seal):
    """Encodes the payloads of chunk objects, unless that makes them hardly smaller, or there is no codec.

    The checksum is that of the encoded payload. Objects that are as long as the chunk object are not encoded,
    and transferred without a copy.
    """

    def __init__(
        self,
        backend: Backend,
        sealer: Sealer,
        encoder: Encoder,
        catalog: Catalog,
        tier: int,
        is_full: Callable[[], bool] = lambda: False,
    ) -> None:
        """``catalog``: knows the length of each object in the tier. ``is_full``: see :class:`CodecChoice`."""
        super().__init__(backend, sealer)
        self.written = Written()
        self.choice = CodecChoice(is_full, MIN_GAIN) if encoder.measured else None
        """With ``codec: auto``."""
        self.densest: set[ChunkKey] = set()
        """What the denser codec has encoded, or made hardly smaller. Forgotten if it becomes too much."""
        self._known = encoder.known
        self._encoder = encoder
        self._catalog = catalog
        self._tier = tier

    async def _put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Encode and seal each chunk object, and store it."""
        if self.choice is not None and self.choice.needs_trial:
            try:
                await self._try_codec(items, self.choice)
            except Exception as error:
                logger.warning("the codec cannot be measured: %r; storing chunks as they are", error)
                self.choice.tried(1, 1, 0.0)
        self.densest.difference_update(key for key, _ in items)
        smaller = self._encoder.has_codec and (self.choice is None or self.choice.encodes)
        if smaller or self._encoder.keys is not None:
            return await self._put_encoded(items, smaller=smaller)
        outcomes = await super()._put(items)
        stored = _transferred(items, outcomes)
        self.written.chunk_bytes += stored
        self.written.stored_bytes += stored
        return outcomes

    async def encode_stored(self, items: Sequence[PutItem], *, denser: bool = False) -> Sequence[Outcome]:
        """Replace chunk objects by smaller ones, with the ``denser`` codec also those that are encoded.

        A ``MISS`` leaves what is stored: it would be hardly smaller.
        """
        outcomes = await self._put_encoded(items, replaces=True, denser=denser)
        for (key, _), outcome in zip(items, outcomes, strict=True):
            if denser and outcome in (Outcome.OK, Outcome.MISS):
                self._settle(key)
        return outcomes

    def _settle(self, key: ChunkKey) -> None:
        if len(self.densest) >= MAX_DENSEST:
            self.densest.clear()
        self.densest.add(key)

    def _check_head(self, stored: StoredObject) -> StoredHeader:
        header = super()._check_head(stored)
        if self._encoder.denser is not None and header.codec == self._encoder.denser.code:
            self._settle(stored.key)
        return header

    async def _put_encoded(
        self,
        items: Sequence[PutItem],
        *,
        smaller: bool = True,
        replaces: bool = False,
        denser: bool = False,
    ) -> Sequence[Outcome]:
        encoder, found = self._encoder, await self._sealer.headers(items)
        valid = [at for at, header in enumerate(found) if header is not None]
        headers = [header for header in found if header is not None]
        keys = encoder.keys
        tenants = [keys.mark_of(self._catalog.tenant(header.key)) if keys else b"" for header in headers]

        def encode(
            at: int, header: ChunkHeader, buffer: memoryview, tenant: bytes
        ) -> memoryview | Fault | None:
            try:
                return encoder.encode(header, items[at][1], buffer, tenant, smaller=smaller, denser=denser)
            except CorruptChunk as error:
                return Fault(error.kind, str(error))

        with encoder.scratch([encoder.max_bytes(header) for header in headers]) as buffers:
            encoded = await self._in_threads(encode, valid, headers, buffers, tenants)
            views: dict[int, memoryview] = {}
            plain = []
            for at, view in zip(valid, encoded, strict=True):
                if isinstance(view, Fault):
                    self._sealer.damaged(items[at], view.kind, view.text)
                elif view is None:
                    plain += [] if replaces else [at]
                elif not replaces or len(view) < self._stored(items[at]) * (1 - MIN_DENSER_GAIN):
                    views[at] = view
            seals = await self._sealer.seal([items[at] for at in plain])
            views |= {at: items[at][1] for at, seal in zip(plain, seals, strict=True) if seal is not None}
            throughput = None if self.choice is None else self.choice.writes
            views = dict(sorted(views.items()))  # A medium that fills up has the beginning of a prompt.
            stored = [(items[at][0], view) for at, view in views.items()]
            results = await _timed(throughput, self._backend.put, stored)
        outcomes = [Outcome.MISS] * len(items)
        for (at, view), outcome in zip(views.items(), results, strict=True):
            outcomes[at] = outcome
            if outcome is Outcome.OK:
                key, chunk = items[at]
                self.written.chunk_bytes += len(chunk)
                self.written.stored_bytes += len(view)
                self._catalog.resize(key, self._tier, len(view))
        return outcomes

    async def _try_codec(self, items: Sequence[PutItem], choice: CodecChoice) -> None:
        """Encode a batch and decode it again, to measure the codec."""
        encoder = self._encoder
        found = zip(await self._sealer.headers(items), items, strict=True)
        valid = [(header, chunk) for header, (_, chunk) in found if header is not None]
        if not valid:
            return
        headers, chunks = zip(*valid, strict=True)
        sizes = [len(chunk) for chunk in chunks]
        with encoder.scratch([*map(encoder.max_bytes, headers), *sizes]) as buffers:
            stored, targets = buffers[: len(valid)], buffers[len(valid) :]
            lengths = await self._in_threads(encoder.encode_payload, headers, chunks, stored)
            began = time.monotonic()
            await self._in_threads(encoder.decode_payload, headers, stored, lengths, targets)
            seconds = time.monotonic() - began
        encoded = [
            size if length is None else object_bytes(length)
            for size, length in zip(sizes, lengths, strict=True)
        ]
        choice.tried(sum(sizes), sum(encoded), seconds)

    async def _in_threads(self, call: Callable[..., ResultT], *arguments: Sequence[object]) -> list[ResultT]:
        """Call a function with the first of each of the ``arguments``, with the second of each, and so on."""
        calls = list(zip(*arguments, strict=True))
        return await spread(lambda one: call(*one), calls, parts=HASHED_AT_ONCE, executor=self._executor)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Fill each view with a verified and decoded chunk object. See :meth:`Backend.get`."""
        lengths = await self._lengths(items)
        outcomes = list(await self._get(items, lengths))
        # One may have been replaced by an encoded one since.
        missed = [at for at, outcome in enumerate(outcomes) if outcome is Outcome.MISS]
        if missed and self._pool is None:
            now = await self._lengths(items)
            replaced = [at for at in missed if now[at] != lengths[at]]
            if replaced:
                again = await self._get([items[at] for at in replaced], [now[at] for at in replaced])
                for at, outcome in zip(replaced, again, strict=True):
                    outcomes[at] = outcome
        return outcomes

    async def _get(self, items: Sequence[GetItem], lengths: Sequence[int]) -> Sequence[Outcome]:
        every = self._encoder.keys is not None
        encoded = [at for at, (_, view) in enumerate(items) if every or lengths[at] != len(view)]
        if not encoded:
            return await super().get(items)
        with self._encoder.scratch([lengths[at] for at in encoded]) as buffers:
            places = dict(zip(encoded, buffers, strict=True))
            reads = [(key, view, places.get(at)) for at, (key, view) in enumerate(items)]
            found = await self._read([(key, view if place is None else place) for key, view, place in reads])
            return await self.checked(reads, found, self._decode, parts=HASHED_AT_ONCE)

    async def _lengths(self, items: Sequence[GetItem]) -> list[int]:
        """Return the length of each object in the medium. A shared pool is asked: others write to it, too."""
        if self._pool is None:
            return [self._stored(item) for item in items]
        held = await self._pool.lengths([key for key, _ in items])
        # What is not held, or has a length that it cannot have, is a miss of the chunk's own length.
        return [
            length if 0 < length <= len(view) and length % OBJECT_ALIGNMENT == 0 else len(view)
            for length, (_, view) in zip(held, items, strict=True)
        ]

    def _stored(self, item: GetItem) -> int:
        key, view = item
        return self._catalog.stored_length(key, self._tier, len(view))

    def _decode(self, read: tuple[ChunkKey, memoryview, memoryview | None], hashed: bool) -> None:
        """Verify what was read into a chunk's memory, or decode it into that from where it was read to."""
        key, chunk, encoded = read
        if encoded is None:
            ChunkHeader.verify(chunk, key, hashed=hashed)
        else:
            self._encoder.decode(key, encoded, chunk, hashed=hashed)

    async def _read(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        throughput = None if self.choice is None else self.choice.reads
        return await _timed(throughput, self._backend.get, items)


async def _timed(
    throughput: Throughput | None,
    call: Callable[[Sequence[PutItem]], Awaitable[Sequence[Outcome]]],
    items: Sequence[PutItem],
) -> Sequence[Outcome]:
    """Call a medium, and record how long it took."""
    if throughput is None:
        return await call(items)
    total = sum(len(view) for _, view in items)
    outcomes: Sequence[Outcome] = ()
    throughput.begin(total)
    try:
        outcomes = await call(items)
        return outcomes
    finally:
        throughput.end(total, _transferred(items, outcomes))


def _transferred(items: Sequence[PutItem], outcomes: Sequence[Outcome]) -> int:
    """Return the bytes of those that were written or read. There may be too few outcomes, or none."""
    results = zip(items, outcomes, strict=False)
    return sum(len(view) for (_, view), outcome in results if outcome in (Outcome.OK, Outcome.VERIFIED))
