"""Publish which chunks the tiers hold as vLLM's KV events, for routers.

The cache process reports which tiers hold the chunks that the engine has described, and routers receive the
differences. So nothing depends on the order or number of changes, and every state is corrected by the next.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from vllm.distributed.kv_events import BlockRemoved

from kvtier.bridge.client import SchedulerBridge
from kvtier.bridge.protocol import MAX_WATCHED_CHUNKS
from kvtier.integrations.vllm.engine_blocks import EngineBlocks
from kvtier.integrations.vllm.published import Published, media_of_tiers
from kvtier.memory.keys import ChunkKey

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent

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
        while self._ended:
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
