"""Index of the chunks in each tier, with their state and pins.

Designed for ten million chunks as a structure of arrays: a hash table maps keys to *rows*, and everything
else is in flat arrays indexed by row. One object per chunk would cost seconds in every full garbage
collection. Synchronous and not thread-safe; each call takes time proportional to its arguments.
See ``benchmarks/catalog.py`` for measurements.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import compress, pairwise
from struct import Struct

from kvtier.catalog.eviction import (
    NO_PARENT,
    ChunkColumns,
    EvictionPolicy,
    IncomingPrompt,
    MakePolicy,
    RemovalReason,
)
from kvtier.catalog.gone import REMOVED, GoneChunks
from kvtier.catalog.hints import NO_HINTS, ChunkHints
from kvtier.catalog.partial_matches import PartialMatchIndex
from kvtier.catalog.selection import select_victims
from kvtier.catalog.table import FASTEST, MAX_TIERS, NO_ROW, Rows, TableColumns
from kvtier.catalog.tenants import EvictionScope, TenantPolicies
from kvtier.logs import RateLimitedLog
from kvtier.memory.keys import KEY_BYTES, ChunkKey

ALL_TIERS = (1 << MAX_TIERS) - 1
REPORT_SECONDS, MAX_REPORT_SECONDS = 0.001, 0.01
"""How long after a lookup policies learn of it, and how long that waits for lookups that keep coming."""
REPORTS_PER_STEP = 3
"""How many reports the next lookup may have to wait for. One takes adaptive up to 0.1 ms."""
POLICY_FAILED = "the eviction policy of tier %d has failed at a lookup: %r"

_KEY = Struct(f"{KEY_BYTES}s")


class State(IntEnum):
    """A chunk's state in one tier."""

    ABSENT = 0
    PENDING = 1
    """In flight into the tier: its memory is allocated, its bytes must not be read."""
    READY = 2


