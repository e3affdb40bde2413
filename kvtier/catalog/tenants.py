"""Tenants: how the room of a tier is divided among them, and what they use of it.

Each configured tenant has an eviction policy of its own in each tier, and all others share one. Which of them
gives up chunks depends on what each holds; which chunks these are, on its policy.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import pairwise
from operator import gt
from typing import NamedTuple

from blake3 import blake3

from kvtier.catalog.eviction import NO_PARENT, ChunkColumns, EvictionPolicy, MakePolicy, RemovalReason
from kvtier.memory.keys import ChunkKey
from kvtier.settings.tenants import MAX_TENANTS, OTHER

SCAN_ROWS = 16_384
"""Rows to examine at once for chunks that keep those of another tenant in a tier. About 1 ms."""

SALTED = "salt-"
"""What names begin with that are derived from a salt."""

_ABSENT, _UNCLAIMED, _FIRST = 0, 1, 2
"""Owners of rows: not in the tier, no tenant yet, and from 2 on the number of the group plus 2."""


class Quota(NamedTuple):
    """What a tenant may hold of a tier, as fractions of the room that eviction leaves in use."""

    share: float = 0.0
    """What it can hold whatever others do."""
    max: float = 1.0
    """What it can hold at most."""
    weight: float = 1.0
    """Its part of the room beyond all shares, relative to that of others who want it."""


class EvictionScope(IntEnum):
    """Whose chunks may be chosen for eviction, if there are tenants."""

    ANY = -1
    """Those of all, whatever their shares."""
    ALL = 0
    """Also those of tenants within their share, unless another one is above its share."""
    ABOVE_SHARE = 1
    """Those of tenants above their share."""
    OVER_MAXIMUM = 2
    """Only those of tenants beyond their maximum."""


class Usage(NamedTuple):
    """What a tenant has in a tier, and what happened to its chunks there."""

    tenant: str
    share_bytes: int
    max_bytes: int
    used_bytes: int
    chunks: int
    hits: int
    """Chunks that lookups found here, and in no faster tier."""
    evictions: int


def tenant_of_salt(salt: str) -> str:
    """Return the name of the tenant who uses a cache salt. A caller can test a guessed salt with it."""
    return f"{SALTED}{blake3(salt.encode()).hexdigest()[:8]}" if salt else ""


class Tenants:
    """The configured tenants of a cache. Pass :meth:`policy` of each local tier to the catalog."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """``names``: the name of the configured tenant by each name that requests use for it.

        :data:`OTHER` need not be among them.
        """
        configured = [name for name in dict.fromkeys(names.values()) if name != OTHER]
        if len(configured) > MAX_TENANTS:
            raise ValueError(f"{len(configured)} tenants, must be at most {MAX_TENANTS}")
        self.names = [OTHER, *configured]
        """By the number of their group."""
        self._aliases = names
        self.tiers: list[TenantPolicies] = []
        """The policies of all tiers so far, faster ones first."""

    def policy(
        self, make: Callable[[float], MakePolicy], quotas: Mapping[str, Quota], room: int
    ) -> MakePolicy:
        """Return what creates the policies of one tier, given in the order of the tiers.

        ``make`` creates one for a fraction of the tier's capacity. ``room``: the bytes that eviction leaves
        in use.
        """

        def create(columns: ChunkColumns) -> EvictionPolicy:
            of_group = [quotas.get(name, Quota()) for name in self.names]
            # A single order would have to pass by the chunks of tenants within their share, maybe millions.
            policies = [make(quota.max)(columns) for quota in of_group]
            tier = TenantPolicies(self, policies, of_group, room, columns)
            self.tiers.append(tier)
            return tier

        return create

    def owners(self, columns: ChunkColumns) -> dict[int, int]:
        """Return the owner by the number of the hints' tenant, and reserve these numbers."""
        owners = {0: _UNCLAIMED}
        for alias, name in self._aliases.items():
            owners[columns.hints.number(alias)] = _FIRST + self.names.index(name)
        return owners


