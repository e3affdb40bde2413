"""Copies between CUDA devices and the arena (csrc/src/cuda). Imported by :mod:`kvtier.native` alone."""

from collections.abc import Sequence
from enum import Enum

abi: int
"""As in :func:`kvtier._native.build_info`."""

class CudaError(RuntimeError):
    """What CUDA has to say against a call, or what went wrong on the device."""

class Carrier(Enum):
    """Who carries a batch: one kernel, the copy engines, or whichever suits its pages."""

    BEST = 0
    KERNEL = 1
    COPY_ENGINES = 2

def device_count() -> int:
    """How many devices there are; 0 without a driver, too."""

class PinnedMemory:
    """Memory that is registered with CUDA, and stays mapped, as long as this lives."""

    def __init__(self, memory: memoryview) -> None:
        """Pin it: some 0.1 s a GiB, without the GIL. Raises :class:`CudaError`."""

class DevicePages:
    """Where the pages of an engine's KV memory lie on a device, to copy many of them at once.

    ``groups`` and ``skipped`` are as for :class:`kvtier._native.KvMemory`. Called from one thread at a time.
    Waits, when it is let go of, for the copies that are under way.
    """

    def __init__(self, device: int, groups: list[list[tuple[int, int, int]]], skipped: int) -> None: ...
    def load(
        self,
        arena: PinnedMemory,
        chunks: list[tuple[int, Sequence[Sequence[int]]]],
        engine: int,
        carrier: Carrier = ...,
    ) -> int:
        """Begin to copy chunks' pages into the engine's memory, behind all that is on its stream now.

        ``engine`` is that stream. Does not wait for the device; the ticket tells whether it is done. Raises
        ``IndexError``, before anything is begun, where a block or a chunk lies outside its memory, and
        :class:`CudaError`.
        """

    def save(
        self,
        arena: PinnedMemory,
        chunks: list[tuple[int, Sequence[Sequence[int]]]],
        engine: int,
        carrier: Carrier = ...,
    ) -> int:
        """Begin to copy chunks' pages out of the engine's memory; else like :meth:`load`.

        What is put on ``engine`` later waits for it.
        """

    def done(self, ticket: int) -> bool:
        """Whether that copy is done. Does not wait. Raises :class:`CudaError` where it has failed."""

    def wait(self, ticket: int) -> None:
        """Wait until it is done, without the GIL."""