class Catalog:
    """The chunks of one host's tiers, numbered from the fastest. Each tier has its own eviction policy.

    A chunk that is in no tier keeps its row while a chunk in some tier names it as its parent. So the row of
    a parent is never that of another chunk, and a parent that comes back is the parent again.
    """

    def __init__(
        self,
        policies: Sequence[MakePolicy],
        encoded: Collection[int] = (),
        clock: Callable[[], float] = time.monotonic,
        remembered: int = 0,
        later: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        """``encoded``: the tiers whose chunks may be shorter than in the others. ``clock``: in seconds.

        ``remembered``: of how many chunks to know why they are gone. ``later`` calls a function after so many
        seconds, in the same thread: policies learn of lookups only then, when these have been answered, or
        before anything else happens to them. Without it, they learn of them at once.
        """
        if not 0 < len(policies) <= MAX_TIERS:
            raise ValueError(f"{len(policies)} tiers, must be 1 to {MAX_TIERS}")
        self._clock = clock
        self.columns = ChunkColumns()
        self._of_tier = [self.columns] * len(policies)
        for tier in encoded:
            self._of_tier[tier] = self.columns.with_own_lengths()
        self._policies = [make(columns) for make, columns in zip(policies, self._of_tier, strict=True)]
        self._later = later
        self._unreported: deque[Callable[[EvictionPolicy], None]] = deque()
        """What policies have not been notified of, in order."""
        self._noted_at = self._report_by = 0.0
        """When the last of it happened, and until when the first may wait."""
        self._called = False
        """Whether :meth:`_catch_up_between` will be called."""
        self._warn = RateLimitedLog(logging.getLogger("kvtier"))
        table = TableColumns(self.columns, [columns.lengths for columns in self._of_tier])
        self.gone = GoneChunks(remembered, clock)
        """Why chunks are in no tier."""
        self._index = Rows(table, self.gone.now)
        self._table, self._find = self._index.table, self._index.find
        self._ready, self._pending, self._children = table.ready, table.pending, table.children
        self._spaces, self._generations = table.spaces, table.generations
        self._parents, self._lengths, self._hints = (
            self.columns.parents,
            self.columns.lengths,
            self.columns.hints,
        )
        self.namespaces = self._index.namespaces
        self.pins = ChunkPins()
        self.partial_matches = PartialMatchIndex(self.columns, self._index, self._ready, self._pending)
        self._used = [0] * len(policies)
        self._saved = [0] * len(policies)
        self._count = [0] * len(policies)

    def __len__(self) -> int:
        return len(self._index) - self._table.parents_only

    @property
    def policies(self) -> Sequence[EvictionPolicy]:
        """The eviction policy of each tier. Only the catalog changes their state."""
        self._catch_up()
        return self._policies

    def __contains__(self, key: ChunkKey) -> bool:
        row = self._find(key)
        return row != NO_ROW and bool(self._ready[row] | self._pending[row])

    def add(
        self,
        key: ChunkKey,
        tier: int,
        length: int,
        state: State,
        parent: ChunkKey | None = None,
        namespace: bytes = b"",
        hints: ChunkHints | None = None,
    ) -> int:
        """Add a chunk object to a tier. Return its row. Raises ``ValueError`` if it is already there.

        If another tier holds the chunk, ``length`` and ``namespace`` keep their values and ``parent`` may be
        omitted. ``parent`` is the preceding chunk of the prefix; it need not be in the catalog. ``length`` is
        the size in bytes before encoding; see :meth:`resize`.
        """
        self._catch_up()
        row = self._find(key)
        parent_row = NO_PARENT if parent is None else self._find(parent)
        left = NO_PARENT
        if row == NO_ROW:
            [row] = self._index.new_chain((key,), (length,), parent_row, namespace)
        elif (self._ready[row] | self._pending[row]) >> tier & 1:
            raise ValueError(f"chunk {key.hex()[:16]} is already in tier {tier}")
        else:
            left = self._reuse(row, length, parent_row if parent is not None else None, namespace)
        now = self._clock()
        if hints is not None:
            self._hints.set((row,), hints, now)
        self._enter([row], tier, state is State.READY)
        if left >= 0:
            self._index.free_parents((left,))
        self.policies[tier].added([row], now)
        return row

    def add_chain(
        self,
        keys: Sequence[ChunkKey],
        tier: int,
        lengths: Sequence[int],
        state: State,
        parent: ChunkKey | None = None,
        namespace: bytes = b"",
        hints: ChunkHints | None = None,
    ) -> list[int]:
        """Add consecutive chunks of one prompt, in a third of the time of :meth:`add` for each.

        Return their rows. ``parent`` is the chunk before the first. Raises ``ValueError``, and adds nothing,
        if one of them is already in the tier or occurs twice in ``keys``.
        """
        self._catch_up()
        known = self._table.find_all(keys)
        before = NO_PARENT if parent is None else self._find(parent)
        left: list[int] = []
        if known.count(NO_ROW) == len(known):
            rows = self._index.new_chain(keys, lengths, before, namespace)
        else:
            for key, row in zip(keys, known, strict=True):
                if row != NO_ROW and (self._ready[row] | self._pending[row]) >> tier & 1:
                    raise ValueError(f"chunk {key.hex()[:16]} is already in tier {tier}")
            if len(set(keys)) < len(keys):
                raise ValueError("a chunk occurs twice")
            rows = []
            for key, length, row in zip(keys, lengths, known, strict=True):
                if row == NO_ROW:
                    rows += self._index.new_chain((key,), (length,), before, namespace)
                else:
                    left.append(self._reuse(row, length, before, namespace))
                    rows.append(row)
                before = rows[-1]
        if hints is not None:
            self.set_hints(rows, hints)
        self._enter(rows, tier, state is State.READY)
        self._index.free_parents([row for row in left if row >= 0])
        self.policies[tier].added(rows, self._clock())
        return rows

    def add_copies(self, keys: Sequence[ChunkKey], tier: int) -> list[int]:
        """Add chunks that other tiers hold as PENDING, with the same length and parent. Return their rows.

        Raises ``ValueError``, and adds nothing, if one of them is in no tier or already in this one.
        """
        self._catch_up()
        rows, bit = self._table.find_all(keys), 1 << tier
        for key, row in zip(keys, rows, strict=True):
            held = 0 if row < 0 else self._ready[row] | self._pending[row]
            if not held or held & bit:
                where = f"already in tier {tier}" if held else "in no tier"
                raise ValueError(f"chunk {key.hex()[:16]} is {where}")
        if len(set(rows)) < len(rows):
            raise ValueError("a chunk occurs twice")
        self._enter(rows, tier, False)
        now, parents = self._clock(), self._parents
        starts = [at for at, row in enumerate(rows) if not at or parents[row] != rows[at - 1]]
        for start, stop in pairwise([*starts, len(rows)]):
            self.policies[tier].added(rows[start:stop], now)
        return rows

    def _enter(self, rows: Sequence[int], tier: int, ready: bool) -> None:
        """Count chunks in a tier, and mark them as READY or PENDING there."""
        self._used[tier] += self._table.enter(rows, tier, ready)
        self._count[tier] += len(rows)

    def _reuse(self, row: int, length: int, parent: int | None, namespace: bytes) -> int:
        """Prepare a known row for one more tier. ``parent``: the row of the parent; ``None`` if not given.

        Return the row of the former parent if it has lost this child, to be passed to ``free_parents``.
        """
        held, before = self._ready[row] | self._pending[row], self._parents[row]
        if not held:
            self._table.parents_only -= 1
            self._index.describe(row, length, NO_PARENT if parent is None else parent, namespace)
            return NO_PARENT
        if parent is None or parent == before:
            return NO_PARENT
        self.partial_matches.remove(row)
        self._parents[row] = parent
        for tier in range(len(self._policies)):
            if held >> tier & 1 and parent >= 0:
                self._children[tier][parent] += 1
            if held >> tier & 1 and before >= 0:
                self._children[tier][before] -= 1
        return before

    def set_ready(self, key: ChunkKey, tier: int) -> int:
        """Mark a PENDING chunk as READY. Return its row. Raises ``KeyError`` if it is not PENDING."""
        row, bit = self._find(key), 1 << tier
        if row == NO_ROW or not self._pending[row] & bit:
            raise KeyError(f"chunk {key.hex()[:16]} is not pending in tier {tier}")
        self._pending[row] ^= bit
        self._ready[row] |= bit
        return row

    def remove(self, key: ChunkKey, tier: int, reason: RemovalReason = RemovalReason.EVICTED) -> None:
        """Remove a chunk from a tier, and its row with the last tier. Raises ``KeyError`` if not there."""
        self.remove_all((key,), tier, reason)

    def remove_all(
        self, keys: Sequence[ChunkKey], tier: int, reason: RemovalReason = RemovalReason.EVICTED
    ) -> None:
        """Remove chunks from a tier, in a fraction of the time of :meth:`remove` for each.

        Raises ``KeyError``, and removes nothing, if one is not there or occurs twice.
        """
        self._catch_up()
        try:
            rows, length = self._table.leave(keys, tier)
        except KeyError as error:
            key = error.args[0].hex()[:16]
            raise KeyError(f"chunk {key} is not in tier {tier}, or occurs twice") from None
        self._used[tier] -= length
        self._count[tier] -= len(rows)
        if (own := self._of_tier[tier].lengths) is not self._lengths:
            self._saved[tier] -= sum(self._lengths[row] - own[row] for row in rows)
        self.policies[tier].removed(rows, reason)
        if self.gone and (gone := [row for row in rows if not self._ready[row]]):
            since = self.columns.since
            self.gone.note(self.columns.keys_of(gone), REMOVED[reason], tier, [since[row] for row in gone])
        if self.pins or self.partial_matches or self._hints:
            self._forget([row for row in rows if not self._ready[row] | self._pending[row]])
        self._index.release(rows, tier)

    def _forget(self, rows: Sequence[int]) -> None:
        """Forget what only some chunks have, of those in no tier any more."""
        if self.pins:
            self.pins.remove(self.columns.keys_of(rows))
        self.partial_matches.remove_all(rows)
        for row in rows if self._hints else ():
            self._hints.reset(row)

    def row(self, key: ChunkKey) -> int | None:
        """Return the row of a chunk, which is its own until it is removed from its last tier."""
        row = self._find(key)
        return None if row == NO_ROW else row

    def namespace(self, key: ChunkKey) -> bytes:
        """Return the namespace of a chunk; empty if it has none. Takes time proportional to their number."""
        row = self._find(key)
        return b"" if row == NO_ROW else self.namespaces.known()[self._spaces[row]]

    def tenant(self, key: ChunkKey) -> str:
        """Return the tenant of a chunk; empty without one."""
        row = self._find(key)
        return "" if row == NO_ROW else self._hints.tenant_names[self._hints.tenant(row)]

    def generation(self, key: ChunkKey) -> int:
        """Return the generation of a chunk, which changes when it is cleared; -1 if it is in no tier."""
        row = self._find(key)
        return -1 if row == NO_ROW or not self._ready[row] | self._pending[row] else self._generations[row]

    def generations(self, rows: Sequence[int]) -> list[int]:
        """Return the generations of the chunks in these rows."""
        return [self._generations[row] for row in rows]

    def begin_generation(self, keys: Iterable[ChunkKey]) -> None:
        """Begin a new generation for chunks that are about to be cleared."""
        self._index.begin_generation(keys)

    def state(self, key: ChunkKey, tier: int) -> State:
        """Return a chunk's state in one tier."""
        row = self._find(key)
        if row == NO_ROW:
            return State.ABSENT
        if self._ready[row] >> tier & 1:
            return State.READY
        return State.PENDING if self._pending[row] >> tier & 1 else State.ABSENT

    def length(self, key: ChunkKey) -> int:
        """Return the size of the chunk object in bytes. Raises ``KeyError`` if the chunk is unknown."""
        row = self._find(key)
        if row == NO_ROW:
            raise KeyError(f"chunk {key.hex()[:16]} is in no tier")
        return self._lengths[row]

    def parent(self, key: ChunkKey) -> ChunkKey | None:
        """Return the chunk before a chunk, if both are in the catalog."""
        row = self._find(key)
        parent = NO_PARENT if row == NO_ROW else self._parents[row]
        return None if parent < 0 else self.columns.key(parent)

    def children(self, key: ChunkKey) -> int:
        """Return how many objects continue a chunk, in the tier that holds most of them."""
        row = self._find(key)
        return 0 if row == NO_ROW else max(children[row] for children in self._children)

    def stored_length(self, key: ChunkKey, tier: int, default: int) -> int:
        """Return the size of a chunk object as a tier stores it, or ``default`` if it is not there."""
        row = self._find(key)
        if row == NO_ROW or not (self._ready[row] | self._pending[row]) >> tier & 1:
            return default
        return self._of_tier[tier].lengths[row]

    def resize(self, key: ChunkKey, tier: int, length: int) -> None:
        """Record how long an encoded chunk object is in a tier. Ignored if it is not there."""
        before = self.stored_length(key, tier, length)
        if length != before:
            self._catch_up()
            row = self._find(key)
            self._of_tier[tier].lengths[row] = length
            self._used[tier] += length - before
            self._saved[tier] += before - length
            self.policies[tier].resized(row, length - before)

    def tiers(self, key: ChunkKey) -> list[int]:
        """Return the tiers in which a chunk is READY, fastest first."""
        row = self._find(key)
        ready = 0 if row == NO_ROW else self._ready[row]
        return [tier for tier in range(len(self._policies)) if ready >> tier & 1]

    def places(self, keys: Iterable[ChunkKey]) -> Iterator[tuple[int, int]]:
        """Yield for each chunk the bit masks of tiers in which it is READY and PENDING. Evaluated lazily."""
        find, ready, pending = self._find, self._ready, self._pending
        for key in keys:
            row = find(key)
            yield (0, 0) if row == NO_ROW else (ready[row], pending[row])

    def absent(self, keys: Sequence[ChunkKey], tier: int) -> list[int]:
        """Return the positions of the chunks that are not READY in a tier."""
        return self._table.absent(keys, tier)

    def fastest(self, key: ChunkKey) -> int:
        """Return the fastest tier in which a chunk is READY, or -1."""
        row = self._find(key)
        return -1 if row == NO_ROW else FASTEST[self._ready[row]]

    def prefix(self, keys: Sequence[ChunkKey], among: int = ALL_TIERS) -> list[int]:
        """Return the fastest tier of each leading chunk, up to the first that is READY in no tier.

        ``among`` is a bit mask of the tiers to consider.
        """
        return list(self.prefix_rows(keys, among)[1])

    def prefix_rows(self, keys: Sequence[ChunkKey], among: int = ALL_TIERS) -> tuple[list[int], bytes]:
        """Return the rows of the chunks of :meth:`prefix`, and their fastest tiers."""
        return self._table.prefix(keys, among)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Record the use of a prefix."""
        self.touch_rows([row for row in self._table.find_all(keys) if row != NO_ROW])

    def touch_rows(self, rows: Sequence[int]) -> None:
        """Record the use of a prefix, given its rows."""
        now = self._clock()
        self._notify(lambda policy: policy.used(rows, now))

    def report_missed(self, keys: Sequence[ChunkKey], hints: ChunkHints | None = None) -> None:
        """Report the chunks of a prompt behind those just used, which were not found. ``hints``: its own."""
        if keys:
            tenant, now = 0 if hints is None else self._hints.number(hints.tenant), self._clock()

            def notify(policy: EvictionPolicy) -> None:
                of = policy.of_tenant(tenant) if isinstance(policy, TenantPolicies) else policy
                of.missed(keys, now)

            self._notify(notify)

    def _notify(self, notify: Callable[[EvictionPolicy], None]) -> None:
        """Let policies learn of a lookup, later if they can."""
        self._noted_at = self._clock()
        if self._later is not None and not self._unreported:
            self._report_by = self._noted_at + MAX_REPORT_SECONDS
        self._unreported.append(notify)
        self._call_later(REPORT_SECONDS)
        if self._later is None:
            self._catch_up()

    def _catch_up(self) -> None:
        """Let policies learn of all lookups. Before each change of what they or their columns know."""
        while self._unreported:
            self._report_next()

    def _catch_up_between(self) -> None:
        """Let policies learn of some lookups, if no other follows closely or they have waited for long."""
        self._called = False
        waiting, now = len(self._unreported), self._clock()
        seconds = 0.0  # Before the next step, the event loop handles what has arrived.
        if now < min(self._noted_at + REPORT_SECONDS / 2, self._report_by):
            seconds = REPORT_SECONDS
        else:
            # More of them if many wait: they must not pile up.
            for _ in range(min(waiting, max(REPORTS_PER_STEP, waiting // 16))):
                self._report_next()
        if self._unreported:
            self._call_later(seconds)

    def _call_later(self, seconds: float) -> None:
        if self._later is not None and not self._called:
            self._later(seconds, self._catch_up_between)
            self._called = True

    def _report_next(self) -> None:
        notify = self._unreported.popleft()
        for tier, policy in enumerate(self._policies):
            try:
                notify(policy)
            except Exception as error:
                # A plugin's may raise anything, and the caller has not caused it.
                if self._later is None:
                    raise
                self._warn(POLICY_FAILED, tier, error)

    def report_answer_ended(
        self, keys: Sequence[ChunkKey], signature: Sequence[int], seconds: float = 0.0
    ) -> None:
        """Report that an answer has ended, ``seconds`` ago. See :meth:`EvictionPolicy.answer_ended`."""
        rows, now = [row for row in self._table.find_all(keys) if row != NO_ROW], self._clock() - seconds
        for policy in self.policies:
            policy.answer_ended(rows, keys, now, signature)

    def returning(self, limit: int) -> list[list[ChunkKey]]:
        """Return up to ``limit`` prompts of lower tiers that are about to come back, as policies expect."""
        now = self._clock()
        rows = [row for policy in self.policies[1:] for row in policy.returning(now)]
        return [self.path(row) for row in rows[:limit]]

    def path(self, row: int) -> list[ChunkKey]:
        """Return the chunks from the root to that in a row."""
        rows = []
        while row != NO_PARENT:
            rows.append(row)
            row = self._parents[row]
        return self.columns.keys_of(reversed(rows))

    def to_promote(self, keys: Sequence[ChunkKey]) -> IncomingPrompt | None:
        """Return the chunks of a prompt that only lower tiers hold, as new ones for the first tier.

        ``None`` if there are none, or if any is READY in no tier.
        """
        rows, tiers = self.prefix_rows(keys)
        below = [at for at, tier in enumerate(tiers) if tier]
        if len(rows) < len(keys) or not below:
            return None
        parent = keys[below[0] - 1] if below[0] else None
        lengths = [self._lengths[rows[at]] for at in below]
        return self.incoming_prompt([keys[at] for at in below], lengths, parent)

    def set_hints(self, rows: Sequence[int], hints: ChunkHints) -> None:
        """Replace the hints of chunks, given their rows."""
        self._catch_up()
        self._hints.set(rows, hints, self._clock())

    def pin(self, keys: Sequence[ChunkKey], until: float | None) -> None:
        """Protect chunks from eviction until a ``time.monotonic()`` time, or permanently with ``None``.

        Of two pins on one chunk the longer one counts. Chunks in no tier are ignored.
        """
        self.pins.add((key for key in keys if key in self), until)

    def superseded(self, key: ChunkKey, *, whole: bool) -> list[ChunkKey]:
        """Return the chunks of :meth:`PartialMatchIndex.superseded_by` that are not pinned."""
        now, pins = self._clock(), self.pins
        return [
            other
            for other in self.partial_matches.superseded_by(key, whole=whole)
            if not pins.holds(other, now)
        ]

    def used(self, tier: int) -> int:
        """Return the bytes of chunk objects in a tier, READY or PENDING."""
        return self._used[tier]

    def ratio(self, tier: int) -> float | None:
        """Return how many times fewer bytes a tier has than before encoding; ``None`` if unknown."""
        used, is_known = self._used[tier], self._of_tier[tier] is not self.columns
        return (used + self._saved[tier]) / used if used and is_known else None

    def count(self, tier: int) -> int:
        """Return the number of chunks in a tier, READY or PENDING."""
        return self._count[tier]

    def victims(
        self,
        tier: int,
        needed_bytes: int = sys.maxsize,
        is_leased: Callable[[int], bool] | None = None,
        limit: int | None = None,
        scope: EvictionScope = EvictionScope.ALL,
        prompt: IncomingPrompt | None = None,
    ) -> list[ChunkKey]:
        """Return chunks to evict from a tier, in order, with at least ``needed_bytes`` in total if possible.

        They are READY, not pinned, and not ``is_leased`` (given a row). Of two chunks of a prompt, the later
        one comes first. Examines at most ``limit`` chunks that are READY and not pinned, of tenants within
        ``scope``. ``prompt``: the new chunks that need the room. If the policy prefers what the tier holds,
        the victims are too few for them.
        """
        rows = select_victims(
            self.policies[tier],
            self._of_tier[tier],
            self._children[tier],
            self._ready,
            1 << tier,
            self._is_pinned() if self.pins else None,
            is_leased,
            needed_bytes,
            limit,
            scope,
            prompt,
        )
        self.policies[tier].evictable(rows)
        return self.columns.keys_of(rows)

    def incoming_prompt(
        self,
        keys: Sequence[ChunkKey],
        lengths: Sequence[int],
        parent: ChunkKey | None,
        hints: ChunkHints | None = None,
    ) -> IncomingPrompt:
        """Return a description of new consecutive chunks, for :meth:`victims` and :meth:`decline`."""
        row = NO_PARENT if parent is None else self._find(parent)
        return IncomingPrompt(keys, lengths, row, parent, self._clock(), hints or NO_HINTS)

    def decline(self, tier: int, prompt: IncomingPrompt) -> None:
        """Report new chunks that a tier does not store to its policy, which learns from all prompts."""
        self.policies[tier].declined(prompt)

    @property
    def pinned(self) -> int:
        """The number of pinned chunks."""
        return self.pins.count(self._clock())

    def _is_pinned(self) -> Callable[[int], bool]:
        now = self._clock()
        return lambda row: self.pins.holds(self.columns.key(row), now)

    @property
    def rows(self) -> range:
        """All rows, including vacant ones. Use :meth:`slices` for long scans."""
        return range(self._index.size)

    def slices(self, rows: int) -> Iterator[range]:
        """Yield the current rows in ranges of ``rows``.

        The result of a scan is valid only until the event loop runs other tasks: a chunk added later may get
        a row that was already visited, or one after the last.
        """
        size = self._index.size
        return (range(start, min(start + rows, size)) for start in range(0, size, rows))

    def keys(self, tier: int, namespace: bytes | None = None, *, rows: range | None = None) -> list[ChunkKey]:
        """Return the chunks of a tier, READY or PENDING, optionally of one namespace and some rows only.

        Takes about 0.1 s per million rows.
        """
        rows = self.rows if rows is None else rows
        space = None if namespace is None else self.namespaces.find(namespace)
        ready, pending = self._ready[rows.start : rows.stop], self._pending[rows.start : rows.stop]
        spaces = self._spaces
        return self.columns.keys_of(
            row
            for row, ready_mask, pending_mask in zip(rows, ready, pending, strict=True)
            if (ready_mask | pending_mask) >> tier & 1 and (space is None or spaces[row] == space)
        )

    def ready_keys(self, tier: int, rows: range) -> bytes:
        """Return the joined keys of the chunks in ``rows`` that are READY in a tier. About 0.1 µs per row."""
        selected = [mask >> tier & 1 for mask in self._ready[rows.start : rows.stop]]
        keys = _KEY.iter_unpack(self.columns.keys[rows.start * KEY_BYTES : rows.stop * KEY_BYTES])
        return b"".join(key for (key,) in compress(keys, selected))


class ChunkPins:
    """Until when chunks are pinned. Times are those of ``time.monotonic()``."""

    def __init__(self) -> None:
        self._until: dict[ChunkKey, float] = {}
        self._first_end = math.inf
        """No pin expires before."""

    def __bool__(self) -> bool:
        """Return whether any chunk may be pinned."""
        return bool(self._until)

    def count(self, now: float) -> int:
        """Return the number of pinned chunks. Removes expired pins."""
        if self._first_end <= now:
            self._until = {key: until for key, until in self._until.items() if until > now}
            self._first_end = min(self._until.values(), default=math.inf)
        return len(self._until)

    def add(self, keys: Iterable[ChunkKey], until: float | None) -> None:
        """Pin chunks until a time, or permanently with ``None``. The longer one of two pins counts."""
        end = math.inf if until is None else until
        self._first_end = min(self._first_end, end)
        for key in keys:
            self._until[key] = max(end, self._until.get(key, end))

    def remove(self, keys: Iterable[ChunkKey]) -> None:
        """Remove all pins on these chunks. Chunks that are not pinned are ignored."""
        for key in keys:
            self._until.pop(key, None)

    def holds(self, key: ChunkKey, now: float) -> bool:
        """Return whether a chunk is pinned."""
        until = self._until.get(key)
        if until is None:
            return False
        if until <= now:
            del self._until[key]
            return False
        return True
