"""Adapters and models whose files are replaced in place: no chunk of the earlier ones is used."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.cache_process import CHUNK, MIB, TIMEOUT_SECONDS, CacheProcess
from tests.rigs.servers import RedisServer
from tests.rigs.vllm import models
from tests.rigs.vllm.engine import Answer, Engine
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import MakeCache, Oracle, StartEngine, peer_settings

LENGTH = 1000
WHOLE = LENGTH // CHUNK * CHUNK

Place = Callable[[int], dict[str, Any]]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """``place(seed)``: put an adapter trained with this seed into the folder that is served."""
    served = {"lora_name": "adapter", "lora_int_id": 1, "lora_path": str(tmp_path / "served")}

    def place(seed: int) -> dict[str, Any]:
        models.make_lora(Path(served["lora_path"]), seed=seed)
        time.sleep(0.2)  # Beyond adapters.FRESH_SECONDS, in which they are taken to be as they were.
        return served

    return place


@pytest.fixture
def expected(llama: Path, oracle: Oracle, tmp_path: Path) -> Callable[[int], list[int]]:
    """``expected(seed)``: the tokens of an adapter that was never replaced."""

    def expected(seed: int) -> list[int]:
        folder = tmp_path / f"copy-{seed}"
        if not folder.exists():
            models.make_lora(folder, seed=seed)
        lora = {"lora_name": f"copy-{seed}", "lora_int_id": 100 + seed, "lora_path": str(folder)}
        return oracle(llama, prompt(LENGTH), lora=lora)

    return expected


def ask(engine: Engine, cache: CacheProcess, lora: dict[str, Any]) -> Answer:
    engine.reset_prefix_cache()
    answer = engine.generate(prompt(LENGTH), lora=lora)
    cache.wait_until_idle()
    return answer


LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 1}


def test_adapter_trained_again_into_the_same_folder(
    llama: Path, cache: CacheProcess, start: StartEngine, place: Place, expected: Callable[[int], list[int]]
) -> None:
    """Each time with a new engine, while the cache process runs on."""
    assert expected(1) != expected(2)
    for seed, hit in ((1, 0), (2, 0), (1, WHOLE), (2, WHOLE)):
        lora = place(seed)
        with start(llama, cache, **LORA) as engine:
            assert ask(engine, cache, lora) == Answer(expected(seed), hit, "length")
        if seed == 2 and not hit:
            cache.stop()
            cache.start()  # What follows comes from disk.


def test_adapter_that_is_replaced_while_the_engine_runs(
    llama: Path,
    cache: CacheProcess,
    start: StartEngine,
    place: Place,
    expected: Callable[[int], list[int]],
    tmp_path: Path,
) -> None:
    other = str(models.make_lora(tmp_path / "other", seed=3))
    evicts = {"lora_name": "other", "lora_int_id": 2, "lora_path": other}
    with start(llama, cache, **LORA) as engine:

        def check(lora: dict[str, Any], seed: int, hit: int) -> None:
            assert ask(engine, cache, lora) == Answer(expected(seed), hit, "length")

        engine.load_adapter(place(1))
        check(place(1), 1, 0)
        check(place(1), 1, WHOLE)
        # In memory is the old one, on disk the new one: neither loaded nor stored.
        stale = place(2)
        check(stale, 1, 0)
        check(stale, 1, 0)
        # It is evicted, and loaded from disk again.
        ask(engine, cache, evicts)
        check(stale, 2, 0)
        check(stale, 2, 0)
        engine.load_adapter({**stale, "load_inplace": True})
        check(stale, 2, 0)
        check(stale, 2, WHOLE)
        engine.load_adapter({**place(1), "load_inplace": True})
        check(stale, 1, WHOLE)
        # vLLM's own cache has KV of the old one: what continues it is not stored.
        engine.load_adapter({**place(2), "load_inplace": True})
        before = cache.status()["tiers"][0]["chunks"]
        engine.generate(prompt(LENGTH + 4 * CHUNK), lora=stale)
        cache.wait_until_idle()
        assert cache.status()["tiers"][0]["chunks"] == before


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of the same shape with other weights."""
    return models.make_llama(tmp_path_factory.mktemp("other"), seed=8)


