"""What the saves in flight on a GPU read: the engine waits for one only before it changes its blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from kvtier.integrations.vllm.copies import NULL_BLOCK, ChunkCopy
from kvtier.memory.layout import STATE_TOKENS, ChunkLayout

MAX_PART_BYTES = 32 << 20
"""Maximum size of a copy of several chunks. The engine waits for whole copies: 0.6 ms of PCIe 5."""
MAX_SHARE = 4
"""Saves in flight read at most one in so many of the engine's blocks; those of three steps, any number."""
YOUNG_STEPS = 2
"""The saves of so many steps before this one are not late: with vLLM's asynchronous scheduling, the GPU still
computes the last one, and has just computed the one before.
"""


class Reads:
    """The blocks that each save in flight reads. Not thread-safe.

    vLLM keeps most of them: those of running requests, and of finished ones until their last save. What it
    has given to another request is in the list of the first step that may write it (``written_blocks``). It
    does not name the blocks of states, which it may overwrite in any step.
    """

    def __init__(self, blocks: int) -> None:
        """``blocks``: number of the engine's blocks."""
        self._max = blocks // MAX_SHARE
        self._by_ticket: dict[int, set[int]] = {}
        self._states: set[int] = set()
        """Copies of states."""
        self._steps: deque[set[int]] = deque([set()], maxlen=YOUNG_STEPS + 1)
        """The copies of the last steps and, at the end, of this one."""

    def next_step(self) -> None:
        """Note that the copies to come are those of the next step."""
        self._steps.append(set())

    def add(self, ticket: int, chunks: Sequence[ChunkCopy]) -> None:
        """Add a copy that has begun."""
        self._steps[-1].add(ticket)
        self._by_ticket[ticket] = blocks_of(chunks)
        if any(chunk.tokens == STATE_TOKENS for chunk in chunks):
            self._states.add(ticket)

    def remove(self, tickets: Collection[int]) -> None:
        """Remove copies that are done, or that the engine's stream waits for."""
        for ticket in tickets:
            self._by_ticket.pop(ticket, None)
            self._states.discard(ticket)

    def of(self, blocks: Collection[int]) -> list[int]:
        """Return the tickets of the copies that read any of these blocks."""
        if not self._by_ticket:
            return []
        changing = set(blocks)
        return [ticket for ticket, read in self._by_ticket.items() if not read.isdisjoint(changing)]

    def of_states(self) -> list[int]:
        """Return the tickets of the copies that read states."""
        return list(self._states)

    def admits(self, chunks: Sequence[ChunkCopy]) -> bool:
        """Return whether so many more blocks may be read: a slow device must not keep the engine's blocks."""
        young = set().union(*islice(self._steps, len(self._steps) - 1))
        reading = sum(len(read) for ticket, read in self._by_ticket.items() if ticket not in young)
        return not reading or reading + len(blocks_of(chunks)) <= self._max


def blocks_of(chunks: Sequence[ChunkCopy]) -> set[int]:
    """Return the blocks of the pages that are copied."""
    found = {block for chunk in chunks for group in chunk.blocks for block in group}
    found.discard(NULL_BLOCK)
    return found


def parts(layout: ChunkLayout, chunks: Sequence[ChunkCopy]) -> Iterator[list[ChunkCopy]]:
    """Yield parts of up to :data:`MAX_PART_BYTES`, states first: the next step waits for these."""
    states = [chunk for chunk in chunks if chunk.tokens == STATE_TOKENS]
    part, length = states, MAX_PART_BYTES
    for chunk in chunks:
        if chunk.tokens == STATE_TOKENS:
            continue
        size = layout.rank_bytes(chunk.tokens)
        if length + size > MAX_PART_BYTES:
            if part:
                yield part
            part, length = [], 0
        part.append(chunk)
        length += size
    if part:
        yield part
