"""Why tokens of a prompt were not a hit: decided after the answer to a lookup, which does not wait for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec

from kvtier.catalog.catalog import ALL_TIERS
from kvtier.catalog.misses import AGAIN, Miss, MissReason, misses_behind
from kvtier.catalog.partial_matches import PromptTags, block_tags_of
from kvtier.memory.header import object_bytes
from kvtier.memory.keys import ChunkKey, block_hashes, chunk_keys, root_key
from kvtier.memory.layout import LAYERS, ChunkLayout
from kvtier.pipeline.discover import DiscoverStage
from kvtier.pipeline.found import FoundPrefix
from kvtier.pipeline.hierarchy import Hierarchy
from kvtier.pipeline.query import Expected, Query

MAX_FIRST_CHUNKS = 8192
"""First chunks of prompts to remember with what their keys depend on besides tokens, some 400 bytes each."""
MAX_IDENTITIES = 1024
MAX_VARIANTS = 4
"""Roots to remember for each of them."""


class Variant(msgspec.Struct, frozen=True):
    """What keys of a prompt depend on besides its tokens."""

    namespace: bytes
    adapter: str
    """Its display name; empty for none."""
    first: ChunkKey
    """The key of the prompt's first chunk."""


class MissStage:
    """Finds the reasons. Takes some microseconds for each chunk that was not found."""

    def __init__(self, hierarchy: Hierarchy, discovering: DiscoverStage) -> None:
        self._hierarchy = hierarchy
        self._discovering = discovering
        self._identities: OrderedDict[bytes, tuple[str, str]] = OrderedDict()
        self._first_chunks: OrderedDict[bytes, dict[ChunkKey, Variant]] = OrderedDict()
        """By the tags of a prompt's first chunk: the roots that were looked up, the newest last."""

    def identify(self, namespace: bytes, model: str, weights: str) -> None:
        """Note what a namespace stands for, besides its layout."""
        self._identities[namespace] = model, weights
        if len(self._identities) > MAX_IDENTITIES:
            self._identities.popitem(last=False)

    def explain(self, found: FoundPrefix, namespace: bytes = b"", adapter: str = "") -> list[Miss]:
        """Return why each token of a settled lookup behind the chunks that were found whole was not a hit.

        In prefix order. The caller knows how much was used of a chunk that was found in part.
        """
        query, keys = found.query, found.query.keys
        first = found.whole
        reasons = [] if first >= len(keys) else list(self._reasons(found, first, namespace, adapter))
        if query.block_tags is not None and keys:
            self._remember(query.block_tags, Variant(namespace, adapter, keys[0]))
        chunk, misses, at = found.chunk_tokens, list[Miss](), first
        for miss, run in groupby(reasons):
            count = sum(1 for _ in run)
            start, stop = at * chunk, min((at + count) * chunk, query.tokens)
            misses.append(msgspec.structs.replace(miss, tokens=max(0, stop - start)))
            at += count
        return misses

    async def explain_prompt(
        self, namespace: bytes, layout: ChunkLayout, tokens: Sequence[int], salt: str = ""
    ) -> tuple[list[tuple[str, int]], list[Miss]]:
        """See :meth:`kvtier.TieredCache.explain_prompt`."""
        chunk, step, root = layout.chunk_tokens, layout.granularity, root_key(namespace, salt)
        keys = chunk_keys(root, tokens, chunk, tail=not layout.has_states)
        tags = PromptTags(root, block_tags_of(block_hashes(tokens, step)), chunk // step) if step else None
        found = FoundPrefix(Query(keys, min(len(tokens), len(keys) * chunk), block_tags=tags))
        found.chunk_tokens = chunk
        lengths = [
            object_bytes(layout.payload_bytes(min(chunk, len(tokens) - at * chunk)))
            for at in range(len(keys))
        ]
        await self._discovering.ask(keys, Expected(namespace, lengths))
        rows, sources = self._hierarchy.catalog.prefix_rows(keys, ALL_TIERS)
        found.taken = len(rows)
        hits, stop = list[tuple[str, int]](), 0
        for tier, run in groupby(sources):
            start, stop = stop, min(stop + sum(1 for _ in run) * chunk, len(tokens))
            hits.append((self._name(tier), stop - start))
        return hits, misses_behind(self.explain(found, namespace), stop, stop, len(tokens))

    def _reasons(self, found: FoundPrefix, first: int, namespace: bytes, adapter: str) -> Iterator[Miss]:
        """Yield the reason of each chunk from ``first`` on."""
        catalog, keys = self._hierarchy.catalog, found.query.keys
        broken: Miss | None = None
        new: Miss | None = None
        for index in range(first, len(keys)):
            key = keys[index]
            if key in catalog:
                # What is held behind a missing chunk is missed for the same reason.
                broken = broken or self._given_up(found, key)
                yield broken
            elif (gone := catalog.gone.find(key)) is not None:
                broken = Miss(gone.reason, 0, self._name(gone.tier), gone.kept, gone.ago)
                yield broken
            else:
                # Nothing can be stored behind what is not.
                new = new or self._not_answered(found) or self._never_stored(found, index, namespace, adapter)
                broken = new
                yield new

    def _given_up(self, found: FoundPrefix, key: ChunkKey) -> Miss:
        """Return why a chunk that is held was not found."""
        if found.cut is not None:
            return Miss(found.cut.reason, 0, self._name(found.cut.tier), found.cut.seconds)
        if found.held:
            return Miss(MissReason.NO_STATE, 0)
        tiers = self._hierarchy.catalog.tiers(key)
        if not tiers:
            return Miss(MissReason.BEING_STORED, 0)
        reason = MissReason.NO_ROOM
        if not self._hierarchy.usable_of([key]) >> tiers[0] & 1:
            reason = MissReason.QUARANTINED
        elif not any(self._hierarchy.tiers[tier].available for tier in tiers):
            reason = MissReason.TIER_UNAVAILABLE
        return Miss(reason, 0, self._name(tiers[0]))

    def _not_answered(self, found: FoundPrefix) -> Miss | None:
        """Return why shared pools may hold a chunk that is not known here, if one has not said whether."""
        if (late := found.not_answered) is not None:
            return Miss(late.reason, 0, self._name(late.tier), late.seconds)
        failing = (tier for tier in self._hierarchy.lower if tier.shared and tier.breaker.error is not None)
        return next((Miss(MissReason.TIER_UNAVAILABLE, 0, tier.name) for tier in failing), None)

    def _name(self, tier: int) -> str:
        tiers = self._hierarchy.tiers
        return tiers[tier].name if tier < len(tiers) else ""

    def _never_stored(self, found: FoundPrefix, index: int, namespace: bytes, adapter: str) -> Miss:
        """Return why a chunk was never stored: what is before it may be, with other tokens behind it."""
        tags, chunk = found.query.block_tags, found.chunk_tokens
        if tags is None or not chunk:
            return Miss(MissReason.NEVER_STORED, 0)
        catalog = self._hierarchy.catalog
        parent, block_tags = tags.after(found.query.keys[:index])
        like = catalog.partial_matches.like(parent, block_tags) if block_tags else None
        if like is not None and like.equal < min(like.blocks, len(block_tags)):
            position = index * chunk + like.equal * chunk // tags.per_chunk
            return Miss(MissReason.DIVERGES, 0, position=position, field=AGAIN if like.equal_later else "")
        if like is None and index and catalog.children(parent):
            return Miss(MissReason.DIVERGES, 0, position=index * chunk)
        return (None if index or like else self._elsewhere(tags, namespace, adapter)) or Miss(
            MissReason.NEVER_STORED, 0
        )

    def _elsewhere(self, tags: PromptTags, namespace: bytes, adapter: str) -> Miss | None:
        """Return what the keys of a prompt with the same beginning depend on that is held, or was."""
        catalog = self._hierarchy.catalog
        variants = self._first_chunks.get(tags.block_tags[: tags.per_chunk], {})
        others = [variant for root, variant in variants.items() if root != tags.root]
        others = [
            variant for variant in others if variant.first in catalog or catalog.gone.find(variant.first)
        ]
        if not others:
            return None
        # The one that differs least says most.
        same = [variant for variant in others if variant.namespace == namespace]
        if any(variant.adapter == adapter for variant in same):
            return Miss(MissReason.OTHER_SALT, 0, field="cache_salt")
        if same:
            return Miss(MissReason.OTHER_ADAPTER_OR_IMAGE, 0, field="adapter")
        fields = self._differences(namespace, others[-1].namespace)
        if fields == ["weights"]:
            return Miss(MissReason.OTHER_WEIGHTS, 0, field="weights")
        return Miss(MissReason.OTHER_MODEL_OR_LAYOUT, 0, field=", ".join(fields))

    def _differences(self, one: bytes, other: bytes) -> list[str]:
        """Return the names of what two namespaces differ in, as far as it is known."""
        layouts = [self._hierarchy.layouts.get(namespace) for namespace in (one, other)]
        first, second = ({} if layout is None else layout.fields() for layout in layouts)
        fields = [name for name in first.keys() & second.keys() if first[name] != second[name]]
        fields = [name for name in fields if name != LAYERS] or fields
        for at, name in enumerate(("model", "weights")):
            known = [self._identities.get(namespace, ("", ""))[at] for namespace in (one, other)]
            fields += [name] * (known[0] != known[1])
        return sorted(fields)

    def _remember(self, tags: PromptTags, variant: Variant) -> None:
        first = tags.block_tags[: tags.per_chunk]
        if len(first) < tags.per_chunk:  # Less than a chunk: too short to be the same by its tags.
            return
        known = self._first_chunks.setdefault(first, {})
        known.pop(tags.root, None)
        known[tags.root] = variant
        self._first_chunks.move_to_end(first)
        if len(known) > MAX_VARIANTS:
            catalog = self._hierarchy.catalog
            gone = (root for root, variant in known.items() if variant.first not in catalog)
            del known[next(gone, next(iter(known)))]
        if len(self._first_chunks) > MAX_FIRST_CHUNKS:
            self._first_chunks.popitem(last=False)
