"""Open a backend with the wrappers of every tier."""

from __future__ import annotations

from contextlib import AsyncExitStack

from kvtier.backends.base import Backend, SupportsArena
from kvtier.tiers.breaker import GuardedBackend
from kvtier.tiers.sealed import SealedBackend
from kvtier.tiers.sealer import Sealer


async def open_wrapped(
    stack: AsyncExitStack, backend: Backend, *, name: str, sealer: Sealer | None
) -> GuardedBackend:
    """Open a tier's backend, and close it with the stack. Raises :class:`kvtier.errors.TierError`.

    ``sealer`` is the sealer of the memory that chunks are stored from; ``None`` for the first tier, which is
    that memory. Reads from a lower tier that is memory are not verified.
    """
    if sealer is not None:
        backend = SealedBackend(backend, sealer=sealer, verify=not isinstance(backend, SupportsArena))
    guarded = GuardedBackend(backend, name=name)
    await guarded.open()
    stack.push_async_callback(guarded.close)
    return guarded
