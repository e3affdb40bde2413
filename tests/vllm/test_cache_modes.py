"""A request may switch the cache off, or only read it, or only write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rigs.cache_process import CHUNK, MIB, CacheProcess
from tests.rigs.vllm import models
from tests.rigs.vllm.engine import Answer, Engine
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import MakeCache, Oracle, Running, StartEngine
from tests.vllm.test_states import MAMBA

LENGTH = 1000
WHOLE_CHUNKS = LENGTH // CHUNK * CHUNK


def generate(engine: Engine, mode: str, start: int = 0) -> Answer:
    """Run one prompt that vLLM's own cache does not have."""
    engine.reset_prefix_cache()
    return engine.generate(prompt(LENGTH, start=start), params={"kvtier": {"cache": mode}})


def chunks(cache: CacheProcess) -> int:
    """Return the number of stored chunks and states, once nothing is in flight."""
    cache.wait_until_idle()
    return sum(int(tier["chunks"]) for tier in cache.status()["tiers"])


def looked_up(engine: Engine) -> float:
    return engine.metrics().get("kvtier_looked_up_tokens_total", 0)


@pytest.mark.parametrize("partial_chunks", [False, True])
def test_modes(
    llama: Path, make_cache: MakeCache, start: StartEngine, oracle: Oracle, partial_chunks: bool
) -> None:
    """The tokens are always the same; only what is looked up, loaded and stored differs."""
    cache = make_cache(partial_chunks=partial_chunks).start()
    tokens = oracle(llama, prompt(LENGTH))
    with start(llama, cache) as engine:
        for mode in ("off", "read"):
            assert generate(engine, mode) == answered(tokens, cached=0)
            engine.reset_prefix_cache()
            assert chunks(cache) == 0, mode
        assert looked_up(engine) == (LENGTH if partial_chunks else WHOLE_CHUNKS)

        assert generate(engine, "write") == answered(tokens, cached=0)
        engine.reset_prefix_cache()
        held = chunks(cache)
        assert held
        hit = LENGTH if partial_chunks else WHOLE_CHUNKS
        assert generate(engine, "off") == answered(tokens, cached=0)
        assert generate(engine, "write") == answered(tokens, cached=0)
        assert generate(engine, "read") == answered(tokens, cached=hit)
        assert generate(engine, "both") == answered(tokens, cached=hit)
        engine.reset_prefix_cache()
        assert chunks(cache) == held


def test_prompts_end_with_a_whole_block_once_room_is_short(
    llama: Path, make_cache: MakeCache, start: StartEngine, oracle: Oracle
) -> None:
    """What was stored up to its end before is a hit up to there as well, from the disk."""
    cache = make_cache(partial_chunks=True, ram={"capacity": 16 * MIB}).start()
    with start(llama, cache) as engine:
        whole = LENGTH // engine.block_tokens * engine.block_tokens
        assert whole < LENGTH
        first, *more, last = [5000 * number for number in range(7)]
        generate(engine, "write", first)
        engine.reset_prefix_cache()
        cache.wait_until_idle()
        assert generate(engine, "read", first).cached == LENGTH
        for number in more:
            generate(engine, "write", number)
            engine.reset_prefix_cache()
            cache.wait_until_idle()
        generate(engine, "write", last)
        engine.reset_prefix_cache()
        cache.wait_until_idle()
        for number in (last, first):
            expected = oracle(llama, prompt(LENGTH, start=number))
            assert generate(engine, "read", number) == answered(expected, cached=whole)


def test_mode_of_one_request_does_not_affect_another(llama: Path, running: Running, oracle: Oracle) -> None:
    first, second = prompt(LENGTH), prompt(LENGTH, start=5000)
    engine, cache = running
    private = engine.submit(first, params={"kvtier": {"cache": "off"}})
    stored = engine.submit(second)
    assert engine.answer(private).tokens == oracle(llama, first)
    assert engine.answer(stored).tokens == oracle(llama, second)
    cache.wait_until_stored(WHOLE_CHUNKS)
    engine.reset_prefix_cache()
    assert engine.generate(first).cached == 0
    assert engine.generate(second).cached == WHOLE_CHUNKS


def test_states_are_stored_and_loaded_by_mode(
    tmp_path: Path, make_cache: MakeCache, start: StartEngine
) -> None:
    cache = make_cache(chunk_tokens="auto").start()
    granite = models.make_granite(tmp_path)
    with start(granite, cache, **MAMBA) as engine:
        tokens = generate(engine, "off").tokens
        assert generate(engine, "read") == answered(tokens, cached=0)
        engine.reset_prefix_cache()
        assert chunks(cache) == 0
        while not generate(engine, "read").cached:  # A state whose room comes too late is not stored.
            assert generate(engine, "write") == answered(tokens, cached=0)
            engine.reset_prefix_cache()
            cache.wait_until_idle()
        hit = (LENGTH - 1) // engine.block_tokens * engine.block_tokens
        assert generate(engine, "read") == answered(tokens, cached=hit)
        assert generate(engine, "off") == answered(tokens, cached=0)


def answered(tokens: list[int], *, cached: int) -> Any:
    """Return an answer, whose parameters may be any: each names the address of its instance."""
    return Answer(tokens, cached, "length", {"kvtier": {"peer": None}})
