"""One engine that gets other weights: no chunk is used that the earlier weights have computed."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from kvtier.bridge import client
from tests.rigs.cache_process import CHUNK, TIMEOUT_SECONDS, CacheProcess
from tests.rigs.vllm import models
from tests.rigs.vllm.engine import Answer, Engine
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import Oracle, StartEngine

LENGTH = 1000
CHUNKS = LENGTH // CHUNK


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of the same shape with other weights."""
    return models.make_llama(tmp_path_factory.mktemp("other"), seed=8)


def update(engine: Engine, model: Path, version: str | None) -> None:
    """Change the weights as vLLM does: reset, load, then name them."""
    engine.reset_prefix_cache(external=True)
    engine.load_weights(model)
    if version is not None:
        engine.name_weights(version)


def weights_of(cache: CacheProcess) -> str:
    """Return the weights of the only engine, as its scheduler has reported them."""
    return "".join(engine["weights_id"] for engine in cache.status()["engines"])


def reconnect(engine: Engine, cache: CacheProcess, before: str = "") -> None:
    """Run requests, too short to be stored, until the cache process knows of other weights."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while weights_of(cache) in ("", before):
        assert time.monotonic() < deadline, cache.tail()
        engine.generate(prompt(CHUNK // 2), 1)


def test_named_weights(
    llama: Path, other: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle, tmp_path: Path
) -> None:
    def ask(model: Path, cached: int) -> None:
        engine.reset_prefix_cache()
        answer = engine.generate(prompt(LENGTH))
        assert answer == Answer(oracle(model, prompt(LENGTH)), cached * CHUNK, "length")

    assert oracle(llama, prompt(LENGTH)) != oracle(other, prompt(LENGTH))
    with start(llama, cache) as engine:
        engine.name_weights("step-1")
        ask(llama, 0)
        cache.wait_until_stored(LENGTH)
        update(engine, other, "step-2")
        ask(other, 0)
        cache.wait_until_stored(2 * CHUNKS * CHUNK)
        ask(other, CHUNKS)
        update(engine, llama, "step-1")
        ask(llama, CHUNKS)
        assert client.clear_weights(cache.socket, "step-1", ["ram"]).chunks == CHUNKS
        ask(llama, CHUNKS)
        # The id is set first, then the cache is reset. The cache process is killed in between.
        cache.kill()
        engine.load_weights(other)
        engine.name_weights("step-3")
        engine.reset_prefix_cache(external=True)
        cache.start()
        reconnect(engine, cache)
        assert weights_of(cache) == "step-3"
        ask(other, 0)
        cache.wait_until_stored(CHUNKS * CHUNK)
        # Weights of an id are found on disk, wherever they were loaded from, until they are removed there.
        assert client.clear_weights(cache.socket, "step-1").chunks == CHUNKS
        copied = shutil.copytree(other, tmp_path / "copy")
        for version, cached in (("step-1", 0), ("step-2", CHUNKS)):
            update(engine, copied, version)
            ask(other, cached)


def test_weights_without_an_id(
    llama: Path, other: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle
) -> None:
    def ask(model: Path, cached: int) -> None:
        engine.reset_prefix_cache()
        answer = engine.generate(prompt(LENGTH))
        assert answer == Answer(oracle(model, prompt(LENGTH)), cached * CHUNK, "length")

    with start(llama, cache) as engine:
        ask(llama, 0)
        cache.wait_until_stored(LENGTH)
        ask(llama, CHUNKS)
        cache.wait_until_idle()
        # Killed before it can remove anything: the old chunks are still on disk.
        cache.kill()
        update(engine, other, None)
        cache.start()
        reconnect(engine, cache)
        assert cache.status()["tiers"][1]["chunks"] == CHUNKS
        ask(other, 0)
        cache.wait_until(lambda status: status["tiers"][1]["chunks"] == 2 * CHUNKS)
        ask(other, CHUNKS)
        # It hangs, and does not answer to the reset.
        cache.wait_until_idle()
        before = weights_of(cache)
        cache.pause()
        update(engine, llama, None)
        cache.resume()
        reconnect(engine, cache, before)
        ask(llama, 0)
        # The weights of the start have been loaded again.
        engine.reset_prefix_cache(external=True)
        engine.name_weights("default")
        ask(llama, CHUNKS)
