"""The native keys equal those of Python, for all token types."""

from __future__ import annotations

import random
import sys
import threading
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvtier import native
from kvtier.memory.keys import ChunkKey, chunk_keys, encode_tokens, root_key

pytestmark = pytest.mark.skipif(not native.available(), reason=native.summary())

ROOT = root_key(bytes(range(32)))
BIG = 200_000
"""A number of tokens for which the native core releases the GIL."""

token_ids = st.integers(0, 2**32 - 1) | st.integers(0, 2**15)


def native_keys(
    tokens: object, chunk_tokens: int, *, tail: bool = False, extras: Sequence[bytes] = ()
) -> list[bytes]:
    return native.core.chunk_keys(ROOT, tokens, chunk_tokens, tail, list(extras))


def python_keys(
    tokens: Sequence[int], chunk_tokens: int, *, tail: bool = False, extras: Sequence[bytes] = ()
) -> list[ChunkKey]:
    def extra(start: int, _: int) -> bytes:
        index = start // chunk_tokens
        return extras[index] if index < len(extras) else b""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "available", lambda: False)
        return chunk_keys(ROOT, tokens, chunk_tokens, extra=extra, tail=tail)


@pytest.mark.parametrize(
    "length", [0, 1, 63, 64, 65, 1023, 1024, 1025, 1060, 2048, 2049, 3073, 8193, 102_400]
)
def test_hashes_match_the_blake3_package(length: int) -> None:
    data = random.Random(length).randbytes(length)
    assert native.core.blake3(data) == blake3(data).digest()


@given(st.binary(max_size=5000))
def test_hashes_of_random_data_match_the_blake3_package(data: bytes) -> None:
    assert native.core.blake3(data) == blake3(data).digest()


