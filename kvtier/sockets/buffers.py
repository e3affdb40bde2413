"""Lists of buffers for scatter-gather I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

IOV_MAX = 1024
"""Buffers per system call; IOV_MAX of Linux."""

Buffers = deque[memoryview]


def to_buffers(buffers: Iterable[bytes | memoryview]) -> Buffers:
    """Return views of the non-empty buffers, to be consumed with :func:`advance`."""
    return deque(memoryview(buffer) for buffer in buffers if buffer)


def first_buffers(buffers: Buffers) -> list[memoryview]:
    """Return the leading buffers, as many as one system call takes."""
    return [buffers[index] for index in range(min(len(buffers), IOV_MAX))]


def split_runs(buffers: Iterable[memoryview], length: int) -> list[Buffers]:
    """Split buffers into runs of ``length`` bytes; the last may be shorter. No buffers give one empty run."""
    runs: list[Buffers] = [deque()]
    room = length
    for buffer in buffers:
        left = buffer
        while left:
            if not room:
                runs.append(deque())
                room = length
            runs[-1].append(left[:room])
            room -= len(runs[-1][-1])
            left = left[len(runs[-1][-1]) :]
    return runs


def advance(buffers: Buffers, moved: int) -> None:
    """Drop the first ``moved`` bytes."""
    while buffers and moved >= len(buffers[0]):
        moved -= len(buffers.popleft())
    if moved:
        buffers[0] = buffers[0][moved:]
