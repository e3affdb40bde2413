"""Move the same chunks through a medium and its limit, in turns."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from time import perf_counter

from kvtier.lab.bench.rows import KVTIER, LIMIT, Extent, Row, Samples, rotated
from kvtier.lab.bench.run import within
from kvtier.lab.bench.sides import BenchFailed, Chunk, Side, Stuck, clear_stamps, have_stamps, put_stamps
from kvtier.memory.arena import Arena

STOP_SECONDS = 10

Advance = Callable[[], None]
"""Called after each completed step."""


class Turns:
    """Puts and gets of the same chunks by all sides: ``KVTIER`` and, if it is known, its ``LIMIT``."""

    def __init__(self, sides: Mapping[str, Side], deadline: float, extent: Extent) -> None:
        """``deadline``: of each batch, in seconds."""
        self._sides = sides
        self._deadline = deadline
        self._extent = extent
        self._put, self._get = Samples(), Samples()

    async def run(self, chunks: Sequence[Chunk], advance: Advance) -> None:
        """Run all turns, after one that is not counted. Raises :class:`BenchFailed`, and what a side does."""
        for turn in range(-1, self._extent.turns):  # The first one warms up.
            for name in rotated(list(self._sides), turn + 1):
                with others_paused(self._sides, name):
                    await self._run_turn(name, chunks, counted=turn >= 0)
            advance()

    def row(self, name: str, kind: str, lookups_per_s: float | None = None, remark: str = "") -> Row:
        """Return the results of all turns."""
        limit = self._sides[LIMIT].title if LIMIT in self._sides else None
        put, get = (samples.direction(self._extent.length) for samples in (self._put, self._get))
        return Row(name, kind, limit, put, get, lookups_per_s, remark)

    async def _run_turn(self, name: str, chunks: Sequence[Chunk], *, counted: bool) -> None:
        side = self._sides[name]
        singles = await self._move(side, chunks, 1) if name == KVTIER else ([], [])
        batches = await self._move(side, chunks, self._extent.in_flight)
        if not counted:
            return
        for samples, single, batch in zip((self._put, self._get), singles, batches, strict=True):
            samples.singles += single
            samples.turns.setdefault(name, []).append(sum(batch))

    async def _move(
        self, side: Side, chunks: Sequence[Chunk], in_flight: int
    ) -> tuple[list[float], list[float]]:
        """Put, get and delete all chunks; return the seconds of each batch of puts, and of gets."""
        deadline = self._deadline
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
                raise BenchFailed("the medium returned other bytes than were stored")
        await within(deadline, "deleting", lambda: side.forget([key for key, _ in chunks]))
        return puts, gets


def closing(arena: Arena) -> Callable[..., bool]:
    """Return an exit callback that closes the arena, unless a stuck call may still write there."""

    def close(_kind: object, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, Stuck):
            arena.close()
        return False

    return close


@contextmanager
def others_paused(sides: Mapping[str, Side], name: str) -> Iterator[None]:
    """Stop the helpers of all sides but one (SIGSTOP) while the block runs."""
    paused = [number for other, side in sides.items() if other != name for number in side.helpers]
    for number in paused:
        os.kill(number, signal.SIGSTOP)
    try:
        for number in paused:
            _wait_until_stopped(number)
        yield
    finally:
        for number in paused:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGCONT)


def _wait_until_stopped(process: int) -> None:
    """Wait until SIGSTOP takes effect. Raises :class:`BenchFailed` if the process exits or does not stop."""
    deadline = perf_counter() + STOP_SECONDS
    while (state := _state_of(process)) != "T":
        if state in "ZX":
            raise BenchFailed(f"helper process {process} has exited")
        if perf_counter() > deadline:
            raise BenchFailed(f"helper process {process} does not stop: its state is {state}")


def _state_of(process: int) -> str:
    """Return the state of a process as in ps(1): T is stopped, Z a zombie."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
