"""What leaves a small tier while its prompt is answered is stored again at the end of the answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs.cache_process import CHUNK, MIB, CacheProcess
from tests.rigs.vllm.engine import Engine
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import MakeCache, Oracle, StartEngine

LENGTH, ANSWER = 1000, 400
CHUNKS = LENGTH // CHUNK
COUNTER = "kvtier_stored_again_chunks_total"


@pytest.fixture
def small(make_cache: MakeCache) -> CacheProcess:
    """A cache process with room for two prompts, whose policy may decline others."""
    ram = {"name": "ram", "type": "cpu", "capacity": 9 * MIB, "eviction": "resume"}
    return make_cache(tiers=[ram], save_decode=False, prefetch={"policy": "timeout"}).start()


def displace(engine: Engine, cache: CacheProcess) -> int:
    """Start to answer a prompt, and store others in its place. Return the number of the request."""
    answering = engine.submit(prompt(LENGTH), ANSWER)
    cache.wait_until(lambda status: status["tiers"][0]["chunks"] >= CHUNKS)
    for other in range(1, 5):
        engine.generate(prompt(LENGTH, start=2000 * other), 1)
    assert not engine.finished(answering)
    return answering


def test_evicted_prompt_is_stored_at_the_end_of_its_answer(
    llama: Path, small: CacheProcess, start: StartEngine, oracle: Oracle
) -> None:
    expected = oracle(llama, prompt(LENGTH), ANSWER)
    with start(llama, small) as engine:
        answering = displace(engine, small)
        before = engine.metrics().get(COUNTER, 0)
        assert engine.answer(answering).tokens == expected
        engine.wait_until_free()
        small.wait_until_idle()
        assert engine.metrics()[COUNTER] > before
        engine.reset_prefix_cache()
        again = engine.generate(prompt(LENGTH), ANSWER)
    assert (again.tokens, again.cached) == (expected, CHUNKS * CHUNK)


@pytest.mark.parametrize("ends", [False, True])
def test_blocks_are_free_although_nobody_takes_the_offer(
    llama: Path, small: CacheProcess, start: StartEngine, oracle: Oracle, *, ends: bool
) -> None:
    """The cache process has ended, or answers nothing for a while."""
    expected = oracle(llama, prompt(LENGTH), ANSWER)
    with start(llama, small) as engine:
        answering = displace(engine, small)
        if ends:
            small.kill()
        else:
            small.pause()
        assert engine.answer(answering).tokens == expected
        engine.wait_until_free()
        if ends:
            small.start()
        else:
            small.resume()
        engine.reset_prefix_cache()
        assert engine.generate(prompt(LENGTH), ANSWER).tokens == expected
        # Only now: an idle engine reads a late answer, and gives back its room, with the next request.
        small.wait_until_idle()