class ConstantList(Sequence[int]):
    """A view of a list, as vLLM gives of the tokens of a request."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, at: Any) -> Any:
        return self._tokens[at]


@given(
    st.lists(token_ids, max_size=600),
    st.integers(1, 300),
    st.booleans(),
    st.lists(st.binary(max_size=80), max_size=5),
)
def test_native_keys_match_python(tokens: list[int], size: int, tail: bool, extras: list[bytes]) -> None:
    assert native_keys(tokens, size, tail=tail, extras=extras) == python_keys(
        tokens, size, tail=tail, extras=extras
    )


@pytest.mark.parametrize(
    "kind",
    [
        list,
        tuple,
        lambda tokens: array("I", tokens),
        lambda tokens: array("l", tokens),
        lambda tokens: array("q", tokens),
        lambda tokens: array("L", tokens),
        lambda tokens: np.array(tokens, dtype=np.int64),
        lambda tokens: np.array(tokens, dtype=np.int32),
        lambda tokens: np.array(tokens, dtype=np.uint32),
        lambda tokens: np.array(tokens, dtype=np.uint64),
        lambda tokens: np.array(tokens, dtype=np.uint16),
        lambda tokens: np.array(tokens, dtype=">i4"),
        lambda tokens: np.array([tokens, tokens]).T[:, 0],
        lambda tokens: list(np.array(tokens)),
        lambda tokens: memoryview(array("I", tokens)),
        encode_tokens,
    ],
)
@pytest.mark.parametrize("with_native", [True, False], ids=["native", "python"])
def test_tokens_of_any_type_have_the_same_keys(
    kind: Any, with_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = random.Random(1).choices(range(2**16), k=1000)
    expected = python_keys(tokens, 64, tail=True)
    if not with_native:
        monkeypatch.setattr(native, "available", lambda: False)
    assert chunk_keys(ROOT, kind(tokens), 64, tail=True) == expected


@pytest.mark.parametrize("with_native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([1, -1], OverflowError),
        ([1, 2**32], OverflowError),
        ([1, 2**64], OverflowError),
        ([1, -(2**70)], OverflowError),
        (np.array([1, -1]), OverflowError),
        (np.array([1, 2**32]), OverflowError),
        ([1, "2"], TypeError),
        ([1, 2.0], TypeError),
        ([1, None], TypeError),
        (np.array([1.0, 2.0]), TypeError),
        (b"12345", ValueError),
    ],
    ids=str,
)
def test_invalid_token_ids_are_rejected(
    tokens: Any, error: type[Exception], with_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_native:
        monkeypatch.setattr(native, "available", lambda: False)
    with pytest.raises(error):
        chunk_keys(ROOT, tokens, 1)


@pytest.mark.parametrize("with_native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize(
    "kind",
    [list, tuple, range, lambda tokens: array("q", tokens), np.array, encode_tokens, ConstantList],
    ids=["list", "tuple", "range", "array", "numpy", "bytes", "view"],
)
@pytest.mark.parametrize(("start", "stop"), [(0, None), (3, 700), (999, 1000), (7, 7), (9, 3), (990, 2000)])
def test_a_part_of_the_tokens_is_encoded(
    kind: Any, start: int, stop: int | None, with_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = range(1000) if kind is range else random.Random(1).choices(range(2**31), k=1000)
    given = tokens if kind is range else kind(tokens)
    monkeypatch.setattr(native, "available", lambda: with_native)
    assert encode_tokens(given, start, stop) == array("I", tokens[start:stop]).tobytes()


def test_list_that_shrinks_while_a_part_is_encoded_is_rejected() -> None:
    tokens: list[Any] = []

    class Shrinking:
        def __index__(self) -> int:
            del tokens[55:]
            return 1

    tokens += [*range(50), Shrinking(), *range(100)]
    with pytest.raises(RuntimeError, match="changed while they were read"):
        encode_tokens(tokens, 40, 60)


def test_objects_with_index_are_accepted() -> None:
    class Seven:
        def __index__(self) -> int:
            return 7

    assert native_keys([Seven(), True], 2) == python_keys([7, 1], 2)


def test_list_that_shrinks_while_read_is_rejected() -> None:
    tokens: list[Any] = []

    class Shrinking:
        def __index__(self) -> int:
            del tokens[5:]
            return 1

    tokens += [1, Shrinking(), *range(100)]
    with pytest.raises(RuntimeError, match="changed while they were read"):
        native_keys(tokens, 10)


def test_list_that_grows_while_read_keeps_its_original_length() -> None:
    tokens: list[Any] = []

    class Growing:
        def __index__(self) -> int:
            tokens.extend(range(10_000))
            return 1

    tokens += [1, Growing(), *range(100)]
    assert native_keys(tokens, 10) == python_keys([1, 1, *range(100)], 10)


@pytest.mark.parametrize("kind", [list, lambda tokens: array("I", tokens), encode_tokens])
def test_long_prompts_give_the_same_keys_without_the_gil(kind: Any) -> None:
    tokens = random.Random(2).choices(range(100_000), k=BIG)
    expected = python_keys(tokens, 256)
    results: list[list[bytes]] = []
    threads = [
        threading.Thread(target=lambda: results.append(native_keys(kind(tokens), 256))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 3


def test_references_are_balanced() -> None:
    """Reference counts of all arguments are unchanged after success and failure."""
    number, extra = 10**6, bytes(range(200))
    tokens = [number, number + 1]
    data = bytearray(8)
    before = sys.getrefcount(tokens[0]), sys.getrefcount(extra), sys.getrefcount(tokens)
    for _ in range(100):
        native_keys(tokens, 1, extras=[extra])
        native_keys(data, 1)
        with pytest.raises(OverflowError):
            native_keys([tokens[0], -1], 1, extras=[extra])
    assert (sys.getrefcount(tokens[0]), sys.getrefcount(extra), sys.getrefcount(tokens)) == before
    data.append(1)  # Raises BufferError if its memory is still exported.


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(33)])
def test_parent_of_wrong_length_is_rejected(key: bytes) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        native.core.chunk_keys(key, [1], 1, False, [])


def test_chunk_size_of_zero_is_rejected() -> None:
    with pytest.raises(ValueError, match="must not be 0"):
        native.core.chunk_keys(ROOT, [1], 0, False, [])
