"""Measure a tier, interleaved with its limit, as a cache uses it: with header and checksum (not memory)."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import anyio
from anyio import CancelScope

from kvtier.backends.base import Backend
from kvtier.bench.calls import within
from kvtier.bench.chunks import clear_stamps, have_stamps, make_chunks, put_stamps, random_keys
from kvtier.bench.errors import BenchFailed, Stuck
from kvtier.bench.limits import limit_of
from kvtier.bench.rows import Extent, Row, Samples
from kvtier.bench.sides import BackendSide, Chunk, Side
from kvtier.bench.timing import rotated
from kvtier.memory.arena import Arena
from kvtier.memory.keys import ChunkKey
from kvtier.plugins import is_memory
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
KVTIER, LIMIT = "kvtier", "limit"

Advance = Callable[[], None]
"""Called after each completed step."""


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
        stack.push(_closing(arena))
        await stack.enter_async_context(_opened(backend, arena))
        check, remark = backend.capabilities().check, ""
        if check is not None:
            remark = await within(OPENING_SECONDS, "checking it", check.check)
        sides: dict[str, Side] = {KVTIER: BackendSide(backend, seal)}
        limit = limit_of(tier, backend, arena, extent.length)
        if limit is not None:
            sides[LIMIT] = limit[1]
            stack.push_async_callback(limit[1].close)
        bench = _Bench(sides, backend, arena, tier, extent)
        put, get, lookups = await bench.measure(advance)
    name = limit[0] if limit is not None else None
    return Row(
        tier.name,
        tier.type,
        name,
        put.direction(KVTIER, LIMIT if name else None, extent.length),
        get.direction(KVTIER, LIMIT if name else None, extent.length),
        LOOKUP_KEYS / statistics.median(lookups),
        remark,
    )


def _closing(arena: Arena) -> Callable[..., bool]:
    def close(_kind: object, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, Stuck):  # The stuck call may still write there.
            arena.close()
        return False

    return close


@asynccontextmanager
async def _opened(backend: Backend, arena: Arena) -> AsyncIterator[None]:
    """Open a backend and register the arena; close it when the block exits, unless a call is stuck in it."""
    await within(OPENING_SECONDS, "opening it", backend.open)
    try:
        registration = backend.capabilities().registration
        if registration is not None:
            await within(OPENING_SECONDS, "registering memory", lambda: registration.register(arena))
        yield
    except Stuck:
        raise
    except BaseException:
        with CancelScope(shield=True), suppress(Exception):  # Keep the first error.
            await within(OPENING_SECONDS, "closing it", backend.close)
        raise
    await within(OPENING_SECONDS, "closing it", backend.close)


class _Bench:
    """Measures the sides of one tier with the same chunks."""

    def __init__(
        self, sides: dict[str, Side], backend: Backend, arena: Arena, tier: TierSettings, extent: Extent
    ) -> None:
        self._sides = sides
        self._backend = backend
        self._arena = arena
        self._deadline = tier.deadline
        self._extent = extent
        self._keys: list[ChunkKey] = []
        """All keys that may be stored."""
        self._samples = {"put": Samples(), "get": Samples()}

    async def measure(self, advance: Advance) -> tuple[Samples, Samples, list[float]]:
        """Return the seconds of puts, gets and lookups, after one warm-up turn."""
        extent = self._extent
        moved, held = random_keys(extent.chunks), random_keys(LOOKUP_KEYS)
        chunks = make_chunks(self._arena, moved, extent.size)
        small = make_chunks(self._arena, held, LOOK_UP_BYTES)
        self._keys = [*moved, *held]
        try:
            for turn in range(-1, extent.turns):
                for name in rotated(list(self._sides), turn + 1):
                    await self._run_turn(name, chunks, counted=turn >= 0)
                advance()
            lookups = await self._look_up(small)
            await self._verify_deleted()
            advance()
        except Stuck:
            raise
        except BaseException:
            await self._clean_up()
            raise
        return self._samples["put"], self._samples["get"], lookups

    async def _run_turn(self, name: str, chunks: Sequence[Chunk], *, counted: bool) -> None:
        if name == KVTIER:
            singles = await self._move(name, chunks, 1)
            if counted:
                for direction, seconds in singles.items():
                    self._samples[direction].singles += seconds
        for direction, seconds in (await self._move(name, chunks, self._extent.in_flight)).items():
            if counted:
                self._samples[direction].turns.setdefault(name, []).append(sum(seconds))

    async def _move(self, name: str, chunks: Sequence[Chunk], in_flight: int) -> dict[str, list[float]]:
        """Put, get and delete all chunks; return the seconds of each batch."""
        side, deadline = self._sides[name], self._deadline
        batches = [chunks[start : start + in_flight] for start in range(0, len(chunks), in_flight)]
        count = f"{in_flight} chunks" if in_flight > 1 else "one chunk"
        puts = [await within(deadline, f"storing {count}", partial(side.put, batch)) for batch in batches]
        gets = []
        for batch in batches:
            stamps = clear_stamps(batch)
            gets.append(await within(deadline, f"reading {count}", partial(side.get, batch)))
            if not side.fills:
                put_stamps(batch, stamps)
            elif not have_stamps(batch, stamps):
                raise BenchFailed("it returned other bytes than were stored")
        await within(deadline, "deleting", lambda: side.forget([key for key, _ in chunks]))
        return {"put": puts, "get": gets}

    async def _look_up(self, chunks: Sequence[Chunk]) -> list[float]:
        """Return the seconds of lookups of all chunks at once, as for a prompt."""
        side, keys = self._sides[KVTIER], [key for key, _ in chunks]
        await within(self._deadline, "storing", lambda: side.put(chunks))
        seconds = []
        for _ in range(self._extent.lookups):
            duration = await within(self._deadline, "looking up", lambda: side.prefix(keys))
            if duration is None:
                duration = await within(self._deadline, "looking up", lambda: side.look_up(keys))
            seconds.append(duration)
        await within(self._deadline, "deleting", lambda: side.forget(keys))
        return seconds

    async def _verify_deleted(self) -> None:
        """Retry the deletion until the deadline, because a pool may keep recently read chunks for a while."""
        until = time.monotonic() + self._deadline
        backend, keys = self._backend, self._keys
        while any(await within(self._deadline, "looking up", lambda: backend.contains(keys))):
            if time.monotonic() > until:
                duration = format_duration(self._deadline)
                raise BenchFailed(f"it still holds chunks {duration} after they were deleted")
            await anyio.sleep(DELETING_PAUSE_SECONDS)
            await within(self._deadline, "deleting", lambda: backend.delete(keys))

    async def _clean_up(self) -> None:
        """Delete all chunks that may have been stored, best effort: another error is being raised already."""
        with CancelScope(shield=True):
            for side in self._sides.values():
                try:
                    await within(self._deadline, "deleting", partial(side.forget, self._keys))
                except Stuck:
                    raise
                except Exception as error:
                    logger.debug("cleaning up after an error: deleting failed: %r", error)
