"""Publish which chunks the tiers hold as vLLM's KV events, for routers.

The cache process reports which tiers hold the chunks that the engine has described, and routers receive the
differences. So nothing depends on the order or number of changes, and every state is corrected by the next.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import msgspec
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored

from kvtier.bridge.client import SchedulerBridge
from kvtier.bridge.protocol import MAX_WATCHED_CHUNKS
from kvtier.integrations.vllm.compat import block_index, block_stored
from kvtier.integrations.vllm.layout import ModelLayout
from kvtier.integrations.vllm.plain import builtin
from kvtier.memory.keys import ChunkKey

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from kvtier.integrations.vllm.request import RequestState

logger = logging.getLogger("vllm.kvtier")

MAX_PROMPTS = 10_000
"""Maximum number of prompts that wait to be described."""
STEP_DESCRIBED, KNOWN_PER_DESCRIBED = 32, 32
"""How many chunks a step describes, and how many known ones it looks at in the time of one."""
STEP_PUBLISHED = 64
"""How many chunks a step publishes."""
STEP_WATCHED = 2048
"""How many chunks a step watches again after a reconnect."""

MEDIA = {1: MEDIUM_CPU, 2: MEDIUM_STORAGE}
"""The media of vLLM's events that kvtier uses, by their bit in a mask."""
IN_MEMORY, IN_STORAGE = MEDIA
MEMORY_TYPES = ("cpu", "hugepage")
UNPUBLISHED_TYPES = ("peers", "staging")
"""Types of tiers that are not published: peers publish their content themselves, and staging is transient."""

_encode = msgspec.msgpack.Encoder(enc_hook=builtin).encode


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


_published: WeakKeyDictionary[BlockPool, WeakSet[Published]] = WeakKeyDictionary()
"""By engine. The kvtier of a ``MultiConnector`` do not know each other otherwise."""


def published_group(model: ModelLayout) -> int | None:
    """Return the index in the layout of the group whose blocks are published; ``None`` without attention.

    The first one of full attention, if any: routers match prefixes against its blocks. A chunk holds what a
    hit needs of every group, so publishing the other groups would add nothing.
    """
    groups = [(bool(group.window), at) for at, group in enumerate(model.layout.groups) if not group.state]
    return min(groups)[1] if groups else None


class EngineBlocks:
    """Describes chunks by the blocks of one KV-cache group."""

    def __init__(self, manager: KVCacheManager, model: ModelLayout, group: int) -> None:
        self._pool = manager.block_pool
        self._group = model.group_ids[group]
        self._block_tokens = model.layout.groups[group].block_tokens
        self._kind, self._window = manager.kv_cache_event_metadata[self._group]
        self._index = block_index(self._pool)
        self.published = _published.setdefault(self._pool, WeakSet())
        """What is published of the engine, by each of its connectors."""

    def describe(self, request: Request, start: int, tokens: int) -> bytes | None:
        """Return the encoded event of the whole blocks among ``tokens`` tokens from ``start`` on.

        ``None`` without a whole block, or if they are not hashed yet. Encoded, it takes 2 KB for 256 tokens:
        a fifth of what the objects take.
        """
        first, last = start // self._block_tokens, (start + tokens) // self._block_tokens
        if first == last:
            return None
        event = block_stored(self._pool, request, self._group, self._block_tokens, first, last)
        if event is None:
            return None
        # ``KVCacheManager.take_events`` adds these to the events of its pool.
        event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window = self._kind, self._window
        return _encode(event)

    def take_reset(self) -> bool:
        """Return whether vLLM has reset its own cache since the last call, and published that."""
        index = block_index(self._pool)
        reset, self._index = index is not self._index, index
        return reset


class _Prompt(NamedTuple):
    """Chunks of a request to describe, from index ``first`` on."""

    state: RequestState
    first: int
    keys: Sequence[ChunkKey]
    tokens: int
    """Number of tokens of all of ``keys``."""


