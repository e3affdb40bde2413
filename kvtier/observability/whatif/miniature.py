"""Miniature caches: what other settings would hit, from a sample of the chunks.

From C. Waldspurger et al., "Cache Modeling and Optimization using Miniature Simulations" (ATC 2017): a cache
of 1/n of the capacity with 1/n of the chunks hits the same part. All of them see the same sample, so that
most of its error is not in the difference between two of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.catalog.hints import ChunkHints
from kvtier.memory.keys import ChunkKey
from kvtier.observability.whatif.simulated_cache import SimulatedCache, SimulatedTiers
from kvtier.plugins import Plugins
from kvtier.settings import LocalTierSettings, Settings
from kvtier.tiers.batches import BATCH_BYTES

MIN_CHUNKS = 8
"""Of a tier of a miniature cache."""
GB_S = 1.0
"""How fast its tiers are read, which does not matter: every chunk that is found is loaded."""


def evicted_to(tier: LocalTierSettings, capacity: float) -> float:
    """Return the fraction of a capacity at which eviction stops: after one batch, if that is not less."""
    return max(tier.low_watermark, tier.high_watermark - BATCH_BYTES / max(1.0, capacity))


def with_changes(
    tiers: Sequence[LocalTierSettings], tier: int, **changes: object
) -> Sequence[LocalTierSettings]:
    """Return the tiers, of which one has other settings."""
    return [
        settings.model_copy(update=changes) if at == tier else settings for at, settings in enumerate(tiers)
    ]


class Miniature:
    """One miniature cache, and what it has hit."""

    def __init__(
        self,
        plugins: Plugins,
        settings: Settings,
        tiers: Sequence[LocalTierSettings],
        chunk_bytes: int,
        rate: float,
    ) -> None:
        """``tiers``: in full size. ``rate``: the part of all keys that is in its sample."""
        scaled = [
            tier.model_copy(
                update={
                    "capacity": max(MIN_CHUNKS * chunk_bytes, int(tier.capacity * rate)),
                    "low_watermark": evicted_to(tier, tier.capacity),
                    "eviction": plugins.policy_settings(tier).of_sample(rate).model_dump(),
                }
            )
            for tier in tiers
        ]
        self.cache = SimulatedCache(
            plugins, SimulatedTiers(scaled, [GB_S] * len(scaled), settings, ""), chunk_bytes
        )
        self._counted = [0] * len(tiers)
        self.hits = [0.0] * len(tiers)
        """Estimated chunks of all prompts that each tier, or a faster one, has hit."""

    def serve(
        self,
        time: float,
        keys: Sequence[ChunkKey],
        positions: Sequence[int],
        count: int,
        rate: float,
        hints: ChunkHints | None,
        *,
        counts: bool = True,
    ) -> None:
        """Serve a prompt of ``count`` chunks, of which ``keys`` at ``positions`` are in the sample.

        ``counts``: whether the hits are added to those before.
        """
        between = 1 / rate - 1
        self.cache.serve(time, keys, hints)
        found = 0
        for tier, hits in enumerate(self.cache.hits):
            found += hits - self._counted[tier]
            self._counted[tier] = hits
            if counts:
                # On average, the first miss of the prompt is `between` chunks before its first sampled one.
                self.hits[tier] += positions[found] - between if found < len(keys) else count

    @property
    def full(self) -> bool:
        """Whether it has evicted chunks. Before, it has hit what any other one has hit."""
        return any(self.cache.evicted)

    def skip(self, count: int) -> None:
        """Take a prompt without sampled chunks into account, for which there is no miss."""
        self.hits = [hits + count for hits in self.hits]

    def decay(self, factor: float) -> None:
        """Decay the hits."""
        self.hits = [hits * factor for hits in self.hits]
