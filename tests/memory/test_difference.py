"""Comparisons of two chunks: what is equal, what rounding explains, and what is the KV of other tokens."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.memory.difference import BYTES_TOLERANCE, TOLERANCES, Difference, difference
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, object_bytes
from kvtier.memory.keys import ChunkKey
from kvtier.memory.layout import ChunkLayout, GroupLayout

BLOCK, TOKENS, WIDTH = 16, 64, 8
LAYERS = 3
NOISE = {"float32": 1e-5, "bfloat16": 0.02, "float16": 0.005}
"""More than rounding has changed in any measurement, relative to the values."""


def layout_of(dtype: str, window: int = 0) -> ChunkLayout:
    size = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}[dtype]
    return ChunkLayout(TOKENS, (GroupLayout(BLOCK, (BLOCK * WIDTH * size,) * LAYERS, window),))


def encode(values: np.ndarray, dtype: str) -> bytes:
    """Return float32 values in another type."""
    if dtype == "bfloat16":
        return (((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)).tobytes()
    if dtype == "uint8":  # As a quantized cache with one scale.
        return np.clip(np.round(values * 32 + 128), 0, 255).astype(np.uint8).tobytes()
    return values.astype(dtype).tobytes()


def kv(layout: ChunkLayout, tokens: int, seed: int = 0) -> np.ndarray:
    pages = len(layout.groups[0].blocks(tokens))
    random = np.random.default_rng(seed)
    return random.normal(size=(LAYERS, pages, BLOCK, WIDTH)).astype(np.float32)


def compare(
    layout: ChunkLayout, first: bytes, second: bytes, dtype: str, tokens: int = TOKENS
) -> Difference | None:
    header = ChunkHeader(ChunkKey(bytes(32)), ChunkKey(bytes(32)), bytes(32), len(first), tokens=tokens)
    padding = bytes(object_bytes(len(first)) - HEADER_BYTES - len(first))
    views = (memoryview(header.packed() + payload + padding) for payload in (first, second))
    return difference(layout, header, *views, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "uint8"])
def test_equal_bytes_are_no_difference(dtype: str) -> None:
    layout = layout_of(dtype)
    payload = encode(kv(layout, TOKENS), dtype)
    assert compare(layout, payload, payload, dtype) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rounding_is_tolerable_and_one_wrong_token_is_not(dtype: str) -> None:
    layout, random = layout_of(dtype), np.random.default_rng(1)
    values = kv(layout, TOKENS)
    noise = (values * (1 + NOISE[dtype] * random.normal(size=values.shape))).astype(np.float32)
    found = compare(layout, encode(values, dtype), encode(noise, dtype), dtype)
    assert found is not None
    assert found.distance <= TOLERANCES[dtype]
    assert found.differing
    assert found.values == values.size
    wrong = values.copy()
    wrong[1, 2, 5] = values[1, 2, 6]  # In one layer, the KV of the next token.
    found = compare(layout, encode(values, dtype), encode(wrong, dtype), dtype)
    assert found is not None
    assert found.distance > TOLERANCES[dtype]
    assert found.differing <= WIDTH
    assert found.distance > 0.1


def test_quantized_values_may_differ_in_most_bytes_of_a_page_if_these_are_rounded() -> None:
    layout, random = layout_of("uint8"), np.random.default_rng(1)
    values = kv(layout, TOKENS)
    noise = (values * (1 + 0.005 * random.normal(size=values.shape))).astype(np.float32)
    found = compare(layout, encode(values, "uint8"), encode(noise, "uint8"), "uint8")
    assert found is not None
    assert found.distance <= BYTES_TOLERANCE
    found = compare(layout, encode(values, "uint8"), encode(kv(layout, TOKENS, seed=2), "uint8"), "uint8")
    assert found is not None
    assert found.distance > BYTES_TOLERANCE
    assert found.distance > 0.9


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_no_numbers_are_not_tolerable(value: float) -> None:
    layout = layout_of("float32")
    values = kv(layout, TOKENS)
    wrong = values.copy()
    wrong[0, 0, 0, 0] = value
    found = compare(layout, encode(values, "float32"), encode(wrong, "float32"), "float32")
    assert found is not None
    assert found.distance > TOLERANCES["float32"]


def test_zeros_of_both_signs_are_equal() -> None:
    layout = layout_of("float32")
    zeros = np.zeros_like(kv(layout, TOKENS))
    assert compare(layout, encode(zeros, "float32"), encode(-zeros, "float32"), "float32") is None


@pytest.mark.parametrize("window", [0, 24])
def test_the_last_block_counts_only_if_it_is_full(window: int) -> None:
    layout, tokens = layout_of("float32", window), 2 * BLOCK + 3
    values = kv(layout, tokens)
    other = values.copy()
    other[:, -1] = 7  # What the block held before, in place of the tokens after the last one.
    assert compare(layout, encode(values, "float32"), encode(other, "float32"), "float32", tokens) is None
    other[:, -2] = 7
    found = compare(layout, encode(values, "float32"), encode(other, "float32"), "float32", tokens)
    assert found is not None
    assert found.distance > TOLERANCES["float32"]


def test_the_shares_of_all_ranks_are_compared() -> None:
    groups = (GroupLayout(BLOCK, (BLOCK * WIDTH * 4,) * LAYERS, shards=(0, 0, 1)),)
    layout = ChunkLayout(TOKENS, groups, ranks=3)
    values = np.concatenate([kv(layout, TOKENS, seed) for seed in (1, 2)])
    other = values.copy()
    other[-1, -1] = 0
    found = compare(layout, encode(values, "float32"), encode(other, "float32"), "float32")
    assert found is not None
    assert found.distance > TOLERANCES["float32"]
    assert found.values == values.size
