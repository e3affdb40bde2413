"""What routers know of the chunks: the events that were published, and those that bring them up to date."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING
from weakref import WeakSet

import msgspec
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored

from kvtier.memory.keys import ChunkKey

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent

MEDIA = {1: MEDIUM_CPU, 2: MEDIUM_STORAGE}
"""The media of vLLM's events that kvtier uses, by their bit in a mask."""
IN_MEMORY, IN_STORAGE = MEDIA
MEMORY_TYPES = ("cpu", "hugepage")
UNPUBLISHED_TYPES = ("peers", "staging")
"""Types of tiers that are not published: peers publish their content themselves, and staging is transient."""


class _Blocks(msgspec.Struct):
    """The fields of an encoded event that its removal needs."""

    block_hashes: list[bytes | int]
    group_idx: int | None = None


_decode = msgspec.msgpack.Decoder(BlockStored).decode
_decode_blocks = msgspec.msgpack.Decoder(_Blocks).decode


def media_of_tiers(types: Iterable[str]) -> list[int]:
    """Return the bit of the medium of each tier by its type; 0 if it is not published."""
    return [
        0 if kind in UNPUBLISHED_TYPES else IN_MEMORY if kind in MEMORY_TYPES else IN_STORAGE
        for kind in types
    ]


class Published:
    """The chunks that were published as stored. As many as its caller has described."""

    def __init__(self, chunks: Mapping[ChunkKey, bytes], beside: WeakSet[Published] | None = None) -> None:
        """``chunks``: the encoded ``BlockStored`` event of each chunk that may be published.

        ``beside``: what the engine's connectors have published. None of their blocks is removed.
        """
        self._chunks = chunks
        self._beside = WeakSet() if beside is None else beside
        self._beside.add(self)
        self._media: dict[ChunkKey, int] = {}
        """The media that each chunk was published in, as a mask."""
        self._outdated: dict[ChunkKey, int] = {}
        """The same for chunks of which it is unknown whether they are still held."""
        self._starts: dict[bytes | int, tuple[ChunkKey, ...]] = {}
        """Published chunks by their first block. The last chunk of a prompt may be a part of a whole one."""

    def update(self, key: ChunkKey, media: int) -> list[KVCacheEvent]:
        """Return the events after which a chunk is published in exactly ``media``."""
        before = self._outdated.pop(key, 0) | self._media.pop(key, 0)
        if media:
            self._media[key] = media
        if media == before:
            return []
        blocks = _decode_blocks(self._chunks[key])
        start = blocks.block_hashes[0]
        self._replace(key, start, add=bool(media))
        events: list[KVCacheEvent] = []
        for bit, medium in MEDIA.items():
            if media & ~before & bit:
                event = _decode(self._chunks[key])
                event.medium = medium
                events.append(event)
        for bit, medium in MEDIA.items():
            if before & ~media & bit:
                kept = {block for each in self._beside for block in each._blocks_from(start, bit)}
                hashes = [block for block in blocks.block_hashes if block not in kept]
                if hashes:
                    events.append(BlockRemoved(hashes, medium, blocks.group_idx))
        return events

    def _replace(self, key: ChunkKey, start: bytes | int, *, add: bool) -> None:
        """Add or remove a chunk that starts with a block."""
        others = tuple(other for other in self._starts.pop(start, ()) if other != key)
        if add or others:
            self._starts[start] = (*others, key) if add else others

    def _blocks_from(self, start: bytes | int, bit: int) -> set[bytes | int]:
        """Return the blocks of the chunks that start with a block and are published in a medium."""
        keys = self._starts.get(start, ())
        held = [key for key in keys if (self._media.get(key, 0) | self._outdated.get(key, 0)) & bit]
        return {block for key in held for block in _decode_blocks(self._chunks[key]).block_hashes}

    def invalidate(self) -> None:
        """Count everything as outdated: :meth:`remove_outdated` removes what is not updated before."""
        if not self._outdated:  # Without a copy of up to 262,144 entries.
            self._outdated, self._media = self._media, self._outdated
        self._outdated.update(self._media)
        self._media = {}

    def remove_outdated(self, limit: int) -> list[KVCacheEvent]:
        """Return the removals of up to ``limit`` chunks that are outdated."""
        return [event for key in list(islice(self._outdated, limit)) for event in self.update(key, 0)]

    def take_all(self) -> dict[ChunkKey, int]:
        """Forget everything, because routers have; return the media of the chunks that were published."""
        media, self._media, self._outdated, self._starts = self._media, {}, {}, {}
        return media
