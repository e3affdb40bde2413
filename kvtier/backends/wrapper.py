"""A backend around a backend: the one way in which checksums, breakers and faults are added to any medium.

A wrapper has exactly the optional powers (:class:`~kvtier.backends.base.SupportsScan` and the others) of
what it wraps, so that ``isinstance(wrapper, SupportsScan)`` tells the truth. Since such a check looks at
the class, the class of a wrapper is put together, once for each combination, when the wrapper is made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import cache
from typing import Any, Self

from kvtier.arena import Arena
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
from kvtier.keys import ChunkKey
from kvtier.slices import Lease, Leases


class WrapperBackend(Backend):
    """Does what the wrapped backend does. Subclass it and override what shall differ.

    A subclass that has something to say about scanning or prefixes overrides :meth:`scan_inner` or
    :meth:`held_prefix_inner`, not ``scan`` or ``held_prefix``, which it only has where the wrapped backend
    has them.
    """

    def __new__(cls, inner: Backend, *_args: object, **_kwargs: object) -> Self:
        """Make an instance that has the optional powers of ``inner``."""
        powers = tuple(mixin for power, mixin in _POWERS if isinstance(inner, power))
        made: Self = super().__new__(_with_powers(cls, powers))
        return made

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    @property
    def inner(self) -> Backend:
        """What is wrapped."""
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
        """What ``scan`` tells. Only asked where the wrapped backend can scan."""
        if not isinstance(self._inner, SupportsScan):
            raise TypeError(f"{type(self._inner).__name__} cannot tell what it holds")
        return self._inner.scan()

    async def held_prefix_inner(self, keys: Sequence[ChunkKey]) -> int:
        """What ``held_prefix`` answers. Only asked where the wrapped backend has it."""
        if not isinstance(self._inner, SupportsPrefix):
            raise TypeError(f"{type(self._inner).__name__} cannot tell how much of a prompt it holds")
        return await self._inner.held_prefix(keys)


class _Scan(SupportsScan):
    """Has what the wrapped backend held when it was opened."""

    def scan(self: Any) -> AsyncIterator[Sequence[StoredObject]]:
        """See :meth:`SupportsScan.scan`."""
        found: AsyncIterator[Sequence[StoredObject]] = self.scan_inner()
        return found


class _Arena(SupportsArena):
    """Is the memory that the wrapped backend is."""

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
    """Leases many chunks in one go, as the wrapped backend does."""

    _inner: SupportsLeases

    def lease_all(self, keys: Sequence[ChunkKey]) -> Leases:
        """See :meth:`SupportsLeases.lease_all`."""
        return self._inner.lease_all(keys)


class _Registration(SupportsRegistration):
    """Wants to know the arena, as the wrapped backend does."""

    _inner: SupportsRegistration

    async def register(self, arena: Arena) -> None:
        """See :meth:`SupportsRegistration.register`."""
        await self._inner.register(arena)


class _Prefix(SupportsPrefix):
    """Can tell how much of a prompt it holds, as the wrapped backend can."""

    async def held_prefix(self: Any, keys: Sequence[ChunkKey]) -> int:
        """See :meth:`SupportsPrefix.held_prefix`."""
        held: int = await self.held_prefix_inner(keys)
        return held


class _Check(SupportsCheck):
    """Says how the wrapped backend is."""

    _inner: SupportsCheck

    async def check(self) -> str:
        """See :meth:`SupportsCheck.check`."""
        return await self._inner.check()


class _TTL(SupportsTTL):
    """Forgets when the wrapped backend does."""

    _inner: SupportsTTL

    @property
    def ttl(self) -> float | None:
        """See :attr:`SupportsTTL.ttl`."""
        return self._inner.ttl


_POWERS: tuple[tuple[Any, type], ...] = (
    (SupportsScan, _Scan),
    (SupportsArena, _Arena),
    (SupportsLeases, _Leases),
    (SupportsRegistration, _Registration),
    (SupportsPrefix, _Prefix),
    (SupportsCheck, _Check),
    (SupportsTTL, _TTL),
)


@cache
def _with_powers(wrapper: type[Any], powers: tuple[type, ...]) -> type[Any]:
    if not powers:
        return wrapper
    return type(wrapper.__name__, (wrapper, *powers), {"__module__": wrapper.__module__})
