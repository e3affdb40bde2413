"""Chunks that a peer has granted to this host, and their release."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import anyio

from kvtier.errors import ChannelError
from kvtier.memory.keys import ChunkKey
from kvtier.peers.protocol import Release, Released
from kvtier.rpc.endpoint import Endpoint
from kvtier.transports.base import RemoteSpan

MAX_PROMISES = 65_536
"""Per peer; about 15 MB."""
LAST_SECONDS = 0.5
"""A promise is not used in the last seconds of its lease."""


@dataclass(slots=True, eq=False)
class Promise:
    """One chunk that a peer has granted."""

    key: ChunkKey
    grant: int
    number: int
    """Its index in the grant."""
    offset: int
    length: int
    ready: bool
    """Whether it may be read now; otherwise the peer is still promoting it to memory."""
    ends: float
    """When it stops being usable, on the clock of :func:`time.monotonic`."""

    @property
    def span(self) -> RemoteSpan:
        """Where its bytes are in the peer's memory."""
        return RemoteSpan(self.grant, self.offset, self.length)


class Promises:
    """The newest promise of one peer for each chunk, in bounded number. Synchronous.

    All promises last equally long, so the oldest expires first. ``release`` is called for promises that are
    dropped before they expire.
    """

    def __init__(
        self,
        release: Callable[[Iterable[Promise]], None],
        *,
        limit: int = MAX_PROMISES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._release = release
        self._limit = limit
        self._clock = clock
        self._by_key: dict[ChunkKey, Promise] = {}

    def __len__(self) -> int:
        self._drop_expired()
        return len(self._by_key)

    def add(self, promises: Iterable[Promise]) -> None:
        """Add these, replacing earlier promises of the same chunks."""
        self._drop_expired()
        replaced = []
        for promise in promises:
            previous = self._by_key.pop(promise.key, None)
            if previous is not None:
                replaced.append(previous)
            self._by_key[promise.key] = promise
        while len(self._by_key) > self._limit:
            replaced.append(self._by_key.pop(next(iter(self._by_key))))
        if replaced:
            self._release(replaced)

    def find(self, key: ChunkKey) -> Promise | None:
        """Return the promise of a chunk if it is still usable."""
        promise = self._by_key.get(key)
        return promise if promise is not None and promise.ends > self._clock() else None

    def take(self, key: ChunkKey) -> Promise | None:
        """Remove and return the promise of a chunk if usable; the caller must release it."""
        promise = self.find(key)
        if promise is not None:
            del self._by_key[key]
        return promise

    def drop(self, keys: Iterable[ChunkKey]) -> None:
        """Release the promises of these chunks."""
        dropped = [promise for key in keys if (promise := self.take(key)) is not None]
        if dropped:
            self._release(dropped)

    def clear(self) -> None:
        """Drop all promises without releasing them; the connection loss ended them at the peer."""
        self._by_key.clear()

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._by_key:
            oldest = next(iter(self._by_key))
            if self._by_key[oldest].ends > now:
                return
            del self._by_key[oldest]


class Releases:
    """Releases promises at a connected peer, with one message per grant, and waits for no response."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._unsent: dict[int, list[int]] = {}
        """Numbers of promises by grant."""
        self._added = anyio.Event()

    def add(self, promises: Iterable[Promise]) -> None:
        """Release these soon. Does nothing once the connection has ended, which ends the grants as well."""
        if self._endpoint.closed:
            return
        for promise in promises:
            self._unsent.setdefault(promise.grant, []).append(promise.number)
        self._added.set()

    async def run(self) -> None:
        """Send releases until cancelled. Ends the connection if one cannot be sent."""
        while True:
            await self._added.wait()
            self._added = anyio.Event()
            unsent, self._unsent = self._unsent, {}
            try:
                for grant, numbers in unsent.items():
                    self._endpoint.call(
                        partial(Release, grant=grant, chunks=numbers),
                        Released,
                        lambda _released, _wanted: None,
                    )
            except ChannelError as error:
                self._endpoint.end(error)


def usable_seconds(lease: float) -> float:
    """Return how long after the request a promise is usable whose grant lasts ``lease`` seconds."""
    return lease - min(LAST_SECONDS, lease / 2)
