"""Chunk keys: equal keys mean equal prefix, namespace and tenant, in every process and version."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ProtocolError
from kvtier.memory.keys import (
    KEY_BYTES,
    ChunkKey,
    chunk_key,
    chunk_keys,
    encode_extra,
    encode_tokens,
    join_keys,
    root_key,
    split_keys,
)

pytestmark = pytest.mark.usefixtures("either_core")

NAMESPACE = bytes(range(32))
ROOT = root_key(NAMESPACE)

token_ids = st.integers(0, 2**32 - 1)
prompts = st.lists(token_ids, max_size=40)
chunk_sizes = st.integers(1, 8)


def first_difference(left: list[int], right: list[int]) -> int:
    """Return the index of the first token that differs, or the length of the shorter list."""
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


# A change of these values invalidates all stored chunks.


def test_root_keys_are_stable() -> None:
    assert ROOT.hex() == "c538a47890e2a7e2e01c5c55530147bc6b745e8758770179c6703966af9ffd90"
    tenant = root_key(NAMESPACE, "tenant")
    assert tenant.hex() == "3d54fa486bdbb95938788b4e5f863284548e9ef3cd539993bad2a030bd07aac7"


def test_chunk_keys_are_stable() -> None:
    assert [key.hex() for key in chunk_keys(ROOT, range(10), 4, tail=True)] == [
        "3b5aae8479b0cf78478bc450cf21a09c97a95e48145936b4aee1b416848c1104",
        "4449a2782723590de8ab64214f8b0c024ccb1d27b0a818f4a37ffec96f83ec29",
        "dfd9b9453fe636ecdc0a3e6f85acb590d8a06001b0cf48a013fa8d767cc4c48b",
    ]


def test_keys_with_extra_are_stable() -> None:
    keys = chunk_keys(ROOT, range(10), 4, tail=True, extra=lambda start, _: encode_extra(["lora", start]))
    assert [key.hex() for key in keys] == [
        "d91a8ca1443788a9621ddee400be94a205db95a51c08221e1540b004bfc0abfc",
        "8c64b4c16fe72215b4ba4f17382b59552673ae836e71daf24ebed8ca79631624",
        "87d896c17096f5cfc71833737c191e759e8acec1553916d7284fccaf98671244",
    ]


def test_keys_do_not_depend_on_the_process() -> None:
    program = (
        "from kvtier.memory.keys import chunk_keys, root_key\n"
        "print(chunk_keys(root_key(bytes(range(32))), range(10), 4, tail=True)[-1].hex())"
    )
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        result = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert result.stdout.strip() == chunk_keys(ROOT, range(10), 4, tail=True)[-1].hex()


# The chain.


@given(prompts, chunk_sizes)
def test_one_key_per_full_chunk_and_one_for_the_tail(tokens: list[int], size: int) -> None:
    keys = chunk_keys(ROOT, tokens, size)
    assert len(keys) == len(tokens) // size
    with_tail = chunk_keys(ROOT, tokens, size, tail=True)
    assert len(with_tail) == -(-len(tokens) // size)
    assert with_tail[: len(keys)] == keys
    assert all(len(key) == KEY_BYTES for key in with_tail)
    assert len(set(with_tail)) == len(with_tail)


@given(prompts, prompts, prompts, chunk_sizes)
def test_keys_are_shared_exactly_for_the_common_prefix(
    prefix: list[int], left: list[int], right: list[int], size: int
) -> None:
    left, right = prefix + left, prefix + right
    left_keys, right_keys = chunk_keys(ROOT, left, size), chunk_keys(ROOT, right, size)
    shared = first_difference(left, right) // size
    assert left_keys[:shared] == right_keys[:shared]
    assert not set(left_keys[shared:]) & set(right_keys[shared:])


@given(prompts, chunk_sizes)
def test_chunk_key_chain_equals_chunk_keys(tokens: list[int], size: int) -> None:
    parent, keys = ROOT, []
    for start in range(0, len(tokens), size):
        parent = chunk_key(parent, encode_tokens(tokens[start : start + size]))
        keys.append(parent)
    assert keys == chunk_keys(ROOT, tokens, size, tail=True)


@given(st.lists(token_ids, min_size=2, max_size=20))
def test_key_of_a_tail_differs_from_the_full_chunk(tokens: list[int]) -> None:
    (tail,) = chunk_keys(ROOT, tokens[:-1], len(tokens), tail=True)
    (full,) = chunk_keys(ROOT, tokens, len(tokens), tail=True)
    assert tail != full
    padded = chunk_keys(ROOT, [*tokens[:-1], 0], len(tokens))
    assert tail not in padded


def test_different_chunk_sizes_share_no_keys() -> None:
    fours, eights = chunk_keys(ROOT, range(8), 4), chunk_keys(ROOT, range(8), 8)
    assert not set(fours) & set(eights)


# Separation.


@given(
    st.binary(min_size=32, max_size=32), st.text(max_size=8), st.binary(min_size=32, max_size=32), st.text()
)
def test_root_keys_are_equal_only_for_equal_namespace_and_salt(
    namespace: bytes, salt: str, other_namespace: bytes, other_salt: str
) -> None:
    same = (namespace, salt) == (other_namespace, other_salt)
    assert (root_key(namespace, salt) == root_key(other_namespace, other_salt)) is same


@given(st.lists(token_ids, min_size=1, max_size=20), chunk_sizes)
def test_tenants_never_share_a_key(tokens: list[int], size: int) -> None:
    ours = chunk_keys(root_key(NAMESPACE, "a"), tokens, size, tail=True)
    theirs = chunk_keys(root_key(NAMESPACE, "b"), tokens, size, tail=True)
    assert not set(ours) & set(theirs)


extras = st.lists(st.text(max_size=4) | st.integers(0, 9) | st.binary(max_size=4), max_size=4)


@given(
    st.lists(token_ids, min_size=1, max_size=4), extras, st.lists(token_ids, min_size=1, max_size=4), extras
)
def test_key_separates_tokens_from_extra(
    tokens: list[int], extra: list[object], other_tokens: list[int], other_extra: list[object]
) -> None:
    left = chunk_key(ROOT, encode_tokens(tokens), encode_extra(extra))
    right = chunk_key(ROOT, encode_tokens(other_tokens), encode_extra(other_extra))
    assert (left == right) is ((tokens, extra) == (other_tokens, other_extra))


def test_extra_that_looks_like_tokens_gives_another_key() -> None:
    whole, half = encode_tokens([1, 2]), encode_tokens([1])
    assert chunk_key(ROOT, half, whole[len(half) :]) != chunk_key(ROOT, whole)


def test_extra_changes_its_chunk_and_all_later_ones() -> None:
    def image(start: int, stop: int) -> bytes:
        return encode_extra(["image"]) if start <= 5 < stop else b""

    plain, with_image = chunk_keys(ROOT, range(16), 4), chunk_keys(ROOT, range(16), 4, extra=image)
    assert [a == b for a, b in zip(plain, with_image, strict=True)] == [True, False, False, False]


def test_extra_is_called_with_the_range_of_each_chunk() -> None:
    ranges: list[tuple[int, int]] = []

    def extra(start: int, stop: int) -> bytes:
        ranges.append((start, stop))
        return b""

    assert chunk_keys(ROOT, range(10), 4, extra=extra, tail=True) == chunk_keys(ROOT, range(10), 4, tail=True)
    assert ranges == [(0, 4), (4, 8), (8, 10)]


# Encodings.


@given(st.lists(token_ids, max_size=20))
def test_tokens_are_little_endian_words(tokens: list[int]) -> None:
    assert encode_tokens(tokens) == b"".join(token.to_bytes(4, "little") for token in tokens)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_out_of_range_is_rejected(token: int) -> None:
    with pytest.raises(OverflowError):
        chunk_keys(ROOT, [token], 1)


@given(st.lists(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES).map(ChunkKey), max_size=5))
def test_join_and_split_keys(keys: list[ChunkKey]) -> None:
    assert split_keys(join_keys(keys)) == keys


@pytest.mark.parametrize("length", [1, 31, 33])
def test_partial_key_is_rejected(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"{length} bytes are not a whole number of 32-byte keys"):
        split_keys(bytes(length))
