"""Expect: track chunks that are pushed into the first tier, and the lookups that wait for them.

The receiver of a push announces its chunks and withdraws them when the push has ended. A waiting lookup gets
each chunk as soon as it is READY, in prefix order, and leases it immediately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import anyio

from kvtier.catalog.catalog import State
from kvtier.concurrency.tasks import Changes
from kvtier.events import Observer
from kvtier.memory.keys import ChunkKey
from kvtier.pipeline.hierarchy import Hierarchy

UNANNOUNCED_SECONDS = 2.0
"""How long a lookup waits for a chunk that has not been announced."""
MAX_ENDED = 65_536
"""Maximum withdrawn chunks to remember."""

Take = Callable[[ChunkKey], bool]
"""Adds a chunk to a lookup if it is READY in memory. Returns whether it was."""


class Expectation:
    """A lookup that waits for chunks. For one event loop; created by :meth:`ExpectStage.begin`."""

    def __init__(self, stage: ExpectStage, keys: Sequence[ChunkKey], take: Take) -> None:
        self.finished = False
        """Whether all chunks have arrived, the next one will not arrive, or the wait was ended."""
        self.ended = anyio.Event()
        """Set when :meth:`wait` has returned or :meth:`end` was called."""
        self._stage = stage
        self._keys = keys
        self._take = take
        self._at = 0
        self._changes = Changes()

    @property
    def next_key(self) -> ChunkKey | None:
        """The first chunk that has not arrived."""
        return self._keys[self._at] if self._at < len(self._keys) else None

    async def wait(self, seconds: float, find_below: Callable[[], int]) -> None:
        """Wait until finished, at most ``seconds``, then end the wait.

        ``find_below`` adds the next chunks that lower tiers hold to the lookup, and returns their number.
        """
        try:
            with anyio.move_on_after(seconds):
                while not self.finished and await self._progress():
                    if not self._stage.is_below(self.next_key):
                        continue
                    if not (count := find_below()):
                        break  # The first tier has no room for them.
                    self._stage.forget(self)
                    self._at += count
                    self.advance()
        finally:
            self.end()

    async def _progress(self) -> bool:
        """Wait for a change. ``False`` if the next chunk has not been announced in time."""
        seconds = None if self._stage.is_announced(self.next_key) else UNANNOUNCED_SECONDS
        with anyio.move_on_after(seconds) as scope:
            await self._changes.after(self._changes.count)
        return not scope.cancelled_caught

    def advance(self) -> None:
        """Take the chunks that have arrived. Finish if the next one will not arrive."""
        self._stage.forget(self)
        while (key := self.next_key) is not None and self._take(key):
            self._at += 1
        if key is None or self._stage.is_abandoned(key):
            self.finished = True
        if not self.finished:
            self._stage.remember(self)
        self._changes.notify()

    def end(self) -> None:
        """End the wait. Idempotent."""
        self._stage.forget(self)
        self.finished = True
        self._changes.notify()
        self.ended.set()


class ExpectStage(Observer):
    """Tracks announced chunks and the lookups that wait for them. Synchronous. Observes the hierarchy."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy
        self._memory = hierarchy.memory
        self._announced: dict[ChunkKey, int] = {}
        """Number of announcements."""
        self._ended: dict[ChunkKey, None] = {}
        self._waiting: dict[ChunkKey, set[Expectation]] = {}
        """Expectations by their next chunk."""
        hierarchy.observers.append(self)

    @property
    def announced(self) -> int:
        """Number of announced chunks."""
        return len(self._announced)

    @property
    def waiting(self) -> int:
        """Number of lookups that wait for chunks."""
        return sum(map(len, self._waiting.values()))

    def is_announced(self, key: ChunkKey | None) -> bool:
        """Return whether the chunk is announced."""
        return key in self._announced

    def is_abandoned(self, key: ChunkKey) -> bool:
        """Return whether the chunk was announced, is not now, and no lower tier holds it."""
        return key not in self._announced and key in self._ended and not self.is_below(key)

    def is_below(self, key: ChunkKey | None) -> bool:
        """Return whether the chunk is READY in lower tiers only."""
        return key is not None and self._hierarchy.catalog.fastest(key) > self._memory.index

    def announce(self, keys: Iterable[ChunkKey]) -> None:
        """Announce chunks that are about to be pushed here. Undo with :meth:`withdraw`."""
        for key in keys:
            self._ended.pop(key, None)
            self._announced[key] = self._announced.get(key, 0) + 1
            self.wake(key)

    def withdraw(self, keys: Iterable[ChunkKey]) -> None:
        """Undo an announcement, after the push has ended or failed."""
        withdrawn = []
        for key in keys:
            announcements = self._announced[key] - 1
            if announcements:
                self._announced[key] = announcements
            else:
                del self._announced[key]
                withdrawn.append(key)
        for key in withdrawn:
            self._ended.pop(key, None)
            if self._memory.state(key) is not State.READY:
                self._ended[key] = None
        excess = len(self._ended) - MAX_ENDED
        for key in list(islice(self._ended, max(0, excess))):
            del self._ended[key]
        for key in withdrawn:  # Only now: a lookup that is woken looks at the next ones as well.
            self.wake(key)

    def begin(self, keys: Sequence[ChunkKey], take: Take) -> Expectation:
        """Start to wait for chunks, in order. The result may be finished already."""
        expectation = Expectation(self, keys, take)
        expectation.advance()
        return expectation

    def remember(self, expectation: Expectation) -> None:
        """Register an expectation under its next chunk."""
        if (key := expectation.next_key) is not None:
            self._waiting.setdefault(key, set()).add(expectation)

    def forget(self, expectation: Expectation) -> None:
        """Undo :meth:`remember`. Idempotent."""
        key = expectation.next_key
        if key is not None and (waiting := self._waiting.get(key)) is not None:
            waiting.discard(expectation)
            if not waiting:
                del self._waiting[key]

    def changed(self, tier: int, stored: Sequence[ChunkKey], removed: Sequence[ChunkKey]) -> None:
        """Let the waiting lookups take stored chunks immediately, before these can be evicted."""
        if tier == self._memory.index and self._waiting:
            for key in stored:
                self.wake(key)

    def wake(self, key: ChunkKey) -> None:
        """Let the lookups whose next chunk this is look for it, also outside the first tier."""
        for expectation in list(self._waiting.get(key, ())):
            expectation.advance()
