"""What this host has promised to its peers: which slices of the arena, until when, and how much in all."""

from __future__ import annotations

import secrets
import time
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence

from kvtier.peers.protocol import NO_GRANT
from kvtier.settings_peer import PeerSettings
from kvtier.slices import Lease, Slices
from kvtier.transports.base import Access, RemoteSpan

MOST_SLICES = 1 << 18
"""That are granted at once, each counted as often as it is granted. Some 40 MiB of Python's memory."""
GRANT_BITS = 63


class Grant:
    """Slices of the arena that one grantee may read, or write. Numbered from 0, as they were granted."""

    __slots__ = (
        "_order",
        "_starts",
        "access",
        "ends",
        "leases",
        "left",
        "number",
        "on_end",
        "owner",
        "unready",
    )

    def __init__(
        self, number: int, owner: Hashable, leases: list[Lease | None], access: Access, ends: float
    ) -> None:
        self.number = number
        self.owner = owner
        self.access = access
        self.ends = ends
        """In the time of the book's clock."""
        self.leases = leases
        """``None`` for each that was given back."""
        self.left = len(leases)
        self.unready: set[int] = set()
        """Those that hold no chunk yet, or never will: nobody may have them."""
        self.on_end: Callable[[], None] | None = None
        """Called once, when it is over: synchronously, and it must not raise."""
        self._starts: list[int] | None = None
        self._order: list[int] = []

    def slice_of(self, span: RemoteSpan) -> Lease | None:
        """The slice within which a span lies, where it may be had."""
        index = self._begins_before(span.offset)
        lease = None if index is None or index in self.unready else self.leases[index]
        if lease is None or span.length <= 0 or span.offset + span.length > lease.offset + lease.length:
            return None
        return lease

    def _begins_before(self, offset: int) -> int | None:
        """The number of the last slice that does not begin after ``offset``."""
        if self._starts is None:
            begins = [-1 if lease is None else lease.offset for lease in self.leases]
            self._order = sorted(range(len(begins)), key=begins.__getitem__)
            self._starts = [begins[index] for index in self._order]
        at = bisect_right(self._starts, offset) - 1
        return self._order[at] if at >= 0 else None


