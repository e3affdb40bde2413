"""Expect: what others push into the first tier, and the look-ups that wait for it.

Whoever takes pushed chunks in says which are coming, and when that is no longer so. A look-up that waits sees
each chunk in the moment in which it is READY, in prefix order, and leases it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import anyio

from kvtier.catalog import State
from kvtier.events import Report
from kvtier.keys import ChunkKey
from kvtier.pipeline.base import Hierarchy
from kvtier.router import FIRST

UNANNOUNCED_SECONDS = 2.0
"""For so long a look-up waits for a chunk of which nobody has said that it is coming."""
MOST_ENDED = 65_536
"""Chunks of which it is remembered that they were coming once and are not any longer."""

Take = Callable[[ChunkKey], bool]
"""Adds a chunk to a look-up where it is READY in memory; whether it was."""


class Expectation:
    """One look-up that waits for chunks. Used in one event loop; made by :meth:`ExpectStage.begin`."""

    def __init__(self, stage: ExpectStage, keys: Sequence[ChunkKey], take: Take) -> None:
        self.over = False
        """Whether all have come, the next one will not, or nobody waits any longer."""
        self.ended = anyio.Event()
        """Set when :meth:`wait` is through, or :meth:`end` was called."""
        self._stage = stage
        self._keys = keys
        self._take = take
        self._at = 0
        self._news = anyio.Event()

    @property
    def next_key(self) -> ChunkKey | None:
        """The first that has not come."""
        return self._keys[self._at] if self._at < len(self._keys) else None

    async def wait(self, seconds: float, find_below: Callable[[], int]) -> None:
        """Until it is over, so long at most, and end it.

        ``find_below`` adds to the look-up those next chunks that lower tiers hold, and says how many.
        """
        try:
            with anyio.move_on_after(seconds):
                while not self.over and await self._progress():
                    if not self._stage.is_below(self.next_key):
                        continue
                    if not (count := find_below()):
                        break  # Memory has no room for them.
                    self._stage.forget(self)
                    self._at += count
                    self.advance()
        finally:
            self.end()

    async def _progress(self) -> bool:
        """Wait for news, while there is reason to; ``False`` where nobody has ever said that it is coming."""
        seconds = None if self._stage.is_coming(self.next_key) else UNANNOUNCED_SECONDS
        with anyio.move_on_after(seconds) as patience:
            await self._news.wait()
        return not patience.cancelled_caught

    def advance(self) -> None:
        """Take what has come, and wait for the next; give up where that will not come."""
        self._stage.forget(self)
        while (key := self.next_key) is not None and self._take(key):
            self._at += 1
        if key is None or self._stage.is_hopeless(key):
            self.over = True
        if not self.over:
            self._stage.remember(self)
        news, self._news = self._news, anyio.Event()
        news.set()

    def end(self) -> None:
        """Nobody waits any longer. Harmless when repeated."""
        self._stage.forget(self)
        self.over = True
        self._news.set()
        self.ended.set()


class ExpectStage:
    """Knows what is coming, and who waits for it. Synchronous; an observer of the hierarchy."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy
        self._coming: dict[ChunkKey, int] = {}
        """How many have said so."""
        self._ended: dict[ChunkKey, None] = {}
        self._waiting: dict[ChunkKey, set[Expectation]] = {}
        """By the chunk that is the next one for it."""
        hierarchy.observers.append(self)

    @property
    def coming(self) -> int:
        """How many chunks somebody is about to push here."""
        return len(self._coming)

    @property
    def waiting(self) -> int:
        """How many look-ups wait for such."""
        return sum(map(len, self._waiting.values()))

    def is_coming(self, key: ChunkKey | None) -> bool:
        """Whether somebody is about to push it."""
        return key in self._coming

    def is_hopeless(self, key: ChunkKey) -> bool:
        """Whether somebody was about to push it, and nobody is any longer."""
        return key not in self._coming and key in self._ended and not self.is_below(key)

    def is_below(self, key: ChunkKey | None) -> bool:
        """Whether it is READY in a lower tier alone."""
        return key is not None and self._hierarchy.catalog.fastest(key) > FIRST

    def announce(self, keys: Iterable[ChunkKey]) -> None:
        """Somebody is about to push these. To be undone with :meth:`withdraw`."""
        for key in keys:
            self._ended.pop(key, None)
            self._coming[key] = self._coming.get(key, 0) + 1
            self._wake(key)

    def withdraw(self, keys: Iterable[ChunkKey]) -> None:
        """He has done so, or will not any longer."""
        gone = []
        for key in keys:
            left = self._coming[key] - 1
            if left:
                self._coming[key] = left
            else:
                del self._coming[key]
                gone.append(key)
        for key in gone:
            self._ended.pop(key, None)
            if self._hierarchy.catalog.state(key, FIRST) is not State.READY:
                self._ended[key] = None
        excess = len(self._ended) - MOST_ENDED
        for key in list(islice(self._ended, max(0, excess))):
            del self._ended[key]
        for key in gone:
            self._wake(key)

    def arrived(self, key: ChunkKey) -> None:
        """It can be taken from elsewhere than the first tier: have those who wait do so at once."""
        self._wake(key)

    def begin(self, keys: Sequence[ChunkKey], take: Take) -> Expectation:
        """Wait for these, in their order, from now on. May be over at once."""
        expectation = Expectation(self, keys, take)
        expectation.advance()
        return expectation

    def remember(self, expectation: Expectation) -> None:
        """It waits for its next chunk."""
        if (key := expectation.next_key) is not None:
            self._waiting.setdefault(key, set()).add(expectation)

    def forget(self, expectation: Expectation) -> None:
        """The inverse of :meth:`remember`. Harmless when repeated."""
        key = expectation.next_key
        if key is not None and (waiting := self._waiting.get(key)) is not None:
            waiting.discard(expectation)
            if not waiting:
                del self._waiting[key]

    def observe(self, report: Report) -> None:
        """Transfers are not of interest here."""

    def changed(self, tier: int, stored: Sequence[ChunkKey], removed: Sequence[ChunkKey]) -> None:
        """Have those who wait take at once what has come: nothing can evict it in between."""
        if tier == FIRST and self._waiting:
            for key in stored:
                self._wake(key)

    def _wake(self, key: ChunkKey) -> None:
        for expectation in list(self._waiting.get(key, ())):
            expectation.advance()
