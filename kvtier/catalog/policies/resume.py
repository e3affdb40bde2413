"""Resume eviction policy: keep the prompts that are likely to come back soon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from math import inf, log2

import msgspec
from msgspec.structs import replace
from pydantic import Field

from kvtier.bounded import remember
from kvtier.catalog.endings import Endings
from kvtier.catalog.eviction import (
    NO_PARENT,
    ChunkColumns,
    DepthSettings,
    EvictionPolicy,
    IncomingPrompt,
    PolicySettings,
    RemovalReason,
)
from kvtier.catalog.policies.returns import (
    AGES,
    CLASSES,
    FIRST_EXPECTED,
    NEW,
    STARTS,
    Returns,
    class_continued,
    class_ended,
    class_expected,
    class_of,
    class_retained,
    has_ended,
)
from kvtier.catalog.policies.visits import NONE, Visits
from kvtier.memory.keys import ChunkKey

LEFT = CLASSES
"""Class of the ends of prompts that have come back with another end."""
KINDS = CLASSES + 1
PRIORITIES = 5
DEEPEST = 3
LEVELS = tuple(2.0**level for level in range(-2, PRIORITIES - 2 + DEEPEST))
"""What the value is multiplied by: priorities from -100 to 100 by the first ones, depth moves on by up to
:data:`DEEPEST`."""
NORMAL = LEVELS.index(1.0)
GHOST = len(LEVELS) * KINDS * AGES
"""Rings are numbered by priority, class and span of age. Those of ghosts follow after all others."""
_NEW_RING, _LEFT_RING = (NORMAL * KINDS + NEW) * AGES, (NORMAL * KINDS + LEFT) * AGES
SETTLE_SECONDS = 0.5
"""How often visits are moved on to the span of their age, and rings are ranked."""
MAX_SETTLED = 512
"""Visits to move in one call: about a millisecond."""
PASS_SECONDS = 10.0
"""For how long visits that cannot leave are offered last: leased, pinned, or continued by others."""
MIN_GHOSTS = 4096
EXPECTED_CHANCE = 0.5
"""Prompts that return more often than this are expected to."""
MAX_PROMPTS = 1024
"""Those that were looked up longest ago are forgotten: most of them were not stored."""


class ResumeSettings(DepthSettings):
    """Settings of the policy."""

    learn: float = Field(0.25, gt=0, le=1, description="Weight of the newest gap in a prompt's typical gap.")
    ghosts: float = Field(
        4.0, ge=0, le=64, description="Prompts to remember after their eviction, for each one that is held."
    )


class ResumePolicy(EvictionPolicy):
    """Orders prompts by the hits per second that they are worth: see :mod:`kvtier.catalog.policies.returns`.

    A prompt that comes back is recognised by the end of its last visit. Its class is that of its gaps so far
    and of how many chunks are new, or of the hints of its request. Visits of a class and a span of age have
    the same worth, and share a ring; within a visit the deepest chunk leaves first. 4 bytes for each chunk,
    47 for each visit.
    """

    settings_type = ResumeSettings

    def __init__(self, settings: PolicySettings, capacity_bytes: int, chunks: ChunkColumns) -> None:
        super().__init__(settings, capacity_bytes, chunks)
        assert isinstance(settings, ResumeSettings)
        self._learn, self._ghosts_a_visit = settings.learn, settings.ghosts
        self._depth = settings.depth
        self._chunks = chunks
        self._returns = Returns()
        self._endings = Endings()
        self._visits = Visits(chunks, 2 * GHOST)
        self._incoming = UnfinishedPrompts()
        self._used: set[int] = set()
        """The rings that may have visits."""
        self._ghosts = 0
        self._ranked: list[int] = []
        """The rings in the order of eviction; empty if that is not known."""
        self._settled = self._now = self._returning_at = 0.0
        self._elapsed = 0.0
        """Seconds between the last two times that settling began."""
        self._unsettled: list[int] = []
        """Rings whose visits are still to be moved on; inverted if some of them have been."""
        self._offered: list[tuple[int, int]] = []
        """The visits that the last search has offered, and their last rows."""
        self._passed: set[int] = set()
        """Visits whose last row was offered and stayed."""
        self._passed_at = 0.0

    def added(self, rows: Sequence[int], now: float) -> None:
        """Continue the visit that ends with their parent, or begin one."""
        if not rows:
            return
        self._settle(now)
        visits = self._visits
        visits.cover(max(rows))
        above = self._chunks.parents[rows[0]]
        keys, parent = self._chunks.keys_of(rows), None if above == NO_PARENT else self._chunks.key(above)
        rest = self._incoming.rest(keys, parent, visits.ghosts)
        self._incoming.passed(keys, parent, rest)
        visit = self._visit_of(above, rest)
        if visit == NONE:
            visit = visits.new(now, _NEW_RING)
        if not self._is_offered_again(visit, rest):
            self._put(visit, self._continuing(visit, rest), rows[-1], now)
            visits.added[visit] += len(rows)
        elif visits.rings[visit] >= GHOST:
            self._move(visit, visits.rings[visit] - GHOST)
        visits.forget_ghost(visit)  # It may have lost chunks that come back now.
        visits.give(visit, rows)
        before = self._before(rest, visit)
        if before != NONE:
            self._resume(visit, before, rows[-1], now)
            visits.added[visit] = len(rows) - rest.known  # The others were there before.
            kind = class_continued(self._kind(visit), rest.chunks - rest.known)
            self._put(visit, kind, rows[-1], now)

    def used(self, rows: Sequence[int], now: float) -> None:
        """Begin a visit, which takes over the rows that are in the tier."""
        self._settle(now)
        visits = self._visits
        runs = visits.runs(rows)
        if sum(map(len, runs)) < len(rows):
            # Another tier holds them, from which they come here now: they have come back as well.
            absent = [row for row in rows if visits.visit(row) == NONE]
            self._incoming.expect(self._chunks.keys_of(absent), visits.ghosts)
        for run in runs:
            self._revisit(run, now)

    def missed(self, keys: Sequence[ChunkKey], now: float) -> None:
        """Recognise a prompt as a whole, before its parts are stored."""
        # The first part of a long prompt looks like a short one, and lacks the chunk that identifies a visit.
        self._incoming.expect(keys, self._visits.ghosts)

    def _revisit(self, rows: Sequence[int], now: float) -> None:
        visits = self._visits
        last = visits.of_row[rows[-1]]
        # Or the one before: the last chunk is often a partial one, which the next turn has in another form.
        ends = visits.last_rows(last)
        returning = rows[-1] in ends and self._kind(last) != LEFT
        if (ghost := visits.ghost_keys[last]) and returning:
            # It went on: only a prompt that does so, too, is the same. That is known once it is stored.
            returning = ghost in map(hash, self._chunks.keys_of(ends))
        visit = visits.new(now, _NEW_RING)
        self._put(visit, NEW, rows[-1], now)
        emptied = visits.take(visit, rows)
        if returning:
            self._resume(visit, last, rows[-1], now)
        for other in emptied:
            if visits.rings[other] != NONE:
                self._empty(other)

    def answer_ended(
        self, rows: Sequence[int], keys: Sequence[ChunkKey], now: float, signature: Sequence[int]
    ) -> None:
        """Let the age of a visit begin anew, in the class of its ending."""
        self._settle(now)
        visits, visit = self._visits, self._answered(rows, keys)
        if visit == NONE:
            return
        if len(keys) > 2:
            visits.mark(visit, keys[0])
        slot = self._endings.answer_ended(signature, now)
        visits.endings[visit] = slot + 1
        kind, ring = self._kind(visit), visits.rings[visit]
        if kind >= FIRST_EXPECTED:
            return
        if not has_ended(kind):
            self._returns.answer_ended(kind, max(now - visits.since[visit], 0.0))
        visits.since[visit] = now
        self._move(visit, ring + (class_ended(kind, self._endings.ending(slot)) - kind) * AGES - ring % AGES)

    def _answered(self, rows: Sequence[int], keys: Sequence[ChunkKey]) -> int:
        """Return the visit of which these are the last chunks, those of them that are held and all."""
        visits = self._visits
        for row in reversed(rows):
            # Or the one before it, to which a state belongs. Or any in front of an answer: its last chunks
            # may not be stored yet.
            if (visit := visits.visit(row)) == NONE:
                continue
            if row in visits.last_rows(visit) or (len(keys) > 2 and not visits.endings[visit]):
                return self._joined(visit)
        return next((visits.ghosts[hash(key)] for key in reversed(keys) if hash(key) in visits.ghosts), NONE)

    def _joined(self, visit: int) -> int:
        """Join the visit of an answer with that of its prompt, if it has one of its own. Return the visit."""
        # As the answer grows, a whole chunk replaces the partial one with which the visit of the prompt ends.
        visits = self._visits
        rows = list(visits.path(visit))
        prompt = self._continued(self._chunks.parents[rows[-1]])
        if prompt == NONE or visits.typical[visit] or LEFT in (self._kind(prompt), self._kind(visit)):
            return visit
        visits.give(prompt, rows[::-1])
        visits.added[prompt] += len(rows)
        visits.counts[visit], visits.tails[visit] = 0, NONE
        self._close(visit)
        return prompt

    def returning(self, now: float) -> list[int]:
        """Return the prompts that have just become worth more, since their answers have ended a while ago."""
        self._settle(now)
        since, self._returning_at = self._returning_at, now
        visits, found = self._visits, list[int]()
        for ring in self._used:
            kind, at = ring // AGES % KINDS, ring % AGES
            if ring < GHOST and has_ended(kind) and visits.sizes[ring] and self._returns.peaks(kind, at):
                for visit in visits.in_ring(ring, newest_first=True):
                    if visits.since[visit] + STARTS[at] <= since:
                        break
                    found.append(visits.tails[visit])
        return found

    def removed(self, rows: Sequence[int], reason: RemovalReason) -> None:
        """Take the rows from their visits. Remember the visits of evicted rows as ghosts."""
        visits = self._visits
        for row in rows:
            if visits.visit(row) == NONE:
                continue
            was_last = visits.tails[visits.of_row[row]] == row
            visit = visits.lose(row)
            if reason is RemovalReason.EVICTED and was_last and self._kind(visit) != LEFT:
                # By the chunk before the last, which is often partial and another one in the next turn.
                parent = self._chunks.parents[row]
                visits.remember(visit, self._chunks.key(row if parent == NO_PARENT else parent))
            if not visits.counts[visit]:
                self._empty(visit)

    def expects(self, row: int) -> bool:
        """Whether the prompt that used a chunk last is more likely to come back than not."""
        visit = self._visits.visit(row)
        if visit == NONE or (kind := self._kind(visit)) == LEFT:
            return False
        return self._returns.chance(kind, self._visits.rings[visit] % AGES) > EXPECTED_CHANCE

    def victims(self) -> Iterator[int]:
        """Yield the chunks of the visits that are worth least first."""
        return self._worth_at_most(inf)

    @property
    def declines(self) -> bool:
        """Always: only prompts that come back are worth the room."""
        return True

    def victims_for(self, prompt: IncomingPrompt) -> Iterator[int]:
        """Yield only chunks of visits that are not worth more than the new ones."""
        rest = self._incoming.rest(prompt.keys, prompt.parent_key, self._visits.ghosts)
        limit = self._worth(self._ring_for(prompt, rest))
        return self._worth_at_most(limit, self._continued(prompt.parent))

    def declined(self, prompt: IncomingPrompt) -> None:
        """Remember a prompt that was not stored, or not to its end: it may come back like those that were."""
        # Otherwise a kind of prompt that is never stored would never be known to come back.
        self._settle(prompt.now)
        visits, count = self._visits, len(prompt.keys)
        rest = self._incoming.rest(prompt.keys, prompt.parent_key, visits.ghosts)
        ring, visit = self._ring_for(prompt, rest), self._visit_of(prompt.parent, rest)
        if visit == NONE:
            visit = visits.new(prompt.now, ring)
        before = self._before(rest, visit)
        if before != NONE:
            self._resume(visit, before, prompt.parent, prompt.now)
            visits.added[visit] = -rest.known
        if not self._is_offered_again(visit, rest):
            visits.added[visit] += count
            visits.since[visit] = prompt.now
        self._move(visit, ring)
        if rest.declined:
            visits.forget_ghost(visit)
        if count > 1 or prompt.parent == NO_PARENT:
            visits.remember(visit, prompt.keys[max(0, count - 2)])
        if not visits.counts[visit]:
            self._empty(visit)
        above = self._depth_of(prompt.parent, rest.above + count)
        self._incoming.passed(prompt.keys, prompt.parent_key, rest, visits.ghost_keys[visit], above)

    def _continued(self, parent: int) -> int:
        """Return the visit that ends with a row, or :data:`NONE`."""
        visit = self._visits.visit(parent)
        return visit if visit != NONE and self._visits.tails[visit] == parent else NONE

    def _visit_of(self, parent: int, rest: Rest) -> int:
        """Return the visit that new chunks continue, stored or declined so far, or :data:`NONE`."""
        if (visit := self._continued(parent)) != NONE:
            return visit
        visit = self._visits.ghosts.get(rest.ghost, NONE)
        # If it holds any of its chunks, its last one is the parent of those that are offered again.
        if self._is_offered_again(visit, rest) and not self._visits.counts[visit]:
            return visit
        return self._visits.ghosts.get(rest.declined, NONE)

    def _is_offered_again(self, visit: int, rest: Rest) -> bool:
        """Whether an engine offers again what a visit has lost, since its answer has ended."""
        if visit == NONE or rest.looked_up:
            return False
        return self._visits.endings[visit] > 0 and self._kind(visit) != LEFT

    def _continuing(self, visit: int, rest: Rest) -> int:
        """Return the class of a visit that gets further chunks, or of a new one."""
        kind, added = (NEW, 0) if visit == NONE else (self._kind(visit), self._visits.added[visit])
        return class_continued(NEW if kind == LEFT else kind, added + rest.chunks)

    def _before(self, rest: Rest, visit: int) -> int:
        """Return the earlier visit of a prompt that is remembered, or :data:`NONE`."""
        before = self._visits.ghosts.get(rest.ghost, NONE)
        return NONE if before == visit or self._is_offered_again(before, rest) else before

    def _ring_for(self, prompt: IncomingPrompt, rest: Rest) -> int:
        """Return the ring in which new chunks would be."""
        visits, visit, hints = self._visits, self._visit_of(prompt.parent, rest), prompt.hints
        if self._is_offered_again(visit, rest):
            return visits.rings[visit] % GHOST
        before = self._before(rest, visit)
        if before != NONE:
            gap = max(prompt.now - visits.since[before], 0.0)
            kind = class_continued(class_of(self._typical(before, gap)), rest.chunks - rest.known)
        else:
            kind = self._continuing(visit, rest)
        deeper = self._deeper(self._depth_of(prompt.parent, rest.above + rest.chunks))
        return _ring_of(kind, hints.priority, hints.resume or 0.0, hints.retention or 0.0, deeper)

    def _worth_at_most(self, limit: float, spared: int = NONE) -> Iterator[int]:
        """Yield the chunks of visits that are not worth more, except of one."""
        self._pass_by()
        if not self._ranked:
            rings = [ring for ring in self._used if ring < GHOST]
            self._ranked = sorted(rings, key=lambda ring: (self._worth(ring), ring))
        visits, later = self._visits, []
        for ring in self._ranked:
            if limit < inf and self._worth(ring) > limit:
                break
            for visit in visits.in_ring(ring):
                if visit == spared:
                    continue
                if visit in self._passed:
                    later.append(visit)
                else:
                    self._offered.append((visit, visits.tails[visit]))
                    yield from visits.path(visit)
        for visit in later:
            yield from visits.path(visit)

    def evictable(self, rows: Sequence[int]) -> None:
        """Offer visits again first whose last chunk may leave."""
        leaving = set(rows)
        self._offered = [offered for offered in self._offered if offered[1] not in leaving]

    def _pass_by(self) -> None:
        """Note which visits the last search could not evict. It may have stopped at the last one."""
        if self._now - self._passed_at > PASS_SECONDS:
            self._passed_at = self._now
            self._passed.clear()
        tails = self._visits.tails
        self._passed.update(visit for visit, tail in self._offered[:-1] if tails[visit] == tail)
        self._offered.clear()

    def _worth(self, ring: int) -> float:
        level, kind, at = ring // (AGES * KINDS), ring // AGES % KINDS, ring % AGES
        return 0.0 if kind == LEFT else LEVELS[level] * self._returns.values(kind)[at]

    # Visits.

    def _use(self, ring: int) -> None:
        """Note that a ring may have visits."""
        if ring not in self._used:
            self._used.add(ring)
            self._ranked.clear()

    def _kind(self, visit: int) -> int:
        return self._visits.rings[visit] // AGES % KINDS

    def _put(self, visit: int, kind: int, row: int, now: float) -> None:
        """Make a visit the newest of a class, or of the class of the hints of its last row."""
        self._visits.since[visit] = now
        self._move(visit, self._ring(kind, row, now))

    def _move(self, visit: int, ring: int) -> None:
        """Make a visit the newest of a ring."""
        self._use(ring)
        self._ghosts += (ring >= GHOST) - (self._visits.rings[visit] >= GHOST)
        self._visits.move(visit, ring)

    def _ring(self, kind: int, row: int, now: float) -> int:
        """Return the first ring of a class, or of that which the hints of a row put it into."""
        hints, deeper = self._chunks.hints, self._deeper(self._depth_of(row))
        if not 0 <= row < len(hints):
            return _ring_of(kind, 0, 0.0, 0.0, deeper)
        resume, retention = hints.resume_at(row) - now, hints.retain_until(row) - now
        return _ring_of(kind, hints.priority(row), resume, retention, deeper)

    def _depth_of(self, row: int, behind: int = 0) -> int:
        """Return how many chunks a prompt has up to ``behind`` chunks after a row, as far as it matters."""
        parents, most = self._chunks.parents, self._depth * 2**DEEPEST
        depth = behind
        while row != NO_PARENT and depth < most:
            row, depth = parents[row], depth + 1
        return depth

    def _deeper(self, chunks: int) -> int:
        """Return by how many levels a prompt of so many chunks is worth more."""
        if not self._depth:
            return 0
        # A depth may be as small as a float can be.
        return round(log2(1 + min(chunks / self._depth, 2**DEEPEST - 1)))

    def _resume(self, visit: int, before: int, row: int, now: float) -> None:
        """Continue the history of an earlier visit in a new one."""
        visits = self._visits
        kind, gap = self._kind(before), max(now - visits.since[before], 0.0)
        self._returns.returned(kind, gap)
        if has_ended(kind):
            self._endings.returned(visits.endings[before] - 1, gap, now)
        visits.typical[visit] = typical = self._typical(before, gap)
        self._put(visit, class_of(typical), row, now)
        if visits.counts[before]:  # Its last chunk, which has another continuation now.
            visits.forget_ghost(before)
            self._move(before, _LEFT_RING)
        else:
            self._close(before)

    def _typical(self, before: int, gap: float) -> float:
        """Return the typical gap of a prompt that came back after ``gap`` seconds."""
        typical = self._visits.typical[before]
        typical = gap if not typical else typical * ((gap + 1) / (typical + 1)) ** self._learn
        return max(typical, 1e-3)

    def _empty(self, visit: int) -> None:
        """End a visit that has no rows, or remember it as a ghost."""
        if not self._visits.ghost_keys[visit]:
            self._close(visit)
            return
        self._move(visit, self._visits.rings[visit] + GHOST)
        held = len(self._visits) - self._ghosts
        while self._ghosts > max(MIN_GHOSTS, self._ghosts_a_visit * held):
            oldest = self._visits.oldest_ghost()
            if oldest == NONE:
                return
            if not self._visits.counts[oldest]:
                self._close(oldest)

    def _close(self, visit: int) -> None:
        """End a visit without rows."""
        self._ghosts -= self._visits.rings[visit] >= GHOST
        self._visits.end(visit)

    def _settle(self, now: float) -> None:
        """Move visits on to the span of their age, and record how long they have been away. Some a call."""
        now = self._now = max(now, self._now)  # An end is reported later, at the time when it was.
        if not self._unsettled:
            if 0 <= now - self._settled < SETTLE_SECONDS:
                return
            self._elapsed, self._settled = max(0.0, now - self._settled), now
            # From the end: older ones first, which the younger ones join.
            self._unsettled = sorted(self._used)
            self._returns.passed()
            self._ranked.clear()
        left = MAX_SETTLED
        while self._unsettled and left > 0:
            left -= 1
            ring, begun = self._unsettled.pop(), False
            if ring < 0:
                ring, begun = ~ring, True
            kind, at = ring // AGES % KINDS, ring % AGES
            if kind != LEFT:
                if not begun:
                    self._returns.waited(kind, at, self._visits.sizes[ring], self._elapsed)
                moved = self._visits.move_on(ring, at, STARTS, now, left)
                for reached in compress(range(AGES), moved):
                    self._use(ring - at + reached)
                left -= sum(moved)
                if left == 0:
                    self._unsettled.append(~ring)
            if not self._visits.sizes[ring]:
                self._used.discard(ring)


def _ring_of(kind: int, priority: int, resume: float, retention: float, deeper: int) -> int:
    """Return the first ring of a class, or of that which hints put a prompt into. Times in seconds, or 0."""
    level = min(PRIORITIES - 1, max(0, round(priority / 50) + NORMAL)) + deeper
    if resume > 0:
        kind = class_expected(resume)
    elif retention > 0:
        kind = class_retained(retention)
    return (level * KINDS + kind) * AGES


class Rest(msgspec.Struct, frozen=True, gc=False):
    """The chunks of a prompt that are still to be stored, counted from the next one on."""

    chunks: int
    known: int = 0
    """How many there are up to the last one by which an earlier visit is remembered."""
    ghost: int = 0
    """The hash of that chunk's key; 0 without one. The next part continues that visit."""
    declined: int = 0
    """The hash by which this visit is remembered if the part before was declined; otherwise 0."""
    looked_up: bool = False
    """Whether the prompt was looked up. Otherwise, the engine offers again what has left meanwhile."""
    above: int = 0
    """The chunks of the prompt before these, if the part before was declined: then they have no row."""


