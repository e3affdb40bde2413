"""Loads whose chunks arrive one by one from a disk: failures, kills and cancellations between two chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.cache_process import CHUNK, CacheProcess
from tests.rigs.vllm.engine import Engine
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import FillDisk, MakeCache, Oracle, StartEngine

LENGTH = 1500
PROMPT = prompt(LENGTH)
WHOLE_CHUNKS = LENGTH // CHUNK * CHUNK
FIRST = 2
"""The number of chunks that the disk returns at first (``faulty_serve.py``)."""

Restart = Callable[[str], None]


@pytest.fixture
def cache(make_cache: MakeCache, fill_disk: FillDisk) -> CacheProcess:
    """It has the prompt on disk, and is not started yet. Its disk deadline exceeds the test."""
    return fill_disk(make_cache(ssd={"deadline": "60s"}, prefetch={"deadline": "60s"}), PROMPT)


@pytest.fixture
def engine(llama: Path, cache: CacheProcess, start: StartEngine) -> Iterator[Engine]:
    """An engine with a disk that returns only the first chunks of the prompt at first."""
    cache.start(fault=["holdrest-get"])
    with start(llama, cache) as engine:
        yield engine


def begin(engine: Engine, cache: CacheProcess) -> int:
    """Send the prompt, and return once the engine holds leases of the chunks that have arrived."""
    number = engine.submit(PROMPT, 16)
    cache.wait_until(lambda status: leases(status) >= FIRST)
    return number


def leases(status: dict[str, Any]) -> int:
    return sum(engine["leases"] for engine in status["engines"])


def test_other_requests_run_while_chunks_arrive(
    engine: Engine, cache: CacheProcess, llama: Path, oracle: Oracle
) -> None:
    number = begin(engine, cache)
    other = prompt(200, start=5000)
    assert engine.generate(other).tokens == oracle(llama, other)
    assert not engine.finished(number)
    cache.release_disk()
    answer = engine.answer(number)
    assert answer.tokens == oracle(llama, PROMPT)
    assert answer.cached >= WHOLE_CHUNKS
    cache.wait_until_idle()


def test_cache_process_killed_between_two_chunks(
    engine: Engine, cache: CacheProcess, llama: Path, oracle: Oracle
) -> None:
    number = begin(engine, cache)
    cache.kill()
    assert engine.answer(number).tokens == oracle(llama, PROMPT)
    engine.wait_until_free()
    cache.release_disk()
    cache.start()
    while not cache.status()["engines"]:  # It tries to connect in its steps, at most every 10 s.
        engine.generate(PROMPT[:CHUNK], 1)
    engine.reset_prefix_cache()
    assert engine.generate(PROMPT).tokens == oracle(llama, PROMPT)


def test_cancelled_between_two_chunks(
    engine: Engine, cache: CacheProcess, llama: Path, oracle: Oracle
) -> None:
    """Its blocks are free before the other chunks arrive."""
    engine.abort(begin(engine, cache))
    engine.wait_until_free()
    cache.wait_until(lambda status: leases(status) == 0)
    cache.release_disk()
    cache.wait_until_idle()
    assert engine.generate(PROMPT).tokens == oracle(llama, PROMPT)


def test_failure_costs_only_the_rest(
    llama: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle
) -> None:
    cache.start(fault=["failrest-get"])
    with start(llama, cache) as engine:
        number = begin(engine, cache)
        engine.generate(prompt(200, start=5000))  # Meanwhile the first chunks are copied.
        cache.release_disk()
        answer = engine.answer(number)
        assert answer.tokens == oracle(llama, PROMPT)
        assert answer.cached == FIRST * CHUNK
        assert f"only {FIRST * CHUNK} of " in engine.log.read_text()
