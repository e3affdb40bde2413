"""Report chunks stored in and removed from the tiers as vLLM's KV events."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored

from kvtier.bridge.protocol import Changed
from kvtier.memory.keys import split_keys

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent

    from kvtier.integrations.vllm.request import RequestState

REMEMBERED_CHUNKS = 100_000
MEMORY = ("cpu", "hugepage")


class _Chunk(NamedTuple):
    parent: bytes | None
    tokens: list[int]
    lora: str | None


class ChangeLog:
    """Converts changed keys to events.

    A ``BlockStored`` event needs the tokens, which only the engine that computed them knows. It is omitted
    for chunks of other engines, and for those older than the last :data:`REMEMBERED_CHUNKS`.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._chunks: OrderedDict[bytes, _Chunk] = OrderedDict()

    def remember(self, state: RequestState, first: int, keys: Sequence[bytes], sizes: Sequence[int]) -> None:
        """Keep the tokens of chunks that will be stored."""
        lora = state.request.lora_request
        start = first * self._chunk_tokens
        for index, (key, tokens) in enumerate(zip(keys, sizes, strict=True)):
            parent = state.parent(first + index) if first + index else None
            ids = list(state.request.all_token_ids[start : start + tokens])
            self._chunks[key] = _Chunk(parent, ids, None if lora is None else lora.lora_name)
            start += tokens
        while len(self._chunks) > REMEMBERED_CHUNKS:
            self._chunks.popitem(last=False)

    def events(self, changes: Sequence[Changed], media: Sequence[str]) -> Iterator[KVCacheEvent]:
        """Yield one event for each stored chunk, and one for the removals of each change."""
        for change in changes:
            medium = MEDIUM_CPU if media[change.tier] in MEMORY else MEDIUM_STORAGE
            for key in split_keys(change.stored):
                chunk = self._chunks.get(key)
                if chunk is not None:
                    yield BlockStored(
                        block_hashes=[bytes(key)],
                        parent_block_hash=chunk.parent,
                        token_ids=chunk.tokens,
                        block_size=self._chunk_tokens,
                        lora_id=None,
                        medium=medium,
                        lora_name=chunk.lora,
                    )
            removed = split_keys(change.removed)
            if removed:
                yield BlockRemoved(block_hashes=list(removed), medium=medium)
