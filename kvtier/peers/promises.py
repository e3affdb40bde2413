"""What a peer has promised to let this host read: bounded, and forgotten before it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvtier.keys import ChunkKey
from kvtier.transports.base import RemoteSpan

MOST_PROMISES = 65_536
"""Of one peer. Some 15 MB."""
LAST_SECONDS = 0.5
"""A promise is not used any longer when it has so little time left."""


@dataclass(slots=True, eq=False)
class Promise:
    """One chunk that a peer has granted."""

    key: ChunkKey
    grant: int
    number: int
    """Its place in the grant."""
    offset: int
    length: int
    ready: bool
    """Whether it may be read now; else it is on its way into the peer's memory."""
    ends: float
    """When it is not to be used any longer, on the clock of :func:`time.monotonic`."""

    @property
    def span(self) -> RemoteSpan:
        """Where its bytes are."""
        return RemoteSpan(self.grant, self.offset, self.length)


class Promises:
    """The newest promise of one peer for each chunk. Synchronous.

    All last equally long, so the oldest is always the next to end. ``release`` is told of each that is
    dropped while it could still have been used.
    """

    def __init__(
        self,
        release: Callable[[Iterable[Promise]], None],
        *,
        most: int = MOST_PROMISES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._release = release
        self._most = most
        self._clock = clock
        self._by_key: dict[ChunkKey, Promise] = {}

    def __len__(self) -> int:
        self._forget_ended()
        return len(self._by_key)

    def add(self, promises: Iterable[Promise]) -> None:
        """Keep these in place of what was promised of the same chunks before."""
        self._forget_ended()
        replaced = []
        for promise in promises:
            before = self._by_key.pop(promise.key, None)
            if before is not None:
                replaced.append(before)
            self._by_key[promise.key] = promise
        while len(self._by_key) > self._most:
            replaced.append(self._by_key.pop(next(iter(self._by_key))))
        if replaced:
            self._release(replaced)

    def find(self, key: ChunkKey) -> Promise | None:
        """What is promised of a chunk, if it can still be used."""
        promise = self._by_key.get(key)
        return promise if promise is not None and promise.ends > self._clock() else None

    def take(self, key: ChunkKey) -> Promise | None:
        """Like :meth:`find`; it is the caller's to release now."""
        promise = self.find(key)
        if promise is not None:
            del self._by_key[key]
        return promise

    def drop(self, keys: Iterable[ChunkKey]) -> None:
        """Release what is promised of these chunks."""
        dropped = [promise for key in keys if (promise := self.take(key)) is not None]
        if dropped:
            self._release(dropped)

    def clear(self) -> None:
        """Forget all: the connection on which they were given is gone, and they with it."""
        self._by_key.clear()

    def _forget_ended(self) -> None:
        now = self._clock()
        while self._by_key:
            oldest = next(iter(self._by_key))
            if self._by_key[oldest].ends > now:
                return
            del self._by_key[oldest]


def usable_seconds(lease: float) -> float:
    """How long after it was asked for a promise may be used whose grant lasts ``lease`` seconds."""
    return lease - min(LAST_SECONDS, lease / 2)