class TenantPolicies(EvictionPolicy):
    """The eviction order of a tier that tenants share.

    A chunk belongs to the tenant who stored it, in all tiers, also if others use it later. If that is not
    known, it belongs to the first tenant who uses it, and until then to :data:`OTHER`. The room beyond the
    shares is divided in proportion to the weights, among those who use it: what one does not use, others may
    use for the time being.
    """

    def __init__(
        self,
        tenants: Tenants,
        policies: Sequence[EvictionPolicy],
        quotas: Sequence[Quota],
        room: int,
        columns: ChunkColumns,
    ) -> None:
        """``policies`` and ``quotas``: by group. ``tenants``: with the policies of the faster tiers."""
        self._names = tenants.names
        self._policies = policies
        self._shares = [int(quota.share * room) for quota in quotas]
        self._maxima = [int(quota.max * room) for quota in quotas]
        self._limits = [sys.maxsize if quota.max >= 1 else int(quota.max * room) for quota in quotas]
        """Like the maxima, without those that are the whole room: that is what the watermarks are for."""
        self._weights = [quota.weight for quota in quotas]
        self._lengths, self._parents, self._hints = columns.lengths, columns.parents, columns.hints
        self._owner_of = tenants.owners(columns)
        self._tiers = tenants.tiers
        self._faster = list(tenants.tiers)
        self._owners = bytearray()
        """By row: see :data:`_FIRST`."""
        self._bytes = [0] * len(policies)
        self._chunks = array("Q", [0]) * len(policies)
        self._hits = array("Q", [0]) * len(policies)
        self._evictions = array("Q", [0]) * len(policies)
        self._next_row = self._searched = 0
        """Where :meth:`unblock` goes on, and how many rows it has examined since it last found a chunk."""
        self._now = 0.0

    def added(self, rows: Sequence[int], now: float) -> None:
        """Add chunks to their tenants' policies."""
        if not rows:
            return
        self._now = now
        missing = max(rows) + 1 - len(self._owners)
        if missing > 0:
            self._owners += bytes(missing + missing // 8)
        owners = [self._find_owner(row) for row in rows]
        for row, owner in zip(rows, owners, strict=True):
            self._owners[row] = owner
            self._count(row, _group(owner), 1)
        groups = [_group(owner) for owner in owners]
        starts = [at for at in range(len(rows)) if not at or groups[at] != groups[at - 1]]
        for start, stop in pairwise([*starts, len(rows)]):
            self._policies[groups[start]].added(rows[start:stop], now)

    def _find_owner(self, row: int) -> int:
        for tier in self._tiers:
            if tier is not self and (owner := tier.owner(row)) > _UNCLAIMED:
                return owner
        return self._owner_of.get(self._hints.tenant(row), _FIRST)

    def owner(self, row: int) -> int:
        """Return the owner of a row; 0 if it is not in the tier."""
        return self._owners[row] if row < len(self._owners) else _ABSENT

    def used(self, rows: Sequence[int], now: float) -> None:
        """Record the use of a prefix in the policies of its tenants."""
        self._now = now
        owners, size = self._owners, len(self._owners)
        held = [row for row in rows if row < size and owners[row]]
        for row in held:
            if owners[row] == _UNCLAIMED and (tenant := self._hints.tenant(row)):
                self._move(row, self._owner_of.get(tenant, _FIRST), now)
        found = held
        for tier in self._faster:
            found = [row for row in found if not tier.owner(row)]
        for row in found:
            self._hits[_group(owners[row])] += 1
        groups = {_group(owner) for owner in {owners[row] for row in held}}
        for group in groups:
            of_group = held if len(groups) == 1 else [row for row in held if _group(owners[row]) == group]
            self._policies[group].used(of_group, now)

    def of_tenant(self, number: int) -> EvictionPolicy:
        """Return the policy of a tenant, given its number in the hints."""
        return self._policies[_group(self._owner_of.get(number, _FIRST))]

    def answer_ended(
        self, rows: Sequence[int], keys: Sequence[ChunkKey], now: float, signature: Sequence[int]
    ) -> None:
        """Report the end to the policy of the tenant of the last row. Without any, it is not known."""
        if rows:
            owner = self.owner(rows[-1]) or self._find_owner(rows[-1])
            self._policies[_group(owner)].answer_ended(rows, keys, now, signature)

    def returning(self, now: float) -> list[int]:
        """Return what the policies of all tenants expect."""
        return [row for policy in self._policies for row in policy.returning(now)]

    def removed(self, rows: Sequence[int], reason: RemovalReason) -> None:
        """Remove chunks from their tenants' policies."""
        for group, gone in self._by_group(rows).items():
            for row in gone:
                self._owners[row] = _ABSENT
                self._count(row, group, -1)
            self._policies[group].removed(gone, reason)
            if reason is RemovalReason.EVICTED:
                self._evictions[group] += len(gone)

    def resized(self, row: int, change: int) -> None:
        """Count the change, and pass it to the policy of the tenant."""
        group = _group(self._owners[row])
        self._bytes[group] += change
        self._policies[group].resized(row, change)

    def expects(self, row: int) -> bool:
        """Ask the policy of the tenant."""
        owner = self.owner(row)
        return owner != _ABSENT and self._policies[_group(owner)].expects(row)

    def evictable(self, rows: Sequence[int]) -> None:
        """Pass the rows to the policies of their tenants."""
        for group, own in self._by_group(rows).items():
            self._policies[group].evictable(own)

    def _by_group(self, rows: Sequence[int]) -> dict[int, list[int]]:
        by_group: dict[int, list[int]] = {}
        for row in rows:
            by_group.setdefault(_group(self._owners[row]), []).append(row)
        return by_group

    def victims(self) -> Iterator[int]:
        """Yield chunks, those of the tenant who is furthest above its share first."""
        return self.order([], EvictionScope.ALL)

    def order(self, chosen: Sequence[int], scope: EvictionScope) -> Iterator[int]:
        """Yield chunks like :meth:`victims`, given which of them were ``chosen`` so far.

        The next chunk is one of the tenant who is furthest above its share without those.
        """
        held, seen = list(self._bytes), 0
        orders = {group: self._policies[group].victims() for group, count in enumerate(self._chunks) if count}
        ranks = {group: self._rank(group, held[group]) for group in orders}
        while ranks:
            group = max(ranks, key=ranks.__getitem__)
            if ranks[group][0] < scope:
                return
            kept = ranks[group][0] is EvictionScope.ALL and scope is not EvictionScope.ANY
            if kept and any(map(gt, held, self._shares)):
                return  # Those above their share have nothing more to give up, and the others keep theirs.
            for row in orders[group]:
                yield row
                if len(chosen) > seen:
                    for gone in chosen[seen:]:
                        owner = _group(self._owners[gone])
                        held[owner] -= self._lengths[gone]
                        if owner in ranks:
                            ranks[owner] = self._rank(owner, held[owner])
                    seen = len(chosen)
                    break
            else:
                del ranks[group]

    def _rank(self, group: int, held: int) -> tuple[EvictionScope, float]:
        """Return the narrowest scope that includes a tenant with ``held`` bytes, and its rank in it."""
        share, limit = self._shares[group], self._limits[group]
        if held > limit:
            return EvictionScope.OVER_MAXIMUM, held / max(limit, 1)
        if held > share:
            return EvictionScope.ABOVE_SHARE, (held - share) / self._weights[group]
        return EvictionScope.ALL, held / max(share, 1)

    def excess_bytes(self) -> int:
        """Return how many bytes tenants hold beyond their maximum."""
        pairs = zip(self._bytes, self._limits, strict=True)
        return sum(held - limit for held, limit in pairs if held > limit)

    def due(self, chosen: Sequence[int]) -> list[int]:
        """Return the chosen chunks without those that would be taken from a tenant's share.

        A chunk that waited for one of another tenant may be such a chunk by the time it is chosen.
        """
        held, due, needed = list(self._bytes), [], set()
        for row in chosen:
            group = _group(self._owners[row])
            within = held[group] <= self._shares[group] and any(map(gt, held, self._shares))
            if within or row in needed:
                needed.add(self._parents[row])
            else:
                held[group] -= self._lengths[row]
                due.append(row)
        return due

    def unblock(self) -> bool:
        """Find chunks that could be evicted only after those of tenants who continue their prompts.

        They belong to one of these tenants from then on, because only those need them: so they count against
        its share. Examines some of the rows. Return ``False`` if there are no such chunks.
        """
        owners, first = self._owners, self._next_row
        stop = min(first + SCAN_ROWS, len(owners))
        self._next_row, self._searched = stop % len(owners), self._searched + stop - first
        for row in range(first, stop):
            above = self._parents[row] if owners[row] else NO_PARENT
            while above >= 0 and self._gives_up(above, owners[row]):
                self._move(above, owners[row], self._now)
                above, self._searched = self._parents[above], 0
        if self._searched < len(owners):
            return True
        self._searched = 0
        return False

    def _gives_up(self, row: int, owner: int) -> bool:
        """Whether a chunk is in the tier, and belongs to another tenant who is above its share."""
        group = _group(self.owner(row))
        return (
            self.owner(row) != _ABSENT and group != _group(owner) and self._bytes[group] > self._shares[group]
        )

    def _move(self, row: int, owner: int, now: float) -> None:
        """Make a chunk of the tier that of another owner."""
        before, after = _group(self._owners[row]), _group(owner)
        self._owners[row] = owner
        if before != after:
            self._policies[before].removed([row], RemovalReason.MOVED)
            self._count(row, before, -1)
            self._count(row, after, 1)
            self._policies[after].added([row], now)

    def _count(self, row: int, group: int, sign: int) -> None:
        self._bytes[group] += sign * self._lengths[row]
        self._chunks[group] += sign

    def usage(self) -> list[Usage]:
        """Return the usage of each configured tenant, and of all others."""
        columns = (self._shares, self._maxima, self._bytes, self._chunks, self._hits, self._evictions)
        return [Usage(*row) for row in zip(self._names, *columns, strict=True)]


def _group(owner: int) -> int:
    """Return the number of the group of an owner: 0 for :data:`OTHER`."""
    return owner - _FIRST if owner > _FIRST else 0
