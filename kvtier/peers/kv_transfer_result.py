"""Result of a KV transfer."""

from __future__ import annotations

import logging
from collections import Counter
from typing import NamedTuple

from kvtier.memory.keys import ChunkKey
from kvtier.peers.push import PushOutcome
from kvtier.units import format_size

logger = logging.getLogger("kvtier")


class KVTransferResult(NamedTuple):
    """Result of a KV transfer."""

    outcomes: dict[ChunkKey, PushOutcome]
    """Outcome of every chunk, in prefix order."""
    leading: int
    """Length of the prefix that the peer has, in chunks."""
    pushed_bytes: int
    seconds: float
    """Total duration."""
    pushing_seconds: float
    """Time with pushes in flight; for most of :attr:`seconds` there is nothing to push yet."""
    refused: bool
    """Whether the peer rejects this namespace."""
    last_error: str
    """Why the transfer is incomplete, as text; empty if it is complete or the reason is unknown."""

    def log(self, to: str) -> None:
        """Log a summary."""
        counts = Counter(self.outcomes.values())
        logger.info(
            "%d of %d chunks pushed to %s, %d already there: %s in %.1f ms (%.2f GB/s)",
            counts[PushOutcome.OK],
            len(self.outcomes),
            to,
            counts[PushOutcome.HELD],
            format_size(self.pushed_bytes),
            self.pushing_seconds * 1e3,
            self.pushed_bytes / max(self.pushing_seconds, 1e-9) / 1e9,
        )
