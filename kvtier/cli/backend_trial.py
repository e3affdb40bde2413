"""One chunk's way into a backend and out again, each step timed and held to the tier's deadline."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

from kvtier.arena import Arena
from kvtier.backends.base import Backend, Outcome, SupportsArena, SupportsCheck, SupportsRegistration
from kvtier.backends.sealed import SealedBackend
from kvtier.errors import KVTierError
from kvtier.header import HEADER_BYTES, ChunkHeader
from kvtier.keys import KEY_BYTES, ChunkKey
from kvtier.settings import TierSettings
from kvtier.slices import Lease
from kvtier.units import format_duration, format_size

GRACE_SECONDS = 1.0
"""How much longer than its deadline a call is waited for: it gives up by itself then, and can say why."""
OPENING_SECONDS = 30.0
"""Opening and registering memory have no deadline in a tier, and may take long once."""
DELETING_PAUSE_SECONDS = 0.1

AnswerT = TypeVar("AnswerT")

REMEDY_FAILED = "see that it runs and can be reached from here, and `kvtier config show` for its settings"
_REMEDY_SLOW = "see whether it hangs; where it is only slow, raise the tier's `deadline`"
_REMEDY_LIES = "do not use it until that is mended: it costs a miss for every chunk"


class Problem(KVTierError):
    """What is wrong with a backend, in words."""

    def __init__(self, found: str, remedy: str = "") -> None:
        super().__init__(found)
        self.remedy = remedy


class _Chunk(NamedTuple):
    """What is written, and where it is to be read into."""

    key: ChunkKey
    written: Lease
    read: Lease


async def run_trial(backend: Backend, tier: TierSettings, size: int, *, checksum: bool) -> str:
    """Carry a chunk object of ``size`` bytes, whole pages, through ``backend``; how that went, in words.

    Opens the backend and closes it. Raises :class:`Problem`, and what else the backend raises.
    """
    arena = Arena.create(2 * size)
    trial = _Trial(SealedBackend(backend, checksum), tier)
    try:
        await trial.open()
        try:
            told = [await trial.about(), await trial.carry(arena, size)]
        except BaseException:
            await trial.close_anyhow()
            raise
        await trial.close()
    finally:
        if not trial.stuck:
            arena.close()
    return "; ".join(part for part in told if part)


def _make_chunk(arena: Arena, size: int) -> _Chunk:
    """A chunk under a key that nobody else has. Both leases' memory is touched, so as not to time that."""
    written, read = arena.allocate(size), arena.allocate(size)
    assert written is not None
    assert read is not None
    key = ChunkKey(os.urandom(KEY_BYTES))
    written.view[HEADER_BYTES:] = os.urandom(size - HEADER_BYTES)
    read.view[:] = bytes(size)
    header = ChunkHeader(key, ChunkKey(bytes(KEY_BYTES)), os.urandom(KEY_BYTES), size - HEADER_BYTES)
    header.seal(written.view, checksum=False)
    return _Chunk(key, written, read)