class KVEvents:
    """Collects chunks, and publishes them. Not thread-safe. No call blocks.

    A step does a bounded amount of work, and leaves the rest to the next one.

    The :data:`~kvtier.bridge.protocol.MAX_WATCHED_CHUNKS` chunks that were used last are described, in
    3 KB each. Older ones are published as removed.
    """

    def __init__(self, bridge: SchedulerBridge, chunk_tokens: int, blocks: EngineBlocks) -> None:
        self._bridge = bridge
        self._chunk_tokens = chunk_tokens
        self._blocks = blocks
        self._prompts: deque[_Prompt] = deque(maxlen=MAX_PROMPTS)
        self._chunks: OrderedDict[ChunkKey, bytes] = OrderedDict()
        """The encoded event of each chunk, least recently used first, and a chunk before its parent."""
        self._published = Published(self._chunks, blocks.published)
        self._ended: deque[Published] = deque()
        """What was published of earlier weights, and has not been removed yet."""
        self._held: dict[ChunkKey, int] = {}
        """The media in which chunks are held, where it has not been published yet."""
        self._unwatched: list[ChunkKey] = []
        """Chunks to watch, the last one first."""
        self._forgotten: list[ChunkKey] = []
        self._connection = (0, 0)

    def add(self, state: RequestState, first: int, keys: Sequence[ChunkKey], tokens: int) -> None:
        """Add chunks of a request from index ``first`` on, which have ``tokens`` tokens in total."""
        self._prompts.append(_Prompt(state, first, keys, tokens))

    def resync(self) -> None:
        """Publish everything as removed, except what the cache process still holds. Call after a clear."""
        self._bridge.take_held()
        self._held.clear()
        self._published.invalidate()
        self._unwatched = list(self._chunks) if self._bridge.epoch else []

    def forget_all(self) -> None:
        """Publish everything as removed, and watch nothing: the engine has other weights.

        Their chunks have the same blocks for routers, so nothing is published as stored before.
        """
        self._prompts.clear()
        self._held.clear()
        self._unwatched.clear()
        self._bridge.take_held()
        self._forgotten += self._chunks
        self._published.invalidate()
        self._ended.append(self._published)
        self._chunks = OrderedDict()
        self._published = Published(self._chunks, self._blocks.published)

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last call. Called once per step."""
        connection = self._bridge.connections, self._bridge.epoch
        if connection != self._connection:
            self._connection = connection
            self.resync()
        if self._blocks.take_reset():
            # vLLM has published ``AllBlocksCleared``, and routers drop the blocks of all media.
            self._ended.clear()
            held, self._held = self._held, self._published.take_all()
            self._held.update(held)
        while self._ended:  # First: the same blocks of other weights may be published as stored after it.
            if events := self._ended[0].remove_outdated(STEP_PUBLISHED):
                return _merged(events)
            self._ended.popleft()
        events = self._describe()
        self._watch()
        events += self._publish()
        events += self._published.remove_outdated(STEP_PUBLISHED)
        return _merged(events)

    def _describe(self) -> list[KVCacheEvent]:
        """Describe chunks of the added prompts; return the removals of those that this displaces."""
        left = STEP_DESCRIBED * KNOWN_PER_DESCRIBED
        fresh: list[ChunkKey] = []
        while self._prompts and left > 0:
            state, first, keys, tokens = self._prompts.popleft()
            for at, key in enumerate(keys):
                if left <= 0:
                    done = at * self._chunk_tokens
                    self._prompts.appendleft(_Prompt(state, first + at, keys[at:], tokens - done))
                    break
                left -= 1
                if key not in self._chunks and (chunk := self._encoded(state, first, at, tokens)) is not None:
                    self._chunks[key] = chunk
                    fresh.append(key)
                    left -= KNOWN_PER_DESCRIBED
            else:
                left -= self._touch([*state.keys[:first], *keys])
        self._unwatched += reversed(fresh)
        return self._displace()

    def _encoded(self, state: RequestState, first: int, at: int, tokens: int) -> bytes | None:
        start = at * self._chunk_tokens
        length = min(self._chunk_tokens, tokens - start)
        return self._blocks.describe(state.request, first * self._chunk_tokens + start, length)

    def _touch(self, prefix: Sequence[ChunkKey]) -> int:
        """Count a prefix as used just now, each chunk before its parent; return its length."""
        for key in reversed(prefix):
            if key in self._chunks:
                self._chunks.move_to_end(key)
        return len(prefix)

    def _displace(self) -> list[KVCacheEvent]:
        events: list[KVCacheEvent] = []
        while len(self._chunks) > MAX_WATCHED_CHUNKS:
            key = next(iter(self._chunks))
            events += self._published.update(key, 0)
            self._held.pop(key, None)
            del self._chunks[key]
            self._forgotten.append(key)
        return events

    def _watch(self) -> None:
        if not (self._unwatched or self._forgotten) or not self._bridge.accepts_requests:
            return
        keys = self._unwatched[-STEP_WATCHED:]
        del self._unwatched[-STEP_WATCHED:]
        # A displaced chunk may have been described again.
        forgotten = [key for key in self._forgotten[-STEP_WATCHED:] if key not in self._chunks]
        del self._forgotten[-STEP_WATCHED:]
        self._bridge.watch([key for key in reversed(keys) if key in self._chunks], forgotten)

    def _publish(self) -> list[KVCacheEvent]:
        """Publish what the cache process has reported, parents first."""
        if (reported := self._bridge.take_held()) and (welcome := self._bridge.welcome) is not None:
            bits = media_of_tiers(welcome.media)
            for key, tiers in reported.items():
                if key in self._chunks:
                    self._held[key] = _media(tiers, bits)
        keys = list(islice(self._held, STEP_PUBLISHED))
        return [event for key in keys for event in self._published.update(key, self._held.pop(key))]


def _media(tiers: int, bits: Sequence[int]) -> int:
    media = 0
    for tier, bit in enumerate(bits):
        if tiers >> tier & 1:
            media |= bit
    return media


def _merged(events: Iterable[KVCacheEvent]) -> list[KVCacheEvent]:
    """Merge consecutive removals from one medium."""
    merged: list[KVCacheEvent] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, BlockRemoved) and isinstance(last, BlockRemoved) and event.medium == last.medium:
            last.block_hashes += event.block_hashes
        else:
            merged.append(event)
    return merged
