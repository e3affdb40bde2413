"""A backend in the wrappers that every tier's backend has."""

from __future__ import annotations

from contextlib import AsyncExitStack

from kvtier.backends.base import Backend, SupportsArena
from kvtier.backends.guarded import GuardedBackend
from kvtier.backends.sealed import SealedBackend


async def open_wrapped(
    stack: AsyncExitStack, backend: Backend, *, name: str, checksum: bool
) -> GuardedBackend:
    """Open it; it is closed with the stack. Memory needs no seal. Raises :class:`kvtier.errors.TierError`."""
    guarded = GuardedBackend(
        backend if isinstance(backend, SupportsArena) else SealedBackend(backend, checksum=checksum),
        name=name,
    )
    await guarded.open()
    stack.push_async_callback(guarded.close)
    return guarded