class _Trial:
    """A backend and how long each call to it may take."""

    def __init__(self, backend: SealedBackend, tier: TierSettings) -> None:
        self._backend = backend
        self._deadline = tier.deadline
        self.stuck = False
        """A call has not ended though it was cancelled, and still has the memory."""

    async def open(self) -> None:
        """Make it ready."""
        await self._timed("opening it", self._backend.open, OPENING_SECONDS)

    async def close(self) -> None:
        """Let go of it."""
        await self._timed("closing it", self._backend.close, OPENING_SECONDS)

    async def close_anyhow(self) -> None:
        """Let go of it as well as can be: what is wrong is known already."""
        if not self.stuck:
            with suppress(Exception):
                await self.close()

    async def about(self) -> str:
        """What it says of itself, nothing where it cannot."""
        backend = self._backend
        if not isinstance(backend, SupportsCheck):
            return ""
        about, _ = await self._timed("asking what it is", backend.check)
        return about

    async def carry(self, arena: Arena, size: int) -> str:
        """Write, look up, read, compare and delete a chunk."""
        backend = self._backend
        if isinstance(backend, SupportsRegistration):
            await self._timed("registering memory", lambda: backend.register(arena), OPENING_SECONDS)
        chunk = _make_chunk(arena, size)
        if await self._holds(chunk.key):
            raise Problem("it says that it holds a chunk which nobody has stored", _REMEDY_LIES)
        try:
            if isinstance(backend, SupportsArena):
                # Its pages are given to it when they are touched, which a cache process pays for once.
                await self._write(chunk)
                await self._delete(chunk.key)
            writing = await self._write(chunk)
            looking_up = await self._look_up(chunk.key)
            reading = await self._read(chunk)
        except BaseException:
            await self._clean_up(chunk.key)
            raise
        await self._delete(chunk.key)
        return (
            f"{format_size(size)} written in {_speed(size, writing)}, read in {_speed(size, reading)}, "
            f"looked up in {_shown(looking_up)}"
        )

    async def _holds(self, key: ChunkKey) -> bool:
        held, _ = await self._asked_for(key)
        return held

    async def _look_up(self, key: ChunkKey) -> float:
        held, seconds = await self._asked_for(key)
        if not held:
            raise Problem("it does not hold a chunk that it said it had stored", _REMEDY_LIES)
        return seconds

    async def _asked_for(self, key: ChunkKey) -> tuple[bool, float]:
        try:
            return await self._ask("looking a chunk up", lambda: self._backend.contains([key]))
        except OSError as error:
            raise Problem(f"it could not be asked for a chunk: {error}", REMEDY_FAILED) from error

    async def _write(self, chunk: _Chunk) -> float:
        item = (chunk.key, chunk.written.view)
        outcome, seconds = await self._ask("writing a chunk", lambda: self._backend.put([item]))
        if outcome is Outcome.FULL:
            size = format_size(chunk.written.length)
            raise Problem(f"it has no room for a chunk of {size}", "give it more, or let it evict")
        if outcome is not Outcome.OK:
            raise Problem("it did not store a chunk", REMEDY_FAILED)
        return seconds

    async def _read(self, chunk: _Chunk) -> float:
        item = (chunk.key, chunk.read.view)
        outcome, seconds = await self._ask("reading a chunk", lambda: self._backend.get([item]))
        if self._backend.corrupt or (outcome is Outcome.OK and chunk.read.view != chunk.written.view):
            raise Problem("it gave back other bytes than were written", _REMEDY_LIES)
        if outcome is Outcome.MISS:
            raise Problem("it did not give back a chunk that it said it held", _REMEDY_LIES)
        if outcome is not Outcome.OK:
            raise Problem("it stored a chunk and could not read it", REMEDY_FAILED)
        return seconds

    async def _delete(self, key: ChunkKey) -> None:
        """Delete for as long as the deadline is: a pool may keep for a while what was just read."""
        until = time.monotonic() + self._deadline
        while True:
            # One that lets nobody delete raises, too; it can still be asked for the chunk.
            with suppress(OSError):
                await self._timed("deleting a chunk", lambda: self._backend.delete([key]))
            if not await self._holds(key):
                return
            if time.monotonic() > until:
                raise Problem(
                    f"it still holds a chunk {format_duration(self._deadline)} after it was deleted",
                    "let this user delete",
                )
            await asyncio.sleep(DELETING_PAUSE_SECONDS)

    async def _clean_up(self, key: ChunkKey) -> None:
        """Delete what may have been written, as well as can be: what is wrong is known already."""
        if not self.stuck:
            with suppress(Exception):
                await self._timed("deleting a chunk", lambda: self._backend.delete([key]))

    async def _ask(
        self, doing: str, call: Callable[[], Awaitable[Sequence[AnswerT]]]
    ) -> tuple[AnswerT, float]:
        """The one answer to one question, and how long it took."""
        answers, seconds = await self._timed(doing, call)
        if len(answers) != 1:
            raise Problem(f"{doing} it gave {len(answers)} answers to one question", _REMEDY_LIES)
        return answers[0], seconds

    async def _timed(
        self, doing: str, call: Callable[[], Awaitable[AnswerT]], seconds: float | None = None
    ) -> tuple[AnswerT, float]:
        """What ``call`` answers and how long it took. Raises :class:`Problem` where that was too long."""
        limit = seconds or self._deadline
        started = time.perf_counter()
        task = asyncio.ensure_future(_awaited(call))
        await asyncio.wait([task], timeout=limit + GRACE_SECONDS)
        took = time.perf_counter() - started
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=GRACE_SECONDS)
            self.stuck = not task.done()
        elif took <= limit or task.exception():
            # What it raises says more than that it took long.
            return task.result(), took
        still = ", and does not end when it is cancelled" if self.stuck else ""
        whose = "" if seconds else ", the tier's `deadline`"
        raise Problem(f"{doing} takes longer than {format_duration(limit)}{whose}{still}", _REMEDY_SLOW)


async def _awaited(call: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
    return await call()


def _speed(size: int, seconds: float) -> str:
    rate = size / max(seconds, 1e-9)
    shown = f"{rate / 1e9:.1f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.1f} MB/s"
    return f"{_shown(seconds)} ({shown})"


def _shown(seconds: float) -> str:
    """In two digits: one measurement is worth no more."""
    return format_duration(float(f"{seconds:.2g}"))
