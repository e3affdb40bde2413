"""The collaborators of a tier in the shape of a backend, so that a test can treat them like one."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from kvtier.backends.base import Backend, Capabilities, GetItem, Outcome, PutItem, StoredObject, SupportsScan
from kvtier.catalog.catalog import Catalog
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.memory.header import HEADER_BYTES, ChunkHeader
from kvtier.memory.keys import ChunkKey
from kvtier.settings import TierSettings
from kvtier.testing.faults import WrapperBackend
from kvtier.tiers.breaker import CircuitBreaker
from kvtier.tiers.codec import Codec, CodecSettings
from kvtier.tiers.encoded_seal import Codecs, EncodedSeal, Encoder, Layouts
from kvtier.tiers.encryption import Keys
from kvtier.tiers.lossless import LosslessCodec
from kvtier.tiers.seal import Seal
from kvtier.tiers.sealer import Sealer
from kvtier.tiers.tier import Deletions, Tier


class SealedSuite:
    """Mixin of a conformance suite that puts its backends behind a seal."""

    chunk_objects = True

    def make_backend(self, path: Path) -> Backend:
        return SealedBackend(super().make_backend(path))

    def seal(self, backend: SealedBackend | TierBackend) -> Seal:
        return backend.seal


class TierSuite(SealedSuite):
    """Mixin of a conformance suite that puts its backends into a tier."""

    checksum = True

    def make_backend(self, path: Path) -> Backend:
        return TierBackend(super(SealedSuite, self).make_backend(path), checksum=self.checksum)


class EncodedSuite(SealedSuite):
    """Mixin of a conformance suite that encodes what its backends store."""

    # A tier asks for what its catalog has, and what it stores has other lengths and headers than in memory.
    test_a_value_of_another_length_is_a_miss = test_scanning = None

    @cached_property
    def catalog(self) -> StoredLengths:
        """For all backends of a test: it knows what it finds again."""
        return StoredLengths()

    def make_backend(self, path: Path) -> Backend:
        return EncodedBackend(super(SealedSuite, self).make_backend(path), self.catalog)

    def value(self, key: ChunkKey, size: int, seed: int = 0) -> memoryview:
        """Like values of bfloat16 between 1 and 2, with random mantissas."""
        view = super().value(key, size, seed)
        exponents = view[HEADER_BYTES + 1 : HEADER_BYTES + ChunkHeader.parse(view).payload_bytes : 2]
        exponents[:] = b"\x3f" * len(exponents)
        normalize(view)
        return view


class EncryptedSuite(EncodedSuite):
    """Mixin of a conformance suite that encodes and encrypts what its backends store."""

    keys = Keys({2: bytes(range(32)), 1: bytes(32)})

    def make_backend(self, path: Path) -> Backend:
        return EncodedBackend(super(SealedSuite, self).make_backend(path), self.catalog, self.keys)


class SealedBackend(WrapperBackend, SupportsScan):
    """A backend behind a seal: puts and gets are chunk objects."""

    def __init__(self, inner: Backend, checksum: bool = True, *, sealer: Sealer | None = None) -> None:
        super().__init__(inner)
        self.seal = Seal(inner, sealer or Sealer(checksum))

    @property
    def corrupt(self) -> int:
        return self.seal.corrupt

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        return await self.seal.put(items)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        return await self.seal.get(items)

    def scan(self) -> AsyncIterator[Sequence[StoredObject]]:
        return self.seal.scan()

    def capabilities(self) -> Capabilities:
        inner = super().capabilities()
        return inner._replace(scan=inner.scan and self)


def normalize(chunk: memoryview) -> None:
    """Remove what is not stored with an encoded payload: its checksum, and what follows it."""
    header = ChunkHeader.parse(chunk)
    chunk[:HEADER_BYTES] = header.packed()
    rest = chunk[HEADER_BYTES + header.payload_bytes :]
    rest[:] = bytes(len(rest))


class StoredLengths:
    """The part of a catalog that an :class:`EncodedSeal` uses."""

    def __init__(self) -> None:
        self._lengths: dict[ChunkKey, int] = {}

    def stored_length(self, key: ChunkKey, tier: int, default: int) -> int:
        return self._lengths.get(key, default)

    def resize(self, key: ChunkKey, tier: int, length: int) -> None:
        self._lengths[key] = length

    def tenant(self, key: ChunkKey) -> str:
        return "" if key[0] % 2 else "team-a"


class EncodedBackend(SealedBackend):
    """A backend behind a seal with the codec `lossless`, or another one."""

    def __init__(
        self, inner: Backend, catalog: Any, keys: Keys | None = None, codec: type[Codec] = LosslessCodec
    ) -> None:
        super().__init__(inner)
        own = codec(CodecSettings(type="lossless"))
        encoder = Encoder(Codecs(own, {}), Layouts(), checksum=True, keys=keys)
        self.seal = EncodedSeal(inner, Sealer(), encoder, catalog, 1)

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """What is not encoded is sealed in memory: undo that."""
        outcomes = await super().put(items)
        for _, view in items:
            normalize(view)
        return outcomes

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """What was decoded has no checksum, and neither has anything else here."""
        outcomes = await super().get(items)
        for (_, view), outcome in zip(items, outcomes, strict=True):
            if outcome is Outcome.OK:
                normalize(view)
        return outcomes

    def capabilities(self) -> Capabilities:
        """Lengths are those of the objects in the medium."""
        return super().capabilities()._replace(lengths=None)


def tier_over(backend: Backend, breaker: CircuitBreaker, *, checksum: bool = True) -> Tier:
    """Return a tier of an open backend, for calls without deadline."""
    catalog = Catalog([LruPolicy.factory()] * 2)
    tier = Tier(1, TierSettings(name="doll", type="doll"), backend, catalog, None, Sealer(checksum))
    tier.breaker = breaker
    return tier


class TierBackend(WrapperBackend, SupportsScan):
    """A tier's calls of its medium: through the circuit breaker, after failed deletions, and sealed."""

    tier: Tier

    def __init__(
        self,
        inner: Backend,
        *,
        breaker: CircuitBreaker | None = None,
        checksum: bool = True,
        retry_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self.breaker = breaker or CircuitBreaker("doll", clock=clock)
        self._checksum = checksum
        self._deletions = Deletions("doll", inner, retry_seconds, clock=clock)

    async def open(self) -> None:
        await super().open()
        self.tier = tier_over(self._inner, self.breaker, checksum=self._checksum)
        self.tier._deletions = self._deletions

    @property
    def seal(self) -> Seal:
        return self.tier.seal

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return await self.tier.contains(keys)

    async def held_prefix(self, keys: Sequence[ChunkKey]) -> int:
        return await self.tier.count_prefix(keys)

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        return await self.tier.write_items(items)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        return await self.tier.read_items(items)

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        await self.tier.remove(keys)

    def scan(self) -> AsyncIterator[Sequence[StoredObject]]:
        return self.tier.scan()

    def capabilities(self) -> Capabilities:
        inner = super().capabilities()
        return inner._replace(scan=inner.scan and self)