def replace(served: Path, model: Path) -> None:
    """Copy a model into the folder that is served. Its times do not show that."""
    served.mkdir(exist_ok=True)
    for file in model.iterdir():
        shutil.copy(file, served / file.name)
        os.utime(served / file.name, (1, 1))


def test_model_files_that_are_replaced_in_place(
    llama: Path, other: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle, tmp_path: Path
) -> None:
    assert oracle(llama, prompt(LENGTH)) != oracle(other, prompt(LENGTH))
    served = tmp_path / "served"
    for model, hit in ((llama, 0), (other, 0), (llama, WHOLE)):
        replace(served, model)
        with start(served, cache) as engine:
            answer = engine.generate(prompt(LENGTH))
            assert answer == Answer(oracle(model, prompt(LENGTH)), hit, "length")
            cache.wait_until_idle()


@pytest.mark.slow
def test_model_files_that_are_replaced_and_loaded_while_the_engine_runs(
    llama: Path, other: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle, tmp_path: Path
) -> None:
    served = tmp_path / "served"
    replace(served, llama)

    def check(model: Path, hit: int) -> None:
        engine.reset_prefix_cache()
        assert engine.generate(prompt(LENGTH)) == Answer(oracle(model, prompt(LENGTH)), hit, "length")
        cache.wait_until_idle()

    with start(served, cache) as engine:
        check(llama, 0)
        for model in (other, llama):
            replace(served, model)
            engine.reset_prefix_cache(external=True)
            engine.load_weights(served)
            engine.name_weights("default")  # It names the files that the engine has started with.
            check(model, 0)
            check(model, WHOLE)
    replace(served, other)
    with start(served, cache) as engine:
        check(other, 0)


def pools(make_cache: MakeCache, stack: ExitStack) -> list[CacheProcess]:
    """Return two cache processes that share a Redis."""
    if reason := RedisServer.missing():
        pytest.skip(reason)
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvt-"))
    server = stack.enter_context(RedisServer(Path(folder)))
    pool = {**server.tier(), "deadline": TIMEOUT_SECONDS, "queue": 64 * MIB}
    return [make_cache(pool=pool) for _ in range(2)]


def peers(make_cache: MakeCache, stack: ExitStack) -> list[CacheProcess]:
    """Return two cache processes that are peers."""
    return [make_cache(peer=peer) for peer in peer_settings(2)]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "found"), [(pools, "found_pool"), (peers, "found_peers")])
def test_replaced_files_and_chunks_of_another_host(
    llama: Path,
    other: Path,
    make_cache: MakeCache,
    start: StartEngine,
    oracle: Oracle,
    place: Place,
    expected: Callable[[int], list[int]],
    tmp_path: Path,
    make: Callable[[MakeCache, ExitStack], list[CacheProcess]],
    found: str,
) -> None:
    """The first one stores chunks of a model and an adapter. Where the second runs, both are replaced."""
    served = tmp_path / "served-model"
    with ExitStack() as stack:
        first, second = (cache.start() for cache in make(make_cache, stack))
        for cache, model, seed, hits in (
            (first, llama, 1, (0, 0)),
            (second, other, None, (0, 0)),
            (second, llama, 2, (WHOLE, 0)),
            (second, llama, 1, (WHOLE, WHOLE)),
        ):
            replace(served, model)
            with start(served, cache, **LORA) as engine:
                answer = engine.generate(prompt(LENGTH))
                assert answer == Answer(oracle(model, prompt(LENGTH)), hits[0], "length")
                cache.wait_until_idle()
                if seed is not None:
                    assert ask(engine, cache, place(seed)) == Answer(expected(seed), hits[1], "length")
        assert second.status()["counts"][found] == 2 * WHOLE // CHUNK
