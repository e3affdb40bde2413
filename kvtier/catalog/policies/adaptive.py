"""Adaptive eviction policy: follows the candidate with the highest recent hit rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, compress

import msgspec
from pydantic import Field

from kvtier.bounded import remember
from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.eviction import (
    NO_PARENT,
    ChunkColumns,
    DepthSettings,
    EvictionPolicy,
    IncomingPrompt,
    MakePolicy,
    PolicySettings,
    RemovalReason,
)
from kvtier.catalog.policies.arc import ArcPolicy
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.catalog.policies.resume import ResumePolicy, ResumeSettings
from kvtier.catalog.policies.rings import cover
from kvtier.catalog.sampling import POLICY_SAMPLE, SAMPLED, sampled_rows
from kvtier.memory.keys import ChunkKey

CANDIDATES: dict[str, type[EvictionPolicy]] = {"lru": LruPolicy, "arc": ArcPolicy, "resume": ResumePolicy}
"""The first one is in use until another one has proved better."""

OPEN_REQUESTS = 64
MAX_ANSWERS = 1024
"""Requests whose end is waited for. The oldest are forgotten: not every engine reports ends."""
MIN_SHADOW_CHUNKS = 256
"""A shadow cache with fewer chunks is too inexact: its sample is made larger."""


class _Request(msgspec.Struct, gc=False):
    """The sampled chunks of a request so far, which are accessed in the shadow caches together."""

    time: float
    parent: ChunkKey | None
    chunks: dict[ChunkKey, int] = msgspec.field(default_factory=dict)
    """Their lengths, in the order of the prompt."""
    signature: Sequence[int] | None = None
    """How its answer has ended; ``None`` before."""
    last: Sequence[ChunkKey] = ()
    """The last ones then, as :meth:`EvictionPolicy.answer_ended` gets them."""
    awaited: Sequence[ChunkKey] = ()
    """Those of another tier, which are likely to be added here soon, without a further access."""


class AdaptiveSettings(DepthSettings):
    """Settings of the policy."""

    shadow_chunks: int = Field(
        2048,
        ge=64,
        le=1 << 20,
        description="Chunks in each shadow cache. With more of them it follows the tier more closely.",
    )
    sampling: float = Field(
        0.25,
        gt=0,
        le=1,
        description=(
            "Largest part of all chunks that is in shadow caches, if a tier has only few chunks. Each costs "
            "some microseconds in a lookup."
        ),
    )
    window: int = Field(
        20_000,
        ge=100,
        description="Sampled chunks of requests after which an observation counts for half.",
    )
    margin: float = Field(
        0.005,
        ge=0,
        le=0.1,
        description="By how much of the hit rate another policy must be better before it takes over.",
    )


class AdaptivePolicy(EvictionPolicy):
    """Keeps the order of each candidate for the chunks of the tier, and evicts in that of the best one.

    Each candidate also has a :class:`ShadowCache`, which it manages alone. What those hit decides.
    """

    settings_type = AdaptiveSettings

    def __init__(self, settings: PolicySettings, capacity_bytes: int, chunks: ChunkColumns) -> None:
        super().__init__(settings, capacity_bytes, chunks)
        assert isinstance(settings, AdaptiveSettings)
        self._settings = settings
        self._capacity_bytes = capacity_bytes
        self._chunks = chunks
        self._orders = [make(chunks) for make in _candidates(capacity_bytes, settings.depth)]
        self._shadows: list[ShadowCache] = []
        """Created with the first chunk: how many there can be in the tier depends on their size.

        None for a shared pool, whose capacity is unknown: it stays with the first candidate.
        """
        self._threshold = 0
        self._shadow_depth = 0.0
        self._window = float(settings.window)
        self._hits = [0.0] * len(CANDIDATES)
        self._asked = self._seen = 0.0
        """Sampled chunks, for which the hits are counted: by their worth, and by their number."""
        self._active = 0
        self._held = bytearray()
        """Whether the chunk in each row is in the tier."""
        self._open: dict[ChunkKey, _Request] = {}
        """Requests that may have more chunks, by their last one. The shadow caches see them whole."""
        self._awaited: set[ChunkKey] = set()
        self._answers: dict[ChunkKey, _Request] = {}
        """Requests by their last chunk, from their observation to the end of their answer."""
        self._prompt_ends: dict[ChunkKey, None] = {}
        """The last sampled chunks of prompts that were looked up: what a request has behind is its answer."""

    @property
    def follows(self) -> str:
        """The name of the best candidate."""
        return list(CANDIDATES)[self._active]

    @property
    def hit_rates(self) -> dict[str, float]:
        """The recent hit rate of each candidate's shadow cache."""
        return {name: hits / (self._asked or 1.0) for name, hits in zip(CANDIDATES, self._hits, strict=True)}

    def added(self, rows: Sequence[int], now: float) -> None:
        """Add chunks to all orders."""
        if not rows:
            return
        if not self._shadows and self._capacity_bytes:
            self._make_shadows(self._chunks.lengths[rows[0]])
        for order in self._orders:
            order.added(rows, now)
        cover(max(rows), self._held)
        for row in rows:
            self._held[row] = 1
        if self._shadows:
            parent = self._chunks.parents[rows[0]]
            request = self._request(None if parent == NO_PARENT else self._chunks.key(parent), parent, now)
            self._extend(request, rows)

    def declined(self, prompt: IncomingPrompt) -> None:
        """Report the chunks to all orders, and to the shadow caches, which see whole prompts."""
        for order in self._orders:
            order.declined(prompt)
        if self._shadows:
            request = self._request(prompt.parent_key, prompt.parent, prompt.now)
            chosen = POLICY_SAMPLE.of(prompt.keys, self._threshold)
            pairs = compress(zip(prompt.keys, prompt.lengths, strict=True), chosen)
            self._observe_later(request, dict(pairs), prompt.keys[-1])

    def used(self, rows: Sequence[int], now: float) -> None:
        """Use a prefix in all orders."""
        for order in self._orders:
            order.used(rows, now)
        if rows and self._shadows:
            self._awaited.difference_update(self._chunks.keys_of(rows) if self._awaited else ())
            request, held, known = _Request(now, None), self._held, len(self._held)
            chosen = self._extend(request, rows)
            self._note_prompt_end(self._chunks.keys_of(chosen[-1:]))
            absent = [row for row in chosen if row >= known or not held[row]]
            request.awaited = self._chunks.keys_of(absent)
            self._awaited.update(request.awaited)

    def missed(self, keys: Sequence[ChunkKey], now: float) -> None:
        """Report the chunks to all orders. The shadow caches see whole prompts."""
        self._awaited.difference_update(keys if self._awaited else ())
        self._note_prompt_end(list(compress(keys, POLICY_SAMPLE.of(keys, self._threshold)))[-1:])
        for order in self._orders:
            order.missed(keys, now)

    def _note_prompt_end(self, last: Sequence[ChunkKey]) -> None:
        for key in last:
            remember(self._prompt_ends, key, None, MAX_ANSWERS)

    def answer_ended(
        self, rows: Sequence[int], keys: Sequence[ChunkKey], now: float, signature: Sequence[int]
    ) -> None:
        """Report the end to all orders, and to the shadow caches once they have seen the request."""
        for order in self._orders:
            order.answer_ended(rows, keys, now, signature)
        for key in reversed(keys):
            while key in self._open:
                self._observe_oldest()
            if (request := self._answers.pop(key, None)) is not None:
                request.time, request.signature = now, signature
                chunks = list(request.chunks)
                ends = [at for at, chunk in enumerate(chunks, 1) if chunk in self._prompt_ends]
                end = max(ends, default=len(chunks))
                request.last = [*chunks[:end][-2:], *(chunks[end:][-2:] or keys[2:])]
                # The engine may now offer them again, which is no use of them.
                request.awaited = chunks
                self._awaited.update(request.awaited)
                self._observe_later(request, {}, key)
                return

    def returning(self, now: float) -> Sequence[int]:
        """Return what any candidate expects, in use or not."""
        return [row for order in self._orders for row in order.returning(now)]

    def removed(self, rows: Sequence[int], reason: RemovalReason) -> None:
        """Remove chunks from all orders, and from the shadow caches those that did not have to leave."""
        for order in self._orders:
            order.removed(rows, reason)
        for row in rows:
            self._held[row] = 0
        if reason in (RemovalReason.CLEARED, RemovalReason.REPLACED):
            keys = self._chunks.keys_of(rows)
            cleared = list(compress(keys, POLICY_SAMPLE.of(keys, self._threshold)))
            for shadow in self._shadows:
                shadow.remove(cleared)

    def expects(self, row: int) -> bool:
        """Whether a candidate expects the chunk, in use or not."""
        return any(order.expects(row) for order in self._orders)

    def victims(self) -> Iterator[int]:
        """Yield the chunks in the order of the best candidate."""
        return self._orders[self._active].victims()

    @property
    def declines(self) -> bool:
        """Whether the best candidate does."""
        return self._orders[self._active].declines

    def victims_for(self, prompt: IncomingPrompt) -> Iterator[int]:
        """Yield what the best candidate would evict for new chunks."""
        return self._orders[self._active].victims_for(prompt)

    def evictable(self, rows: Sequence[int]) -> None:
        """Pass the rows to the best candidate, whose search it was."""
        self._orders[self._active].evictable(rows)

    def _make_shadows(self, length: int) -> None:
        chunks = max(1, self._capacity_bytes // max(1, length))
        wanted = SAMPLED * min(1.0, self._settings.shadow_chunks / chunks)
        most = SAMPLED * max(self._settings.sampling, min(1.0, MIN_SHADOW_CHUNKS / chunks))
        self._threshold = max(1, int(min(most, wanted)))
        # In the same time as with the sample that was wanted.
        self._window = self._settings.window * min(1.0, most / wanted)
        capacity = max(length, self._capacity_bytes * self._threshold // SAMPLED)
        self._shadow_depth = self._settings.depth * self._threshold / SAMPLED
        makes = _candidates(capacity, self._shadow_depth)
        self._shadows = [ShadowCache(make, capacity) for make in makes]

    def _request(self, before: ChunkKey | None, row: int, now: float) -> _Request:
        """Return the open request that a chunk continues, or begin one. ``before``, ``row``: its parent."""
        while before is not None and before in self._open:
            if self._open[before].signature is None:
                return self._open.pop(before)
            self._observe_oldest()  # Its answer has ended: what is behind that is no part of it.
        return _Request(now, self._sampled_ancestor(row))

    def _extend(self, request: _Request, rows: Sequence[int]) -> list[int]:
        """Add the sampled chunks to an open request, and return their rows."""
        chosen = sampled_rows(self._chunks, rows, self._threshold)
        lengths = self._chunks.lengths
        keys = zip(self._chunks.keys_of(chosen), chosen, strict=True)
        self._observe_later(request, {key: lengths[row] for key, row in keys}, self._chunks.key(rows[-1]))
        return chosen

    def _observe_later(self, request: _Request, chosen: dict[ChunkKey, int], last: ChunkKey) -> None:
        """Add chunks with their lengths to an open request, whose last chunk is ``last`` now.

        If many are open, this ends the one that has been so for longest.
        """
        for key, length in chosen.items():
            if key in self._awaited:
                self._awaited.discard(key)
            else:
                request.chunks[key] = length
        # Whole requests: the part that this tier happened to hold would look like a prompt of its own.
        while last in self._open or len(self._open) >= OPEN_REQUESTS:
            self._observe_oldest()
        self._open[last] = request

    def _observe_oldest(self) -> None:
        """Ask the shadow caches for the sampled chunks of a request, or end its answer there."""
        # In the order of their begin: policies are judged by what was used between two uses of a chunk.
        last = next(iter(self._open))
        request = self._open.pop(last)
        self._awaited.difference_update(request.awaited)
        if not request.chunks:
            return
        keys, lengths = list(request.chunks), list(request.chunks.values())
        for at, shadow in enumerate(self._shadows):
            shadow.now = max(shadow.now, request.time)
            if request.signature is None:
                self._hits[at] += self._worth(shadow.access(keys, lengths, request.parent))
            else:
                shadow.answer_ended(request, request.signature)
        if request.signature is not None:
            return
        remember(self._answers, last, request, MAX_ANSWERS)
        self._asked += self._worth(len(keys))
        self._seen += len(keys)
        if self._seen > 2 * self._window:
            self._seen *= 0.5
            self._asked *= 0.5
            self._hits = [hits * 0.5 for hits in self._hits]
        self._choose()

    def _worth(self, chunks: int) -> float:
        """Return the time to compute the first sampled chunks of a prompt, in that of the first one."""
        depth = self._shadow_depth
        return chunks + chunks * (chunks - 1) / (2 * depth) if depth else chunks

    def _sampled_ancestor(self, row: int) -> ChunkKey | None:
        """Return the key of the nearest sampled chunk from a row upwards, among the next ones."""
        # Four times the average distance: all but 2 % of the walks that end at no root meet a sampled chunk.
        for _ in range(4 * SAMPLED // self._threshold):
            if row == NO_PARENT:
                return None
            key = self._chunks.key(row)
            if POLICY_SAMPLE.of([key], self._threshold)[0]:
                return key
            row = self._chunks.parents[row]
        return None

    def _choose(self) -> None:
        best = max(range(len(self._hits)), key=self._hits.__getitem__)
        lead = self._hits[best] - self._hits[self._active]
        # A few prompts do not decide, unless the lead is already as large as a whole window must have.
        asked = self._asked if self._seen >= self._window / 8 else self._asked * self._window / self._seen
        if lead > self._settings.margin * asked:
            self._active = best


def _candidates(capacity_bytes: int, depth: float) -> list[MakePolicy]:
    """Return what creates the candidates."""
    settings = {name: policy.settings_type(type=name) for name, policy in CANDIDATES.items()}
    settings["resume"] = ResumeSettings.model_validate({"type": "resume", "depth": depth})
    return [policy.factory(settings[name], capacity_bytes) for name, policy in CANDIDATES.items()]


class ShadowCache:
    """A catalog of one tier without bytes. It stores all that its policy does not decline."""

    def __init__(self, make: MakePolicy, capacity_bytes: int) -> None:
        self.now = 0.0
        self.capacity_bytes = capacity_bytes
        self._catalog = Catalog([make], clock=lambda: self.now)

    def access(self, keys: Sequence[ChunkKey], lengths: Sequence[int], parent: ChunkKey | None) -> int:
        """Look up consecutive chunks of a prompt, and add those that are missing. Return the hits.

        ``parent``: the sampled chunk before the first. Without it in the cache, none of them is a hit.
        """
        catalog = self._catalog
        held = len(catalog.prefix(keys)) if parent is None or parent in catalog else 0
        catalog.touch(keys)
        if new := [at for at in range(held, len(keys)) if keys[at] not in catalog]:
            catalog.report_missed([keys[at] for at in new])
            self._store(keys, lengths, new, parent)
        return held

    def answer_ended(self, request: _Request, signature: Sequence[int]) -> None:
        """End the answer to a request, and store what is missing of it, unless that is declined again."""
        catalog, keys = self._catalog, list(request.chunks)
        catalog.report_answer_ended(request.last, signature)
        new = [at for at, key in enumerate(keys) if key not in catalog]
        if new and catalog.policies[0].declines:
            self._store(keys, list(request.chunks.values()), new, request.parent)

    def _store(
        self, keys: Sequence[ChunkKey], lengths: Sequence[int], new: Sequence[int], parent: ChunkKey | None
    ) -> None:
        """Add the chunks at the positions ``new``, up to the first without room."""
        catalog, sizes = self._catalog, [lengths[at] for at in new]
        others = sum(lengths) - sum(sizes)
        fitting = _fitting(sizes, self.capacity_bytes - others)
        if fitting:
            self._make_room(self._incoming_prompt(keys, lengths, new[:fitting], parent), keys)
            fitting = _fitting(sizes[:fitting], self.capacity_bytes - catalog.used(0))
        first, stop = new[0], new[0] + fitting
        if new[:fitting] == list(range(first, stop)):
            if fitting:
                before = keys[first - 1] if first else parent
                catalog.add_chain(keys[first:stop], 0, sizes[:fitting], State.READY, before)
        else:
            for at in new[:fitting]:
                catalog.add(keys[at], 0, lengths[at], State.READY, keys[at - 1] if at else parent)
        if rest := new[fitting:]:
            catalog.decline(0, self._incoming_prompt(keys, lengths, rest, parent))

    def _incoming_prompt(
        self, keys: Sequence[ChunkKey], lengths: Sequence[int], new: Sequence[int], parent: ChunkKey | None
    ) -> IncomingPrompt:
        before = keys[new[0] - 1] if new[0] else parent
        return self._catalog.incoming_prompt([keys[at] for at in new], [lengths[at] for at in new], before)

    def _make_room(self, prompt: IncomingPrompt, used: Sequence[ChunkKey]) -> None:
        """Evict other chunks than those in use, unless the policy prefers them to the new ones."""
        catalog = self._catalog
        excess = catalog.used(0) + sum(prompt.lengths) - self.capacity_bytes
        if excess > 0:
            busy = {catalog.row(key) for key in used}
            victims = catalog.victims(0, excess, busy.__contains__, prompt=prompt)
            catalog.remove_all(victims, 0, RemovalReason.EVICTED)

    def remove(self, keys: Sequence[ChunkKey]) -> None:
        """Remove chunks that were cleared."""
        held = [key for key in keys if key in self._catalog]
        self._catalog.remove_all(held, 0, RemovalReason.CLEARED)


def _fitting(lengths: Sequence[int], room: int) -> int:
    """Return how many of the first chunks fit."""
    return sum(total <= room for total in accumulate(lengths))
