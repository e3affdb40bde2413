"""The collaborators of a tier in the shape of a backend, so that a test can treat them like one."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from kvtier.backends.base import Backend, Capabilities, GetItem, Outcome, PutItem, StoredObject, SupportsScan
from kvtier.catalog.catalog import Catalog
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.memory.keys import ChunkKey
from kvtier.settings import TierSettings
from kvtier.testing.faults import WrapperBackend
from kvtier.tiers.breaker import CircuitBreaker
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
