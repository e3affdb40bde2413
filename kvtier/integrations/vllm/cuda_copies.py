"""Copies of whole pages between the arena and a GPU: a batch in one launch, on streams of their own.

Nothing here waits for the device, but for what is copied from or to a staging buffer, which torch does. The
arena is registered with CUDA once, in a thread of its own, since that takes some 0.1 s a GiB; until it is
done, and where it fails, torch copies.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import torch

from kvtier import native
from kvtier.arena import ArenaMap
from kvtier.integrations.vllm.copies import ChunkCopy, Memory, Pages, TorchCopies, placed, regions
from kvtier.layout import ChunkLayout
from kvtier.threads import run_in_background

logger = logging.getLogger("vllm.kvtier")


class Pinning:
    """One arena that is registered, or about to be."""

    def __init__(self, arena: ArenaMap) -> None:
        self.arena = arena
        self.memory: native.cuda.PinnedMemory | None = None
        self._ended = threading.Event()
        try:
            run_in_background(self._pin)
        except RuntimeError as error:  # The system gives no thread.
            logger.warning("the arena cannot be registered with CUDA, so torch copies, slower: %s", error)
            self._ended.set()

    def _pin(self) -> None:
        try:
            self.arena.take_large_pages()  # What is pinned stays in the pages that it is in.
            self.memory = native.cuda.PinnedMemory(self.arena.view(0, self.arena.capacity))
        except (native.cuda.CudaError, OSError, ValueError) as error:
            logger.warning("the arena cannot be registered with CUDA, so torch copies, slower: %s", error)
        finally:
            self._ended.set()

    def wait(self) -> None:
        """Block until it is registered, or has failed to be."""
        self._ended.wait()

    def release(self) -> None:
        """Unregister it, in a thread, as that takes as long as registering. No copy may use it."""
        try:
            run_in_background(self._unpin)
        except RuntimeError:  # The system gives no thread.
            self._unpin()

    def _unpin(self) -> None:
        self._ended.wait()
        self.memory = None


class CudaCopies:
    """See :class:`~kvtier.integrations.vllm.copies.PageCopies`. torch's current stream is the engine's."""

    def __init__(self, layout: ChunkLayout, rank: int, pages: Pages, null_block: int) -> None:
        self._layout = layout
        self._rank = rank
        self._pages = pages  # Holds the memory that is known below by its address alone.
        self._device = pages[0][0].device
        self._memory = native.cuda.DevicePages(self._device.index or 0, regions(pages), null_block)
        self._torch = TorchCopies(layout, rank, pages, null_block)
        self._pinning: Pinning | None = None
        self._replaced: list[tuple[Pinning, set[int]]] = []
        """The arenas of earlier cache processes, and the copies that may still use them."""
        self._under_way: set[int] = set()

    def load(self, memory: Memory, chunks: Sequence[ChunkCopy]) -> int:
        """See :meth:`PageCopies.load`. Returns at once, from the arena."""
        if not isinstance(memory, ArenaMap) or (pinned := self._pinned(memory)) is None:
            return self._torch.load(memory, chunks)
        wanted = placed(self._layout, self._rank, chunks)
        return self._began(self._memory.load(pinned, wanted, self._stream()))

    def save(self, memory: Memory, chunks: Sequence[ChunkCopy]) -> int:
        """See :meth:`PageCopies.save`. Returns at once, into the arena."""
        if not isinstance(memory, ArenaMap) or (pinned := self._pinned(memory)) is None:
            return self._torch.save(memory, chunks)
        wanted = placed(self._layout, self._rank, chunks)
        return self._began(self._memory.save(pinned, wanted, self._stream()))

    def done(self, ticket: int) -> bool:
        """See :meth:`PageCopies.done`."""
        try:
            done = bool(self._memory.done(ticket))
        except native.cuda.CudaError:
            self._under_way.discard(ticket)
            raise
        if done:
            self._under_way.discard(ticket)
        return done

    def wait(self, ticket: int) -> None:
        """See :meth:`PageCopies.wait`."""
        self._memory.wait(ticket)
        self._under_way.discard(ticket)

    def pin(self, arena: ArenaMap) -> bool:
        """Block until the arena is registered; whether it is."""
        self._pinned(arena)
        if self._pinning is None:
            return False
        self._pinning.wait()
        return self._pinning.memory is not None

    def close(self) -> None:
        """See :meth:`PageCopies.close`."""
        for ticket in list(self._under_way):
            self.wait(ticket)
        self._replaced.clear()
        if self._pinning is not None:
            self._pinning.wait()
            self._pinning = None

    def _pinned(self, arena: ArenaMap) -> native.cuda.PinnedMemory | None:
        if self._pinning is None or self._pinning.arena is not arena:
            if self._pinning is not None:
                self._replaced.append((self._pinning, set(self._under_way)))
            self._pinning = Pinning(arena)
        self._release_replaced()
        return self._pinning.memory

    def _release_replaced(self) -> None:
        """Unpin arenas of earlier cache processes that no copy uses any more. Does not block."""
        for pinning, tickets in self._replaced:
            tickets &= self._under_way
            if not tickets:
                pinning.release()
        self._replaced = [(pinning, tickets) for pinning, tickets in self._replaced if tickets]

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def _began(self, ticket: int) -> int:
        self._under_way.add(ticket)
        return ticket