class UnfinishedPrompts:
    """The rest of each prompt, by the key of its next chunk or, behind a part, of the chunk before.

    An engine computes a long prompt in several steps, and stores a part after each. But its worth depends on
    its whole length, and an earlier visit of it is recognised by one of its last chunks.
    """

    def __init__(self) -> None:
        self._rests: dict[int, Rest] = {}

    def expect(self, keys: Sequence[ChunkKey], ghosts: Mapping[int, int]) -> None:
        """Note the chunks that a prompt is missing. ``ghosts``: the keys by which visits are remembered."""
        self._put(hash(keys[0]), replace(_seen(keys, ghosts), looked_up=True))

    def rest(self, keys: Sequence[ChunkKey], parent: ChunkKey | None, ghosts: Mapping[int, int]) -> Rest:
        """Return what is known of a prompt whose next part begins with ``keys``, behind ``parent``."""
        for key in (keys[0], parent):
            rest = None if key is None else self._rests.get(hash(key))
            if rest is not None and rest.chunks >= len(keys):
                if rest.ghost in ghosts:
                    return rest
                seen = _seen(keys, ghosts)
                return replace(rest, known=seen.known, ghost=seen.ghost)
        return _seen(keys, ghosts)

    def passed(
        self, keys: Sequence[ChunkKey], parent: ChunkKey | None, rest: Rest, declined: int = 0, above: int = 0
    ) -> None:
        """Note that a part with these chunks was stored, or declined and is remembered by ``declined``.

        ``above``: the chunks of the prompt up to there, if it was declined.
        """
        for key in (keys[0], parent):
            if key is not None:
                self._rests.pop(hash(key), None)
        left = rest.chunks - len(keys)
        if left > 0:
            self._put(hash(keys[-1]), Rest(left, declined=declined, looked_up=rest.looked_up, above=above))

    def _put(self, key: int, rest: Rest) -> None:
        remember(self._rests, key, rest, MAX_PROMPTS)


def _seen(keys: Sequence[ChunkKey], ghosts: Mapping[int, int]) -> Rest:
    """Return what is known from the chunks themselves."""
    for at in range(len(keys) if ghosts else 0, 0, -1):
        if (ghost := hash(keys[at - 1])) in ghosts:
            return Rest(len(keys), at, ghost)
    return Rest(len(keys))
