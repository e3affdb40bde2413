"""Prefetch ahead: read prompts from lower tiers shortly before they are expected back.

Such as a prompt whose answer has ended with a tool call, when the tool is about to be done. Only in place of
what memory's eviction policy expects later. See :meth:`EvictionPolicy.returning`.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from kvtier.events import Prefetch
from kvtier.memory.slices import Leases
from kvtier.pipeline.allocate import Allocator
from kvtier.pipeline.hierarchy import Hierarchy
from kvtier.pipeline.read import Reader

CHECK_SECONDS = 0.5
"""How often to ask the policies which prompts are about to come back."""
MAX_PROMPTS = 16
"""To read each time, one after the other. The others are read when they are asked for."""


async def prefetch_ahead(
    hierarchy: Hierarchy, allocator: Allocator, reader: Reader, is_ending: Callable[[], bool]
) -> None:
    """Read what is about to be asked for, as far as memory prefers it to others, until the cache ends."""
    while True:
        await anyio.sleep(CHECK_SECONDS)
        try:
            returning = hierarchy.catalog.returning(MAX_PROMPTS)
        except Exception as error:  # A plugin's policy may raise anything, and no request waits for this.
            hierarchy.warn("ahead", "no prompt is read ahead: the eviction policy has failed: %r", error)
            continue
        for keys in returning:
            if is_ending():
                return
            prompt = hierarchy.catalog.to_promote(keys)
            if prompt is None or not hierarchy.memory.declines:  # Otherwise all would be worth their room.
                continue
            event = Prefetch(keys=prompt.keys, among=hierarchy.usable_of(keys))
            readable = sum(len(transfer.keys) for transfer in hierarchy.planner.prefetch(event))
            if readable < len(prompt.keys):  # Room would be made for what is on its way or cannot be read.
                continue
            leases, _ = allocator.allocate_for(prompt)
            # The reader allocates this room again: nothing else runs in between.
            Leases.of(leases).release_all()
            hierarchy.counts["ahead"] += len(leases)
            await reader.promote(prompt.keys[: len(leases)])
