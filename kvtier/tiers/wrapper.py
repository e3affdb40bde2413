"""Base class of backend wrappers, which add checksums, circuit breakers and faults to any backend.

A wrapper has exactly the optional capabilities (:class:`~kvtier.backends.base.SupportsScan` and others) of
the wrapped backend, so that ``isinstance(wrapper, SupportsScan)`` is correct. Because ``isinstance`` checks
the class, the class of a wrapper is composed when it is constructed, once per combination.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import cache
from typing import Any, Self

from kvtier.backends.base import (
    Backend,
    GetItem,
    Outcome,
    PutItem,
    StoredObject,
    SupportsArena,
    SupportsCheck,
    SupportsLeases,
    SupportsPrefix,
    SupportsRegistration,
    SupportsScan,
    SupportsTTL,
)
from kvtier.memory.arena import Arena
from kvtier.memory.keys import ChunkKey
from kvtier.memory.slices import Lease, Leases


class WrapperBackend(Backend):
    """Forwards all calls to the wrapped backend. Subclass it and override methods.

    To change scans or prefix queries, override :meth:`scan_inner` or :meth:`held_prefix_inner`, not ``scan``
    or ``held_prefix``, which exist only if the wrapped backend has them.
    """

    def __new__(cls, inner: Backend, *_args: object, **_kwargs: object) -> Self:
        """Create an instance with the optional capabilities of ``inner``."""
        capabilities = tuple(mixin for capability, mixin in _CAPABILITIES if isinstance(inner, capability))
        made: Self = super().__new__(_with_capabilities(cls, capabilities))
        return made

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    @property
    def inner(self) -> Backend:
        """The wrapped backend."""
        return self._inner

    async def open(self) -> None:
        """See :meth:`Backend.open`."""
        await self._inner.open()

    async def close(self) -> None:
        """See :meth:`Backend.close`."""
        await self._inner.close()

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """See :meth:`Backend.contains`."""
        return await self._inner.contains(keys)

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """See :meth:`Backend.put`."""
        return await self._inner.put(items)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """See :meth:`Backend.get`."""
        return await self._inner.get(items)

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """See :meth:`Backend.delete`."""
        await self._inner.delete(keys)

    def scan_inner(self) -> AsyncIterator[Sequence[StoredObject]]:
        """Implement ``scan``. Only called if the wrapped backend supports it."""
        if not isinstance(self._inner, SupportsScan):
            raise TypeError(f"{type(self._inner).__name__} does not support scan")
        return self._inner.scan()

    async def held_prefix_inner(self, keys: Sequence[ChunkKey]) -> int:
        """Implement ``held_prefix``. Only called if the wrapped backend supports it."""
        if not isinstance(self._inner, SupportsPrefix):
            raise TypeError(f"{type(self._inner).__name__} does not support held_prefix")
        return await self._inner.held_prefix(keys)


class _Scan(SupportsScan):
    """Forwards ``scan``."""

    def scan(self: Any) -> AsyncIterator[Sequence[StoredObject]]:
        """See :meth:`SupportsScan.scan`."""
        found: AsyncIterator[Sequence[StoredObject]] = self.scan_inner()
        return found


class _Arena(SupportsArena):
    """Forwards access to the arena."""

    _inner: SupportsArena

    @property
    def arena(self) -> Arena:
        """See :attr:`SupportsArena.arena`."""
        return self._inner.arena

    def adopt(self, key: ChunkKey, lease: Lease) -> None:
        """See :meth:`SupportsArena.adopt`."""
        self._inner.adopt(key, lease)

    def lease(self, key: ChunkKey) -> Lease | None:
        """See :meth:`SupportsArena.lease`."""
        return self._inner.lease(key)

    def idle(self, key: ChunkKey) -> bool:
        """See :meth:`SupportsArena.idle`."""
        return self._inner.idle(key)

    def discard(self, key: ChunkKey) -> None:
        """See :meth:`SupportsArena.discard`."""
        self._inner.discard(key)


class _Leases(SupportsLeases):
    """Forwards ``lease_all``."""

    _inner: SupportsLeases

    def lease_all(self, keys: Sequence[ChunkKey]) -> Leases:
        """See :meth:`SupportsLeases.lease_all`."""
        return self._inner.lease_all(keys)


class _Registration(SupportsRegistration):
    """Forwards ``register``."""

    _inner: SupportsRegistration

    async def register(self, arena: Arena) -> None:
        """See :meth:`SupportsRegistration.register`."""
        await self._inner.register(arena)


class _Prefix(SupportsPrefix):
    """Forwards ``held_prefix``."""

    async def held_prefix(self: Any, keys: Sequence[ChunkKey]) -> int:
        """See :meth:`SupportsPrefix.held_prefix`."""
        held: int = await self.held_prefix_inner(keys)
        return held


class _Check(SupportsCheck):
    """Forwards ``check``."""

    _inner: SupportsCheck

    async def check(self) -> str:
        """See :meth:`SupportsCheck.check`."""
        return await self._inner.check()


class _TTL(SupportsTTL):
    """Forwards ``ttl``."""

    _inner: SupportsTTL

    @property
    def ttl(self) -> float | None:
        """See :attr:`SupportsTTL.ttl`."""
        return self._inner.ttl


_CAPABILITIES: tuple[tuple[Any, type], ...] = (
    (SupportsScan, _Scan),
    (SupportsArena, _Arena),
    (SupportsLeases, _Leases),
    (SupportsRegistration, _Registration),
    (SupportsPrefix, _Prefix),
    (SupportsCheck, _Check),
    (SupportsTTL, _TTL),
)


@cache
def _with_capabilities(wrapper: type[Any], capabilities: tuple[type, ...]) -> type[Any]:
    if not capabilities:
        return wrapper
    return type(wrapper.__name__, (wrapper, *capabilities), {"__module__": wrapper.__module__})
