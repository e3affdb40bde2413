"""How answers end, and which endings come back soon.

The tool call of an agent ends with other tokens than the last word to a user, and its result follows within
seconds. Which tokens, depends on the model. It is learned from keyed hashes of the last ones.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from blake3 import blake3

SIGNED_TOKENS = 3
"""The last ones of an answer that count: many agents' answers end alike before a tool call."""
MAX_SIGNATURE = 8
"""Maximum number of hashes in a signature, of any version."""
SOON_SECONDS = 60.0
"""Nearly all results of tools come within this time, and few users answer."""
PERIOD_SECONDS = 5.0
SLOTS = 4096
PRIOR = 8.0
"""As many observations as the shorter suffix counts for."""
FORGET = 256.0
"""Observations of a suffix after which they are halved, to follow another template or tool."""
LIMITS = tuple(1 / (1 + odds) for odds in (4, 1, 1 / 4, 1 / 16, 1 / 64))
"""Rates of not coming back soon that separate the classes. By odds: 1 % to 4 % is as far as 20 % to 50 %."""
ENDINGS = len(LIMITS) + 1


def signature(key: bytes, how: str, tokens: Sequence[int]) -> tuple[int, ...]:
    """Return hashes of how an answer ended: without its tokens, with its last one, last two and last three.

    ``key``: 32 random bytes. Without them, it cannot be tried which tokens have these hashes. Takes 4 µs.
    """
    encoded = how.encode(errors="replace")
    # Its length goes first, so that no other text looks like this one and a token.
    hasher = blake3(len(encoded).to_bytes(4, "little") + encoded, key=key)
    hashes = [hasher.digest(8)]
    for token in reversed(tokens[-SIGNED_TOKENS:]):
        hasher.update((int(token) & 0xFFFF_FFFF).to_bytes(4, "little"))
        hashes.append(hasher.digest(8))
    return tuple(int.from_bytes(hashed, "little") for hashed in hashes)


class _Period(NamedTuple):
    """The endings of some seconds by slot. Not all of them can have come back yet."""

    begun: float
    ended: Counter[int]
    soon: Counter[int]


class Endings:
    """The rates at which endings come back soon, by suffix. 700 kB, and 0.4 for an answer of this minute.

    A suffix has a slot, which a new one takes over when this one has not occurred for longest. Endings count
    after :data:`SOON_SECONDS`: earlier, those that are still away would look like those that stay away.
    """

    def __init__(self) -> None:
        self._slots: OrderedDict[int, int] = OrderedDict()
        """The slot of each hash, the least recent first. A suffix is more recent than any longer one."""
        self._parents = array("H", bytes(2 * SLOTS))
        """The slot of the next shorter suffix; 0 is that of all endings."""
        self._ended, self._soon = array("f", bytes(4 * SLOTS)), array("f", bytes(4 * SLOTS))
        self._recent: deque[_Period] = deque()

    def answer_ended(self, signature: Sequence[int], now: float) -> int:
        """Count an answer that has ended. Return the slot of its longest suffix; 0 without a signature."""
        self._settle(now)
        slot = 0
        for hashed in signature:
            slot = self._find(hashed, slot)
        for hashed in reversed(signature):
            self._slots.move_to_end(hashed)
        if slot:
            self._period(now).ended.update(self._suffixes(slot))
        return slot

    def returned(self, slot: int, gap: float, now: float) -> None:
        """Count that a prompt came back ``gap`` seconds after the end of its answer."""
        if slot and gap <= SOON_SECONDS and self._recent:
            self._period(now - gap).soon.update(self._suffixes(slot))

    def ending(self, slot: int) -> int:
        """Return the class of an ending, below :data:`ENDINGS`. Those of class 0 come back soonest."""
        return bisect_right(LIMITS, 1.0 - self.rate(slot))

    def rate(self, slot: int) -> float:
        """Return the part of the answers with an ending that come back soon."""
        rate = 0.5  # Nothing is known.
        for at in reversed(self._suffixes(slot)):
            rate = (self._soon[at] + PRIOR * rate) / (self._ended[at] + PRIOR)
        return min(1.0, rate)

    def _find(self, hashed: int, parent: int) -> int:
        """Return the slot of a hash, as the most recent one. Give it one if it has none."""
        if slot := self._slots.get(hashed, 0):
            self._slots.move_to_end(hashed)
            return slot
        used = len(self._slots)
        slot = used + 1 if used < SLOTS - 1 else self._slots.popitem(last=False)[1]
        self._slots[hashed], self._parents[slot] = slot, parent
        self._ended[slot] = self._soon[slot] = 0.0
        return slot

    def _suffixes(self, slot: int) -> list[int]:
        """Return the slot, those of its shorter suffixes, and 0."""
        slots = [slot]
        # Hashes that are no signature could form a circle.
        while slots[-1] and len(slots) < SIGNED_TOKENS + 2:
            slots.append(self._parents[slots[-1]])
        return slots

    def _period(self, at: float) -> _Period:
        """Return the period of a time, or the oldest one."""
        return next((period for period in reversed(self._recent) if period.begun <= at), self._recent[0])

    def _settle(self, now: float) -> None:
        """Count the periods from which nothing can come back soon any more. Begin one if it is time to."""
        while self._recent and now - self._recent[0].begun > SOON_SECONDS + PERIOD_SECONDS:
            period = self._recent.popleft()
            for slot in period.ended.keys() | period.soon.keys():
                if self._ended[slot] > FORGET:
                    self._ended[slot] *= 0.5
                    self._soon[slot] *= 0.5
                self._ended[slot] += period.ended[slot]
                self._soon[slot] += period.soon[slot]
        if not self._recent or now - self._recent[-1].begun > PERIOD_SECONDS:
            self._recent.append(_Period(now, Counter(), Counter()))
