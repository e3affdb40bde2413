"""Log what a worker stores, in one line per second instead of one per step.

A line costs 0.1 to 1 ms of the engine's step, and steps that store are as frequent as those of a prompt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

INTERVAL_SECONDS = 1.0


class StoreLog:
    """Adds up what is stored until a line is due. Not thread-safe."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._since = 0.0
        self._requests: set[str] = set()
        self._tokens = 0
        self._bytes = 0
        self._seconds = 0.0

    def add(self, requests: Iterable[str], tokens: int, size: int, seconds: float) -> None:
        """Add a step that has stored ``tokens`` of some requests, which are ``size`` bytes."""
        now = time.monotonic()
        if not self._requests:
            self._since = now
        self._requests.update(requests)
        self._tokens += tokens
        self._bytes += size
        self._seconds += seconds
        if now - self._since >= INTERVAL_SECONDS:
            self.write()

    def write(self) -> None:
        """Write the line now, if anything was stored. For steps that compute nothing: the next may be far."""
        if not self._requests:
            return
        (first, *others) = self._requests
        self._logger.info(
            "stored %d tokens for %s in %.1f ms (%.1f GB/s)",
            self._tokens,
            f"{len(others) + 1} requests" if others else f"request {first}",
            self._seconds * 1e3,
            self._bytes / self._seconds / 1e9,
        )
        self._requests.clear()
        self._tokens, self._bytes, self._seconds = 0, 0, 0.0