class GrantBook:
    """All grants of this host. Synchronous, for the event loop.

    What is promised stays leased, and so is not evicted, until it is given back, its owner has gone, or its
    time is over, which :meth:`expire` looks after. A transfer that holds a lease of its own is not disturbed
    by any of these. Memory granted for writing to peers that write without this host's taking part
    (``one_sided``) is not freed because time has passed: only when it is given back, or with its owner, whom
    the caller of :meth:`end` has cut off before.
    """

    def __init__(
        self,
        arena: Slices,
        settings: PeerSettings,
        *,
        one_sided: bool = False,
        reserve: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``reserve``: seconds for which memory is granted for writing; ``peer.lease`` where left out."""
        self.limit = int(arena.capacity * settings.share)
        """Bytes that may be promised at once."""
        self.promised = 0
        """Bytes that are promised; what several were promised counts once."""
        self.given = 0
        """Grants since the start."""
        self.expired = 0
        """Those of them that nobody gave back in time."""
        self.seconds = {
            Access.READ: settings.lease,
            Access.WRITE: settings.lease if reserve is None else reserve,
        }
        """How long a grant lasts."""
        self._one_sided = one_sided
        self._clock = clock
        self._grants: dict[int, Grant] = {}
        self._order: dict[Access, dict[int, Grant]] = {access: {} for access in Access}
        """The same, in the order in which they expire: all of a kind last equally long."""
        self._overdue: dict[int, Grant] = {}
        self._owned: dict[Hashable, set[int]] = {}
        self._slices = 0
        self._times: dict[int, int] = {}
        """How many times the slice at an offset is granted."""

    @property
    def open(self) -> int:
        """How many grants hold memory."""
        return len(self._grants) + len(self._overdue)

    def grant(self, owner: Hashable, leases: Sequence[Lease], access: Access = Access.READ) -> Grant | None:
        """Grant as many of the first leases as there is room for; ``None`` where there is for none.

        Those granted, ``grant.leases``, are the book's from now on; the others stay the caller's.
        """
        count = self._take(leases)
        if not count:
            return None
        number = NO_GRANT
        while number == NO_GRANT or number in self._grants or number in self._overdue:
            number = secrets.randbits(GRANT_BITS)
        grant = Grant(number, owner, list(leases[:count]), access, self._clock() + self.seconds[access])
        self._grants[number] = self._order[access][number] = grant
        self._owned.setdefault(owner, set()).add(number)
        self.given += 1
        return grant

    def find(self, owner: Hashable, number: int) -> Grant | None:
        """A grant that stands, if it was given to this owner."""
        grant = self._grants.get(number)
        if grant is None or grant.owner != owner or grant.ends <= self._clock():
            return None
        return grant

    def count(self, owner: Hashable) -> int:
        """How many grants an owner has."""
        return len(self._owned.get(owner, ()))

    def may_still_write(self, owner: Hashable) -> bool:
        """Whether memory is granted to an owner that may write there whether this host likes it or not."""
        if not self._one_sided:
            return False
        grants = (self._grants.get(number) or self._overdue[number] for number in self._owned.get(owner, ()))
        return any(grant.access is Access.WRITE for grant in grants)

    def hold(self, span: RemoteSpan, access: Access) -> Lease | None:
        """See :meth:`kvtier.transports.base.Grants.hold`."""
        grant = self._grants.get(span.grant)
        if grant is None or grant.access is not access or grant.ends <= self._clock():
            return None
        lease = grant.slice_of(span)
        return None if lease is None else lease.share()

    def release(
        self, owner: Hashable, number: int, chunks: Iterable[int], access: Access | None = None
    ) -> bool:
        """Take back some slices of a grant; whether each of them was this owner's until now.

        With ``access``, only where it was granted for that.
        """
        stood = self.find(owner, number) is not None
        grant = self._grants.get(number) or self._overdue.get(number)
        if grant is None or grant.owner != owner or access not in (None, grant.access):
            return False
        for index in chunks:
            lease = grant.leases[index] if 0 <= index < len(grant.leases) else None
            if lease is None:
                stood = False
                continue
            grant.leases[index] = None
            grant.left -= 1
            self._give_back(lease)
        if not grant.left:
            self._end(grant)
        return stood

    def expire(self) -> None:
        """End every grant whose time is over. To be called a few times in each."""
        now = self._clock()
        for order in self._order.values():
            while order:
                grant = next(iter(order.values()))
                if grant.ends > now:
                    break
                self.expired += 1
                if grant.access is Access.WRITE and self._one_sided:
                    self._forget(grant)
                    self._overdue[grant.number] = grant
                    _tell_end(grant)
                else:
                    self._end(grant)

    def end(self, owner: Hashable) -> None:
        """End every grant of an owner that has gone. Harmless when repeated."""
        for number in list(self._owned.get(owner, ())):
            self._end(self._grants.get(number) or self._overdue[number])

    def close(self) -> None:
        """End every grant: the memory is gone."""
        for owner in list(self._owned):
            self.end(owner)

    def _end(self, grant: Grant) -> None:
        self._forget(grant)
        self._overdue.pop(grant.number, None)
        numbers = self._owned[grant.owner]
        numbers.discard(grant.number)
        if not numbers:
            del self._owned[grant.owner]
        leases, grant.leases = grant.leases, [None] * len(grant.leases)
        grant.left = 0
        for lease in leases:
            if lease is not None:
                self._give_back(lease)
        _tell_end(grant)

    def _forget(self, grant: Grant) -> None:
        self._grants.pop(grant.number, None)
        self._order[grant.access].pop(grant.number, None)

    def _take(self, leases: Sequence[Lease]) -> int:
        """Count the first of these as granted, as far as there is room; how many."""
        times, promised, limit = self._times, self.promised, self.limit
        count = 0
        for lease in leases[: MOST_SLICES - self._slices]:
            offset = lease.offset
            before = times.get(offset, 0)
            if not before:
                if promised + lease.length > limit:
                    break
                promised += lease.length
            times[offset] = before + 1
            count += 1
        self.promised = promised
        self._slices += count
        return count

    def _give_back(self, lease: Lease) -> None:
        self._slices -= 1
        times = self._times[lease.offset] - 1
        if times:
            self._times[lease.offset] = times
        else:
            del self._times[lease.offset]
            self.promised -= lease.length
        lease.release()


def _tell_end(grant: Grant) -> None:
    on_end, grant.on_end = grant.on_end, None
    if on_end is not None:
        on_end()
