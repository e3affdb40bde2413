"""Copies of whole pages between the arena and a GPU, through bounce buffers there, on dedicated streams.

Copies do not wait for the device, except those from or to a staging buffer, which torch runs. The arena is
registered with CUDA once, in a separate thread, because that takes about 0.1 s per GiB. Until it is
registered, and if that fails, torch copies.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch

from kvtier import native
from kvtier.concurrency.threads import run_in_background
from kvtier.integrations.vllm.copies import (
    ChunkCopy,
    Memory,
    PageCopies,
    Pages,
    TorchCopies,
    rank_slices,
    regions,
)
from kvtier.memory.arena import ArenaMap
from kvtier.memory.layout import ChunkLayout

logger = logging.getLogger("vllm.kvtier")


class Pinning:
    """An arena that is registered with CUDA, or is being registered."""

    def __init__(self, arena: ArenaMap, device: int) -> None:
        self.arena = arena
        self._device = device
        self.memory: native.cuda.PinnedMemory | None = None
        self._ended = threading.Event()
        try:
            run_in_background(self._pin)
        except RuntimeError as error:  # Cannot create a thread.
            logger.warning("cannot register the arena with CUDA, using slower torch copies: %s", error)
            self._ended.set()

    def _pin(self) -> None:
        try:
            native.cuda.use_device(self._device)
            self.arena.take_large_pages()  # Before pinning: pinned memory cannot be moved to large pages.
            self.memory = native.cuda.PinnedMemory(self.arena.view(0, self.arena.capacity))
        except (native.cuda.CudaError, OSError, ValueError) as error:
            logger.warning("cannot register the arena with CUDA, using slower torch copies: %s", error)
        finally:
            self._ended.set()

    def wait(self) -> None:
        """Block until registering has succeeded or failed."""
        self._ended.wait()

    def release(self) -> None:
        """Unregister the arena in a thread, as that takes as long as registering. No copy may use it."""
        try:
            run_in_background(self._unpin)
        except RuntimeError:  # Cannot create a thread.
            self._unpin()

    def _unpin(self) -> None:
        with suppress(native.cuda.CudaError):
            native.cuda.use_device(self._device)
        self.unpin()

    def unpin(self) -> None:
        """Unregister the arena. Blocks until it is, and before that until registering has ended."""
        self._ended.wait()
        # Explicitly: the thread that has registered it may still hold a reference to this object.
        self.memory = None


class CudaCopies(PageCopies):
    """GPU implementation.

    torch's current stream must be the engine's.
    """

    deferred = True

    def __init__(self, layout: ChunkLayout, rank: int, pages: Pages, null_block: int) -> None:
        self._layout = layout
        self._rank = rank
        self._pages = pages  # Keeps alive the memory that is referenced below by address only.
        self._device = pages[0][0].device
        self._memory = native.cuda.DevicePages(self._device.index or 0, regions(pages), null_block)
        if not self._memory.staged:
            logger.warning(
                "no 64 MiB of GPU memory are free for bounce buffers, so copies slow down the engine: "
                "lower --gpu-memory-utilization"
            )
        self._torch = TorchCopies(layout, rank, pages, null_block)
        self._pinning: Pinning | None = None
        self._replaced: list[tuple[Pinning, set[int]]] = []
        """Arenas of earlier cache processes, and the copies that may still use them."""
        self._in_flight: set[int] = set()
        self._failed: dict[int, str] = {}
        """Errors of copies that :meth:`close` has waited for, until :meth:`done` raises them."""

    def load(self, memory: Memory, chunks: Sequence[ChunkCopy], after: Sequence[int] = ()) -> int:
        """See :meth:`PageCopies.load`. Does not block for copies from the arena."""
        if not isinstance(memory, ArenaMap) or (pinned := self._pinned(memory)) is None:
            for ticket in after:  # torch copies on the engine's stream.
                self.hold(ticket)
            return self._torch.load(memory, chunks)
        slices = rank_slices(self._layout, self._rank, chunks)
        return self._track(self._memory.load(pinned, slices, self._stream(), after=list(after)))

    def save(self, memory: Memory, chunks: Sequence[ChunkCopy]) -> int:
        """See :meth:`PageCopies.save`. Does not block for copies into the arena."""
        if not isinstance(memory, ArenaMap) or (pinned := self._pinned(memory)) is None:
            return self._torch.save(memory, chunks)
        slices = rank_slices(self._layout, self._rank, chunks)
        return self._track(self._memory.save(pinned, slices, self._stream()))

    def hold(self, ticket: int) -> None:
        """See :meth:`PageCopies.hold`."""
        self._memory.hold(self._stream(), ticket)

    def done(self, ticket: int) -> bool:
        """See :meth:`PageCopies.done`."""
        if ticket in self._failed:
            raise native.cuda.CudaError(self._failed.pop(ticket))
        try:
            done = bool(self._memory.done(ticket))
        except native.cuda.CudaError:
            self._in_flight.discard(ticket)
            raise
        if done:
            self._in_flight.discard(ticket)
        return done

    def wait(self, ticket: int) -> None:
        """See :meth:`PageCopies.wait`."""
        try:
            self._memory.wait(ticket)
        finally:
            self._in_flight.discard(ticket)

    def pin(self, arena: ArenaMap) -> bool:
        """Block until registering the arena has ended; return whether it succeeded."""
        self._pinned(arena)
        if self._pinning is None:
            return False
        self._pinning.wait()
        return self._pinning.memory is not None

    def close(self) -> None:
        """See :meth:`PageCopies.close`. Afterwards, :meth:`done` raises the errors of failed copies."""
        for ticket in list(self._in_flight):
            try:
                self.wait(ticket)
            except native.cuda.CudaError as error:
                self._failed[ticket] = str(error)
        for pinning, _ in self._replaced:
            pinning.unpin()
        self._replaced.clear()
        if self._pinning is not None:
            self._pinning.unpin()
            self._pinning = None

    def _pinned(self, arena: ArenaMap) -> native.cuda.PinnedMemory | None:
        if self._pinning is None or self._pinning.arena is not arena:
            if self._pinning is not None:
                self._replaced.append((self._pinning, set(self._in_flight)))
            self._pinning = Pinning(arena, self._device.index or 0)
        self._release_replaced()
        return self._pinning.memory

    def _release_replaced(self) -> None:
        """Unpin arenas of earlier cache processes that no copy uses. Does not block."""
        for pinning, tickets in self._replaced:
            tickets &= self._in_flight
            if not tickets:
                pinning.release()
        self._replaced = [(pinning, tickets) for pinning, tickets in self._replaced if tickets]

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def _track(self, ticket: int) -> int:
        self._in_flight.add(ticket)
        return ticket
