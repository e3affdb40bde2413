"""Report to a scheduler which tiers hold the chunks that it watches.

A report always contains the catalog's state at the time of sending. A change only marks its chunk, so the
order of changes does not matter, and what an engine has not read yet is bounded by what it watches.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import islice

import anyio

from kvtier.bridge.protocol import MAX_WATCHED_CHUNKS, Held, Watch
from kvtier.cache import TieredCache
from kvtier.errors import ProtocolError
from kvtier.events import Observer
from kvtier.memory.keys import ChunkKey, join_keys, split_keys

GATHER_SECONDS = 0.05
"""Interval of reports."""
MAX_REPORTED = 512
"""Maximum number of chunks per report. A step of the engine takes 0.7 ms to read one."""


class WatchedChunks(Observer):
    """An observer that reports the chunks that one scheduler watches."""

    def __init__(self, cache: TieredCache) -> None:
        self._cache = cache
        self._reported: dict[ChunkKey, int] = {}
        """The watched chunks, and the tiers that were last reported for each, as a bit mask."""
        self._marked: dict[ChunkKey, None] = {}
        """Chunks that may have changed since, in the order in which they were marked."""
        self._changes_marked = anyio.Event()

    def watch(self, request: Watch) -> None:
        """Start and stop watching chunks. Raises :class:`ProtocolError` if there are too many."""
        for key in split_keys(request.forget):
            self._reported.pop(key, None)
            self._marked.pop(key, None)
        keys = dict.fromkeys(split_keys(request.keys))
        self._reported.update(dict.fromkeys(keys, 0))
        if len(self._reported) > MAX_WATCHED_CHUNKS:
            raise ProtocolError(f"the scheduler watches more than {MAX_WATCHED_CHUNKS} chunks")
        self._marked.update(keys)
        self._changes_marked.set()

    def changed(self, tier: int, stored: Sequence[ChunkKey], removed: Sequence[ChunkKey]) -> None:
        """Mark the watched ones among these chunks."""
        if not self._reported:
            return
        for keys in (stored, removed):
            self._marked.update(dict.fromkeys(filter(self._reported.__contains__, keys)))
        if self._marked:
            self._changes_marked.set()

    async def report(self, send: Callable[[Held], Awaitable[None]]) -> None:
        """Send reports until cancelled. Raises the errors of ``send``."""
        self._cache.add_observer(self)
        try:
            while True:
                await self._changes_marked.wait()
                await anyio.sleep(GATHER_SECONDS)
                if (held := self._next_report()) is not None:
                    await send(held)
        finally:
            self._cache.remove_observer(self)

    def _next_report(self) -> Held | None:
        """Return the tiers of the chunks that were marked first, except where they are as reported."""
        keys = list(islice(self._marked, MAX_REPORTED))
        for key in keys:
            del self._marked[key]
        if not self._marked:
            self._changes_marked = anyio.Event()
        masks = [ready for ready, _ in self._cache.catalog.places(keys)]
        changed = [(key, mask) for key, mask in zip(keys, masks, strict=True) if self._reported[key] != mask]
        self._reported.update(changed)
        if not changed:
            return None
        return Held(join_keys([key for key, _ in changed]), [mask for _, mask in changed])
