"""Deletions that are repeated until the medium has executed them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from kvtier.backends.base import Backend
from kvtier.errors import IncompleteScan
from kvtier.logs import RateLimitedLog
from kvtier.memory.keys import ChunkKey

logger = logging.getLogger("kvtier")


class Deletions:
    """The keys still to be deleted from a backend, so that it does not hold more than its tier accounts for.

    A key that was to be deleted while the medium was unreachable is deleted before any other call.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        retry_seconds: float = 30.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        kept: Callable[[IncompleteScan], None] = lambda _: None,
    ) -> None:
        """``retry_seconds``: time between two attempts at deletions that fail while other calls succeed.

        ``kept`` is called if the medium cannot delete some of the keys, which a later scan lists.
        """
        self._name = name
        self._backend = backend
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._kept = kept
        self._pending: set[ChunkKey] = set()
        self._retry_at = 0.0
        self._warn = RateLimitedLog(logger)

    def add(self, keys: Sequence[ChunkKey]) -> None:
        """Delete these keys with the next :meth:`run` or :meth:`retry`."""
        self._pending.update(keys)

    async def run(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Delete all pending keys, which include ``keys``. Raises if the medium cannot be reached."""
        pending, self._pending = self._pending, set()
        try:
            await self._backend.delete(list(pending))
        except IncompleteScan as error:
            self._kept(error)
        except BaseException:
            self._pending.update(pending)
            raise
        return [True] * len(keys)

    async def retry(self) -> None:
        """Repeat deletions that failed earlier. Does not raise."""
        if not self._pending or self._clock() < self._retry_at:
            return
        try:
            await self.run(())
        except Exception as error:
            # The medium may still serve other calls.
            self._retry_at = self._clock() + self._retry_seconds
            self._warn("tier %s: cannot delete %d chunks: %r", self._name, len(self._pending), error)
