"""Decides by measurement whether a tier, or a link to a peer, with ``codec: auto`` encodes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple, Protocol

from kvtier.tiers.batches import BATCH_BYTES
from kvtier.tiers.throughput import Throughput

TRIALS = 3
TRIAL_SECONDS = 600.0
"""The codec is measured again after this time: what else the machine does has changed, or the KV has."""
WORTHWHILE, STILL_WORTHWHILE = 1.1, 1.0
"""Reads must become that many times as fast to begin to encode, and to continue."""
WORTHWHILE_IF_FULL = 0.5
"""In a tier that evicts, a chunk that has no room costs a prefill: reads may take twice as long."""


class Choice(Protocol):
    """What is decided, for display."""

    @property
    def encodes(self) -> float:
        """Whether it encodes now, from 0 to 1."""
        ...

    @property
    def gain(self) -> float | None:
        """How many times as fast encoded chunks are read; ``None`` if unknown."""
        ...


class _Trial(NamedTuple):
    """A batch that was encoded, and decoded again."""

    at: float
    chunk_bytes: int
    stored_bytes: int
    seconds: float
    """Of decoding, and for a link also of encoding."""


class CodecChoice:
    """What a medium and a codec have taken, and what follows. For the event loop only.

    A byte of a chunk that is stored as it is takes as long as the medium does; an encoded one takes a part of
    that, and the time of decoding. The medium is measured by all reads, or by writes while there are too few
    of them.
    """

    def __init__(
        self,
        is_full: Callable[[], bool],
        min_gain: float,
        *,
        reads: Throughput | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``is_full``: whether the tier evicts. ``min_gain``: the part of the bytes that it must save.

        ``reads``: measures the medium, if that is done anyway.
        """
        self._is_full = is_full
        self._min_gain = min_gain
        self._clock = clock
        self.reads = reads or Throughput(BATCH_BYTES, max_age=TRIAL_SECONDS, clock=clock)
        self.writes = Throughput(BATCH_BYTES, max_age=TRIAL_SECONDS, clock=clock)
        self._trials: deque[_Trial] = deque(maxlen=TRIALS)
        self._encodes = True

    @property
    def needs_trial(self) -> bool:
        """Whether the next batch is to be encoded and decoded, to measure the codec."""
        oldest = self._trials[0].at if len(self._trials) == TRIALS else -TRIAL_SECONDS
        return self._clock() - oldest >= TRIAL_SECONDS

    def tried(self, chunk_bytes: int, stored_bytes: int, seconds: float) -> None:
        """Record a batch: its length, its length when encoded, and the seconds that its readers wait."""
        self._trials.append(_Trial(self._clock(), chunk_bytes, stored_bytes, seconds))

    @property
    def gain(self) -> float | None:
        """How many times as fast encoded chunks are read; ``None`` if unknown."""
        if not self._trials:
            return None
        # As measured with batches of about the size of the last one.
        amount = self._trials[-1].stored_bytes
        medium = self.reads.seconds_per_unit(amount) or self.writes.seconds_per_unit(amount)
        if medium is None:
            return None
        # The middle one: on a busy machine, a thread may have waited during one of them.
        return median(
            medium * trial.chunk_bytes / (medium * trial.stored_bytes + trial.seconds)
            for trial in self._trials
        )

    @property
    def encodes(self) -> bool:
        """Whether encoding pays now. Until that is known, it is assumed to."""
        chunk_bytes = sum(trial.chunk_bytes for trial in self._trials)
        saved = chunk_bytes - sum(trial.stored_bytes for trial in self._trials)
        if self._trials and saved < self._min_gain * chunk_bytes:
            return False
        if (gain := self.gain) is not None:
            worthwhile = STILL_WORTHWHILE if self._encodes else WORTHWHILE
            self._encodes = gain >= (WORTHWHILE_IF_FULL if self._is_full() else worthwhile)
        return self._encodes
