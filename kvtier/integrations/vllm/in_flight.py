"""Copies in flight on a GPU, and the blocks that they read: the engine waits only before it changes these."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from kvtier.integrations.vllm.copies import NULL_BLOCK, ChunkCopy, Memory, PageCopies
from kvtier.memory.layout import STATE_TOKENS, ChunkLayout

MAX_PART_BYTES = 32 << 20
"""Maximum size of a copy of several chunks. The engine waits for whole copies: 0.6 ms of PCIe 5."""
MAX_SHARE = 4
"""Saves in flight read at most one in :data:`MAX_SHARE` of the engine's blocks, young ones any number."""
YOUNG_STEPS = 2
"""The saves of the two steps before this one are young: with vLLM's asynchronous scheduling, the GPU still
computes the last one, and has just computed the one before.
"""


class CopiesInFlight:
    """An engine's copies, each after those that it depends on. Not thread-safe. No call waits for a GPU.

    On the host, none is in flight when a call returns. On a GPU, vLLM keeps most of the blocks that saves
    read: those of running requests, and of finished ones until their last save. What it has given to another
    request is in the list of the first step that may write it (``written_blocks``). It does not name the
    blocks of states, which it may overwrite in any step.
    """

    def __init__(
        self, copies: PageCopies, layout: ChunkLayout, blocks: int, *, writes_before_hooks: bool = False
    ) -> None:
        """``blocks``: number of the engine's blocks.

        ``writes_before_hooks``: whether a step may write blocks before :meth:`protect`. Then the engine waits
        for every save.
        """
        self._copies = copies
        self._layout = layout
        self._max_read = blocks // MAX_SHARE
        self._writes_before_hooks = writes_before_hooks
        self.reads: dict[int, set[int]] = {}
        """The blocks that each save in flight reads, by its ticket."""
        self._states: set[int] = set()
        """Saves of states."""
        self._steps: deque[set[int]] = deque([set()], maxlen=YOUNG_STEPS + 1)
        """The saves of the last steps and, at the end, of this one."""

    def next_step(self) -> None:
        """Note that the copies to come are those of the next step."""
        self._steps.append(set())

    def load(self, memory: Memory, chunks: Sequence[ChunkCopy]) -> int:
        """Copy from ``memory`` to the engine's pages; return a ticket for :meth:`done`."""
        after = self._reading(_blocks_of(chunks)) if self.reads else ()
        return self._copies.load(memory, chunks, after)

    def save(self, memory: Memory, chunks: Sequence[ChunkCopy], tickets: list[int]) -> bool:
        """Copy from the engine's pages to ``memory``; add the ticket of each copy that begins to ``tickets``.

        It is there even if a later copy raises. Return ``False`` if none has begun, because too many blocks
        are being read: a slow device must not keep the engine's blocks.
        """
        if not self._copies.deferred:
            tickets.append(self._copies.save(memory, chunks))
            return True
        if not self._admits(chunks):
            return False
        for part in _parts(self._layout, chunks):
            ticket = self._copies.save(memory, part)
            tickets.append(ticket)
            self._steps[-1].add(ticket)
            self.reads[ticket] = _blocks_of(part)
            if any(chunk.tokens == STATE_TOKENS for chunk in part):
                self._states.add(ticket)
            if self._writes_before_hooks:
                self._copies.hold(ticket)
        return True

    def protect(self, written: Collection[int]) -> None:
        """Have the engine's stream wait for the saves that read blocks which the next step may change.

        Those are ``written``, and the blocks of states.
        """
        if self._writes_before_hooks:  # It waits for all of them already.
            return
        held = {*self._reading(written), *self._states}
        for ticket in sorted(held):
            self._copies.hold(ticket)
        self._forget(held)

    def done(self, tickets: Collection[int]) -> bool:
        """Return whether all of these copies are complete. Raises ``RuntimeError`` if one has failed."""
        try:
            if not all(self._copies.done(ticket) for ticket in tickets):
                return False
        except RuntimeError:
            self._forget(tickets)
            raise
        self._forget(tickets)
        return True

    def close(self) -> None:
        """Wait for running copies and release the arena."""
        self._copies.close()

    def _forget(self, tickets: Collection[int]) -> None:
        for ticket in tickets:
            self.reads.pop(ticket, None)
            self._states.discard(ticket)

    def _reading(self, blocks: Collection[int]) -> list[int]:
        """Return the tickets of the saves that read any of these blocks."""
        if not self.reads:
            return []
        changing = set(blocks)
        return [ticket for ticket, read in self.reads.items() if not read.isdisjoint(changing)]

    def _admits(self, chunks: Sequence[ChunkCopy]) -> bool:
        young = set().union(*islice(self._steps, len(self._steps) - 1))
        reading = sum(len(read) for ticket, read in self.reads.items() if ticket not in young)
        return not reading or reading + len(_blocks_of(chunks)) <= self._max_read


def _blocks_of(chunks: Sequence[ChunkCopy]) -> set[int]:
    """Return the blocks of the pages that are copied."""
    found = {block for chunk in chunks for group in chunk.blocks for block in group}
    found.discard(NULL_BLOCK)
    return found


def _parts(layout: ChunkLayout, chunks: Sequence[ChunkCopy]) -> Iterator[list[ChunkCopy]]:
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
