"""Buffers that are sent, or filled, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

BUFFERS_A_CALL = 1024
"""IOV_MAX of Linux."""

Buffers = deque[memoryview]


def buffers_of(buffers: Iterable[bytes | memoryview]) -> Buffers:
    """What is left of them while nothing has been moved."""
    return deque(memoryview(buffer) for buffer in buffers if buffer)


def first_of(buffers: Buffers) -> list[memoryview]:
    """As many as one call takes."""
    return [buffers[index] for index in range(min(len(buffers), BUFFERS_A_CALL))]


def cut(buffers: Iterable[memoryview], length: int) -> list[Buffers]:
    """The buffers in runs of so many bytes, of which the last may have fewer; one that is empty of none."""
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
    """Leave only what comes after so many bytes."""
    while buffers and moved >= len(buffers[0]):
        moved -= len(buffers.popleft())
    if moved:
        buffers[0] = buffers[0][moved:]
