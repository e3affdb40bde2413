"""Directory of which instances hold a prompt. Queried in parallel with the peers, with a timeout."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import anyio

from kvtier.concurrency.backoff import Backoff
from kvtier.logs import RateLimitedLog
from kvtier.memory.keys import ChunkKey

logger = logging.getLogger("kvtier")

MAX_HOLDERS = 256
"""Holders used from one answer; the rest is ignored."""


class Directory(Protocol):
    """Maps chunks to the instances that report holding them, such as a controller."""

    async def who_holds(self, keys: Sequence[ChunkKey]) -> Sequence[tuple[str, int]]:
        """Return ``(HOST:PORT, count)`` of the holders of the leading ``count`` keys, longest prefix first.

        Called concurrently, for every lookup that misses on this host, and cancelled after ``peer.timeout``.
        Must return an empty list at once if the directory is unavailable. Any exception counts as no answer
        and starts a back-off. The result is only a hint: the instances decide what they hold.
        """
        ...


class Holder(NamedTuple):
    """An instance that may hold a prefix of a prompt."""

    address: str
    chunks: int
    """Length of the prefix."""


class DirectoryClient:
    """Queries a directory with a timeout, and backs off after a failure."""

    def __init__(self, directory: Directory, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._backoff = Backoff()
        self._retry_at = 0.0
        self._warn = RateLimitedLog(logger)

    async def holders(self, keys: Sequence[ChunkKey], until: float) -> list[Holder]:
        """Return who may hold a prefix of ``keys``, longest first. ``until`` is in the event loop's time."""
        if self._clock() < self._retry_at:
            return []
        try:
            with anyio.CancelScope(deadline=until) as scope:
                entries = await self._directory.who_holds(keys)
        except Exception as error:
            self._back_off()
            self._warn("directory lookup failed: %r", error)
            return []
        if scope.cancelled_caught:
            self._back_off()
            return []
        self._backoff.reset()
        holders = [Holder(address, chunks) for address, chunks in islice(entries, MAX_HOLDERS) if chunks > 0]
        return sorted(holders, key=lambda holder: -holder.chunks)

    def _back_off(self) -> None:
        # Concurrent lookups that failed together count as one failure.
        if self._clock() >= self._retry_at:
            self._retry_at = self._clock() + self._backoff.next()
