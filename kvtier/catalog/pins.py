"""Pins: chunks that must not be evicted for a time."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvtier.memory.keys import ChunkKey


class ChunkPins:
    """Until when chunks are pinned. Times are those of ``time.monotonic()``."""

    def __init__(self) -> None:
        self._until: dict[ChunkKey, float] = {}
        self._first_end = math.inf
        """No pin expires before."""

    def __bool__(self) -> bool:
        """Return whether any chunk may be pinned."""
        return bool(self._until)

    def count(self, now: float) -> int:
        """Return the number of pinned chunks. Removes expired pins."""
        if self._first_end <= now:
            self._until = {key: until for key, until in self._until.items() if until > now}
            self._first_end = min(self._until.values(), default=math.inf)
        return len(self._until)

    def add(self, keys: Iterable[ChunkKey], until: float | None) -> None:
        """Pin chunks until a time, or permanently with ``None``. The longer one of two pins counts."""
        end = math.inf if until is None else until
        self._first_end = min(self._first_end, end)
        for key in keys:
            self._until[key] = max(end, self._until.get(key, end))

    def remove(self, keys: Iterable[ChunkKey]) -> None:
        """Remove all pins on these chunks. Chunks that are not pinned are ignored."""
        for key in keys:
            self._until.pop(key, None)

    def holds(self, key: ChunkKey, now: float) -> bool:
        """Return whether a chunk is pinned."""
        until = self._until.get(key)
        if until is None:
            return False
        if until <= now:
            del self._until[key]
            return False
        return True
