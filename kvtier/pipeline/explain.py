"""Why tokens of a prompt were not a hit: decided after the answer to a lookup, which does not wait for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import msgspec

from kvtier.bounded import remember
from kvtier.catalog.catalog import ALL_TIERS
from kvtier.catalog.gone import Gone
from kvtier.catalog.misses import AGAIN, Miss, MissReason, misses_behind
from kvtier.catalog.partial_matches import PartialMatch, PromptTags, block_tags_of
from kvtier.memory.header import object_bytes
from kvtier.memory.keys import BLOCK_HASH_BYTES, ChunkKey, beginning_of, block_hashes, chunk_keys, root_key
from kvtier.memory.layout import LAYERS, ChunkLayout
from kvtier.pipeline.discover import DiscoverStage
from kvtier.pipeline.found import FoundPrefix
from kvtier.pipeline.hierarchy import Hierarchy
from kvtier.pipeline.query import Expected, Query
from kvtier.tiers.planner import FIRST

MAX_BEGINNINGS = 16_384
"""Hashes of beginnings of prompts to remember with what their keys depend on besides tokens, three of each
prompt, some 400 bytes each."""
SURELY_EQUAL = 3
"""Equal tags of first chunks, of which there are many, that are not equal by chance."""
MAX_IDENTITIES = 1024
MAX_VARIANTS = 8
"""Roots to remember for each of them."""


class Variant(msgspec.Struct, frozen=True):
    """What keys of a prompt depend on besides its tokens."""

    namespace: bytes
    adapter: str
    """What identifies it; empty for none."""
    first: ChunkKey
    """The key of the prompt's first chunk."""


