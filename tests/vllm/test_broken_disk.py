"""A corrupt, full, failing or hanging disk costs a miss, never a wrong token or a failed request."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs.cache_process import CHUNK, MIB
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import FillDisk, MakeCache, Oracle, StartEngine, check_recomputed

LENGTH = 1000
WHOLE_CHUNKS = LENGTH // CHUNK * CHUNK


def corrupt(path: Path) -> None:
    """Flip one bit in the middle of the payload."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def swap(path: Path) -> None:
    """Replace the file with the object of another chunk, complete and with a valid checksum."""
    other = next(file for file in sorted(path.parent.parent.rglob("*.kv")) if file != path)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize(
    "damage",
    [corrupt, *(pytest.param(damage, marks=pytest.mark.slow) for damage in (swap, truncate, Path.unlink))],
)
def test_damaged_file_is_recomputed(
    llama: Path,
    make_cache: MakeCache,
    fill_disk: FillDisk,
    start: StartEngine,
    oracle: Oracle,
    damage: Callable[[Path], None],
) -> None:
    cache = fill_disk(make_cache(), prompt(LENGTH))
    files = sorted(cache.disk.rglob("*.kv"), key=lambda file: file.stat().st_mtime_ns)
    assert len(files) == LENGTH // CHUNK
    damage(files[len(files) // 2])
    cache.start()
    with start(llama, cache) as engine:
        check_recomputed(engine, cache, prompt(LENGTH), oracle(llama, prompt(LENGTH)))


def test_full_disk_stays_within_its_capacity(
    llama: Path, make_cache: MakeCache, start: StartEngine, oracle: Oracle
) -> None:
    cache = make_cache(ssd={"capacity": 2 * MIB}).start()  # three chunks
    with start(llama, cache) as engine:
        for number in range(3):
            tokens = prompt(LENGTH, start=2000 * number)
            assert engine.generate(tokens).tokens == oracle(llama, tokens)
            cache.wait_until_idle()
            on_disk = sum(file.stat().st_size for file in cache.disk.rglob("*") if file.is_file())
            assert on_disk <= 2 * MIB
    cache.stop()
    cache.start()
    with start(llama, cache) as engine:
        for number in range(3):
            tokens = prompt(LENGTH, start=2000 * number)
            assert engine.generate(tokens).tokens == oracle(llama, tokens)


@pytest.mark.parametrize("fault", [pytest.param("fail-get", marks=pytest.mark.slow), "hang-get"])
def test_unreadable_disk_costs_misses(
    llama: Path, make_cache: MakeCache, fill_disk: FillDisk, start: StartEngine, oracle: Oracle, fault: str
) -> None:
    cache = fill_disk(make_cache(ssd={"deadline": "300ms"}), prompt(LENGTH)).start(fault=[fault])
    prompts = [prompt(LENGTH), prompt(LENGTH + 300), prompt(600, start=9000)]
    # Hung reads keep their memory, so the cache process never becomes idle here.
    with start(llama, cache) as engine:
        for tokens in prompts:
            assert engine.generate(tokens).tokens == oracle(llama, tokens)
            engine.reset_prefix_cache()
        engine.wait_until_free()
        engine.kill()


@pytest.mark.parametrize("fault", [pytest.param("fail-put", marks=pytest.mark.slow), "hang-put"])
def test_unwritable_disk_leaves_hits_in_memory(
    llama: Path, make_cache: MakeCache, start: StartEngine, oracle: Oracle, fault: str
) -> None:
    cache = make_cache(ssd={"deadline": "300ms"}, drain_timeout="1s")
    cache.start(fault=[fault])
    with start(llama, cache) as engine:
        for hit in (0, WHOLE_CHUNKS):
            answer = engine.generate(prompt(LENGTH))
            assert (answer.tokens, answer.cached) == (oracle(llama, prompt(LENGTH)), hit)
            cache.wait_until(lambda status: status["tiers"][0]["chunks"] == LENGTH // CHUNK)
            engine.reset_prefix_cache()
        engine.kill()
