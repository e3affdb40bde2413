"""SIGKILL of an engine or a cache process during stores and loads: after a restart all tokens are right."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.cache_process import CHUNK, CacheProcess
from tests.rigs.vllm.engine import Engine
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import FillDisk, MakeCache, Oracle, StartEngine

LENGTH = 1000
WHOLE_CHUNKS = LENGTH // CHUNK * CHUNK
PROMPTS = [prompt(LENGTH, start=1200 * number) for number in range(4)]

Prepare = Callable[..., None]


@pytest.fixture
def cache(make_cache: MakeCache) -> CacheProcess:
    """Its disk deadline exceeds the test: operations that are held must still be pending at the kill."""
    return make_cache(ssd={"deadline": "60s"})


@pytest.fixture(params=["loads", pytest.param("stores", marks=pytest.mark.slow)])
def moment(request: pytest.FixtureRequest) -> str:
    """What is in flight at the kill."""
    return str(request.param)


@pytest.fixture
def prepare(
    moment: str, llama: Path, cache: CacheProcess, start: StartEngine, fill_disk: FillDisk
) -> Prepare:
    """Start the cache process. For loads, the prompts are on a disk that holds reads until released."""

    def prepare(**settings: Any) -> None:
        if moment == "stores":
            cache.start()
            return
        if settings:
            cache.start()
            with start(llama, cache, **settings) as engine:
                engine.generate_all(PROMPTS, 1)
                cache.wait_until_stored(len(PROMPTS) * WHOLE_CHUNKS)
            cache.stop()
        else:
            fill_disk(cache, *PROMPTS, new=1)
        cache.start(fault=["hold-get"])

    return prepare


def provoke(moment: str, engine: Engine, cache: CacheProcess) -> list[int]:
    """Send requests, and return once some but not most chunks are stored, or once loads are pending."""
    requests = [engine.submit(tokens, 50) for tokens in PROMPTS]
    if moment == "stores":
        cache.wait_until(lambda status: status["tiers"][0]["chunks"] >= 4)
    else:
        cache.wait_until(lambda status: status["flights"] > 0)
    return requests


def check_all(engine: Engine, cache: CacheProcess, llama: Path, oracle: Oracle) -> None:
    """Check the tokens of every prompt twice, the second time with the stored chunks."""
    for _ in range(2):
        for tokens in PROMPTS:
            assert engine.generate(tokens).tokens == oracle(llama, tokens)
        cache.wait_until_idle()
        engine.reset_prefix_cache()


def test_engine_killed(
    llama: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle, moment: str, prepare: Prepare
) -> None:
    prepare()
    with start(llama, cache, max_num_batched_tokens=256) as engine:
        provoke(moment, engine, cache)
        engine.kill()
    cache.release_disk()
    cache.wait_until_idle()
    cache.wait_until(lambda status: status["engines"] == [])
    with start(llama, cache) as engine:
        check_all(engine, cache, llama, oracle)


def test_cache_process_killed(
    llama: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle, moment: str, prepare: Prepare
) -> None:
    expected = [oracle(llama, tokens, 50) for tokens in PROMPTS]
    prepare()
    with start(llama, cache, max_num_batched_tokens=256) as engine:
        requests = provoke(moment, engine, cache)
        cache.kill()
        cache.release_disk()
        assert [engine.answer(request).tokens for request in requests] == expected
        cache.start()
        while not cache.status()["engines"]:  # It tries to connect in its steps, at most every 10 s.
            engine.generate(PROMPTS[0][:CHUNK])
        check_all(engine, cache, llama, oracle)
        # The engine hits what it has stored since.
        assert engine.generate(PROMPTS[0]).cached >= WHOLE_CHUNKS


@pytest.mark.slow  # Each of its engines takes as long to start as a whole other test.
def test_worker_killed(
    llama: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle, moment: str, prepare: Prepare
) -> None:
    prepare(tensor_parallel_size=2)
    with start(llama, cache, max_num_batched_tokens=256, tensor_parallel_size=2) as engine:
        provoke(moment, engine, cache)
        os.kill(engine.workers()[0], signal.SIGKILL)
        # vLLM cannot continue without a worker; an operator restarts it.
        engine.kill()
    cache.release_disk()
    cache.wait_until_idle()
    cache.wait_until(lambda status: status["engines"] == [])
    with start(llama, cache, tensor_parallel_size=2) as engine:
        for tokens in PROMPTS[:2]:
            assert engine.generate(tokens).tokens == oracle(llama, tokens)
