"""Somebody who knows which instances hold a prompt: asked beside the peers, and never waited for in vain."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import anyio

from kvtier.backends.logs import RareWarning
from kvtier.keys import ChunkKey
from kvtier.peers.pauses import GrowingPause

logger = logging.getLogger("kvtier")

MOST_NAMED = 256
"""Holders of one answer that are looked at, from its beginning."""


class Directory(Protocol):
    """Knows, as far as it was told, which instances hold what: a controller, for example."""

    async def who_holds(self, keys: Sequence[ChunkKey]) -> Sequence[tuple[str, int]]:
        """Where to reach those that hold leading ones of ``keys``, ``HOST:PORT``, and how many; most first.

        Asked in every look-up of what is not on this host, by several at once, and cancelled where it takes
        longer than ``peer.patience``. Nothing where it cannot be asked at present: at once, so that nobody
        waits. Whatever it raises counts as no answer, after which it is left alone for a while. It is a hint:
        what the instances themselves say is what counts.
        """
        ...


class Holder(NamedTuple):
    """An instance that may hold some of a prompt."""

    address: str
    chunks: int
    """Leading ones."""


class AskedDirectory:
    """A directory that is asked in time or not at all. One that fails to answer is left alone for a while."""

    def __init__(self, directory: Directory, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._pause = GrowingPause()
        self._not_before = 0.0
        self._warn = RareWarning(logger)

    async def holders(self, keys: Sequence[ChunkKey], until: float) -> list[Holder]:
        """Who may hold leading ones of ``keys``, most first. ``until`` is in the loop's time."""
        if self._clock() < self._not_before:
            return []
        try:
            with anyio.CancelScope(deadline=until) as scope:
                named = await self._directory.who_holds(keys)
        except Exception as error:
            self._fail()
            self._warn("the directory of instances fails: %r", error)
            return []
        if scope.cancelled_caught:
            self._fail()
            return []
        self._pause.reset()
        holders = [Holder(address, chunks) for address, chunks in islice(named, MOST_NAMED) if chunks > 0]
        return sorted(holders, key=lambda holder: -holder.chunks)

    def _fail(self) -> None:
        # Many may have waited for the same answer: that is one failure, not many.
        if self._clock() >= self._not_before:
            self._not_before = self._clock() + self._pause.next()
