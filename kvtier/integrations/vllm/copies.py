"""Copies of whole pages between an engine's KV memory and the arena, or a staging buffer.

By native code if available, otherwise by torch. Independent of vLLM.

:class:`~kvtier.memory.layout.ChunkLayout` defines the order of pages in a chunk's payload: by rank, then by
group of layers, layer, and block. A staging buffer holds the slices of one rank only, without headers.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from kvtier import native
from kvtier.concurrency.threads import run_in_background
from kvtier.memory.arena import ArenaMap
from kvtier.memory.header import HEADER_BYTES
from kvtier.memory.layout import ChunkLayout

logger = logging.getLogger("vllm.kvtier")

NULL_BLOCK = 0
"""vLLM's placeholder block, which belongs to no request: never read, never written."""


@dataclass(slots=True)
class ChunkCopy:
    """Copy of one chunk between the arena, or a staging buffer, and KV memory.

    ``offset`` is the offset of the chunk object in the arena. With a ``staging`` buffer number, it is the
    offset of each rank's slice in that buffer. ``blocks`` has, for each KV-cache group, one block for each
    stored page; :data:`NULL_BLOCK` for pages that are not loaded.
    """

    lease: int
    offset: int
    tokens: int
    blocks: tuple[list[int], ...]
    staging: int = 0

    def copied(self, layout: ChunkLayout) -> tuple[int, int]:
        """Return the number of tokens that are copied, and the bytes of each rank.

        Without the pages that are not loaded, these are fewer tokens than the chunk has.
        """
        tokens = size = 0
        for group, ids in zip(layout.groups, self.blocks, strict=True):
            left_out = ids.count(NULL_BLOCK)
            size += (len(ids) - left_out) * sum(group.page_bytes)
            if not group.state:  # A window's group stores no page of the tokens before it.
                stop = group.blocks(self.tokens).stop - left_out
                tokens = max(tokens, min(self.tokens, stop * group.block_tokens))
        return tokens, size


Pages = Sequence[Sequence[torch.Tensor]]
"""For each group and layer, the engine's memory as a byte tensor ``(blocks, page_bytes)``, maybe strided."""


class Memory(Protocol):
    """Memory that holds chunks: the arena, or a staging buffer, possibly on a device."""

    def tensor(self) -> torch.Tensor:
        """Return the whole memory as a byte tensor."""


class PageCopies(ABC):
    """Copies the pages of chunks, in all layers. Not thread-safe; releases the GIL.

    All chunks of one call are in the same memory. By default, copies are complete when the call returns.
    """

    deferred = False
    """Whether copies may be in flight when a call returns."""

    def __init__(self, layout: ChunkLayout, rank: int, pages: Pages) -> None:
        self._layout = layout
        self._rank = rank
        self._pages = pages  # Keeps alive the memory that native code references by address only.

    def _slices(self, chunks: Sequence[ChunkCopy]) -> list[tuple[int, Sequence[Sequence[int]]]]:
        """Return the offset of this rank's pages of each chunk, and the chunk's blocks."""
        # Computed once per length: most chunks have the same length, and a model may have a hundred layers.
        before = {
            tokens: self._layout.share(tokens, self._rank) for tokens in {each.tokens for each in chunks}
        }
        return [
            (each.offset if each.staging else each.offset + HEADER_BYTES + before[each.tokens], each.blocks)
            for each in chunks
        ]

    @abstractmethod
    def load(self, memory: Memory, chunks: Sequence[ChunkCopy], after: Sequence[int] = ()) -> int:
        """Copy from ``memory`` to the engine's KV memory; return a ticket for :meth:`done`.

        On the host, blocks until the copy is complete. On a device, the copy is ordered after the work queued
        on the engine's stream, and after the copies whose tickets are in ``after``.
        """

    @abstractmethod
    def save(self, memory: Memory, chunks: Sequence[ChunkCopy]) -> int:
        """Copy from the engine's KV memory to ``memory``; otherwise like :meth:`load`.

        On a device, the engine goes on during the copy: see :meth:`hold`.
        """

    def hold(self, ticket: int) -> None:  # noqa: B027 - has a default on purpose
        """Have work that is queued on the engine's stream from now on wait for a copy. Does not block.

        To be called before work is queued that changes pages of a save.
        """

    def done(self, ticket: int) -> bool:
        """Return whether the copy is complete. Does not block."""
        return True

    def close(self) -> None:  # noqa: B027 - has a default on purpose
        """Wait for running copies and release the arena."""


def regions(pages: Pages) -> list[list[tuple[int, int, int, int]]]:
    """Return the address, page size in bytes, number of pages and their distance of each layer, by group."""
    return [
        [(layer.data_ptr(), layer.shape[1], layer.shape[0], layer.stride(0)) for layer in group]
        for group in pages
    ]


class NativeCopies(PageCopies):
    """One native call for all chunks and layers, on at most ``threads`` threads; 0 chooses their number."""

    def __init__(self, layout: ChunkLayout, rank: int, pages: Pages, *, threads: int = 0) -> None:
        super().__init__(layout, rank, pages)
        self._threads = threads
        self._memory = native.core.KvMemory(regions(pages), NULL_BLOCK)

    def load(self, memory: Memory, chunks: Sequence[ChunkCopy], after: Sequence[int] = ()) -> int:
        """See :meth:`PageCopies.load`."""
        self._memory.load(_bytes_of(memory), self._slices(chunks), self._threads)
        return 0

    def save(self, memory: Memory, chunks: Sequence[ChunkCopy]) -> int:
        """See :meth:`PageCopies.save`."""
        self._memory.save(_bytes_of(memory), self._slices(chunks), self._threads)
        return 0


