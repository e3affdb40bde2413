"""Pins, remembered: an instance that is restarted knows nothing of those that it was given.

A pin is a run of chunks of one instance, in prefix order, until a time or for good. It ends when it is taken
back, when its time has come, and when its chunks are cleared or moved away.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence

import msgspec

from kvtier.controller.errors import TooManyPins
from kvtier.controller.state import State, Value
from kvtier.keys import ChunkKey, join_keys, split_keys

MOST_KEYS = 250_000
"""Of all pins together: 8 MB. 64 million tokens in chunks of the usual size."""


class Pin(msgspec.Struct, frozen=True, eq=False):
    """One run of pinned chunks."""

    keys: Sequence[ChunkKey]
    until: float
    """On the clock of :func:`time.time`; infinite for a pin without an end."""
    given_at: float


class Pins:
    """All pins of all instances, whether connected or not. Synchronous."""

    def __init__(
        self, state: State, *, most: int = MOST_KEYS, clock: Callable[[], float] = time.time
    ) -> None:
        """Take in what a former run has left in ``state``."""
        self._state = state
        self._most = most
        self._clock = clock
        self._pins: dict[str, dict[ChunkKey, Pin]] = {}
        """By instance and last key."""
        self._keys = 0
        for instance, keys, until, given_at in state.read("SELECT instance, keys, until, given_at FROM pins"):
            assert isinstance(instance, str)
            assert isinstance(keys, bytes)
            assert isinstance(given_at, float)
            self._put(instance, Pin(split_keys(keys), _end(until), given_at))

    def __len__(self) -> int:
        """How many keys are pinned, each counted as often as it is."""
        return self._keys

    def add(
        self, instance: str, keys: Sequence[ChunkKey], seconds: float | None, connected: Collection[str]
    ) -> None:
        """Remember a pin that ``instance`` has been given, in place of one on the very same chunks.

        Where there are too many, those of instances that are not ``connected`` go first, the oldest before
        all. Raises :class:`TooManyPins` where that does not help; what the instance was given stays in force
        until it ends.
        """
        self.check(len(keys), connected)
        if not keys:
            return
        now = self._clock()
        pin = Pin(keys, math.inf if seconds is None else now + seconds, now)
        self._put(instance, pin)
        self._save(instance, pin)

    def check(self, count: int, connected: Collection[str]) -> None:
        """Make room for so many keys more. Raises :class:`TooManyPins`."""
        self._expire()
        if self._keys + count > self._most:
            self._forget_strangers(self._keys + count - self._most, connected)
        if self._keys + count > self._most:
            raise TooManyPins(
                f"{self._keys} chunks are pinned, and with {count} more they would be over {self._most}: "
                "unpin some"
            )

    def drop(self, instance: str, keys: Collection[ChunkKey]) -> None:
        """Forget the pins on these chunks of an instance."""
        wanted = frozenset(keys)
        for last, pin in list(self._pins.get(instance, {}).items()):
            left = [key for key in pin.keys if key not in wanted]
            if len(left) == len(pin.keys):
                continue
            self._remove(instance, last)
            if left:
                rest = Pin(left, pin.until, pin.given_at)
                self._put(instance, rest)
                self._save(instance, rest)

    def has(self, instance: str) -> bool:
        """Whether anything is pinned at an instance."""
        return instance in self._pins

    def keys(self, instance: str) -> list[ChunkKey]:
        """All that is pinned at an instance."""
        return list({key for pin in self._pins.get(instance, {}).values() for key in pin.keys})

    def of(self, instance: str) -> list[tuple[Sequence[ChunkKey], float | None]]:
        """What is pinned at an instance, and for how many seconds more; ``None`` for good."""
        self._expire()
        now = self._clock()
        return [
            (pin.keys, None if math.isinf(pin.until) else pin.until - now)
            for pin in self._pins.get(instance, {}).values()
        ]

    def _put(self, instance: str, pin: Pin) -> None:
        pins = self._pins.setdefault(instance, {})
        before = pins.get(pin.keys[-1])
        if before is not None:
            self._keys -= len(before.keys)
        pins[pin.keys[-1]] = pin
        self._keys += len(pin.keys)

    def _save(self, instance: str, pin: Pin) -> None:
        until = None if math.isinf(pin.until) else pin.until
        row = (instance, pin.keys[-1], join_keys(pin.keys), until, pin.given_at)
        self._state.write("REPLACE INTO pins VALUES (?, ?, ?, ?, ?)", [row])

    def _remove(self, instance: str, last: ChunkKey) -> None:
        self._keys -= len(self._pins[instance].pop(last).keys)
        if not self._pins[instance]:
            del self._pins[instance]
        self._state.write("DELETE FROM pins WHERE instance = ? AND last = ?", [(instance, last)])

    def _expire(self) -> None:
        now = self._clock()
        over = [
            (instance, last)
            for instance, pins in self._pins.items()
            for last, pin in pins.items()
            if pin.until <= now
        ]
        for instance, last in over:
            self._remove(instance, last)

    def _forget_strangers(self, count: int, connected: Collection[str]) -> None:
        strangers = [
            (pin.given_at, instance, last)
            for instance, pins in self._pins.items()
            if instance not in connected
            for last, pin in pins.items()
        ]
        for _, instance, last in sorted(strangers):
            if count <= 0:
                return
            count -= len(self._pins[instance][last].keys)
            self._remove(instance, last)


def _end(until: Value) -> float:
    return until if isinstance(until, float) else math.inf
