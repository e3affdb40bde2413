"""Load or compute: which of the chunks that a lookup has found are worth waiting for.

A chunk is computed if that gives the first token earlier than its arrival, as far as both are known. The
engine reports how long it computes a prompt; each tier's throughput is measured (``tiers/throughput.py``).

What is computed is stored by the engine, so it is in memory for the next request without being read as well.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate

from kvtier.events import Prefetch
from kvtier.logs import RateLimitedLog
from kvtier.memory.keys import ChunkKey
from kvtier.pipeline.hierarchy import Hierarchy
from kvtier.pipeline.read import Reader

logger = logging.getLogger("kvtier")

CLEARLY_EARLIER = 0.95
"""Chunks are computed only if that takes less than this fraction of the time of loading all of them."""
MIN_GAIN_SECONDS = 0.02
"""And only if it is earlier by this much: less is noise."""


def worth_loading(arrivals: Sequence[float], compute: float, *, whole: bool = False) -> int:
    """Return how many leading chunks to load, so that the first token comes earliest. Pure.

    ``arrivals``: in how many seconds each chunk will be in memory, 0 if it is. ``compute``: the seconds in
    which a chunk is computed, after the last one that is loaded has arrived. With ``whole``, all chunks are
    loaded, or none. Prefers to load all of them unless another number is clearly better.
    """
    count = len(arrivals)
    latest = [0.0, *accumulate(arrivals, max)]
    choices = [0, count] if whole else range(count + 1)
    # Of equal ones the longest, so that what is already in memory is used.
    best = min(choices, key=lambda loaded: (latest[loaded] + compute * (count - loaded), -loaded))
    gain = latest[count] - (latest[best] + compute * (count - best))
    clearly = gain > max(MIN_GAIN_SECONDS, (1 - CLEARLY_EARLIER) * latest[count])
    return best if clearly else count


class LoadOrCompute:
    """Decides with what is known of the tiers. Moves nothing."""

    def __init__(self, hierarchy: Hierarchy, reader: Reader) -> None:
        self._hierarchy = hierarchy
        self._reader = reader
        self._log = RateLimitedLog(logger, level=logging.INFO)
        self.expected_seconds = 0.0
        """What was expected of the waits that have ended, as far as it was known."""
        self.actual_seconds = 0.0
        """How long these took."""

    def decide(
        self, keys: Sequence[ChunkKey], sources: Sequence[int], among: int, compute: float, *, whole: bool
    ) -> tuple[int, float | None]:
        """Return how many leading chunks to load, and in how many seconds they arrive, if that is known.

        ``sources``: the first tier that holds each chunk. ``compute``: seconds per chunk.
        """
        arrivals = self._arrivals(keys, sources, among)
        if None in arrivals:
            return len(keys), None
        known = [seconds for seconds in arrivals if seconds is not None]
        count = worth_loading(known, compute, whole=whole)
        if count < len(keys):
            self._hierarchy.counts["computed_instead"] += len(keys) - count
            self._log(
                "%d of %d chunks are computed: in %.2f s, instead of arriving in %.2f s",
                len(keys) - count,
                len(keys),
                compute * (len(keys) - count),
                max(known),
            )
        return count, max(known[:count], default=0.0)

    def ended(self, expected: float, actual: float) -> None:
        """Record a wait whose duration was known in advance."""
        self.expected_seconds += expected
        self.actual_seconds += actual

    def _arrivals(self, keys: Sequence[ChunkKey], sources: Sequence[int], among: int) -> list[float | None]:
        """Return in how many seconds each chunk will be in memory; ``None`` if unknown."""
        hierarchy, reader = self._hierarchy, self._reader
        plan = hierarchy.planner.prefetch(Prefetch(keys=keys, among=among))
        planned = {key: transfer.source for transfer in plan for key in transfer.keys}
        begun: dict[int, int] = {}
        found: list[float | None] = []
        for key, source in zip(keys, sources, strict=True):
            if source == hierarchy.memory.index:
                found.append(0.0)
                continue
            tier = planned.get(key)
            if tier is not None:
                begun[tier] = begun.get(tier, 0) + hierarchy.catalog.length(key)
            elif (flight := reader.flights.get(key)) is not None:
                tier = flight.source
            found.append(None if tier is None else reader.expected(tier, begun.get(tier, 0)))
        return found
