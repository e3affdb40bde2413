"""How long work takes, learned from recent work: reads of a medium or a peer, or the prefill of prompts.

:mod:`kvtier.tiers.costs` answers another question, which of several media is the cheapest for one read: it
separates latency from bandwidth, and includes failures.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

SAMPLES = 8
"""The number of samples that are kept."""
MIN_SAMPLES = 3
"""With fewer, nothing is known. With more, the slowest one is ignored: a disk may have been asleep."""
MAX_AGE_SECONDS = 120.0
"""Older samples are forgotten: a medium that was slow is tried again."""
COMPARABLE = 1 / 4
"""Samples that are smaller than this part of an amount are ignored for it: most of their time is overhead."""


class Throughput:
    """Recent samples of one kind of work. Constant memory and time; not thread-safe.

    Measure work with :meth:`begin` and :meth:`end`, or pass what was measured to :meth:`record`.
    """

    def __init__(
        self,
        sample: float = float("inf"),
        *,
        least: float = 0.0,
        min_samples: int = MIN_SAMPLES,
        max_age: float = MAX_AGE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``sample``: the amount of one sample; for larger amounts, the time per unit is the same.

        Work that ends before is a sample as well if it is at least ``least``; otherwise more is added to it.
        """
        self._sample, self._least = sample, least
        self._min_samples, self._max_age = min_samples, max_age
        self._clock = clock
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=SAMPLES)
        """When each was recorded, its amount, and its seconds."""
        self._pending = self._done = 0
        self._began = self._busy_seconds = 0.0

    def begin(self, amount: int) -> None:
        """Record the begin of work, which may overlap with other work."""
        if not self._pending:
            self._began = self._clock()
        self._pending += amount

    def end(self, amount: int, done: int) -> None:
        """Record the end of work on ``amount`` that was begun, of which ``done`` has succeeded."""
        now = self._clock()
        self._pending -= amount
        self._done += done
        self._busy_seconds += now - self._began
        self._began = now
        if self._done >= self._sample or (not self._pending and self._done >= self._least):
            self.record(self._done, self._busy_seconds)
            self._done, self._busy_seconds = 0, 0.0

    def record(self, amount: float, seconds: float) -> None:
        """Record that an amount has taken some time. Ignored if either is not positive."""
        if amount > 0 and seconds > 0:
            self._samples.append((self._clock(), amount, seconds))

    def expected(self, amount: float) -> float | None:
        """Return in how many seconds all pending work and ``amount`` more is done; ``None`` if unknown."""
        total = self._pending + amount
        seconds = self.seconds_per_unit(total)
        return None if seconds is None else total * seconds

    def seconds_per_unit(self, amount: float) -> float | None:
        """Return the seconds per unit of an amount; ``None`` if unknown."""
        now, least = self._clock(), COMPARABLE * min(amount, self._sample)
        recent = [
            (seconds / size, size, seconds)
            for at, size, seconds in self._samples
            if size >= least and now - at <= self._max_age
        ]
        if len(recent) < self._min_samples:
            return None
        if len(recent) > MIN_SAMPLES:
            recent.remove(max(recent))
        return sum(seconds for _, _, seconds in recent) / sum(size for _, size, _ in recent)
