"""Boundaries: where a prompt of a model with states can be continued.

After whole chunks, and only where the state at the end of the last one is stored as well. States are stored
at few chunks, so the longest prefix of chunks is of no use by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvtier.memory.keys import ChunkKey, state_key
from kvtier.pipeline.base import Hierarchy
from kvtier.pipeline.discover import DiscoverStage
from kvtier.pipeline.query import Expected

MAX_WALK = 4096
"""Chunks to look at for superseded states."""


class Boundary(NamedTuple):
    """Where a prompt can be continued."""

    needed: list[ChunkKey]
    """The chunks before it, and the state there; empty if there is none."""
    chunks: int
    """The leading chunks that are held. If there are more, prompts branch there, for want of a state."""


class Boundaries:
    """Finds the last boundary of a prompt."""

    def __init__(self, hierarchy: Hierarchy, discovering: DiscoverStage) -> None:
        self._hierarchy = hierarchy
        self._discovering = discovering

    def last(self, keys: Sequence[ChunkKey]) -> Boundary:
        """Return the last boundary of a prompt. Takes about 1 µs for each chunk that is held after it."""
        catalog = self._hierarchy.catalog
        chunks = len(catalog.prefix(keys))
        for count in range(chunks, 0, -1):
            state = state_key(keys[count - 1])
            if catalog.fastest(state) >= 0:
                return Boundary([*keys[:count], state], chunks)
        return Boundary([], chunks)

    def superseded(self, chunk: ChunkKey) -> list[ChunkKey]:
        """Return the states before the end of ``chunk`` that only served to reach it.

        Where prompts branch, a state stays, and so do those before. Takes about 2 µs for each chunk.
        """
        catalog = self._hierarchy.catalog
        states: list[ChunkKey] = []
        before = catalog.parent(chunk)
        for _ in range(MAX_WALK):
            if before is None:
                break
            state = state_key(before)
            held = catalog.fastest(state) >= 0
            if catalog.children(before) > 1 + held:
                break
            if held:
                states.append(state)
            before = catalog.parent(before)
        return states

    async def ask(self, keys: Sequence[ChunkKey], expected: Expected, state_bytes: int) -> None:
        """Query the shared pools for chunks, then for states after the last boundary held. Adds both."""
        known = await self._discovering.ask(keys, expected)
        after = max(0, len(self.last(keys).needed) - 1)
        chunks = keys[after:known]
        states = Expected(expected.namespace, [state_bytes] * len(chunks), chunks)
        await self._discovering.ask_each([state_key(chunk) for chunk in chunks], states)
