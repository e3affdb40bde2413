"""kill -9 of either side, amid stores and amid loads, then a start that serves only right tokens."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.cache_process import CHUNK, CacheProcess
from tests.vllm.conftest import MakeCache, Oracle, StartEngine
from tests.vllm.engine import Engine
from tests.vllm.models import prompt

LENGTH = 1000
WHOLE_CHUNKS = LENGTH // CHUNK * CHUNK
PROMPTS = [prompt(LENGTH, start=1200 * number) for number in range(6)]


@pytest.fixture
def cache(make_cache: MakeCache) -> CacheProcess:
    """Its disk has more time than the test: what is held up must still be so when the kill comes."""
    cache = make_cache(ssd={"deadline": "60s"})
    cache.start()
    return cache


@pytest.fixture(params=["loads", pytest.param("stores", marks=pytest.mark.slow)])
def moment(request: pytest.FixtureRequest) -> str:
    """In the middle of what."""
    return str(request.param)


def prepare(moment: str, llama: Path, cache: CacheProcess, start: StartEngine, **settings: Any) -> None:
    """Before loads, every prompt is on a disk that reads nothing before it is let go."""
    if moment == "loads":
        with start(llama, cache, **settings) as engine:
            engine.generate_all(PROMPTS, 1)
            cache.wait_until_stored(len(PROMPTS) * WHOLE_CHUNKS)
        cache.stop()
        cache.start(fault=["hold-get"])


def provoke(moment: str, engine: Engine, cache: CacheProcess) -> list[int]:
    """Send requests, and come back when some chunks are stored and most are not, or when loads wait."""
    requests = [engine.submit(tokens, 50) for tokens in PROMPTS]
    if moment == "stores":
        cache.wait_until(lambda status: status["tiers"][0]["chunks"] >= 4)
    else:
        cache.wait_until(lambda status: status["flights"] > 0)
    return requests


def check_all(engine: Engine, cache: CacheProcess, llama: Path, oracle: Oracle) -> None:
    """Twice every prompt, the second time with all that is stored: the tokens must be right."""
    for _ in range(2):
        for tokens in PROMPTS:
            assert engine.generate(tokens).tokens == oracle(llama, tokens)
        cache.wait_until_idle()
        engine.reset_prefix_cache()


def test_kill_of_the_engine(
    llama: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle, moment: str
) -> None:
    prepare(moment, llama, cache, start)
    with start(llama, cache, max_num_batched_tokens=256) as engine:
        provoke(moment, engine, cache)
        engine.kill()
    cache.let_go()
    cache.wait_until_idle()
    assert cache.status()["engines"] == []
    with start(llama, cache) as engine:
        check_all(engine, cache, llama, oracle)


def test_kill_of_the_cache_process(
    llama: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle, moment: str
) -> None:
    expected = [oracle(llama, tokens, 50) for tokens in PROMPTS]
    prepare(moment, llama, cache, start)
    with start(llama, cache, max_num_batched_tokens=256) as engine:
        requests = provoke(moment, engine, cache)
        cache.kill()
        cache.let_go()
        assert [engine.answer(request).tokens for request in requests] == expected
        cache.start()
        check_all(engine, cache, llama, oracle)
        # The engine has found the new one: what it stored after the kill is found again.
        assert engine.generate(PROMPTS[0]).cached >= WHOLE_CHUNKS


@pytest.mark.slow  # Each of its engines takes as long to start as all of another test.
def test_kill_of_one_worker(
    llama: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle, moment: str
) -> None:
    prepare(moment, llama, cache, start, tensor_parallel_size=2)
    with start(llama, cache, max_num_batched_tokens=256, tensor_parallel_size=2) as engine:
        provoke(moment, engine, cache)
        os.kill(engine.workers()[0], signal.SIGKILL)
        # vLLM cannot go on without a worker; an operator starts it again.
        engine.kill()
    cache.let_go()
    cache.wait_until_idle()
    assert cache.status()["engines"] == []
    with start(llama, cache, tensor_parallel_size=2) as engine:
        for tokens in PROMPTS[:2]:
            assert engine.generate(tokens).tokens == oracle(llama, tokens)
