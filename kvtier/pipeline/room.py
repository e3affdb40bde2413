"""What leaves a tier to make room in it. Plans only; :mod:`kvtier.pipeline.evict` executes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.catalog.catalog import Catalog
from kvtier.catalog.eviction import IncomingPrompt
from kvtier.catalog.tenants import EvictionScope
from kvtier.memory.keys import ChunkKey
from kvtier.tiers.batches import BATCH_BYTES
from kvtier.tiers.level import Level


def may_decline(tiers: Sequence[Level]) -> bool:
    """Whether the first tier may decline new chunks. Not above others, which get them through it."""
    return len(tiers) == 1 and tiers[0].declines


def surplus_of(catalog: Catalog, target: Level) -> list[ChunkKey]:
    """Return the chunks of a shared pool that the catalog no longer tracks, coldest first."""
    surplus = target.surplus_chunks
    return catalog.victims(target.index, limit=surplus) if surplus else []


def victims_for(
    catalog: Catalog,
    target: Level,
    incoming: int,
    is_leased: Callable[[int], bool] | None = None,
    prompt: IncomingPrompt | None = None,
) -> list[ChunkKey]:
    """Return the coldest chunks of a tier, to be evicted until ``incoming`` more bytes fit.

    ``is_leased``: whether the chunk in a row of the catalog must stay. ``prompt``: what the room is for, see
    :meth:`Catalog.victims`. Then there is no watermark: what may be declined must not find room anyway.
    """
    excess = target.excess_bytes(incoming) if prompt is None else target.missing_bytes(incoming)
    if not excess:
        return []
    return catalog.victims(target.index, min(excess, incoming + BATCH_BYTES), is_leased, prompt=prompt)


def victims_over_maximum(catalog: Catalog, target: Level, incoming: int) -> list[ChunkKey]:
    """Return the coldest chunks of tenants beyond their maximum, of ``incoming`` bytes and a batch more."""
    over = min(target.over_maximum_bytes, incoming + BATCH_BYTES)
    return catalog.victims(target.index, over, scope=EvictionScope.OVER_MAXIMUM) if over else []
