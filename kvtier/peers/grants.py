"""Arena slices granted to peers: which ones, until when, and how many bytes in total."""

from __future__ import annotations

import secrets
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from kvtier.memory.slices import Lease, Slices
from kvtier.peers.protocol import NO_GRANT
from kvtier.settings.peer import PeerSettings
from kvtier.tiers.host_memory import Reservation
from kvtier.transports.base import Access, RemoteSpan

MAX_SLICES = 1 << 18
"""Slices granted at once, counted once per grant. About 40 MiB of Python objects."""
GRANT_BITS = 63


@dataclass(slots=True, eq=False, weakref_slot=True)
class Grant:
    """Arena slices that one owner may read, or write. Numbered from 0 in the order granted."""

    number: int
    owner: Hashable
    leases: list[Lease | None]
    """``None`` for each that was released."""
    access: Access
    ends: float
    """Expiry, on the clock of the :class:`GrantBook`."""
    left: int
    """Number of slices that were not released."""
    unready: set[int] = field(default_factory=set)
    """Slices that hold no complete chunk yet, or never will, and may not be accessed."""
    unfilled: dict[int, Reservation] = field(default_factory=dict)
    """With :attr:`Access.WRITE`: what is not committed yet, by slice. Owned by the user of the table."""
    writes: Counter[int] = field(default_factory=Counter)
    """How many writes have begun, by the offset of their slice."""
    checksums: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """Length and checksum of writes that were hashed while they arrived, by their offset."""
    encoded: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Offset and length of the chunk objects that were encoded, by slice."""
    until_ready: Callable[[Sequence[int]], Awaitable[None]] | None = None
    """Waits until each of these slices may be accessed, or never will be. ``None`` if there is no need."""
    on_end: Callable[[], None] | None = None
    """Called once when the grant ends or expires, synchronously. Must not raise."""
    _starts: list[int] | None = None
    _order: list[int] = field(default_factory=list)

    def is_accessible(self, index: int) -> bool:
        """Return whether there is such a slice, and it may be accessed."""
        return 0 <= index < len(self.leases) and index not in self.unready and self.leases[index] is not None

    def slice_of(self, span: RemoteSpan) -> Lease | None:
        """Return the lease of the slice that contains a span, if it may be accessed."""
        index = self._find_slice(span.offset)
        lease = None if index is None or index in self.unready else self.leases[index]
        if lease is None or span.length <= 0 or span.offset + span.length > lease.offset + lease.length:
            return None
        return lease

    def checksum_of(self, lease: Lease, offset: int, length: int) -> bytes | None:
        """Return the checksum of these bytes of a slice if all came with its only write."""
        written, checksum = self.checksums.get(offset, (0, b""))
        return checksum if written == length and self.writes[lease.offset] == 1 else None

    def _find_slice(self, offset: int) -> int | None:
        """Return the index of the last slice that starts at or before ``offset``."""
        if self._starts is None:
            starts = [-1 if lease is None else lease.offset for lease in self.leases]
            self._order = sorted(range(len(starts)), key=starts.__getitem__)
            self._starts = [starts[index] for index in self._order]
        at = bisect_right(self._starts, offset) - 1
        return self._order[at] if at >= 0 else None


class GrantBook:
    """All grants of one memory to peers. Synchronous; used from the event loop.

    Granted slices stay leased, so they are not evicted, until they are released, their owner disconnects, or
    they expire (:meth:`expire`). A transfer that holds its own lease is not affected by any of these. Memory
    granted for writing to peers that write without this host's participation (``one_sided``) is not freed on
    expiry. It is freed only on release, or by :meth:`end`, whose caller must have cut the owner off before.
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
        """``reserve``: seconds for which memory is granted for writing; default ``peer.lease``."""
        self.limit = int(arena.capacity * settings.share)
        """Bytes that may be granted at once."""
        self.granted_bytes = 0
        """Bytes granted; a slice with several grants counts once."""
        self.slices = 0
        """Slices granted, once for each grant; at most :data:`MAX_SLICES`."""
        self.granted = 0
        """Grants since start."""
        self.expired = 0
        """Grants that expired before they were released."""
        self.seconds = {
            Access.READ: settings.lease,
            Access.WRITE: settings.lease if reserve is None else reserve,
        }
        """Lifetime of a grant by access."""
        self._one_sided = one_sided
        self._clock = clock
        self._grants: dict[int, Grant] = {}
        self._alive: WeakValueDictionary[int, Grant] = WeakValueDictionary()
        """Also those that have ended while they are written to, and are verified afterwards."""
        self._order: dict[Access, dict[int, Grant]] = {access: {} for access in Access}
        """Those that have not expired, in order of expiry: all grants of one access last equally long."""
        self._owned: dict[Hashable, set[int]] = {}
        self._refcounts: dict[int, int] = {}
        """Number of grants of the slice at an offset."""

    @property
    def open(self) -> int:
        """Number of grants that hold memory."""
        return len(self._grants)

    def grant(self, owner: Hashable, leases: Sequence[Lease], access: Access = Access.READ) -> Grant | None:
        """Grant as many leading leases as fit the limits; ``None`` if none does.

        The book takes ownership of the granted ones, ``grant.leases``. The others stay with the caller.
        """
        count = self._count_granted(leases)
        if not count:
            return None
        # Unguessable: any peer that knows the number may read or write.
        number = NO_GRANT
        while number == NO_GRANT or number in self._grants:
            number = secrets.randbits(GRANT_BITS)
        ends = self._clock() + self.seconds[access]
        grant = Grant(number, owner, list(leases[:count]), access, ends, count)
        self._grants[number] = self._alive[number] = self._order[access][number] = grant
        self._owned.setdefault(owner, set()).add(number)
        self.granted += 1
        return grant

    def find(self, owner: Hashable, number: int) -> Grant | None:
        """Return a grant of this owner that has not ended."""
        grant = self._grants.get(number)
        if grant is None or grant.owner != owner or grant.ends <= self._clock():
            return None
        return grant

    def find_write(self, number: int) -> Grant | None:
        """Return a grant for writing whose reservations have not been given up."""
        grant = self._grants.get(number)
        return grant if grant is not None and grant.access is Access.WRITE and grant.on_end else None

    def of(self, owner: Hashable) -> list[Grant]:
        """Return the grants of an owner."""
        return [self._grants[number] for number in self._owned.get(owner, ())]

    def count(self, owner: Hashable) -> int:
        """Return the number of grants of an owner."""
        return len(self._owned.get(owner, ()))

    def may_still_write(self, owner: Hashable) -> bool:
        """Return whether an owner can still write to granted memory without this host's participation."""
        return self._one_sided and any(grant.access is Access.WRITE for grant in self.of(owner))

    def hold(self, span: RemoteSpan, access: Access) -> Lease | None:
        """See :meth:`kvtier.transports.base.Grants.hold`."""
        grant = self._grants.get(span.grant)
        if grant is None or grant.access is not access or grant.ends <= self._clock():
            return None
        lease = grant.slice_of(span)
        if lease is None:
            return None
        if access is Access.WRITE:
            grant.writes[lease.offset] += 1
        return lease.share()

    def arrived(self, span: RemoteSpan, checksum: bytes) -> None:
        """See :meth:`kvtier.transports.base.Grants.arrived`."""
        grant = self._alive.get(span.grant)
        # One for each slice: a peer might send bytes one by one.
        if grant is not None and len(grant.checksums) < len(grant.leases):
            grant.checksums[span.offset] = span.length, checksum

    def replace(self, grant: Grant, index: int, lease: Lease, length: int) -> None:
        """Grant an encoded copy of a chunk, of this length, instead of it.

        Not if the chunk was released since, or the copy exceeds the limit, as others read the chunk itself.
        """
        plain = grant.leases[index]
        if plain is None or index in grant.encoded:
            return
        freed = plain.length if self._refcounts[plain.offset] == 1 else 0
        if self.granted_bytes - freed + lease.length > self.limit:
            return
        grant.leases[index], grant.encoded[index], grant._starts = lease.share(), (lease.offset, length), None
        self._refcounts[lease.offset] = 1
        self.granted_bytes += lease.length
        self.slices += 1
        self._uncount(plain)

    def release(
        self, owner: Hashable, number: int, chunks: Iterable[int], access: Access | None = None
    ) -> bool:
        """Release slices of a grant. Return whether each of them was granted to this owner until now.

        With ``access``, release only a grant of that access.
        """
        valid = self.find(owner, number) is not None
        grant = self._grants.get(number)
        if grant is None or grant.owner != owner or access not in (None, grant.access):
            return False
        for index in chunks:
            lease = grant.leases[index] if 0 <= index < len(grant.leases) else None
            if lease is None:
                valid = False
                continue
            grant.leases[index] = None
            grant.left -= 1
            self._uncount(lease)
        if not grant.left:
            self._end(grant)
        return valid

    def expire(self) -> None:
        """End every expired grant. Call several times per lease time."""
        now = self._clock()
        for order in self._order.values():
            while order:
                grant = next(iter(order.values()))
                if grant.ends > now:
                    break
                self.expired += 1
                del order[grant.number]
                if grant.access is Access.WRITE and self._one_sided:
                    # Nothing here can reject a late write: the memory waits for its release, or a cut-off.
                    _notify_end(grant)
                else:
                    self._end(grant)

    def end(self, owner: Hashable) -> None:
        """End every grant of a disconnected owner. Idempotent."""
        for grant in self.of(owner):
            self._end(grant)

    def close(self) -> None:
        """End every grant, because the memory is being freed."""
        for owner in list(self._owned):
            self.end(owner)

    def _end(self, grant: Grant) -> None:
        del self._grants[grant.number]
        self._order[grant.access].pop(grant.number, None)
        numbers = self._owned[grant.owner]
        numbers.discard(grant.number)
        if not numbers:
            del self._owned[grant.owner]
        leases, grant.leases = grant.leases, [None] * len(grant.leases)
        grant.left = 0
        for lease in leases:
            if lease is not None:
                self._uncount(lease)
        _notify_end(grant)

    def _count_granted(self, leases: Sequence[Lease]) -> int:
        """Count leading leases as granted, up to the limits. Return how many."""
        refcounts, granted, limit = self._refcounts, self.granted_bytes, self.limit
        count = 0
        for lease in leases[: MAX_SLICES - self.slices]:
            offset = lease.offset
            refcount = refcounts.get(offset, 0)
            if not refcount:  # A slice that is granted already occupies no more memory.
                if granted + lease.length > limit:
                    break
                granted += lease.length
            refcounts[offset] = refcount + 1
            count += 1
        self.granted_bytes = granted
        self.slices += count
        return count

    def _uncount(self, lease: Lease) -> None:
        self.slices -= 1
        refcount = self._refcounts[lease.offset] - 1
        if refcount:
            self._refcounts[lease.offset] = refcount
        else:
            del self._refcounts[lease.offset]
            self.granted_bytes -= lease.length
        lease.release()


def _notify_end(grant: Grant) -> None:
    # Both refer to the grant, whose memory would otherwise wait for a garbage collection.
    grant.until_ready = None
    on_end, grant.on_end = grant.on_end, None
    if on_end is not None:
        on_end()
