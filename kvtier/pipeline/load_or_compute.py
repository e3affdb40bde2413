"""Load or compute: which of the chunks that a lookup has found are worth waiting for.

A chunk is computed if that gives the first token earlier than its arrival, as far as both are known. The
engine reports how long it computes a prompt; each tier's throughput is measured (``tiers/throughput.py``).

What is computed is stored by the engine, so it is in memory for the next request without being read as well.

Of a medium that was not used for a while, such as the disk of a cache process that has just started, nothing
is known in advance. A lookup then stops waiting as soon as its own chunks have arrived too slowly.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import accumulate

from kvtier.catalog.misses import MissReason
from kvtier.events import Prefetch
from kvtier.logs import RateLimitedLog
from kvtier.memory.keys import ChunkKey
from kvtier.pipeline.found import Cut
from kvtier.pipeline.hierarchy import Hierarchy
from kvtier.pipeline.read import Reader
from kvtier.tiers.throughput import MIN_SAMPLES

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
    clearly = _is_clearly_earlier(latest[best] + compute * (count - best), latest[count])
    return best if clearly else count


def _is_clearly_earlier(computed: float, loaded: float) -> bool:
    """Whether the first token comes clearly earlier in ``computed`` than in ``loaded`` seconds."""
    return loaded - computed > max(MIN_GAIN_SECONDS, (1 - CLEARLY_EARLIER) * loaded)


class Pace:
    """How fast the chunks of one lookup arrive. The wait for the first of them does not count."""

    def __init__(self, compute: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``compute``: the seconds in which the engine computes a chunk."""
        self._compute = compute
        self._clock = clock
        self._arrivals: list[tuple[float, int]] = []
        """When each wait has ended, and how many chunks had arrived; at first, before any wait."""
        self.left_seconds = 0.0
        """In how many seconds the others would have arrived, if they are not worth waiting for; else 0."""

    def worth_waiting(self, arrived: int, waiting: int) -> bool:
        """Return whether to wait for ``waiting`` more chunks; if not, they are clearly computed earlier.

        Call it before each wait, with the number of chunks that have ``arrived``. Takes constant time.
        """
        arrivals = self._arrivals
        if arrivals and arrivals[-1][1] == arrived:
            return True
        arrivals.append((self._clock(), arrived))
        if len(arrivals) <= MIN_SAMPLES:
            return True
        (began, first), (now, _) = arrivals[1], arrivals[-1]
        left = waiting * (now - began) / (arrived - first)
        if _is_clearly_earlier(waiting * self._compute, left):
            self.left_seconds = left
        return not self.left_seconds


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
    ) -> tuple[int, float | None, Cut | None]:
        """Return how many leading chunks to load, in how many seconds they arrive, and why not the others.

        ``None`` if that is not known, and if all are loaded. ``sources``: the first tier that holds each
        chunk. ``compute``: seconds per chunk.
        """
        arrivals = self._arrivals(keys, sources, among)
        if None in arrivals:
            return len(keys), None, None
        known = [seconds for seconds in arrivals if seconds is not None]
        count = worth_loading(known, compute, whole=whole)
        cut = None
        if count < len(keys):
            cut = self.computed(sources[count:], len(keys), compute, max(known))
        return count, max(known[:count], default=0.0), cut

    def computed(self, sources: Sequence[int], total: int, compute: float, seconds: float) -> Cut:
        """Record that chunks of these ``sources`` are computed, which would have arrived in ``seconds``.

        ``total``: the chunks of the lookup. ``compute``: seconds per chunk.
        """
        count, computing = len(sources), compute * len(sources)
        self._hierarchy.counts["computed_instead"] += count
        message = "%d of %d chunks are computed: in %.2f s, instead of arriving in %.2f s"
        self._log(message, count, total, computing, seconds)
        if len(set(sources)) == 1:  # Of several tiers, it is not known which one is slow.
            tier = self._hierarchy.tiers[sources[0]].name
            self._hierarchy.findings.note(
                f"slow {tier}",
                f"tier {tier} was slower than the engine: {seconds:.2g} s, instead of {computing:.2g} s",
                "use a faster medium, or load in any case, to spare the engine: prefetch.adaptive: false",
            )
        return Cut(MissReason.RECOMPUTE_WAS_FASTER, sources[0], seconds)

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
