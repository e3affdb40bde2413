"""How long work takes, learned from recent work: bytes that a medium reads, tokens that a model computes.

Nothing is concluded from few samples, from much smaller ones, or from one slow one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

SAMPLES = 8
"""The number of samples that are kept."""
MIN_SAMPLES = 3
"""With fewer, nothing is known."""
MAX_AGE_SECONDS = 120.0
"""Older samples are forgotten: a medium that was slow is tried again."""
COMPARABLE = 1 / 4
"""A sample says nothing about an amount of which it is a smaller part than this: it is mostly overhead."""


class Speeds:
    """Recent samples of one kind of work. Constant memory and time."""

    def __init__(self, plenty: float = float("inf"), clock: Callable[[], float] = time.monotonic) -> None:
        """``plenty``: an amount from which on speed does not depend on the amount."""
        self._plenty = plenty
        self._clock = clock
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=SAMPLES)

    def record(self, amount: float, seconds: float) -> None:
        """Record that an amount has taken some time. Ignored if either is not positive."""
        if amount > 0 and seconds > 0:
            self._samples.append((self._clock(), amount, seconds))

    def expected(self, amount: float) -> float | None:
        """Return how many seconds an amount is expected to take; ``None`` if unknown."""
        now, least = self._clock(), COMPARABLE * min(amount, self._plenty)
        recent = [
            (seconds / size, size, seconds)
            for at, size, seconds in self._samples
            if size >= least and now - at <= MAX_AGE_SECONDS
        ]
        if len(recent) < MIN_SAMPLES:
            return None
        if len(recent) > MIN_SAMPLES:
            recent.remove(max(recent))
        return amount * sum(seconds for _, _, seconds in recent) / sum(size for _, size, _ in recent)


class Throughput:
    """What a medium reads while there is something to read, however many requests it is for."""

    def __init__(self, sample: int, clock: Callable[[], float] = time.monotonic) -> None:
        """``sample``: the bytes of one sample. What is read until the medium is idle is one as well."""
        self._sample = sample
        self._clock = clock
        self._speeds = Speeds(sample, clock)
        self._pending = self._read = 0
        self._began = 0.0

    def begin(self, length: int) -> None:
        """Record that as many bytes are to be read."""
        if not self._pending:
            self._began, self._read = self._clock(), 0
        self._pending += length

    def end(self, length: int, read: int) -> None:
        """Record the end of reads of ``length`` bytes that were begun, of which ``read`` have arrived."""
        self._pending -= length
        self._read += read
        if self._read >= self._sample or not self._pending:
            now = self._clock()
            self._speeds.record(self._read, now - self._began)
            self._began, self._read = now, 0

    def expected(self, length: int) -> float | None:
        """Return in how many seconds as many bytes more will have been read; ``None`` if unknown."""
        return self._speeds.expected(self._pending + length)
