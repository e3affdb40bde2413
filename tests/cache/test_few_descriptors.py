"""Without free file descriptors, nothing can be written to disk. No chunk is lost without being counted."""

from __future__ import annotations

import itertools
import logging

import anyio
import pytest

from kvtier import ModelCache, TieredCache
from kvtier.native import available
from tests.rigs.faulty_sources import BUILT_IN
from tests.rigs.open_files import no_free_descriptors

from .conftest import TOKEN_BYTES, MakeSettings, Prompt, rows

ENGINES = ["threads", "uring"] if available() else ["threads"]
pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("io", ENGINES)]


async def store(model: ModelCache, tokens: list[int]) -> None:
    await model.store(tokens, rows(tokens))


async def warmed_up(cache: TieredCache) -> ModelCache:
    """Return a model whose worker threads have started: a new thread may open files."""
    model = cache.model("llama", token_bytes=TOKEN_BYTES)
    await store(model, [1] * 512)
    assert await cache.drain(10)
    return model


async def test_failed_writes_are_repeated_at_the_end(
    settings: MakeSettings, prompt: Prompt, caplog: pytest.LogCaptureFixture, io: str
) -> None:
    configured, prompts = settings(disk={"io": io}), [prompt(1024, seed) for seed in range(2)]
    async with TieredCache.open(configured, plugins=BUILT_IN) as cache:
        model = await warmed_up(cache)
        with caplog.at_level(logging.WARNING, "kvtier"), no_free_descriptors():
            for tokens in prompts:
                await store(model, tokens)
                assert await cache.drain(10)
        assert cache.counts["put_failed"] == 8
        assert "Too many open files: raise this process's limit (ulimit -n, LimitNOFILE)" in caplog.text
    async with TieredCache.open(configured, plugins=BUILT_IN) as cache:
        model = cache.model("llama", token_bytes=TOKEN_BYTES)
        for tokens in prompts:
            target = bytearray(1024 * TOKEN_BYTES)
            assert await model.retrieve(tokens, target) == 1024
            assert target == rows(tokens)


@pytest.mark.parametrize("write", ["through", "on_evict"])
async def test_chunks_that_leave_memory_unwritten_are_counted(
    settings: MakeSettings, prompt: Prompt, io: str, write: str
) -> None:
    configured = settings(ram=16, disk={"io": io, "write": write})
    async with TieredCache.open(configured, plugins=BUILT_IN) as cache:
        model, counts = await warmed_up(cache), cache.counts
        seeds = itertools.count()
        with no_free_descriptors(), anyio.fail_after(60):
            while not counts["evicted_unwritten"]:
                await store(model, prompt(1024, next(seeds)))
                assert await cache.drain(10)
            assert counts["put_failed"]
        for _ in range(10):
            await store(model, prompt(1024, next(seeds)))
            assert await cache.drain(10)
        assert counts["stored"] == len(cache.catalog) + counts["evicted_unwritten"]
