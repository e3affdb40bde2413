"""How far a chunk of another prompt is used: up to the first block that differs, or whose KV may."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from kvtier.bridge.client import LookupState
from kvtier.bridge.protocol import Found
from kvtier.integrations.vllm import request as request_module
from kvtier.integrations.vllm.lookups import hit_of, reported_tokens
from kvtier.integrations.vllm.request import Hit, RequestState, request_root
from kvtier.memory.keys import BLOCK_HASH_BYTES, block_hashes, chunk_keys, encode_tokens, equal_blocks
from kvtier.memory.layout import ChunkLayout, GroupLayout
from tests.integrations.test_request import CHUNK, NAMESPACE, TOKENS, image, request

BLOCK = 16
LAYOUT = ChunkLayout(CHUNK, (GroupLayout(BLOCK, (64,)),))


def state_of(source: Any, lookahead: int = 0) -> RequestState:
    source.num_tokens = len(source.all_token_ids)
    return RequestState(source, request_root(NAMESPACE, source), CHUNK, lookahead, BLOCK)


def hashes(source: Any) -> bytes:
    return state_of(source).block_hashes(0, len(source.all_token_ids))


def test_hashes_are_those_of_the_tokens_and_grow_with_them() -> None:
    growing = request(all_token_ids=TOKENS[:40])
    state = state_of(growing)
    assert state.block_hashes(0, 40) == block_hashes(TOKENS[:32], BLOCK)
    growing.all_token_ids = TOKENS
    assert state.block_hashes(CHUNK, len(TOKENS)) == block_hashes(TOKENS[CHUNK:], BLOCK)
    assert state.block_hashes(CHUNK, CHUNK + 2 * BLOCK) == block_hashes(TOKENS[CHUNK:][: 2 * BLOCK], BLOCK)
    assert state.hashes == block_hashes(TOKENS, BLOCK)


def test_blocks_with_another_image_differ() -> None:
    cat, dog = request(mm_features=[image("cat", 20, 30)]), request(mm_features=[image("dog", 20, 30)])
    assert equal_blocks(hashes(cat), hashes(dog)) == 1
    assert equal_blocks(hashes(cat), hashes(request(mm_features=[image("cat", 21, 30)]))) == 1
    after = [hashes(each)[4 * BLOCK_HASH_BYTES :] for each in (cat, dog, request())]
    assert after[0] == after[1] == after[2]


def test_blocks_of_an_image_are_the_same_however_they_become_known() -> None:
    source = request(mm_features=[image("cat", 20, 30)])
    state = state_of(source)
    for stop in range(0, len(TOKENS), 7):
        state.block_hashes(0, stop)
    assert state.block_hashes(0, len(TOKENS)) == hashes(source)


def test_tokens_are_converted_once_for_keys_and_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    converted = []

    def counting(tokens: Any, start: int = 0, stop: int | None = None) -> bytes:
        converted.append((start, stop))
        return encode_tokens(tokens, start, stop)

    monkeypatch.setattr(request_module, "encode_tokens", counting)
    growing = request(all_token_ids=TOKENS[: CHUNK + 40])
    state = state_of(growing)
    state.extend(CHUNK + 40)
    state.block_hashes(0, CHUNK + 40)
    assert converted == [(0, CHUNK + 40)]
    growing.all_token_ids = TOKENS
    state.extend(len(TOKENS))
    state.block_hashes(0, len(TOKENS))
    # From the first chunk and the first block on that were not complete.
    assert converted[1:] == [(CHUNK, len(TOKENS))]
    assert state.keys == chunk_keys(state.root, TOKENS, CHUNK)
    assert state.hashes == block_hashes(TOKENS, BLOCK)


def test_no_hashes_without_granularity() -> None:
    state = RequestState(request(), request_root(NAMESPACE, request()), CHUNK)
    assert state.block_hashes(0, len(TOKENS)) == b""


def found(chunks: int, last_tokens: int = 0, block_hashes: bytes = b"", parent: bytes = b"") -> LookupState:
    call: Any = SimpleNamespace(result=True, settled=True)
    answer = Found(1, [], [], [], 0, last_tokens=last_tokens, block_hashes=block_hashes, parent=parent)
    return LookupState(call, list(range(chunks)), found=answer)


def other(shared: int) -> list[int]:
    """Return the tokens of a chunk that shares some with the second one of the request."""
    chunk = TOKENS[CHUNK : 2 * CHUNK]
    return chunk[:shared] + [1] * (CHUNK - shared)


@pytest.mark.parametrize(
    ("shared", "lookahead", "tokens"),
    [(15, 0, 0), (16, 0, 16), (47, 0, 32), (64, 0, 64), (47, 1, 16), (16, 1, 0), (64, 1, 48)],
)
def test_as_many_blocks_are_used_as_are_equal(shared: int, lookahead: int, tokens: int) -> None:
    state = state_of(request(), lookahead)
    state.extend(len(TOKENS))
    lookup = found(2, CHUNK, block_hashes(other(shared), BLOCK), state.parent(1))
    assert hit_of(lookup, state, LAYOUT) == (Hit(CHUNK + tokens, 2, CHUNK) if tokens else Hit(CHUNK, 1))


def test_the_same_tokens_after_others_are_not_used() -> None:
    state = state_of(request())
    state.extend(len(TOKENS))
    lookup = found(2, CHUNK, block_hashes(other(CHUNK), BLOCK), state.root)
    assert hit_of(lookup, state, LAYOUT) == Hit(CHUNK, 1)


@pytest.mark.parametrize("chunks", range(2, 20))
@pytest.mark.parametrize("final", [True, False])
def test_a_hit_never_exceeds_the_prompt(chunks: int, final: bool) -> None:
    """Whatever the cache process has answered: vLLM ends otherwise."""
    state = state_of(request())
    state.extend(len(TOKENS))
    lookup = found(chunks, CHUNK, block_hashes(other(CHUNK), BLOCK), state.parent(1))
    if not final:
        lookup.found = replace(lookup.found, fetching=1, likely_blocks=1000)
        lookup.pending_sources = [1]
    assert hit_of(lookup, state, LAYOUT).tokens <= len(TOKENS)


def test_an_answer_without_hashes_uses_nothing_of_the_chunk() -> None:
    assert hit_of(found(2, CHUNK), state_of(request()), LAYOUT) == Hit(CHUNK, 1)


@pytest.mark.parametrize(
    ("window", "stored", "equal", "used"),
    [
        (0, 64, 48, 48),
        (65, 64, 48, 48),
        (24, 64, 48, 0),  # Only the last two blocks of the chunk are stored.
        (24, 64, 64, 64),
        (24, 48, 48, 48),
        (24, 48, 32, 0),
    ],
)
def test_all_blocks_that_attention_needs_must_be_stored(
    window: int, stored: int, equal: int, used: int
) -> None:
    layout = ChunkLayout(CHUNK, (GroupLayout(BLOCK, (64,)), GroupLayout(BLOCK, (64,), window)))
    assert layout.usable(stored, equal) == used


@pytest.mark.parametrize(
    ("window", "tokens", "reported"),
    [
        (0, 100, 100),
        (0, 1, 0),
        (32, 100, 99),
        (32, CHUNK + 1, CHUNK),
        (32, 1, 0),
        (33, 128, 64),  # The last token sees one block more than is stored of the whole prompt.
        (33, 127, 126),
        (1000, 96, 95),
    ],
)
def test_last_token_is_computed_with_all_that_it_sees(window: int, tokens: int, reported: int) -> None:
    layout = ChunkLayout(CHUNK, (GroupLayout(BLOCK, (64,)), GroupLayout(BLOCK, (64,), window)))
    state: Any = SimpleNamespace(request=SimpleNamespace(num_tokens=tokens))
    hit = Hit(tokens, -(-tokens // CHUNK))
    assert reported_tokens(hit, state, layout) == reported
    shorter = Hit(tokens - tokens % BLOCK - BLOCK, 2)
    assert reported_tokens(shorter, state, layout) == shorter.tokens


@pytest.mark.parametrize(
    ("window", "tokens", "reported"),
    [(0, 100, 96), (0, 96, 80), (0, 64, 48), (0, 1, 0), (0, BLOCK, 0), (32, 100, 96), (32, 96, 80)],
)
def test_vllm_that_drops_hits_within_blocks(window: int, tokens: int, reported: int) -> None:
    layout = ChunkLayout(CHUNK, (GroupLayout(BLOCK, (64,)), GroupLayout(BLOCK, (64,), window)))
    state: Any = SimpleNamespace(request=SimpleNamespace(num_tokens=tokens))
    hit = Hit(tokens, -(-tokens // CHUNK))
    assert reported_tokens(hit, state, layout, whole_blocks=True) == reported


@pytest.mark.parametrize(
    ("chunk", "block", "granularity"),
    [(256, 16, 16), (256, 8, 16), (1024, 16, 64), (272, 16, 272), (16, 16, 16)],
)
def test_granularity(chunk: int, block: int, granularity: int) -> None:
    assert ChunkLayout(chunk, (GroupLayout(block, (64,)),)).granularity == granularity


def test_a_part_of_a_hit() -> None:
    hit = Hit(CHUNK + 32, 2, CHUNK)
    assert hit.up_to(CHUNK + 32, CHUNK) == hit
    assert hit.up_to(CHUNK, CHUNK) == Hit(CHUNK, 1)
    assert [hit.stored_tokens(index, CHUNK) for index in range(2)] == [CHUNK, CHUNK]
    assert [Hit(CHUNK + 10, 2).stored_tokens(index, CHUNK) for index in range(2)] == [CHUNK, 10]
