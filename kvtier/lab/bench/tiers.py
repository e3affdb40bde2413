"""Measure a tier, interleaved with its limit, as a cache uses it: with header and checksum (not memory)."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

import anyio
from anyio import CancelScope

from kvtier.backends.base import Backend
from kvtier.lab.bench.codec import remark_on
from kvtier.lab.bench.limits import limit_of
from kvtier.lab.bench.rows import KVTIER, LIMIT, Extent, Row
from kvtier.lab.bench.run import within
from kvtier.lab.bench.sides import BackendSide, BenchFailed, Chunk, Side, Stuck, make_chunks, random_keys
from kvtier.lab.bench.turns import Advance, Turns, closing
from kvtier.memory.arena import Arena
from kvtier.memory.keys import ChunkKey
from kvtier.plugins import IDENTITY, can_be_encoded, is_memory
from kvtier.settings import TierSettings
from kvtier.tiers.seal import Seal
from kvtier.tiers.sealer import Sealer
from kvtier.units import MIB, format_duration

logger = logging.getLogger("kvtier")

LOOKUP_KEYS = 128
"""Keys per lookup: a prompt of 32,768 tokens in chunks of 256."""
LOOK_UP_BYTES = 4096
"""Size of the chunks that are looked up. It does not matter for a lookup."""
OPENING_SECONDS = 30.0
"""Timeout for opening, closing and registering memory, for which a tier has no deadline."""
DELETING_PAUSE_SECONDS = 0.1


def steps_of(extent: Extent) -> int:
    """Return how often :func:`measure_tier` calls ``advance``."""
    return extent.turns + 2


def tier_bytes(extent: Extent) -> int:
    """Return the capacity that a tier needs, in bytes."""
    return extent.length + LOOKUP_KEYS * LOOK_UP_BYTES


def memory_bytes(extent: Extent) -> int:
    """Return the peak memory use of :func:`measure_tier`: chunks, a memory tier, and its limit."""
    return 3 * tier_bytes(extent) + 4 * MIB


async def measure_tier(
    backend: Backend, tier: TierSettings, extent: Extent, advance: Advance, *, checksum: bool = True
) -> Row:
    """Measure a tier: open its backend, store and load chunks under random keys, delete them, close it.

    ``backend`` must not be open. Each batch has the tier's deadline, as in a cache. The keys are also deleted
    after an error or cancellation. The limit blocks the event loop while it moves bytes. Raises
    :class:`BenchFailed`, :class:`Stuck` if a call does not end at all, and what the backend raises.
    """
    seal = None if is_memory(type(backend)) else Seal(backend, Sealer(checksum))
    arena = Arena.create(tier_bytes(extent) + 2 * MIB)
    async with AsyncExitStack() as stack:
        stack.push(closing(arena))
        await stack.enter_async_context(opened(backend, arena))
        check, remark = backend.capabilities().check, ""
        if check is not None:
            remark = await within(OPENING_SECONDS, "checking the backend", check.check)
        own = BackendSide(backend, seal)
        sides: dict[str, Side] = {KVTIER: own}
        limit = limit_of(tier, backend, arena, extent.length)
        if limit is not None:
            sides[LIMIT] = limit
            stack.push_async_callback(limit.close)
        turns = Turns(sides, tier.deadline, extent)
        moved, held = random_keys(extent.chunks), random_keys(LOOKUP_KEYS)
        async with deleting(sides, keys := [*moved, *held], tier.deadline):
            await turns.run(make_chunks(arena, moved, extent.size), advance)
            small = make_chunks(arena, held, LOOK_UP_BYTES)
            lookups = await _look_up(own, small, extent.lookups, tier.deadline)
            await _verify_deleted(backend, keys, tier.deadline)
            advance()
    row = turns.row(tier.name, tier.type, LOOKUP_KEYS / statistics.median(lookups), remark)
    if seal is None or row.get is None or not can_be_encoded(type(backend)):
        return row
    without = tier.codec["type"] != IDENTITY or tier.encrypt is not None
    remarks = remark, "measured without codec and encryption" if without else "", remark_on(row.get)
    return replace(row, remark="; ".join(filter(None, remarks)))


@asynccontextmanager
async def opened(backend: Backend, arena: Arena | None = None) -> AsyncIterator[None]:
    """Open a backend and register the arena; close it when the block exits, unless a call is stuck in it."""
    await within(OPENING_SECONDS, "opening the backend", backend.open)
    try:
        registration = backend.capabilities().registration
        if registration is not None and arena is not None:
            await within(OPENING_SECONDS, "registering memory", lambda: registration.register(arena))
        yield
    except Stuck:
        raise
    except BaseException:
        with CancelScope(shield=True), suppress(Exception):  # Keep the first error.
            await within(OPENING_SECONDS, "closing the backend", backend.close)
        raise
    await within(OPENING_SECONDS, "closing the backend", backend.close)


@asynccontextmanager
async def deleting(
    sides: Mapping[str, Side], keys: Sequence[ChunkKey], deadline: float
) -> AsyncIterator[None]:
    """Delete the keys, any of which may be stored, if the block fails."""
    try:
        yield
    except Stuck:
        raise
    except BaseException:
        with CancelScope(shield=True):
            for side in sides.values():
                try:
                    await within(deadline, "deleting", partial(side.forget, keys))
                except Stuck:
                    raise
                except Exception as error:  # Best effort: another error is being raised already.
                    logger.debug("cleaning up after an error: deleting failed: %r", error)
        raise


async def _look_up(side: BackendSide, chunks: Sequence[Chunk], runs: int, deadline: float) -> list[float]:
    """Return the seconds of lookups of all chunks at once, as for a prompt."""
    keys = [key for key, _ in chunks]
    await within(deadline, "storing", lambda: side.put(chunks))
    seconds = []
    for _ in range(runs):
        duration = await within(deadline, "looking up", lambda: side.prefix(keys))
        if duration is None:
            duration = await within(deadline, "looking up", lambda: side.look_up(keys))
        seconds.append(duration)
    await within(deadline, "deleting", lambda: side.forget(keys))
    return seconds


async def _verify_deleted(backend: Backend, keys: Sequence[ChunkKey], deadline: float) -> None:
    """Retry the deletion until the deadline, because a pool may keep recently read chunks for a while."""
    until = time.monotonic() + deadline
    while any(await within(deadline, "looking up", lambda: backend.contains(keys))):
        if time.monotonic() > until:
            raise BenchFailed(
                f"the backend still holds chunks {format_duration(deadline)} after they were deleted"
            )
        await anyio.sleep(DELETING_PAUSE_SECONDS)
        await within(deadline, "deleting", lambda: backend.delete(keys))
