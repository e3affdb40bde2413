"""How far a hand-over is, and what became of it."""

from __future__ import annotations

import logging
from collections import Counter
from typing import NamedTuple

from kvtier.keys import ChunkKey
from kvtier.peers.push import Pushed
from kvtier.units import format_size

logger = logging.getLogger("kvtier")


class Progress(NamedTuple):
    """How far a hand-over is, in chunks."""

    chunks: int
    """All of them."""
    awaited: int
    """Not READY here yet."""
    under_way: int
    """READY here, and not at the peer."""
    pushed: int
    held: int
    """Those that the peer had already."""
    failed: int
    """Those that the peer will not get by this."""
    pushed_bytes: int


class HandedOver(NamedTuple):
    """What became of a hand-over."""

    outcomes: dict[ChunkKey, Pushed]
    """Of every chunk, in prefix order."""
    leading: int
    """How many chunks from the first on the peer has."""
    pushed_bytes: int
    seconds: float
    """From the beginning to the end."""
    pushing_seconds: float
    """Of these, those in which anything was under way: mostly there is nothing to push yet."""
    refused: bool
    """Whether the peer takes nothing of this model."""
    trouble: str
    """Why not all of it is there, for people; empty where it is or nobody knows."""

    def log(self, to: str) -> None:
        """Say it, for people."""
        counts = Counter(self.outcomes.values())
        logger.info(
            "%d of %d chunks pushed to %s, %d were there: %s in %.1f ms (%.2f GB/s)",
            counts[Pushed.OK],
            len(self.outcomes),
            to,
            counts[Pushed.HELD],
            format_size(self.pushed_bytes),
            self.pushing_seconds * 1e3,
            self.pushed_bytes / max(self.pushing_seconds, 1e-9) / 1e9,
        )
