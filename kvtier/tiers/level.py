"""One level of the hierarchy: its place, its settings, and how much of its capacity is in use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvtier.catalog.catalog import Catalog
from kvtier.catalog.eviction import IncomingPrompt
from kvtier.catalog.tenants import EvictionScope, TenantPolicies
from kvtier.memory.keys import ChunkKey
from kvtier.memory.slices import Lease
from kvtier.settings import LocalTierSettings, TierSettings
from kvtier.tiers.batches import BATCH_BYTES

if TYPE_CHECKING:
    from kvtier.tiers.codec_choice import Choice
    from kvtier.tiers.encoded_seal import Written

MAX_TRACKED_CHUNKS = 1_000_000
"""Chunks of a shared pool tracked in the catalog, about 200 MB. Others are queried on demand."""


class ChunkBytes(NamedTuple):
    """A chunk object in memory, leased for the duration of the transfer."""

    key: ChunkKey
    lease: Lease
    generation: int = 0
    """The chunk's generation in the catalog when it was leased or reserved. Another one: it was cleared."""


class Level:
    """What host memory and the tiers below it have in common. The order is that of the settings."""

    written: Written | None = None
    """What was written here, or came from peers, before and after encoding; ``None`` if it is as it is."""
    densest: set[ChunkKey] | None = None
    """The chunks here that no codec makes smaller; ``None`` unless there is a denser one than the tier's."""
    choice: Choice | None = None
    """What decides whether it encodes; ``None`` without ``codec: auto``."""

    def __init__(self, index: int, settings: TierSettings, catalog: Catalog) -> None:
        self.index = index
        self.settings = settings
        self.name = settings.name
        self.write = settings.write
        """When it receives chunks from above: ``through``, ``on_evict`` or ``never``."""
        self.admit = settings.admit
        """Which of these it receives: see :mod:`kvtier.tiers.admission`."""
        self._local = settings if isinstance(settings, LocalTierSettings) else None
        """Its settings, unless it is a shared pool. Asking for a class of pydantic takes a microsecond."""
        self._catalog = catalog
        self._deleting_bytes = 0
        """Bytes that are removed from the catalog, but still in the medium."""
        self._refused_bytes = 0
        """Bytes of the last written batch that the medium rejected as full."""
        self.unseen_bytes = 0
        """Bytes in the medium that are not in the catalog, because they could not be listed."""

    @property
    def available(self) -> bool:
        """Whether chunks can be written and read now."""
        return True

    @property
    def shared(self) -> bool:
        """Whether it is a pool that other hosts use as well. The catalog then has only part of its chunks."""
        return self._local is None

    @property
    def is_durable(self) -> bool:
        """Whether chunks here are retained reliably. False for a shared pool that this host never writes."""
        return not self.shared or self.write != "never"

    @property
    def outages(self) -> int:
        """How often it has become unavailable."""
        return 0

    @property
    def corrupt(self) -> int:
        """Number of chunks found corrupt here, and deleted."""
        return 0

    @property
    def unreadable(self) -> int:
        """Number of chunks found here that were stored with other settings."""
        return 0

    def cost(self, length: int) -> float | None:
        """Return the expected seconds to read ``length`` bytes; ``None`` if unknown."""
        return None

    @property
    def capacity(self) -> int | None:
        """Maximum size in bytes; ``None`` for a shared pool."""
        return None if self._local is None else self._local.capacity

    @property
    def count(self) -> int:
        """Number of chunks in the catalog, ready or pending."""
        return self._catalog.count(self.index)

    @property
    def used_bytes(self) -> int:
        """Bytes of chunk objects in the catalog, ready or pending, being deleted, or unseen."""
        return self._catalog.used(self.index) + self._deleting_bytes + self.unseen_bytes

    def excess_bytes(self, incoming: int) -> int:
        """Return the bytes to evict before ``incoming`` more are added; 0 below the high watermark.

        Eviction goes down to the low watermark, so that it runs in batches. If the medium has less space
        than its capacity, at least the bytes that it rejected last are evicted.
        """
        settings, required = self._local, self.used_bytes + incoming
        if settings is None:
            return 0
        if required <= settings.capacity * settings.high_watermark:
            return self._refused_bytes
        return max(self._refused_bytes, int(required - settings.capacity * settings.low_watermark))

    def missing_bytes(self, incoming: int) -> int:
        """Return the bytes to evict so that ``incoming`` more fit into the capacity."""
        return 0 if self.capacity is None else max(0, self.used_bytes + incoming - self.capacity)

    @property
    def eviction(self) -> str:
        """The name of its eviction policy; empty for a shared pool."""
        return "" if self._local is None else self._local.eviction["type"]

    @property
    def eviction_in_use(self) -> str:
        """The policy in whose order it evicts now: another one than :attr:`eviction` if that chooses."""
        return self._catalog.policies[self.index].follows or self.eviction

    @property
    def declines(self) -> bool:
        """Whether its policy may prefer what it holds to new chunks."""
        return self._catalog.policies[self.index].declines

    @property
    def tenants(self) -> TenantPolicies | None:
        """How tenants share the tier; ``None`` if they do not."""
        policy = self._catalog.policies[self.index]
        return policy if isinstance(policy, TenantPolicies) else None

    @property
    def over_maximum_bytes(self) -> int:
        """The bytes to evict because tenants hold more than they may."""
        return 0 if self.tenants is None else self.tenants.excess_bytes()

    def over_limit(self) -> list[ChunkKey]:
        """Return the coldest chunks of a shared pool that the catalog has no room for."""
        surplus = max(0, self.count - MAX_TRACKED_CHUNKS) if self.shared else 0
        return self._catalog.victims(self.index, limit=surplus) if surplus else []

    def victims_for(
        self,
        incoming: int,
        is_leased: Callable[[int], bool] | None = None,
        prompt: IncomingPrompt | None = None,
    ) -> list[ChunkKey]:
        """Return the coldest chunks, to be evicted until ``incoming`` more bytes fit.

        ``is_leased``: whether the chunk in a row of the catalog must stay. ``prompt``: what the room is for,
        see :meth:`Catalog.victims`. Then there is no watermark: what may be declined must not find room
        anyway.
        """
        excess = self.excess_bytes(incoming) if prompt is None else self.missing_bytes(incoming)
        if not excess:
            return []
        needed = min(excess, incoming + BATCH_BYTES)
        return self._catalog.victims(self.index, needed, is_leased, prompt=prompt)

    def victims_over_maximum(self, incoming: int) -> list[ChunkKey]:
        """Return the coldest chunks of tenants beyond their maximum: ``incoming`` bytes and a batch more."""
        over = min(self.over_maximum_bytes, incoming + BATCH_BYTES)
        return self._catalog.victims(self.index, over, scope=EvictionScope.OVER_MAXIMUM) if over else []

    def fits(self, length: int) -> bool:
        """Whether ``length`` more bytes fit into the capacity."""
        return not self.missing_bytes(length)

    def status(self) -> dict[str, object]:
        """Return the state for display and tests."""
        return {
            "name": self.name,
            "type": self.settings.type,
            "capacity_bytes": self.capacity,
            "used_bytes": self.used_bytes,
            "chunks": self.count,
            "available": self.available,
            "eviction": self.eviction,
            "eviction_in_use": self.eviction_in_use,
        }


def may_decline(tiers: Sequence[Level]) -> bool:
    """Whether the first tier may decline new chunks. Not above others, which get them through it."""
    return len(tiers) == 1 and tiers[0].declines
