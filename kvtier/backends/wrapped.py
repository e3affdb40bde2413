"""A backend in the wrappers that every tier's backend has."""

from __future__ import annotations

from contextlib import AsyncExitStack

from kvtier.backends.base import Backend, SupportsArena
from kvtier.backends.guarded import GuardedBackend
from kvtier.backends.sealed import SealedBackend
from kvtier.backends.sealer import Sealer


async def open_wrapped(
    stack: AsyncExitStack, backend: Backend, *, name: str, sealer: Sealer | None
) -> GuardedBackend:
    """Open a tier's backend; it is closed with the stack. Raises :class:`kvtier.errors.TierError`.

    ``sealer``: of the memory that chunks are stored from; ``None`` for the first tier, which is that memory.
    A lower tier that is memory is not verified on the way out.
    """
    if sealer is not None:
        backend = SealedBackend(backend, sealer=sealer, verify=not isinstance(backend, SupportsArena))
    guarded = GuardedBackend(backend, name=name)
    await guarded.open()
    stack.push_async_callback(guarded.close)
    return guarded
