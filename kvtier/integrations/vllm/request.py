"""What the scheduler's connector remembers of one request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.integrations.vllm.hints import NO_HINTS, Hints
from kvtier.keys import ChunkKey, ExtraKeys, chunk_key, chunk_keys, encode_extra, encode_tokens, root_key

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class RequestState:
    """One request from its arrival to its end."""

    request: Request
    root: ChunkKey
    chunk_tokens: int
    keys: list[ChunkKey] = field(default_factory=list)
    """Keys of the whole chunks whose tokens are known, in prefix order."""
    ticket: int | None = None
    """The look-up that is not used yet."""
    asked_at: float = 0.0
    waited: bool = False
    """Whether the scheduler has already waited a moment for the look-up's answer."""
    local_tokens: int = 0
    """What vLLM's own cache held when it was last asked."""
    settled: int | None = None
    """The tokens that had been computed before the last step in which it was scheduled."""
    next_chunk: int = 0
    """The first chunk that is neither held nor saved."""
    tail_saved: bool = False
    held_blocks: tuple[Sequence[int], ...] | None = None
    """Its block table at its end, where vLLM keeps the blocks until they are saved."""
    load_failed: bool = False
    """A load failed: compute this request, do not try again."""
    hits_by_tier: dict[int, int] = field(default_factory=dict)
    hints: Hints = NO_HINTS
    hand_over: int | None = None
    """The hand-over to a peer that is under way."""
    preemptions: int = 0
    """How often it had been preempted when that was last looked at."""
    expect_until: float | None = None
    """When chunks that are pushed here are waited for no longer, as :func:`time.monotonic` counts."""
    patience: float = 0.0
    """How many seconds the look-up may take without progress."""

    def ask(self) -> None:
        """A look-up has been sent."""
        self.asked_at = time.monotonic()

    def extend(self, tokens: int, first: int = 0) -> list[ChunkKey]:
        """Keys of whole chunks, from number ``first`` to ``tokens`` tokens; none is hashed twice."""
        whole, known = tokens // self.chunk_tokens, len(self.keys)
        if whole > known:
            start, stop = known * self.chunk_tokens, whole * self.chunk_tokens
            fresh = self.request.all_token_ids[start:stop]
            extra = self._extra_from(start) if _has_extra(self.request) else None
            self.keys += chunk_keys(self.parent(known), fresh, self.chunk_tokens, extra=extra)
        return self.keys[first:whole]

    def _extra_from(self, base: int) -> ExtraKeys:
        return lambda start, stop: _extra(self.request, base + start, base + stop)

    def tail_key(self, tokens: int) -> ChunkKey | None:
        """The key of the partial chunk at the end of the first ``tokens`` tokens, if there is one."""
        whole = tokens // self.chunk_tokens
        start = whole * self.chunk_tokens
        if start >= tokens:
            return None
        self.extend(tokens, whole)
        rest = encode_tokens(self.request.all_token_ids[start:tokens])
        return chunk_key(self.parent(whole), rest, _extra(self.request, start, tokens))

    def parent(self, index: int) -> ChunkKey:
        """The key before chunk number ``index``."""
        return self.keys[index - 1] if index else self.root


def cacheable(request: Request) -> bool:
    """Whether the request's KV follows from token ids and known extra keys alone."""
    return request.prompt_embeds is None and request.prompt_token_ids is not None


def request_root(namespace: bytes, request: Request) -> ChunkKey:
    """The root of a request's chunks: its tenant's."""
    return root_key(namespace, request.cache_salt or "")


def _has_extra(request: Request) -> bool:
    return request.lora_request is not None or bool(request.mm_features)


def _extra(request: Request, start: int, stop: int) -> bytes:
    """LoRA and images: what a chunk's KV depends on besides its tokens."""
    parts: list[object] = []
    lora = request.lora_request
    if lora is not None:
        parts.append(("lora", lora.lora_name, lora.lora_path))
    for feature in request.mm_features:
        offset, length = feature.mm_position.offset, feature.mm_position.length
        if offset < stop and start < offset + length:
            parts.append(("mm", feature.identifier, offset - start))
    return encode_extra(parts)
