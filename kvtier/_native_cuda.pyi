"""Copies between CUDA devices and the arena (csrc/src/cuda). Imported by :mod:`kvtier.native` alone."""

from collections.abc import Sequence
from enum import Enum

abi: int
"""As in :func:`kvtier._native.build_info`."""

class CudaError(RuntimeError):
    """An error reported by CUDA, for a call or for earlier work on the device."""

class CopyMethod(Enum):
    """How a batch is copied: through bounce buffers on the device if there are any, or by a kernel only."""

    BEST = 0
    DIRECT = 1

def device_count() -> int:
    """Return the number of devices; 0 without a driver."""

def use_device(device: int) -> None:
    """Make a device the current one of this thread. In a new thread that is device 0.

    Almost every function of CUDA creates a context on the current device, of hundreds of megabytes there.
    """

class PinnedMemory:
    """Memory that is registered with CUDA and mapped while this object lives."""

    def __init__(self, memory: memoryview) -> None:
        """Register it: about 0.1 s per GiB, without the GIL. Raises :class:`CudaError`."""

class DevicePages:
    """The addresses of an engine's KV pages on a device, for copies of many pages per call.

    ``groups`` and ``skipped`` are as for :class:`kvtier._native.KvMemory`. Not thread-safe. Takes 64 MiB of
    the device for bounce buffers. The destructor waits for the copies in flight.
    """

    staged: bool
    """Whether there was memory for the bounce buffers. Without them, copies disturb the engine's kernels."""

    def __init__(self, device: int, groups: list[list[tuple[int, int, int, int]]], skipped: int) -> None: ...
    def load(
        self,
        arena: PinnedMemory,
        chunks: list[tuple[int, Sequence[Sequence[int]]]],
        engine: int,
        method: CopyMethod = ...,
        after: Sequence[int] = ...,
    ) -> int:
        """Start to copy the pages of chunks into the engine's memory, after the current work on its stream.

        ``engine``: that stream. ``after``: the tickets of copies to wait for, on the device. Returns a ticket
        for :meth:`done`, without waiting for the device. Raises ``IndexError``, before starting anything, if
        a block or a chunk is out of bounds, and :class:`CudaError`.
        """

    def save(
        self,
        arena: PinnedMemory,
        chunks: list[tuple[int, Sequence[Sequence[int]]]],
        engine: int,
        method: CopyMethod = ...,
        after: Sequence[int] = ...,
    ) -> int:
        """Start to copy pages out of the engine's memory. Otherwise like :meth:`load`.

        Later work on ``engine`` does not wait for the copy: see :meth:`hold`.
        """

    def hold(self, engine: int, ticket: int) -> None:
        """Let later work on the engine's stream wait for a copy.

        Blocks only if CUDA fails, and never raises.
        """

    def done(self, ticket: int) -> bool:
        """Return whether the copy is complete. Does not wait. Raises :class:`CudaError` if it failed."""

    def wait(self, ticket: int) -> None:
        """Wait for the copy, without the GIL."""
