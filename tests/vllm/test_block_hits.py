"""Hits end after whole blocks, wherever a prompt leaves what is stored: as in vLLM's own prefix cache."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.cache_process import CHUNK, TIMEOUT_SECONDS, CacheProcess
from tests.rigs.vllm.engine import Engine, Engines
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import MakeCache, Oracle, StartEngine

BLOCK = 32
NEW = 40

SYSTEM = prompt(300, start=9000)
FIRST = prompt(1000)


@pytest.fixture
def cache(make_cache: MakeCache) -> CacheProcess:
    return make_cache(partial_chunks=True).start()


def conversation(oracle: Oracle, model: Path, number: int) -> Iterator[tuple[str, list[int]]]:
    """Yield prompts, each with its relation to those before. No other ``number`` has any of them."""
    first = [number, *FIRST[1:]]
    yield "new", first
    yield "the same", first
    yield "its beginning", first[:500]
    yield "leaves it in the middle of a chunk", first[:730] + prompt(200, start=3000)
    yield "leaves it at the end of a block", first[:736] + prompt(200, start=4000)
    turn = first + oracle(model, first, NEW) + prompt(100, start=5000)
    yield "goes on after its answer", turn
    yield "goes on after that", turn + oracle(model, turn, NEW) + prompt(30, start=6000)
    yield "another answer", turn + prompt(70, start=7000)
    for user in range(3):
        question = prompt(150 + user, start=11_000 + 500 * user)
        yield f"shares a system prompt, {user}", [number, *SYSTEM[1:], *question]


def compare(
    kvtier: Engine, plain: Engine, cache: CacheProcess, oracle: Oracle, model: Path, number: int
) -> dict[str, tuple[int, int]]:
    """Return the cached tokens of each prompt, with kvtier only and in vLLM's own cache."""
    found = {}
    for name, tokens in conversation(oracle, model, number):
        expected = oracle(model, tokens, NEW)
        answer, own = kvtier.generate(tokens, NEW), plain.generate(tokens, NEW)
        assert answer.tokens == own.tokens == expected, name
        found[name] = answer.cached, own.cached
        kvtier.reset_prefix_cache()
        cache.wait_until_idle()
    return found


def assert_no_worse(kvtier: Engine, plain: Engine, cache: CacheProcess, oracle: Oracle, model: Path) -> None:
    """Compare until a conversation has no worse hits with kvtier, less one block.

    The first one usually has. On a busy machine, room that is granted late loses the chunks of a window.
    """
    deadline = time.monotonic() + TIMEOUT_SECONDS
    for number in itertools.count(1):
        found = compare(kvtier, plain, cache, oracle, model, number)
        at_least = {name: own - BLOCK for name, (_, own) in found.items()}
        at_least["the same"] = len(FIRST) - BLOCK
        at_least["goes on after its answer"] = (len(FIRST) + NEW - 1) // BLOCK * BLOCK
        worse = {name: counts for name, counts in found.items() if counts[0] < at_least[name]}
        if not worse:
            return
        assert time.monotonic() < deadline, worse


# test_shapes.py tests the ends of prompts with windows as well, in a tenth of the time.
@pytest.mark.parametrize("model_name", ["llama", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_hits_are_those_of_vllms_own_cache(
    model_name: str,
    request: pytest.FixtureRequest,
    cache: CacheProcess,
    start: StartEngine,
    engines: Engines,
    oracle: Oracle,
) -> None:
    model: Path = request.getfixturevalue(model_name)
    with engines.engine(model, None) as plain, start(model, cache) as engine:
        assert_no_worse(engine, plain, cache, oracle, model)


@pytest.mark.slow
def test_hits_of_two_ranks(
    llama: Path, cache: CacheProcess, start: StartEngine, engines: Engines, oracle: Oracle
) -> None:
    with engines.engine(llama, None) as plain, start(llama, cache, tensor_parallel_size=2) as engine:
        assert_no_worse(engine, plain, cache, oracle, llama)


def test_hits_of_disk_after_a_restart(
    llama: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle
) -> None:
    longer = FIRST[:730] + prompt(200, start=3000)
    with start(llama, cache) as engine:
        engine.generate(FIRST)
    cache.stop()
    cache.start()
    with start(llama, cache) as engine:
        answer = engine.generate(longer, NEW)
    assert answer.tokens == oracle(llama, longer, NEW)
    assert answer.cached == 730 // BLOCK * BLOCK


def test_first_request_of_an_idle_engine_after_a_restart_is_a_hit(
    llama: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle
) -> None:
    """It connects with this request: its scheduler first, and its worker with the load."""
    with start(llama, cache) as engine:
        engine.generate(FIRST)
        engine.reset_prefix_cache()
        cache.wait_until_stored(len(FIRST))
        cache.stop()
        cache.start()
        answer = engine.generate(FIRST, NEW)
    assert answer.tokens == oracle(llama, FIRST, NEW)
    assert answer.cached >= len(FIRST) // CHUNK * CHUNK


def test_partial_chunks_of_a_chat_do_not_pile_up(
    llama: Path, cache: CacheProcess, start: StartEngine
) -> None:
    """Each turn is a few tokens: one chunk at a time is the end of the chat."""
    tokens = prompt(CHUNK + 40)
    with start(llama, cache) as engine:
        for turn in range(6):
            tokens = tokens + engine.generate(tokens, 8).tokens + prompt(10, start=3000 + 20 * turn)
            engine.reset_prefix_cache()
            cache.wait_until_idle()
            for tier in cache.status()["tiers"]:
                assert tier["chunks"] <= len(tokens) // CHUNK + 1, tier


def test_without_partial_chunks_only_whole_chunks_are_stored(
    llama: Path, make_cache: MakeCache, start: StartEngine, oracle: Oracle
) -> None:
    cache = make_cache(partial_chunks=False).start()
    with start(llama, cache) as engine:
        engine.generate(FIRST, NEW)
        engine.reset_prefix_cache()
        cache.wait_until_idle()
        assert cache.status()["tiers"][0]["chunks"] == (len(FIRST) + NEW - 1) // CHUNK
        answer = engine.generate(FIRST[: CHUNK + 70] + prompt(50, start=3000), NEW)
    assert answer.cached == (CHUNK + 70) // BLOCK * BLOCK
    assert answer.tokens == oracle(llama, FIRST[: CHUNK + 70] + prompt(50, start=3000), NEW)