class MissStage:
    """Finds the reasons. Takes some microseconds for each chunk that was not found."""

    def __init__(self, hierarchy: Hierarchy, discovering: DiscoverStage) -> None:
        self._hierarchy = hierarchy
        self._discovering = discovering
        self._identities: dict[bytes, tuple[str, str]] = {}
        self._beginnings: dict[bytes, dict[ChunkKey, Variant]] = {}
        """By each hash of a prompt's beginning: the roots that were looked up, the newest last."""

    def identify(self, namespace: bytes, model: str, weights: str) -> None:
        """Note what a namespace stands for, besides its layout."""
        remember(self._identities, namespace, (model, weights), MAX_IDENTITIES)

    def explain(
        self, found: FoundPrefix, namespace: bytes = b"", adapter: str = "", beginning: bytes = b""
    ) -> list[Miss]:
        """See :meth:`kvtier.TieredCache.explain`. The caller knows what was used of the last chunk found."""
        query, chunk = found.query, found.chunk_tokens
        if not query.keys:
            return []
        variant = Variant(namespace, adapter, query.keys[0])
        reasons = list(self._reasons(found, variant, beginning))
        if query.block_tags is not None:
            self._remember(query.block_tags.root, variant, beginning)
        misses, stop = list[Miss](), found.whole
        for miss, run in groupby(reasons):
            start, stop = stop, stop + sum(1 for _ in run)
            tokens = min(stop * chunk, query.tokens) - start * chunk
            misses.append(msgspec.structs.replace(miss, tokens=max(0, tokens)))
        return misses

    async def explain_prompt(
        self, namespace: bytes, layout: ChunkLayout, tokens: Sequence[int], salt: str = ""
    ) -> tuple[list[tuple[str, int]], list[Miss]]:
        """Return what is held of a prompt, as runs of a tier and tokens, and why the rest is not.

        Leases nothing and does not count as a lookup. Asks the shared pools; takes 15 µs per 1,000 tokens
        besides that. Raises the errors of :func:`~kvtier.memory.keys.chunk_keys`.
        """
        chunk, step, root = layout.chunk_tokens, layout.granularity, root_key(namespace, salt)
        keys, stored = chunk_keys(root, tokens, chunk, tail=not layout.has_states), len(tokens)
        if stored % chunk and keys and keys[-1] not in self._hierarchy.catalog:
            # Where room is short, engines store whole blocks only.
            stored, whole = layout.stored_tokens(stored), stored // chunk
            parent = keys[whole - 1] if whole else root
            keys = [*keys[:whole], *chunk_keys(parent, tokens[whole * chunk : stored], chunk, tail=True)]
        tags = PromptTags(root, block_tags_of(block_hashes(tokens, step)), chunk // step) if step else None
        found = FoundPrefix(Query(keys, min(stored, len(keys) * chunk), block_tags=tags))
        found.chunk_tokens = chunk
        sizes = [min(chunk, stored - at * chunk) for at in range(len(keys))]
        lengths = [object_bytes(layout.payload_bytes(size)) for size in sizes]
        await self._discovering.ask(keys, Expected(namespace, lengths))
        rows, sources = self._hierarchy.catalog.prefix_rows(keys, ALL_TIERS)
        found.taken = len(rows)
        beginning = beginning_of(tokens, step) if step else b""
        held = list(zip(sources, sizes, strict=False))
        begins = sum(count for _, count in held)
        like = self._like(found.query, len(rows), beginning)
        if like is not None and (tiers := self._hierarchy.catalog.tiers(like.key)):
            found.partial, found.taken = like, found.taken + 1
            held.append((tiers[0], like.equal * step))
        hits = [
            (self._name(tier), sum(count for _, count in run)) for tier, run in groupby(held, itemgetter(0))
        ]
        misses = self.explain(found, namespace, beginning=beginning)
        used = sum(count for _, count in held)
        return hits, misses_behind(misses, begins, used, len(tokens))

    def _reasons(self, found: FoundPrefix, variant: Variant, beginning: bytes) -> Iterator[Miss]:
        """Yield the reason of each chunk behind those that were found whole."""
        catalog, keys = self._hierarchy.catalog, found.query.keys
        broken: Miss | None = None
        new: Miss | None = None
        for index in range(found.whole, len(keys)):
            key = keys[index]
            if key in catalog:
                # What is held behind a missing chunk is missed for the same reason.
                broken = broken or self._given_up(found, key)
            elif (rest := self._rest(found, index, beginning)) is not None:
                broken = broken or rest
            elif (gone := catalog.gone.find(key)) is not None:
                broken = self._went(gone)
            else:
                # Nothing can be stored behind what is not.
                new = new or self._not_answered(found) or self._never_stored(found, index, variant, beginning)
                broken = new
            yield broken

    def _like(self, query: Query, index: int, beginning: bytes) -> PartialMatch | None:
        """Return the held chunk that begins like one of a prompt, unless that is by chance."""
        if query.block_tags is None:
            return None
        root, (parent, block_tags) = query.block_tags.root, query.block_tags.after(query.keys[:index])
        like = self._hierarchy.catalog.partial_matches.like(parent, block_tags) if block_tags else None
        if like is None or index or like.equal >= SURELY_EQUAL or not beginning:
            return like
        return like if root in self._beginnings.get(beginning[:BLOCK_HASH_BYTES], ()) else None

    def _rest(self, found: FoundPrefix, index: int, beginning: bytes) -> Miss | None:
        """Return why the end of a prompt was not found, if a chunk begins with all its whole blocks."""
        tags = found.query.block_tags
        if tags is None or index < len(found.query.keys) - 1:
            return None
        like = self._like(found.query, index, beginning)
        if like is None or index * tags.per_chunk + like.equal < len(tags.block_tags):
            return None
        return Miss(MissReason.SHORTER_THAN_A_BLOCK, 0) if found.partial else self._given_up(found, like.key)

    def _went(self, gone: Gone) -> Miss:
        """Return why a chunk that is in no tier has gone."""
        return Miss(gone.reason, 0, self._name(gone.tier), gone.kept, gone.ago)

    def _given_up(self, found: FoundPrefix, key: ChunkKey) -> Miss:
        """Return why a chunk that is held was not found."""
        if found.cut is not None:
            return Miss(found.cut.reason, 0, self._name(found.cut.tier), found.cut.seconds)
        if found.held:
            return Miss(MissReason.NO_STATE, 0)
        tiers = self._hierarchy.catalog.tiers(key)
        reason = MissReason.NO_ROOM
        if tiers and not self._hierarchy.usable_of([key]) >> tiers[0] & 1:
            reason = MissReason.QUARANTINED
        elif not tiers or tiers[0] == FIRST:  # Being stored, or stored since the answer.
            return Miss(MissReason.BEING_STORED, 0)
        elif not any(self._hierarchy.tiers[tier].available for tier in tiers):
            reason = MissReason.TIER_UNAVAILABLE
        return Miss(reason, 0, self._name(tiers[0]))

    def _not_answered(self, found: FoundPrefix) -> Miss | None:
        """Return why shared pools may hold a chunk that is not known here, if one has not said whether."""
        pools = [tier for tier in self._hierarchy.lower if tier.shared]
        if found.not_answered is not None:
            return Miss(MissReason.TOO_LATE, 0, pools[0].name if pools else "", found.not_answered)
        failing = (pool.name for pool in pools if pool.breaker.error is not None)
        return next((Miss(MissReason.TIER_UNAVAILABLE, 0, name) for name in failing), None)

    def _name(self, tier: int) -> str:
        tiers = self._hierarchy.tiers
        return tiers[tier].name if tier < len(tiers) else ""

    def _never_stored(self, found: FoundPrefix, index: int, variant: Variant, beginning: bytes) -> Miss:
        """Return why a chunk was never stored: what is before it may be, with other tokens behind it."""
        tags, chunk = found.query.block_tags, found.chunk_tokens
        never = Miss(MissReason.NEVER_STORED, 0)
        if tags is None or not chunk:
            return never
        parent, block_tags = tags.after(found.query.keys[:index])
        like = self._like(found.query, index, beginning)
        if like is not None and like.equal < min(like.blocks, len(block_tags)):
            position = index * chunk + like.equal * chunk // tags.per_chunk
            return Miss(MissReason.DIVERGES, 0, position=position, field=AGAIN if like.equal_later else "")
        if like is None and index and self._hierarchy.catalog.children(parent):
            shorter = Miss(MissReason.SHORTER_THAN_A_BLOCK, 0)
            return Miss(MissReason.DIVERGES, 0, position=index * chunk) if block_tags else shorter
        if index or like:
            return never
        return self._elsewhere(tags.root, variant, beginning) or never

    def _elsewhere(self, root: ChunkKey, variant: Variant, beginning: bytes) -> Miss | None:
        """Return what differs from a prompt that is held, or was, and begins alike, or goes on alike soon."""
        size = BLOCK_HASH_BYTES
        others = self._known(beginning[size : 2 * size])
        others.pop(root, None)
        if not others:
            later = self._known(beginning[2 * size :])
            return Miss(MissReason.DIVERGES, 0, position=0, field=AGAIN) if root in later else None
        # The one that differs least says most.
        same = [other for other in others.values() if other.namespace == variant.namespace]
        if any(other.adapter == variant.adapter for other in same):
            return Miss(MissReason.OTHER_SALT, 0, field="cache_salt")
        if same:
            return Miss(MissReason.OTHER_ADAPTER_OR_IMAGE, 0, field="adapter")
        *_, other = others.values()
        fields = self._differences(variant.namespace, other.namespace)
        if fields == ["weights"]:
            catalog = self._hierarchy.catalog
            gone = None if other.first in catalog else catalog.gone.find(other.first)
            # A reset of vLLM begins other weights, as it cannot be known that they are the same.
            if gone is not None and gone.reason is MissReason.CLEARED:
                return self._went(gone)
            return Miss(MissReason.OTHER_WEIGHTS, 0, field="weights")
        return Miss(MissReason.OTHER_MODEL_OR_LAYOUT, 0, field=", ".join(fields))

    def _known(self, beginning: bytes) -> dict[ChunkKey, Variant]:
        """Return the variants with a hash that are held, or were, by their roots."""
        catalog, variants = self._hierarchy.catalog, self._beginnings.get(beginning, {})
        return {
            root: variant
            for root, variant in variants.items()
            if variant.first in catalog or catalog.gone.find(variant.first)
        }

    def _differences(self, one: bytes, other: bytes) -> list[str]:
        """Return the names of what two namespaces differ in, as far as it is known."""
        layouts = [self._hierarchy.layouts.get(namespace) for namespace in (one, other)]
        first, second = ({} if layout is None else layout.fields() for layout in layouts)
        fields = [name for name in first.keys() & second.keys() if first[name] != second[name]]
        fields = [name for name in fields if name != LAYERS] or fields
        known = [self._identities.get(namespace, ("", "")) for namespace in (one, other)]
        fields += [name for at, name in enumerate(("model", "weights")) if known[0][at] != known[1][at]]
        return sorted(fields)

    def _remember(self, root: ChunkKey, variant: Variant, beginning: bytes) -> None:
        catalog = self._hierarchy.catalog
        for at in range(0, len(beginning), BLOCK_HASH_BYTES):
            hashed = beginning[at : at + BLOCK_HASH_BYTES]
            known = self._beginnings.get(hashed, {})
            known.pop(root, None)
            known[root] = variant
            remember(self._beginnings, hashed, known, MAX_BEGINNINGS)
            if len(known) > MAX_VARIANTS:
                gone = (root for root, each in known.items() if each.first not in catalog)
                del known[next(gone, next(iter(known)))]
