"""Persistent pins. Instances lose theirs on a restart, so the controller stores and restores them.

A pin covers a run of chunks of one instance, in prefix order, with or without an expiry time. It ends when it
is unpinned, when it expires, and when its chunks are cleared or moved away.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import msgspec

from kvtier.fleet.controller.errors import TooManyPins
from kvtier.fleet.controller.state import PINS, State
from kvtier.memory.keys import ChunkKey, join_keys, split_keys

MAX_KEYS = 250_000
"""Total keys of all pins, which take 8 MB: 64 million tokens at the default chunk size."""


class Pin(msgspec.Struct, frozen=True, eq=False):
    """One run of pinned chunks."""

    keys: Sequence[ChunkKey]
    until: float
    """Expiry as a :func:`time.time`; infinite for a pin without one."""
    given_at: float


class Pins:
    """All pins of all instances, whether connected or not. Synchronous."""

    def __init__(
        self, state: State, *, max_keys: int = MAX_KEYS, clock: Callable[[], float] = time.time
    ) -> None:
        """Load the pins of a previous run from ``state``."""
        self._state = state
        self._max_keys = max_keys
        self._clock = clock
        self._pins: dict[str, dict[ChunkKey, Pin]] = {}
        """By instance and last key of the run."""
        self._counts: Counter[str] = Counter()
        """Pinned keys by instance, counting a key once per pin."""
        self._first_end = math.inf
        """No pin expires before."""
        for instance, pin in state.decoded(state.rows(PINS), _decode):
            self._put(instance, pin)

    def __len__(self) -> int:
        """Return the number of pinned keys, counting a key once per pin."""
        return self._counts.total()

    def count(self, instance: str) -> int:
        """Return the number of pinned keys of an instance, counting a key once per pin."""
        self._expire()
        return self._counts[instance]

    def newest(self, instance: str | None = None) -> list[tuple[str, Pin]]:
        """Return the pins of an instance, or of all, with the instance's id, newest first."""
        self._expire()
        instances = self._pins if instance is None else [instance]
        pins = [(each, pin) for each in instances for pin in self._pins.get(each, {}).values()]
        return sorted(pins, key=lambda item: -item[1].given_at)

    def add(
        self, instance: str, keys: Sequence[ChunkKey], seconds: float | None, connected: Collection[str]
    ) -> None:
        """Store a pin of ``instance``. ``seconds`` is its time to live.

        Of two pins on a run the longer one counts, as on the instance.
        Beyond the limit, pins of instances that are not ``connected`` are dropped first, oldest first.

        Raises: TooManyPins: the limit is still exceeded. The pin on the instance itself stays in force.
        """
        self.check(len(keys), connected)
        if not keys:
            return
        now = self._clock()
        self._save(instance, Pin(keys, math.inf if seconds is None else now + seconds, now))

    def check(self, count: int, connected: Collection[str]) -> None:
        """Make room for ``count`` more keys. Raises: TooManyPins."""
        self._expire()
        if len(self) + count > self._max_keys:
            self._drop_disconnected(len(self) + count - self._max_keys, connected)
        if len(self) + count > self._max_keys:
            raise TooManyPins(
                f"{len(self)} chunks are pinned; {count} more would exceed the limit of {self._max_keys}: "
                "unpin some"
            )

    def drop(self, instance: str, keys: Collection[ChunkKey]) -> list[ChunkKey]:
        """Delete the pins on these chunks of an instance. Return those that were pinned."""
        self._expire()
        dropped = frozenset(keys)
        unpinned: set[ChunkKey] = set()
        for last, pin in list(self._pins.get(instance, {}).items()):
            left = [key for key in pin.keys if key not in dropped]
            if len(left) == len(pin.keys):
                continue
            unpinned.update(dropped.intersection(pin.keys))
            self._remove(instance, last)
            if left:
                self._save(instance, Pin(left, pin.until, pin.given_at))
        return list(unpinned)

    def keys(self, instance: str) -> list[ChunkKey]:
        """Return all pinned keys of an instance."""
        return list({key for pin in self._pins.get(instance, {}).values() for key in pin.keys})

    def of(self, instance: str) -> list[tuple[Sequence[ChunkKey], float | None]]:
        """Return an instance's pins with their remaining time in seconds; ``None`` for no expiry."""
        self._expire()
        now = self._clock()
        return [
            (pin.keys, None if math.isinf(pin.until) else pin.until - now)
            for pin in self._pins.get(instance, {}).values()
        ]

    def _put(self, instance: str, pin: Pin) -> Pin:
        """Add a pin, merged with one that ends with the same chunk; return it."""
        pins = self._pins.setdefault(instance, {})
        before = pins.get(pin.keys[-1])
        if before is not None:
            self._counts[instance] -= len(before.keys)
            # Drops and restarts look a pin up by its last key, which both have.
            shorter, longer = sorted((before.keys, pin.keys), key=len)
            keys = list(dict.fromkeys([*(set(shorter) - set(longer)), *longer]))
            pin = Pin(keys, max(pin.until, before.until), max(pin.given_at, before.given_at))
        pins[pin.keys[-1]] = pin
        self._first_end = min(self._first_end, pin.until)
        self._counts[instance] += len(pin.keys)
        return pin

    def _save(self, instance: str, added: Pin) -> None:
        pin = self._put(instance, added)
        until = None if math.isinf(pin.until) else pin.until
        row = (instance, pin.keys[-1], join_keys(pin.keys), until, pin.given_at)
        self._state.put(PINS, row)

    def _remove(self, instance: str, last: ChunkKey) -> None:
        self._counts[instance] -= len(self._pins[instance].pop(last).keys)
        if not self._pins[instance]:
            del self._pins[instance], self._counts[instance]
        self._state.delete(PINS, [(instance, last)])

    def _expire(self) -> None:
        now = self._clock()
        if now < self._first_end:  # A list of instances asks for each of them.
            return
        expired = [
            (instance, last)
            for instance, pins in self._pins.items()
            for last, pin in pins.items()
            if pin.until <= now
        ]
        for instance, last in expired:
            self._remove(instance, last)
        left = (pin.until for pins in self._pins.values() for pin in pins.values())
        self._first_end = min(left, default=math.inf)

    def _drop_disconnected(self, count: int, connected: Collection[str]) -> None:
        disconnected = [
            (pin.given_at, instance, last)
            for instance, pins in self._pins.items()
            if instance not in connected
            for last, pin in pins.items()
        ]
        for _, instance, last in sorted(disconnected):
            if count <= 0:
                return
            count -= len(self._pins[instance][last].keys)
            self._remove(instance, last)


def _decode(row: object) -> tuple[str, Pin]:
    instance, last, joined, until, given_at = msgspec.convert(
        row, tuple[str, bytes, bytes, float | None, float]
    )
    keys = split_keys(joined)
    if not keys or keys[-1] != last:
        raise ValueError("its chunks are not those of its key")
    return instance, Pin(keys, math.inf if until is None else until, given_at)
