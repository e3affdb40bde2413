"""A test of a backend with one chunk. Each step is timed and limited by the tier's deadline."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import anyio

from kvtier.backends.base import Backend, Outcome
from kvtier.concurrency.tasks import DetachedTask
from kvtier.errors import KVTierError
from kvtier.lab.bench.chunks import make_chunks, random_keys
from kvtier.lab.bench.sides import unseal
from kvtier.memory.arena import Arena
from kvtier.memory.keys import ChunkKey
from kvtier.settings import TierSettings
from kvtier.tiers.seal import Seal
from kvtier.tiers.sealer import Sealer
from kvtier.units import format_duration, format_size

GRACE_SECONDS = 1.0
"""Extra time to wait for a call beyond its deadline, so that it can time out itself and report the reason."""
OPENING_SECONDS = 30.0
"""Deadline for opening and for registering memory, which have none in a tier and happen once."""
DELETING_PAUSE_SECONDS = 0.1

AnswerT = TypeVar("AnswerT")

REMEDY_FAILED = "check that it runs and is reachable, and its settings with `kvtier config show`"
_REMEDY_SLOW = "check whether it hangs; if it is only slow, raise the tier's `deadline`"
_REMEDY_INCORRECT = "do not use it until this is fixed: every chunk would be a miss"


class Problem(KVTierError):
    """A problem found in a backend, with its remedy."""

    def __init__(self, found: str, remedy: str = "") -> None:
        super().__init__(found)
        self.remedy = remedy


async def run_trial(backend: Backend, tier: TierSettings, size: int, *, checksum: bool) -> str:
    """Write, read and delete one chunk object, and return a description of the result.

    Opens and closes the backend. ``size`` is in bytes, a multiple of the page size.

    Raises: Problem, and any error of the backend.
    """
    arena = Arena.create(size)
    trial = _Trial(backend, tier, checksum=checksum)
    try:
        return await trial.run(trial.description, partial(trial.round_trip, arena, size))
    finally:
        if not trial.stuck:
            arena.close()


async def run_contact(backend: Backend, tier: TierSettings) -> str:
    """Contact the medium without storing a chunk, and return a description of the result.

    Opens and closes the backend. Raises like :func:`run_trial`.
    """
    trial = _Trial(backend, tier)
    return await trial.run(trial.description, trial.miss)


class _Trial:
    """A backend under test, and the deadline of its calls."""

    def __init__(self, backend: Backend, tier: TierSettings, *, checksum: bool = True) -> None:
        self._backend = backend
        self._seal = Seal(backend, Sealer(checksum))
        self._deadline = tier.deadline
        self.stuck = False
        """Whether a call has ignored its cancellation, and still uses the memory."""

    async def run(self, *steps: Callable[[], Awaitable[str]]) -> str:
        """Open the backend, run the steps, and close it. Return their results."""
        await self._timed("opening it", self._backend.open, OPENING_SECONDS)
        try:
            results = [await step() for step in steps]
        except BaseException:
            if not self.stuck:
                with suppress(Exception):
                    await self._close()
            raise
        await self._close()
        return "; ".join(result for result in results if result)

    async def _close(self) -> None:
        await self._timed("closing it", self._backend.close, OPENING_SECONDS)

    async def description(self) -> str:
        """Return the backend's description of itself, or "" if it has none."""
        check = self._backend.capabilities().check
        if check is None:
            return ""
        description, _ = await self._timed("checking the backend", check.check)
        return description

    async def miss(self) -> str:
        """Look up a chunk that was never stored."""
        held, seconds = await self._contains(random_keys(1)[0])
        if held:
            raise Problem("it reports a chunk as held that was never stored", _REMEDY_INCORRECT)
        return f"looked up in {_format_seconds(seconds)}"

    async def round_trip(self, arena: Arena, size: int) -> str:
        """Write, look up, read, compare and delete a chunk."""
        capabilities = self._backend.capabilities()
        registration = capabilities.registration
        if registration is not None:
            await self._timed("registering memory", lambda: registration.register(arena), OPENING_SECONDS)
        ((key, view),) = chunks = make_chunks(arena, random_keys(1), size)
        unseal(chunks)
        if await self._is_held(key):
            raise Problem("it reports a chunk as held that was never stored", _REMEDY_INCORRECT)
        try:
            if capabilities.arena is not None:
                # Warm up: fault in its pages, which a cache process does once.
                await self._write(key, view)
                await self._delete(key)
            write_seconds = await self._write(key, view)
            lookup_seconds = await self._look_up(key)
            read_seconds = await self._read(key, view)
        except BaseException:
            await self._clean_up(key)
            raise
        await self._delete(key)
        return (
            f"{format_size(size)} written in {_speed(size, write_seconds)}, "
            f"read in {_speed(size, read_seconds)}, looked up in {_format_seconds(lookup_seconds)}"
        )

    async def _is_held(self, key: ChunkKey) -> bool:
        held, _ = await self._contains(key)
        return held

    async def _look_up(self, key: ChunkKey) -> float:
        held, seconds = await self._contains(key)
        if not held:
            raise Problem("it does not hold a chunk whose write it confirmed", _REMEDY_INCORRECT)
        return seconds

    async def _contains(self, key: ChunkKey) -> tuple[bool, float]:
        try:
            return await self._call_single("looking a chunk up", lambda: self._backend.contains([key]))
        except OSError as error:
            found, remedy = getattr(error, "found", error), getattr(error, "remedy", "")
            raise Problem(f"the lookup of a chunk failed: {found}", remedy or REMEDY_FAILED) from error

    async def _write(self, key: ChunkKey, view: memoryview) -> float:
        outcome, seconds = await self._call_single("writing a chunk", lambda: self._seal.put([(key, view)]))
        if outcome is Outcome.FULL:
            raise Problem(
                f"it has no room for a chunk of {format_size(len(view))}",
                "give it more capacity, or enable eviction",
            )
        if outcome is not Outcome.OK:
            raise Problem("it did not store a chunk", REMEDY_FAILED)
        return seconds

    async def _read(self, key: ChunkKey, view: memoryview) -> float:
        written, view[:] = bytes(view), bytes(len(view))
        outcome, seconds = await self._call_single("reading a chunk", lambda: self._seal.get([(key, view)]))
        if self._seal.corrupt or (outcome is Outcome.OK and view != written):
            raise Problem("it returned other bytes than were written", _REMEDY_INCORRECT)
        if outcome is Outcome.MISS:
            raise Problem("it did not return a chunk that it reported as held", _REMEDY_INCORRECT)
        if outcome is not Outcome.OK:
            raise Problem("it stored a chunk but could not read it", REMEDY_FAILED)
        return seconds

    async def _delete(self, key: ChunkKey) -> None:
        """Delete a chunk. Retry until the deadline: a pool may keep a chunk for a while after a read."""
        until = time.monotonic() + self._deadline
        while True:
            # A backend that forbids deletion raises as well. The lookup below decides.
            with suppress(OSError):
                await self._timed("deleting a chunk", lambda: self._backend.delete([key]))
            if not await self._is_held(key):
                return
            if time.monotonic() > until:
                raise Problem(
                    f"it still holds a chunk {format_duration(self._deadline)} after it was deleted",
                    "allow this user to delete",
                )
            await anyio.sleep(DELETING_PAUSE_SECONDS)

    async def _clean_up(self, key: ChunkKey) -> None:
        """Delete what may have been written after an error, ignoring further errors."""
        if not self.stuck:
            with suppress(Exception):
                await self._timed("deleting a chunk", lambda: self._backend.delete([key]))

    async def _call_single(
        self, operation: str, call: Callable[[], Awaitable[Sequence[AnswerT]]]
    ) -> tuple[AnswerT, float]:
        """Call a batch method with one item. Return its only result, and the time in seconds."""
        answers, seconds = await self._timed(operation, call)
        if len(answers) != 1:
            raise Problem(f"{operation}: it returned {len(answers)} results for one item", _REMEDY_INCORRECT)
        return answers[0], seconds

    async def _timed(
        self, operation: str, call: Callable[[], Awaitable[AnswerT]], seconds: float | None = None
    ) -> tuple[AnswerT, float]:
        """Return the result of ``call`` and its duration in seconds. Raises: Problem: timeout."""
        limit = seconds or self._deadline
        started = time.perf_counter()
        task = DetachedTask(_awaited(call))
        ended = await task.wait(limit + GRACE_SECONDS)
        took = time.perf_counter() - started
        if not ended:
            self.stuck = not await task.stop(GRACE_SECONDS)
        elif took <= limit or task.error:
            # An exception is more informative than the timeout.
            return task.result(), took
        still = ", and does not end when it is cancelled" if self.stuck else ""
        whose = "" if seconds else ", the tier's `deadline`"
        raise Problem(f"{operation} takes longer than {format_duration(limit)}{whose}{still}", _REMEDY_SLOW)


async def _awaited(call: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
    return await call()


def _speed(size: int, seconds: float) -> str:
    rate = size / max(seconds, 1e-9)
    shown = f"{rate / 1e9:.1f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.1f} MB/s"
    return f"{_format_seconds(seconds)} ({shown})"


def _format_seconds(seconds: float) -> str:
    """Format with two significant digits: a single measurement is no more precise."""
    return format_duration(float(f"{seconds:.2g}"))
