"""All modes of vLLM's scheduler: batches, small batches, preemption, aborts, waiting."""

from __future__ import annotations

from pathlib import Path

from tests.rigs.cache_process import CHUNK, MIB, CacheProcess
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import FillDisk, MakeCache, Oracle, Running, StartEngine

LENGTH = 1000
WHOLE_CHUNKS = LENGTH // CHUNK * CHUNK
SHARED = 800


def sharing_a_prefix(count: int) -> list[list[int]]:
    """Return prompts with a common prefix and different ends."""
    return [prompt(SHARED) + prompt(200, start=10_000 + 300 * number) for number in range(count)]


def test_eight_requests_at_once_share_a_prefix_from_disk(
    llama: Path, make_cache: MakeCache, fill_disk: FillDisk, start: StartEngine, oracle: Oracle
) -> None:
    prompts = sharing_a_prefix(8)
    cache = fill_disk(make_cache(), prompt(SHARED)).start()
    with start(llama, cache) as engine:
        answers = engine.generate_all(prompts)
        read = cache.status()["counts"]
    assert [answer.tokens for answer in answers] == [oracle(llama, tokens) for tokens in prompts]
    assert all(answer.cached >= SHARED // CHUNK * CHUNK for answer in answers)
    assert read["get_ok"] == SHARED // CHUNK, "one read per chunk, however many requests need it"


def test_eight_cold_requests_at_once(llama: Path, running: Running, oracle: Oracle) -> None:
    prompts = sharing_a_prefix(8)
    expected = [oracle(llama, tokens) for tokens in prompts]
    engine, cache = running
    for _ in range(2):
        assert [answer.tokens for answer in engine.generate_all(prompts)] == expected
        cache.wait_until_idle()
        engine.reset_prefix_cache()


def test_queued_request_loads_what_the_one_before_it_has_stored(
    llama: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle
) -> None:
    """It was looked up when it arrived, and nothing was stored then."""
    tokens = prompt(LENGTH)
    with start(llama, cache, max_num_seqs=1, enable_prefix_caching=False) as engine:
        engine.hold()
        running, queued = engine.submit(prompt(SHARED), 400), engine.submit(tokens)
        engine.resume()
        answer = engine.answer(queued)
        engine.answer(running)
    assert (answer.tokens, answer.cached) == (oracle(llama, tokens), SHARED)


def test_chunked_prefill_in_small_batches(
    llama: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle
) -> None:
    # 96 tokens per step: most steps end inside a chunk.
    prompts = [prompt(LENGTH), prompt(700, start=3000), prompt(400, start=6000)]
    with start(llama, cache, max_num_batched_tokens=96, max_num_seqs=4) as engine:
        cold = engine.generate_all(prompts, 40)
        cache.wait_until_idle()
        engine.reset_prefix_cache()
        warm = engine.generate_all(prompts, 40)
    expected = [oracle(llama, tokens, 40) for tokens in prompts]
    assert [answer.tokens for answer in cold] == [answer.tokens for answer in warm] == expected
    # The last whole chunk of the first prompt ends in its answer, and is used in part.
    assert [answer.cached for answer in warm] == [
        LENGTH // 32 * 32,
        700 // CHUNK * CHUNK,
        400 // CHUNK * CHUNK,
    ]


def test_preemption(llama: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle) -> None:
    prompts = [prompt(500, start=600 * number) for number in range(6)]
    expected = [oracle(llama, tokens, 60) for tokens in prompts]
    # Room for three such requests.
    with start(llama, cache, kv_cache_memory_bytes=8 << 20, max_model_len=1024) as engine:
        for _ in range(2):
            answers = engine.generate_all(prompts, 60)
            assert [answer.tokens for answer in answers] == expected
            cache.wait_until_idle()
            engine.reset_prefix_cache()
        assert engine.metrics()["vllm:num_preemptions_total"] > 0


def test_aborted_requests_free_everything(
    llama: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle
) -> None:
    prompts = sharing_a_prefix(4)
    with start(llama, cache, max_num_batched_tokens=128) as engine:
        storing = [engine.submit(tokens, 500) for tokens in prompts]
        cache.wait_until(lambda status: status["tiers"][0]["chunks"] > 2)
        engine.abort(*storing)
        assert {engine.answer(number).reason for number in storing} == {"abort"}
        cache.wait_until_idle()
        engine.wait_until_free()
        engine.reset_prefix_cache()
        answer = engine.generate(prompts[0])
    assert answer.tokens == oracle(llama, prompts[0])


def test_requests_aborted_during_disk_reads_free_everything(
    llama: Path, make_cache: MakeCache, fill_disk: FillDisk, start: StartEngine, oracle: Oracle
) -> None:
    cache = fill_disk(make_cache(), prompt(LENGTH)).start(fault=["slow-get"])
    with start(llama, cache) as engine:
        loading = [engine.submit(prompt(LENGTH)) for _ in range(4)]
        cache.wait_until(lambda status: status["flights"] > 0)
        engine.abort(*loading)
        cache.wait_until_idle()
        engine.wait_until_free()
        answer = engine.generate(prompt(LENGTH))
    assert answer.tokens == oracle(llama, prompt(LENGTH))


def test_request_waiting_for_the_disk_does_not_block_others(
    llama: Path, make_cache: MakeCache, fill_disk: FillDisk, start: StartEngine, oracle: Oracle
) -> None:
    cache = make_cache(ssd={"deadline": "10m"}, prefetch={"policy": "timeout", "deadline": "10m"})
    fill_disk(cache, prompt(LENGTH)).start(fault=["hang-get"])
    with start(llama, cache) as engine:
        waiting = engine.submit(prompt(LENGTH))
        cache.wait_until(lambda status: status["flights"] > 0)
        other = engine.generate(prompt(300, start=20_000))
        assert not engine.finished(waiting)
        engine.kill()
    assert other.tokens == oracle(llama, prompt(300, start=20_000))


def test_memory_too_small_for_the_prompt(
    llama: Path, make_cache: MakeCache, start: StartEngine, oracle: Oracle
) -> None:
    cache = make_cache(ram={"capacity": 2 * MIB}).start()  # three chunks
    with start(llama, cache) as engine:
        for _ in range(2):
            assert engine.generate(prompt(LENGTH)).tokens == oracle(llama, prompt(LENGTH))
            cache.wait_until_idle()
            engine.reset_prefix_cache()
