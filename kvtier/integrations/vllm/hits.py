"""What a lookup has found of a prompt: how far it can be used, and from which chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.integrations.vllm.request import NO_HIT, Hit, RequestState
from kvtier.memory.keys import equal_blocks

if TYPE_CHECKING:
    from kvtier.bridge.client import LookupState
    from kvtier.memory.layout import ChunkLayout


def hit_of(lookup: LookupState, state: RequestState, layout: ChunkLayout) -> Hit:
    """Return what a lookup has found; before its final answer, what it will have found if no chunk fails.

    Its last chunk may belong to another prompt: as many of its blocks are used as are equal.
    """
    chunk, tokens, chunks = layout.chunk_tokens, int(state.request.num_tokens), lookup.total
    if chunks < lookup.needed:
        return NO_HIT
    if not lookup.last_tokens:
        # With states, the last lease is that of the state.
        chunks = max(0, chunks - layout.has_states)
        return Hit(min(chunks * chunk, tokens), chunks)
    start = (chunks - 1) * chunk
    equal = 0 if start >= tokens else _equal(lookup, state, start)
    if state.lookahead:  # The KV of the last of these blocks depends on tokens after it.
        equal -= 1
    used = layout.usable(lookup.last_tokens, min(max(0, equal) * layout.granularity, tokens - start))
    return Hit(start + used, chunks, lookup.last_tokens) if used else Hit(min(start, tokens), chunks - 1)


def reported_tokens(hit: Hit, state: RequestState, layout: ChunkLayout, *, whole_blocks: bool = False) -> int:
    """Return how many tokens of a hit vLLM can use. ``whole_blocks``: it drops hits that end within a block.

    It computes the last token of a prompt in any case. If the whole prompt is hit, it first frees the blocks
    outside the window of the next token: the window of the last token may include one of them. A prompt of
    one token would have no computed token then, and be looked up again and again.
    """
    tokens, chunk = int(state.request.num_tokens), layout.chunk_tokens
    whole_blocks = whole_blocks and not layout.has_states
    if hit.tokens < tokens or (tokens > 1 and not layout.has_windows and not whole_blocks):
        return hit.tokens
    start = (hit.chunks - 1) * chunk
    stored, before_last = hit.stored_tokens(hit.chunks - 1, chunk), tokens - 1 - start
    if before_last and (whole_blocks or not layout.continues(stored, before_last)):
        before_last = layout.usable(stored, before_last)
    return start + before_last


def _equal(lookup: LookupState, state: RequestState, start: int) -> int:
    """Return how many blocks of the last chunk are the prompt's from ``start`` on, or will have been."""
    if not lookup.final:
        return lookup.likely_blocks
    before = start // state.chunk_tokens
    if before > len(state.keys) or lookup.parent != state.parent(before):
        return 0  # The same tokens after others.
    return equal_blocks(state.block_hashes(start, int(state.request.num_tokens)), lookup.block_hashes)