def _bytes_of(memory: Memory) -> memoryview:
    assert isinstance(memory, ArenaMap), "an engine with its KV cache in host memory only uses ArenaMap"
    return memory.view(0, memory.capacity)


class TorchCopies(PageCopies):
    """One torch operator for each layer of each chunk, on any device that torch supports.

    Optimized for the host only: on a GPU each copy waits for the device.
    """

    def load(self, memory: Memory, chunks: Sequence[ChunkCopy], after: Sequence[int] = ()) -> int:
        """See :meth:`PageCopies.load`."""
        for pages, blocks, held, kept in self._layers(memory.tensor(), chunks):
            pages.index_copy_(0, blocks.to(pages.device), held[kept].to(pages.device))
        self._wait_for_device()
        return 0

    def save(self, memory: Memory, chunks: Sequence[ChunkCopy]) -> int:
        """See :meth:`PageCopies.save`."""
        for pages, blocks, held, kept in self._layers(memory.tensor(), chunks):
            if isinstance(kept, slice) and pages.device.type == "cpu":
                torch.index_select(pages, 0, blocks, out=held[kept])
            else:
                held[kept] = pages.index_select(0, blocks.to(pages.device)).to(held.device)
        self._wait_for_device()
        return 0

    def _wait_for_device(self) -> None:
        if self._pages and self._pages[0][0].device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _layers(
        self, memory: torch.Tensor, chunks: Sequence[ChunkCopy]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, slice | torch.Tensor]]:
        """Yield for each layer of each chunk: engine pages, block ids, chunk pages, indices into those."""
        for chunk in chunks:
            selected = [self._select(blocks) for blocks in chunk.blocks]
            [(first, _)] = self._slices([chunk])
            for span in self._layout.spans(chunk.tokens, 0):
                blocks, kept = selected[span.group]
                if len(blocks):
                    start = first + span.offset
                    held = memory[start : start + span.pages * span.page_bytes]
                    yield (
                        self._pages[span.group][span.layer],
                        blocks,
                        held.view(span.pages, span.page_bytes),
                        kept,
                    )

    def _select(self, blocks: Sequence[int]) -> tuple[torch.Tensor, slice | torch.Tensor]:
        """Return the blocks that are not null, and the indices of their pages in the chunk."""
        if NULL_BLOCK not in blocks:
            return torch.tensor(blocks, dtype=torch.int64), slice(None)
        kept = [page for page, block in enumerate(blocks) if block != NULL_BLOCK]
        selected = torch.tensor([blocks[page] for page in kept], dtype=torch.int64)
        first = kept[0] if kept else 0
        if kept == list(range(first, first + len(kept))):
            return selected, slice(first, first + len(kept))
        return selected, torch.tensor(kept)


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
    """Through bounce buffers on the GPU, on dedicated streams. torch's current stream must be the engine's.

    Copies do not wait for the device, except those from or to a staging buffer, which torch runs. The arena
    is registered with CUDA once, in a separate thread, because that takes about 0.1 s per GiB. Until it is
    registered, and if that fails, torch copies.
    """

    deferred = True

    def __init__(self, layout: ChunkLayout, rank: int, pages: Pages) -> None:
        super().__init__(layout, rank, pages)
        self._device = pages[0][0].device
        self._memory = native.cuda.DevicePages(self._device.index or 0, regions(pages), NULL_BLOCK)
        if not self._memory.staged:
            logger.warning(
                "no 64 MiB of GPU memory are free for bounce buffers, so copies slow down the engine: "
                "lower --gpu-memory-utilization"
            )
        self._torch = TorchCopies(layout, rank, pages)
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
        return self._track(self._memory.load(pinned, self._slices(chunks), self._stream(), after=list(after)))

    def save(self, memory: Memory, chunks: Sequence[ChunkCopy]) -> int:
        """See :meth:`PageCopies.save`. Does not block for copies into the arena."""
        if not isinstance(memory, ArenaMap) or (pinned := self._pinned(memory)) is None:
            return self._torch.save(memory, chunks)
        return self._track(self._memory.save(pinned, self._slices(chunks), self._stream()))

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
        """Block until the copy is complete."""
        try:
            self._memory.wait(ticket)
        finally:
            self._in_flight.discard(ticket)

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


def page_copies(layout: ChunkLayout, rank: int, pages: Pages) -> PageCopies:
    """Return the fastest implementation for these pages."""
    devices = {layer.device.type for group in pages for layer in group}
    if devices == {"cuda"} and not native.cuda_problem():
        try:
            return CudaCopies(layout, rank, pages)
        except native.cuda.CudaError as error:
            logger.warning("cannot use kvtier's own copies on the GPU, using slower ones of torch: %s", error)
    if devices <= {"cpu"} and native.available():
        return NativeCopies(layout, rank, pages)
    return TorchCopies(layout, rank, pages)
