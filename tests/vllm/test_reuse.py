"""KV is reused instead of prefilled again: from memory, from disk, across engines and restarts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.rigs.cache_process import CHUNK, TIMEOUT_SECONDS, CacheProcess, StartedCacheProcess, is_idle
from tests.rigs.vllm import models
from tests.rigs.vllm.engine import Answer, Engine, Engines
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import MakeCache, Oracle, Running, StartEngine

LENGTH = 1000
WHOLE_CHUNKS = LENGTH // CHUNK * CHUNK


def tokens_from(engine: Engine, source: str) -> float:
    """Return the tokens that vLLM, or before 0.32 kvtier, counts as supplied by ``host`` or ``disk``."""
    metrics = engine.metrics()
    counted = metrics.get(f"vllm:prompt_tokens_cached_by_source_total{{{source}}}")
    if counted is not None:
        return counted
    return metrics.get(
        {"host": "kvtier_hit_tokens_total{ram}", "disk": "kvtier_hit_tokens_total{ssd}"}[source], 0.0
    )


def store(engine: Engine, cache: CacheProcess) -> Answer:
    """Run one prompt until all of its chunks are stored. Return the first answer.

    A reservation that is answered late is useless to a model with a sliding window: by then vLLM has freed
    the blocks outside the window. So on a busy machine, a prompt may have to be computed again.
    """
    cold = engine.generate(prompt(LENGTH))
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        engine.reset_prefix_cache()  # Waits until vLLM has freed all blocks, so until all saves have ended.
        cache.wait_until_idle()
        if all(tier["chunks"] == LENGTH // CHUNK for tier in cache.status()["tiers"]):
            return cold
        assert time.monotonic() < deadline, cache.tail()
        assert engine.generate(prompt(LENGTH)).tokens == cold.tokens


def test_cold_then_warm_from_memory(llama: Path, running: Running, oracle: Oracle) -> None:
    engine, cache = running
    before = tokens_from(engine, "host")
    cold = engine.generate(prompt(LENGTH))
    cache.wait_until_stored(LENGTH)
    engine.reset_prefix_cache()
    warm = engine.generate(prompt(LENGTH))
    assert tokens_from(engine, "host") - before == WHOLE_CHUNKS
    expected = oracle(llama, prompt(LENGTH))
    assert cold == Answer(expected, 0, "length")
    assert warm == Answer(expected, WHOLE_CHUNKS, "length")


def test_warm_from_disk_in_new_processes(
    llama: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle
) -> None:
    with start(llama, cache) as engine:
        engine.generate(prompt(LENGTH))
    cache.stop()
    cache.start()
    with start(llama, cache) as engine:
        warm = engine.generate(prompt(LENGTH))
        assert tokens_from(engine, "disk") == WHOLE_CHUNKS
        engine.reset_prefix_cache()
        again = engine.generate(prompt(LENGTH))
        assert tokens_from(engine, "host") == WHOLE_CHUNKS
    assert warm == again == Answer(oracle(llama, prompt(LENGTH)), WHOLE_CHUNKS, "length")


def test_memory_outlives_the_engine(
    llama: Path, make_cache: MakeCache, start: StartEngine, oracle: Oracle
) -> None:
    cache = make_cache(ssd={"write": "never"}).start()
    with start(llama, cache) as engine:
        engine.generate(prompt(LENGTH))
        cache.wait_until(lambda status: status["tiers"][0]["chunks"] == LENGTH // CHUNK)
        engine.kill()
    with start(llama, cache) as engine:
        assert engine.generate(prompt(LENGTH)) == Answer(
            oracle(llama, prompt(LENGTH)), WHOLE_CHUNKS, "length"
        )


def test_two_engines_hit_each_others_chunks(
    llama: Path, running: Running, start: StartEngine, oracle: Oracle
) -> None:
    first, second = prompt(LENGTH), prompt(LENGTH, start=5000)
    engine_a, cache = running
    with start(llama, cache) as engine_b:
        engine_a.generate(first)
        engine_b.generate(second)
        cache.wait_until_stored(2 * WHOLE_CHUNKS)
        answers = [engine_a.generate(second), engine_b.generate(first)]
    assert answers == [
        Answer(oracle(llama, second), WHOLE_CHUNKS, "length"),
        Answer(oracle(llama, first), WHOLE_CHUNKS, "length"),
    ]


def test_chat_reuses_decoded_tokens(llama: Path, running: Running, oracle: Oracle) -> None:
    turns = [prompt(300), prompt(200, start=4000), prompt(150, start=8000)]
    conversation: list[int] = []
    engine, cache = running
    for turn in turns:
        known = len(conversation)
        conversation += turn
        engine.reset_prefix_cache()
        answer = engine.generate(conversation, 100)
        # The last decoded token has no KV yet.
        assert answer.cached == max(0, known - 1) // CHUNK * CHUNK
        assert answer.tokens == oracle(llama, conversation, 100)
        conversation += answer.tokens
        cache.wait_until_stored(len(conversation) - 1)


def test_decoded_tokens_are_not_stored_without_save_decode(
    llama: Path, make_cache: MakeCache, start: StartEngine
) -> None:
    cache = make_cache(save_decode=False).start()
    with start(llama, cache) as engine:
        engine.generate(prompt(300), 100)
        cache.wait_until_stored(300)
        assert cache.status()["tiers"][0]["chunks"] == 300 // CHUNK


def test_prompt_of_whole_chunks(llama: Path, running: Running, oracle: Oracle) -> None:
    engine, cache = running
    engine.generate(prompt(WHOLE_CHUNKS))
    cache.wait_until_stored(WHOLE_CHUNKS)
    engine.reset_prefix_cache()
    warm = engine.generate(prompt(WHOLE_CHUNKS))
    assert warm.tokens == oracle(llama, prompt(WHOLE_CHUNKS))
    assert warm.cached >= WHOLE_CHUNKS - CHUNK


def test_sliding_window_hybrid(hybrid: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle) -> None:
    longer = prompt(LENGTH + 500)
    with start(hybrid, cache) as engine:
        cold = store(engine, cache)
        warm = engine.generate(prompt(LENGTH))
        engine.reset_prefix_cache()
        further = engine.generate(longer)
    assert cold == Answer(oracle(hybrid, prompt(LENGTH)), 0, "length")
    assert warm == Answer(oracle(hybrid, prompt(LENGTH)), WHOLE_CHUNKS, "length")
    assert further == Answer(oracle(hybrid, longer), WHOLE_CHUNKS, "length")


def test_tensor_parallel(llama: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle) -> None:
    with start(llama, cache, tensor_parallel_size=2) as engine:
        cold = engine.generate(prompt(LENGTH))
        cache.wait_until_stored(LENGTH)
        engine.reset_prefix_cache()
        warm = engine.generate(prompt(LENGTH))
        status = cache.status()
        cache.wait_until_idle()
        engine.wait_until_free()
        engine.kill()  # vLLM waits for its workers for five seconds otherwise.
    assert cold == Answer(oracle(llama, prompt(LENGTH)), 0, "length")
    assert warm == Answer(oracle(llama, prompt(LENGTH)), WHOLE_CHUNKS, "length")
    assert len(status["engines"]) == 1


@pytest.mark.slow
def test_head_of_two_ranks_is_stored_once(
    tmp_path: Path, cache: CacheProcess, start: StartEngine, engines: Engines
) -> None:
    """One KV head: 2 KiB per token, with one rank or two. Each rank writes half of the chunks.

    The ranks are spawned, as vLLM does. Those of other tests are forked, which takes a tenth of the time.
    """
    model, sizes = models.make_llama(tmp_path / "model", kv_heads=1), []
    with engines.engine(model, None, enable_prefix_caching=False) as plain:
        expected = plain.generate(prompt(LENGTH)).tokens
    for ranks in (1, 2):
        with start(model, cache, tensor_parallel_size=ranks, spawned_ranks=True) as engine:
            assert engine.generate(prompt(LENGTH)).tokens == expected
            cache.wait_until_stored(WHOLE_CHUNKS * ranks)
            engine.reset_prefix_cache()
            assert engine.generate(prompt(LENGTH)) == Answer(expected, WHOLE_CHUNKS, "length")
            sizes.append(cache.status()["tiers"][0]["used_bytes"])
    header = 4096  # and padding
    assert sizes[0] == WHOLE_CHUNKS // CHUNK * (CHUNK * 4 * 2 * 64 * 4 + header)
    assert sizes[1] == 2 * sizes[0]


def test_engines_with_different_block_sizes_share_nothing(
    llama: Path, running: Running, start: StartEngine
) -> None:
    engine, cache = running
    engine.generate(prompt(LENGTH))
    cache.wait_until_stored(LENGTH)
    with start(llama, cache, block_size=64) as other:
        assert other.generate(prompt(LENGTH)).cached == 0


def test_external_reset_clears_kvtier(llama: Path, cache: CacheProcess, start: StartEngine) -> None:
    with start(llama, cache) as engine:
        engine.generate(prompt(LENGTH))
        cache.wait_until_stored(LENGTH)
        engine.reset_prefix_cache(external=True)
        cache.wait_until(lambda status: not any(tier["chunks"] for tier in status["tiers"]))
        assert engine.generate(prompt(LENGTH)).cached == 0


def test_connector_starts_a_cache_process_if_no_socket_is_set(
    llama: Path, engines: Engines, tmp_path: Path, oracle: Oracle
) -> None:
    cache = StartedCacheProcess(tmp_path, linger="2s")
    with engines.engine(llama, cache.connector) as engine:
        engine.generate(prompt(LENGTH))
        cache.wait_until_stored(LENGTH)
    with engines.engine(llama, cache.connector) as engine:
        warm = engine.generate(prompt(LENGTH))
        pid = cache.pid
        cache.wait_until(is_idle)
    assert warm == Answer(oracle(llama, prompt(LENGTH)), WHOLE_CHUNKS, "length")
    assert pid is not None
    cache.wait_until_exited(pid)
    cache.kill()  # Removes its files.


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1])
def test_around_one_chunk(llama: Path, running: Running, oracle: Oracle, length: int) -> None:
    engine, cache = running
    engine.generate(prompt(length))
    cache.wait_until_stored(length)
    engine.reset_prefix_cache()
    assert engine.generate(prompt(length)).tokens == oracle(llama, prompt(length))
