"""The engine's own blocks of a chunk, as the event with which vLLM publishes them."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

import msgspec

from kvtier.integrations.vllm.compat import block_index, block_stored
from kvtier.integrations.vllm.layout import ModelLayout
from kvtier.integrations.vllm.plain import builtin
from kvtier.integrations.vllm.published import Published

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

_encode = msgspec.msgpack.Encoder(enc_hook=builtin).encode
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

        ``None`` if there are none, or if they are not hashed yet. Encoded, it takes 2 KB for 256 tokens, a
        fifth of what the objects take.
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
