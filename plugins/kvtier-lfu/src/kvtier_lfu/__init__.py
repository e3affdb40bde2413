"""LFU eviction with dynamic aging (LFU-DA, Arlitt et al. 2000), also across evictions of a chunk."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice

from pydantic import Field

from kvtier import hookimpl
from kvtier.catalog.eviction import ChunkColumns, EvictionPolicy, PolicySettings, RemovalReason
from kvtier.memory.keys import ChunkKey
from kvtier.units import Integer

MAX_USES = 255


class LfuSettings(PolicySettings):
    """Settings of the policy ``fading_lfu``."""

    ghosts: Integer = Field(default=100_000, ge=0, description="Evicted chunks whose uses are remembered.")


class LfuPolicy(EvictionPolicy):
    """Chunks by level: the number of uses plus the age of the tier at the last use. Lowest level first.

    The age is the level of the last evicted chunk, so that chunks that were popular once leave in the end.
    """

    settings_type = LfuSettings

    def __init__(self, settings: LfuSettings, capacity_bytes: int, chunks: ChunkColumns) -> None:
        super().__init__(settings, capacity_bytes, chunks)
        self._chunks = chunks
        self._max_ghosts = settings.ghosts
        self._ghosts: dict[ChunkKey, int] = {}
        self._age = 0
        self._levels: dict[int, dict[int, None]] = {}
        self._level_of = array("Q")
        self._uses = array("B")

    def added(self, rows: Sequence[int], now: float) -> None:
        """Continue with the uses before the last eviction, if they are remembered."""
        missing = max(0, max(rows, default=-1) + 1 - len(self._uses))
        self._uses.frombytes(bytes(missing))
        self._level_of.frombytes(bytes(8 * missing))
        for row in rows:
            self._uses[row] = self._ghosts.pop(self._chunks.key(row), 0)
            self._place(row)

    def used(self, rows: Sequence[int], now: float) -> None:
        """Raise the level of each chunk in the tier."""
        for row in rows:
            if row < len(self._uses) and row in self._levels.get(self._level_of[row], ()):
                self._take(row)
                self._place(row)

    def removed(self, rows: Sequence[int], reason: RemovalReason) -> None:
        """Forget chunks, except how often those that are evicted were used."""
        for row in rows:
            self._take(row)
            if reason is RemovalReason.EVICTED:
                self._age = max(self._age, self._level_of[row])
                self._ghosts[self._chunks.key(row)] = self._uses[row]
        for key in list(islice(self._ghosts, max(0, len(self._ghosts) - self._max_ghosts))):
            del self._ghosts[key]

    def victims(self) -> Iterator[int]:
        """Yield the chunks of the lowest level first, each level in order of the last use."""
        for level in sorted(self._levels):
            yield from self._levels[level]

    def _place(self, row: int) -> None:
        self._uses[row] = min(self._uses[row] + 1, MAX_USES)
        self._level_of[row] = level = self._age + self._uses[row]
        self._levels.setdefault(level, {})[row] = None

    def _take(self, row: int) -> None:
        level = self._level_of[row]
        del self._levels[level][row]
        if not self._levels[level]:
            del self._levels[level]


@hookimpl
def kvtier_eviction_policies() -> dict[str, type[EvictionPolicy]]:
    """Return the policy by its name."""
    return {"fading_lfu": LfuPolicy}
