"""Encode: chunks that a tier with a codec holds as they are, while the machine is idle.

Such chunks are from before the tier had a codec, or from when ``codec: auto`` found that it does not pay: in
a disk with room, as it is then faster. Once the tier is full, fewer bytes keep more chunks. Those that were
not read lately are then encoded with a denser codec, if there is one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial

import anyio

from kvtier.backends.base import Outcome
from kvtier.catalog.catalog import State
from kvtier.catalog.eviction import RemovalReason
from kvtier.events import Encode
from kvtier.memory.keys import ChunkKey
from kvtier.pipeline.hierarchy import Hierarchy
from kvtier.pipeline.read import Reader
from kvtier.tiers.batches import BATCH_BYTES, batch_size
from kvtier.tiers.level import ChunkBytes
from kvtier.tiers.tier import Tier

PAUSE_SECONDS = 5.0
"""Between two attempts to find something to encode."""
BUSY_LOAD = 0.5
"""The machine is idle while fewer threads run than this part of its CPUs, in the mean of a minute."""
SHARE = 0.25
"""The part of the time that encoding may take."""
ROWS_PER_STEP = 512
"""Of the catalog, which are examined in a millisecond."""
STEP_SECONDS = 0.01
DENSE_PAUSE_SECONDS = 600.0
"""Between two passes that encode more densely."""


class EncodeStage:
    """Encodes what tiers with a codec hold as it is, in the order of the catalog: each chunk once in a pass.

    A pass begins when the cache is opened, and when a tier begins to encode again.
    """

    def __init__(self, hierarchy: Hierarchy, reader: Reader) -> None:
        self._hierarchy = hierarchy
        self._reader = reader

    async def run(self, tier: Tier) -> None:
        """Encode the chunks of a tier, as long as the cache is open."""
        row = 0
        while True:
            await anyio.sleep(PAUSE_SECONDS)
            if not self._pays(tier):
                row = 0
            while self._pays(tier) and self._is_idle(tier):
                rows = range(row, min(row + ROWS_PER_STEP, self._hierarchy.catalog.rows.stop))
                if not rows:
                    break
                await self.encode(tier, rows)
                row = rows.stop
                await anyio.sleep(STEP_SECONDS)
            if row >= self._hierarchy.catalog.rows.stop and tier.densest is not None:
                await self._encode_densely(tier)

    async def _encode_densely(self, tier: Tier) -> None:
        """Encode what a full tier holds with the denser codec, while the machine is idle."""
        for rows in self._hierarchy.catalog.slices(ROWS_PER_STEP):
            if not (tier.is_full() and self._pays(tier) and self._is_idle(tier)):
                return
            await self.encode(tier, rows, denser=True)
            await anyio.sleep(STEP_SECONDS)
        await anyio.sleep(DENSE_PAUSE_SECONDS)

    def _pays(self, tier: Tier) -> bool:
        return tier.choice is None or bool(tier.choice.encodes)

    def _is_idle(self, tier: Tier) -> bool:
        busy = os.getloadavg()[0] >= BUSY_LOAD * (os.cpu_count() or 1)
        return not busy and tier.available and not self._reader.flights

    async def encode(self, tier: Tier, rows: range, *, denser: bool = False) -> None:
        """Encode those chunks in rows of the catalog that a tier holds as they are. Waits in between.

        ``denser``: instead, those that memory does not hold, with the denser codec.
        """
        catalog, wanted = self._hierarchy.catalog, self._is_cold if denser else self._is_plain
        keys = [key for key in catalog.keys(tier.index, rows=rows) if wanted(tier, key)]
        while keys:
            count = batch_size((self._hierarchy.length(key) for key in keys), BATCH_BYTES)
            batch, keys = keys[:count], keys[count:]
            began = time.monotonic()
            if chunks := await self._reader.lease(Encode(keys=batch), tier.index, batch):
                await tier.encode_stored(chunks, partial(self._settle, tier), denser=denser)
            await anyio.sleep((time.monotonic() - began) * (1 / SHARE - 1))

    def _is_plain(self, tier: Tier, key: ChunkKey) -> bool:
        catalog, length = self._hierarchy.catalog, self._hierarchy.length(key)
        is_plain = catalog.stored_length(key, tier.index, 0) == length
        return is_plain and catalog.state(key, tier.index) is State.READY

    def _is_cold(self, tier: Tier, key: ChunkKey) -> bool:
        """Return whether a chunk was not used lately, or memory would hold it, and can be denser."""
        catalog, memory = self._hierarchy.catalog, self._hierarchy.memory.index
        is_cold = catalog.state(key, memory) is State.ABSENT and key not in (tier.densest or ())
        return is_cold and catalog.state(key, tier.index) is State.READY

    def _settle(self, tier: Tier, chunks: Sequence[ChunkBytes], outcomes: Sequence[Outcome]) -> None:
        """Delete what was removed from the tier, or cleared, while it was encoded."""
        hierarchy, catalog = self._hierarchy, self._hierarchy.catalog
        for chunk, outcome in zip(chunks, outcomes, strict=True):
            if outcome is not Outcome.OK:
                continue
            hierarchy.counts["encoded_when_idle"] += 1
            if catalog.state(chunk.key, tier.index) is State.ABSENT:
                hierarchy.tasks.start_soon(tier.remove, [chunk.key])
            elif catalog.generation(chunk.key) != chunk.generation:
                hierarchy.tasks.start_soon(tier.delete, [chunk.key], RemovalReason.CLEARED)
