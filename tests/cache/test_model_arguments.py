"""What programs pass to a model's methods: any buffer of the right size is used, all else is an error."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from kvtier import KVTierError, LayoutError, ModelCache, TieredCache
from kvtier.memory.header import object_bytes
from kvtier.pipeline.query import Query

from .conftest import CHUNK_TOKENS, TOKEN_BYTES, MakeSettings, Prompt, retrieve, rows

pytestmark = pytest.mark.anyio

TOKENS = 300
LENGTH = TOKENS * TOKEN_BYTES


@asynccontextmanager
async def opened(settings: MakeSettings) -> AsyncIterator[ModelCache]:
    async with TieredCache.open(settings(ssd=0)) as cache:
        yield cache.model("llama", token_bytes=TOKEN_BYTES)


def as_ctypes(kind: Any, length: int) -> Any:
    return (kind * (length // ctypes.sizeof(kind)))()


BUFFERS: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(LENGTH),
    "memoryview": lambda: memoryview(bytearray(LENGTH)).cast("B", (TOKENS, TOKEN_BYTES)),
    "array": lambda: array("d", bytes(LENGTH)),
    "ctypes": lambda: as_ctypes(ctypes.c_float, LENGTH),
    **{
        f"numpy {kind}": lambda kind=kind: np.zeros((TOKENS, TOKEN_BYTES), "u1").view(kind)
        for kind in ("u1", "f2", ">f4", "c16", "bool", "S8", "M8[s]", "f4,i4")
    },
}


@pytest.mark.parametrize("name", BUFFERS)
async def test_any_contiguous_buffer_is_stored_and_filled(
    settings: MakeSettings, prompt: Prompt, name: str
) -> None:
    tokens = prompt(TOKENS)
    source, target = BUFFERS[name](), BUFFERS[name]()
    ctypes.memmove(address_of(source), bytes(rows(tokens)), LENGTH)
    async with opened(settings) as model:
        assert await model.store(tokens, source) == TOKENS
        assert await model.retrieve(tokens, target) == TOKENS
    assert ctypes.string_at(address_of(target), LENGTH) == rows(tokens)


def address_of(buffer: Any) -> int:
    if isinstance(buffer, np.ndarray):
        return buffer.ctypes.data
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


@pytest.mark.parametrize(
    "source",
    [
        bytes(rows([1] * TOKENS)),
        memoryview(np.frombuffer(rows([1] * TOKENS), ">f4")).toreadonly(),
        np.frombuffer(bytes(rows([1] * TOKENS)), "f8"),
    ],
    ids=["bytes", "memoryview", "numpy"],
)
async def test_read_only_memory_is_stored_and_not_filled(settings: MakeSettings, source: Any) -> None:
    tokens, target = [1] * TOKENS, bytearray(LENGTH)
    async with opened(settings) as model:
        assert await model.store(tokens, source) == TOKENS
        assert await model.retrieve(tokens, target) == TOKENS
        assert target == rows(tokens)
        with pytest.raises(LayoutError, match="read-only: pass memory that can be written to"):
            await model.retrieve(tokens, source)


@pytest.mark.parametrize(
    ("rows_", "remedy"),
    [
        (memoryview(bytes(2 * LENGTH))[::2], "pass a copy"),
        (np.zeros((TOKEN_BYTES, TOKENS), "u1").T, "pass numpy.ascontiguousarray"),
        (np.zeros((TOKENS, TOKEN_BYTES // 8), object), "pass an array of numbers"),
        ([0] * LENGTH, "a list is no KV: pass a buffer, an array or a tensor"),
        (bytearray(LENGTH - 1), f"do not fit {LENGTH - 1} bytes: pass fewer tokens or a larger buffer"),
        (np.zeros((0, TOKEN_BYTES), "f2"), "do not fit 0 bytes"),
    ],
    ids=["memoryview", "numpy", "objects", "list", "short", "empty"],
)
async def test_other_memory_is_a_layout_error(
    settings: MakeSettings, prompt: Prompt, rows_: Any, remedy: str
) -> None:
    tokens = prompt(TOKENS)
    async with opened(settings) as model:
        assert await model.store(tokens, rows(tokens)) == TOKENS
        for use in (model.store, model.retrieve):
            with pytest.raises(LayoutError, match=remedy):
                await use(tokens, rows_)


async def test_of_a_larger_buffer_only_the_beginning_is_stored(
    settings: MakeSettings, prompt: Prompt
) -> None:
    tokens = prompt(TOKENS)
    async with TieredCache.open(settings(ssd=0)) as cache:
        model = cache.model("llama", token_bytes=TOKEN_BYTES)
        assert await model.store(tokens, rows(tokens) + bytes(LENGTH)) == TOKENS
        sizes = [CHUNK_TOKENS, TOKENS - CHUNK_TOKENS]
        assert cache.catalog.used(0) == sum(object_bytes(size * TOKEN_BYTES) for size in sizes)


async def test_a_larger_buffer_is_filled_at_its_beginning(settings: MakeSettings, prompt: Prompt) -> None:
    tokens, target = prompt(TOKENS), np.full((2 * TOKENS, TOKEN_BYTES), 7, "u1")
    async with opened(settings) as model:
        await model.store(tokens, rows(tokens))
        assert await model.retrieve(tokens, target) == TOKENS
    assert target[:TOKENS].tobytes() == rows(tokens)
    assert (target[TOKENS:] == 7).all()


async def call(method: Callable[..., Any], arguments: Sequence[object]) -> None:
    result = method(*arguments)
    if hasattr(result, "__await__"):
        await result


async def call_all(cache: TieredCache, model: Any, tokens: Sequence[int], message: str) -> None:
    """Check that each method that takes tokens raises an error."""
    calls: dict[str, Sequence[object]] = {
        "keys": (tokens,),
        "store": (tokens, bytes(LENGTH)),
        "retrieve": (tokens, bytearray(LENGTH)),
        "held_tokens": (tokens,),
        "prefetch": (tokens,),
        "move": (tokens, "ram", "ssd"),
        "pin": (tokens,),
        "unpin": (tokens,),
        "clear": (tokens,),
    }
    methods = {name for name in dir(model) if not name.startswith("_") and callable(getattr(model, name))}
    assert methods == set(calls), "all methods take tokens"
    for name, arguments in calls.items():
        with pytest.raises(KVTierError, match=message):
            await call(getattr(model, name), arguments)


@pytest.mark.parametrize(
    "tokens",
    [[-1] * 5, [1 << 32], np.array([-1, 2]), [1.5], "abc", b"abc", [None]],
    ids=["negative", "large", "numpy", "float", "text", "bytes", "none"],
)
async def test_wrong_token_ids_are_an_error(settings: MakeSettings, tokens: Any) -> None:
    async with TieredCache.open(settings()) as cache:
        model = cache.model("llama", token_bytes=TOKEN_BYTES)
        await call_all(cache, model, tokens, "token IDs must be integers from 0 to 4294967295")
        assert cache.catalog.count(0) == cache.arena.used == 0


async def test_bytes_of_a_token_may_be_an_integer_of_numpy(settings: MakeSettings, prompt: Prompt) -> None:
    """Even of a type in which the bytes of a prompt overflow."""
    tokens = prompt(1000)
    async with TieredCache.open(settings(ssd=0)) as cache:
        model = cache.model("llama", token_bytes=np.int16(TOKEN_BYTES))
        assert await model.store(tokens, rows(tokens)) == 1000
        assert await retrieve(model, tokens) == 1000


@pytest.mark.parametrize("token_bytes", [0, -1, 1.5, "2"])
async def test_tokens_have_bytes(settings: MakeSettings, token_bytes: int) -> None:
    async with TieredCache.open(settings(ssd=0)) as cache:
        with pytest.raises(LayoutError, match=f"token_bytes is {token_bytes!r}: set it to the bytes of KV"):
            cache.model("llama", token_bytes=token_bytes)


async def test_a_closed_cache_says_so(settings: MakeSettings, prompt: Prompt) -> None:
    tokens, message = prompt(TOKENS), "the cache is closed: use it within the `with` block that opens it"
    async with TieredCache.open(settings()) as cache:
        model = cache.model("llama", token_bytes=TOKEN_BYTES)
        await model.store(tokens, rows(tokens))
        keys = model.keys(tokens)
    await call_all(cache, model, tokens, message)
    with pytest.raises(KVTierError, match=message):
        await model.clear()
    with pytest.raises(KVTierError, match=message):
        cache.model("qwen", token_bytes=TOKEN_BYTES)
    with pytest.raises(KVTierError, match=message):
        cache.look_up(Query(keys))
    with pytest.raises(KVTierError, match=message):
        cache.reserve_all([])
    with pytest.raises(KVTierError, match=message):
        await cache.clear()
    assert cache.status()["pending_bytes"] == 0
