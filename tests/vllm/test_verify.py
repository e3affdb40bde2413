"""Shadow verification: an idle engine computes what it could load, and what differs is in quarantine."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.bridge import client
from kvtier.memory.header import HEADER_BYTES, ChunkHeader
from tests.rigs.cache_process import CHUNK, CacheProcess
from tests.rigs.vllm import models
from tests.rigs.vllm.engine import Engine
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import FillDisk, MakeCache, Oracle, StartEngine
from tests.vllm.test_states import MAMBA

LENGTH = 1000
WHOLE = LENGTH // CHUNK * CHUNK
CHUNKS = LENGTH // CHUNK
OTHER = prompt(LENGTH, start=2000)


def results(cache: CacheProcess) -> dict[str, int]:
    """Return how many chunks were compared, by ``result_tier``."""
    counts = cache.status()["counts"]
    return {key.removeprefix("verified_"): n for key, n in counts.items() if key.startswith("verified_")}


def verify(engine: Engine, cache: CacheProcess, tokens: list[int], chunks: int, **more: Any) -> None:
    """Send a prompt that is computed although it is stored; wait until its chunks have been compared."""
    engine.reset_prefix_cache()
    before = sum(results(cache).values())
    assert engine.generate(tokens, 1, **more).cached == 0
    cache.wait_until(lambda _: sum(results(cache).values()) == before + chunks)


def forge(path: Path, other: Path, change: Callable[[bytearray], None] = lambda _: None) -> None:
    """Replace a chunk object by the payload of another one, with a header and checksum that are right."""
    header, chunk = ChunkHeader.parse(path.read_bytes()), bytearray(other.read_bytes())
    change(chunk)
    header.seal(memoryview(chunk))
    path.write_bytes(chunk)


def files(cache: CacheProcess) -> list[Path]:
    """Return the chunk objects of a prompt on disk, in its order."""
    headers = {ChunkHeader.parse(path.read_bytes()): path for path in cache.disk.rglob("*.kv")}
    after = {header.parent: header for header in headers}
    [key] = after.keys() - {header.key for header in headers}  # Before the first chunk.
    ordered = []
    while (header := after.get(key)) is not None:
        ordered.append(headers[header])
        key = header.key
    return ordered


def errors(cache: CacheProcess) -> list[str]:
    return [line for line in cache.log.read_text().splitlines() if "is not what the engine computes" in line]


@pytest.fixture
def cache(make_cache: MakeCache) -> CacheProcess:
    """Not started. Every load is verified, if the engine is idle."""
    return make_cache(verify=1.0)


def test_sound_chunks_in_memory_and_on_disk_are_equal(
    llama: Path, cache: CacheProcess, fill_disk: FillDisk, start: StartEngine, oracle: Oracle
) -> None:
    fill_disk(cache, prompt(LENGTH)).start()
    with start(llama, cache) as engine:
        verify(engine, cache, prompt(LENGTH), CHUNKS)
        assert results(cache) == {"equal_ssd": CHUNKS}
        assert engine.metrics()["kvtier_verified_tokens_total"] == WHOLE
        engine.reset_prefix_cache()
        assert engine.generate(prompt(LENGTH), 16).tokens == oracle(llama, prompt(LENGTH))
        assert engine.generate(OTHER).tokens == oracle(llama, OTHER)
        cache.wait_until_idle()
        verify(engine, cache, OTHER, CHUNKS)
        engine.reset_prefix_cache()
        assert results(cache) == {"equal_ssd": 2 * CHUNKS, "equal_ram": CHUNKS}
    assert not cache.status()["quarantined"]
    assert not errors(cache)


def test_what_the_engine_has_itself_is_computed_again(
    llama: Path, cache: CacheProcess, start: StartEngine
) -> None:
    """Else a wrong chunk that it has loaded would make what follows differ."""
    cache.start()
    head, whole = prompt(2 * CHUNK), prompt(LENGTH)
    with start(llama, cache) as engine:
        engine.generate(whole, 1)
        cache.wait_until_stored(WHOLE)
        engine.reset_prefix_cache()
        engine.generate(head, 1)
        cache.wait_until_idle()
        done = sum(results(cache).values())
        answer = engine.generate(whole, 1)
        assert answer.cached == 0
        cache.wait_until(lambda _: sum(results(cache).values()) == done + CHUNKS)
        assert engine.generate(whole, 1).cached > 0  # The next one uses vLLM's own cache again.


def test_ends_of_prompts_are_compared_up_to_their_last_whole_block(
    llama: Path, make_cache: MakeCache, start: StartEngine
) -> None:
    cache = make_cache(verify=1.0, partial_chunks=True).start()
    with start(llama, cache) as engine:
        engine.generate(prompt(LENGTH), 1)
        cache.wait_until_stored(LENGTH)
        engine.generate(OTHER, 4)  # Leaves other KV in the blocks.
        cache.wait_until_idle()
        verify(engine, cache, prompt(LENGTH), CHUNKS + 1)
        assert results(cache) == {"equal_ram": CHUNKS + 1}


def test_sliding_windows(hybrid: Path, make_cache: MakeCache, start: StartEngine) -> None:
    cache = make_cache(verify=1.0).start()
    with start(hybrid, cache) as engine:
        engine.generate(prompt(LENGTH), 1)
        cache.wait_until_stored(WHOLE)
        verify(engine, cache, prompt(LENGTH), CHUNKS)
        assert results(cache) == {"equal_ram": CHUNKS}


def test_states(tmp_path: Path, make_cache: MakeCache, start: StartEngine) -> None:
    """Of a hybrid model, chunks are compared, and the state at the last end of a chunk of the prompt."""
    granite = models.make_granite(tmp_path / "granite")
    cache = make_cache(verify=1.0, chunk_tokens="auto").start()
    with start(granite, cache, **MAMBA) as engine:
        chunks = (LENGTH - 1) // engine.block_tokens
        engine.generate(prompt(LENGTH), 1)
        cache.wait_until_stored(chunks * engine.block_tokens)
        cache.wait_until_idle()
        verify(engine, cache, prompt(LENGTH), chunks + 1)
        assert results(cache) == {"equal_ram": chunks + 1}
    cache.stop()
    [state] = [path for path in cache.disk.rglob("*.kv") if not ChunkHeader.parse(path.read_bytes()).tokens]
    forge(
        state,
        state,
        lambda chunk: chunk.__setitem__(slice(HEADER_BYTES, None), bytes(len(chunk) - HEADER_BYTES)),
    )
    cache.start()
    with start(granite, cache, **MAMBA) as engine:
        verify(engine, cache, prompt(LENGTH), chunks + 1)
        check_quarantined(cache, "ssd", 1)
        assert f"state {state.stem[:16]} at token {chunks * engine.block_tokens} " in errors(cache)[0]


@pytest.mark.slow
def test_tensor_parallel(llama: Path, cache: CacheProcess, start: StartEngine) -> None:
    cache.start()
    with start(llama, cache, tensor_parallel_size=2) as engine:
        engine.generate(prompt(LENGTH), 1)
        cache.wait_until_stored(WHOLE)
        verify(engine, cache, prompt(LENGTH), CHUNKS)
        assert results(cache) == {"equal_ram": CHUNKS}


def test_kv_computed_in_batches_and_in_parts_is_tolerable(
    llama: Path, cache: CacheProcess, start: StartEngine
) -> None:
    cache.start()
    with start(llama, cache, dtype="bfloat16", max_num_batched_tokens=96) as engine:
        engine.generate_all([prompt(LENGTH), OTHER], 1)
        cache.wait_until_stored(2 * WHOLE)
    with start(llama, cache, dtype="bfloat16") as engine:
        verify(engine, cache, prompt(LENGTH), CHUNKS)
        verify(engine, cache, OTHER, CHUNKS)
    assert sum(n for name, n in results(cache).items() if not name.startswith("different")) == 2 * CHUNKS


# Faults that no checksum shows.


def check_quarantined(cache: CacheProcess, tier: str, different: int) -> None:
    status = cache.wait_until(lambda status: bool(status["quarantined"]))
    # What memory had is on disk as well.
    assert list(status["quarantined"].values()) == [["ram", "ssd"] if tier == "ram" else [tier]]
    assert results(cache)[f"different_{tier}"] == different
    [line, *_] = errors(cache)
    assert f"tier {tier}" in line


def test_chunk_under_a_forged_key(
    llama: Path, cache: CacheProcess, fill_disk: FillDisk, start: StartEngine, oracle: Oracle
) -> None:
    fill_disk(cache, prompt(LENGTH))
    first, *_, last = files(cache)
    forge(last, first)
    cache.start()
    with start(llama, cache) as engine:
        verify(engine, cache, prompt(LENGTH), CHUNKS)
        check_quarantined(cache, "ssd", 1)
        assert f"token {WHOLE - CHUNK} " in errors(cache)[0]
        assert last.stem[:16] in errors(cache)[0]
        cache.wait_until(lambda _: not last.exists())
        # Nothing of the disk is served, nor is anything written to it. Memory is used as before.
        written = set(cache.disk.rglob("*.kv"))
        for hit in (0, WHOLE):
            engine.reset_prefix_cache()
            answer = engine.generate(OTHER)
            cache.wait_until_idle()
            assert (answer.tokens, answer.cached) == (oracle(llama, OTHER), 0 if not hit else answer.cached)
        assert set(cache.disk.rglob("*.kv")) == written
        client.clear_weights(cache.socket, cache.status()["engines"][0]["weights_id"])
        assert not cache.status()["quarantined"]
        assert not list(cache.disk.rglob("*.kv"))


def test_layers_that_are_stored_in_another_order(
    llama: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle
) -> None:
    cache.start()
    swapped = {"kv_connector": "SwappedConnector", "kv_connector_module_path": "tests.vllm.faulty_connectors"}
    with start(llama, cache, connector_type=swapped) as engine:
        engine.generate(prompt(LENGTH), 1)
        cache.wait_until_stored(WHOLE)
    with start(llama, cache) as engine:
        verify(engine, cache, prompt(LENGTH), CHUNKS)
        check_quarantined(cache, "ram", CHUNKS)
        # All chunks pass through memory: nothing is served or stored any more.
        for _ in range(2):
            engine.reset_prefix_cache()
            answer = engine.generate(prompt(LENGTH))
            assert (answer.tokens, answer.cached) == (oracle(llama, prompt(LENGTH)), 0)
        assert cache.status()["tiers"][0]["chunks"] == 0


def test_adapter_that_has_changed_without_its_fingerprint(
    llama: Path, cache: CacheProcess, start: StartEngine, tmp_path: Path
) -> None:
    cache.start()
    folder = tmp_path / "adapter"
    lora = {"lora_name": "adapter", "lora_int_id": 1, "lora_path": str(folder)}
    blind = {"kv_connector": "BlindConnector", "kv_connector_module_path": "tests.vllm.faulty_connectors"}
    adapters: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "connector_type": blind}
    for seed in (1, 2):
        models.make_lora(folder, seed=seed)
        time.sleep(0.2)  # Beyond adapters.FRESH_SECONDS, in which they are taken to be as they were.
        with start(llama, cache, **adapters) as engine:
            if seed == 1:
                engine.generate(prompt(LENGTH), 1, lora=lora)
                cache.wait_until_stored(WHOLE)
            else:
                verify(engine, cache, prompt(LENGTH), CHUNKS, lora=lora)
                check_quarantined(cache, "ram", CHUNKS)
        shutil.rmtree(folder)


# What goes wrong meanwhile.


def test_nothing_is_verified_while_other_requests_run(
    llama: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle
) -> None:
    cache.start()
    with start(llama, cache) as engine:
        engine.generate(prompt(LENGTH), 1)
        cache.wait_until_stored(WHOLE)
        engine.reset_prefix_cache()
        busy = engine.submit(OTHER, 400)
        answer = engine.generate(prompt(LENGTH))
        assert (answer.tokens, answer.cached) == (oracle(llama, prompt(LENGTH)), WHOLE)
        assert not engine.finished(busy)
        assert not results(cache)
        engine.answer(busy)


def test_without_room_the_request_is_computed(llama: Path, make_cache: MakeCache, start: StartEngine) -> None:
    chunk = CHUNK * 4096 + 4096
    ram = {"capacity": CHUNKS * chunk, "high_watermark": 1.0}
    cache = make_cache(verify=1.0, reserve_share=1.0, ram=ram).start()
    with start(llama, cache) as engine:
        engine.generate(prompt(WHOLE), 1)
        cache.wait_until_stored(WHOLE)
        engine.reset_prefix_cache()
        assert engine.generate(prompt(WHOLE), 1).cached == 0
        cache.wait_until_idle()
        assert not results(cache)
        assert cache.status()["tiers"][0]["chunks"] == CHUNKS


def test_cancelled_request(llama: Path, cache: CacheProcess, start: StartEngine) -> None:
    cache.start()
    with start(llama, cache) as engine:
        engine.generate(prompt(LENGTH), 1)
        cache.wait_until_stored(WHOLE)
        for steps in range(4):
            engine.reset_prefix_cache()
            engine.hold()
            request = engine.submit(prompt(LENGTH), 8)
            for _ in range(steps):
                engine.step()
            engine.abort(request)
            engine.answer(request)
            engine.resume()
            cache.wait_until_idle()
        verify(engine, cache, prompt(LENGTH), CHUNKS)


@pytest.mark.parametrize("victim", ["engine", pytest.param("cache", marks=pytest.mark.slow)])
def test_killed_meanwhile(
    llama: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle, victim: str
) -> None:
    cache.start()
    with start(llama, cache) as engine:
        engine.generate(prompt(LENGTH), 1)
        cache.wait_until_stored(WHOLE)
        engine.reset_prefix_cache()
        engine.hold()
        request = engine.submit(prompt(LENGTH))
        while not cache.status()["reservations"]["bytes"]:
            engine.step()
        if victim == "engine":
            engine.kill(signal.SIGKILL)
        else:
            cache.kill()
            cache.start()
            engine.resume()
            assert engine.answer(request).tokens == oracle(llama, prompt(LENGTH))
    with start(llama, cache) as engine:
        cache.wait_until_idle()
        verify(engine, cache, prompt(LENGTH), CHUNKS)
        assert not cache.status()["quarantined"]
