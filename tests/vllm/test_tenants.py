"""KV is never shared between tenants or adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs.cache_process import CHUNK, CacheProcess
from tests.rigs.vllm import models
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import Oracle, Running, StartEngine

LENGTH = 1000
WHOLE_CHUNKS = LENGTH // CHUNK * CHUNK


def test_tenants_with_different_salts_never_hit_each_other(
    llama: Path, running: Running, oracle: Oracle
) -> None:
    engine, cache = running
    for stored, salt in enumerate(("one", "other", None), 1):
        engine.reset_prefix_cache()
        cold = engine.generate(prompt(LENGTH), salt=salt)
        assert (cold.cached, cold.tokens) == (0, oracle(llama, prompt(LENGTH)))
        cache.wait_until_stored(stored * WHOLE_CHUNKS)
    for salt in ("one", "other", None):
        engine.reset_prefix_cache()
        warm = engine.generate(prompt(LENGTH), salt=salt)
        assert (warm.cached, warm.tokens) == (WHOLE_CHUNKS, oracle(llama, prompt(LENGTH)))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """The arguments of vLLM's ``LoRARequest`` for two adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    return [
        {
            "lora_name": f"adapter-{number}",
            "lora_int_id": number,
            "lora_path": str(models.make_lora(folder / str(number), seed=number)),
        }
        for number in (1, 2)
    ]


def test_adapters_do_not_share(
    llama: Path, cache: CacheProcess, start: StartEngine, oracle: Oracle, adapters: list[dict[str, object]]
) -> None:
    variants = [None, *adapters]
    expected = [oracle(llama, prompt(LENGTH), lora=lora) for lora in variants]
    assert len({tuple(tokens) for tokens in expected}) == len(variants), "the adapters change nothing"
    with start(llama, cache, enable_lora=True, max_lora_rank=8, max_loras=2) as engine:
        for hit in (0, WHOLE_CHUNKS):
            for number, lora in enumerate(variants):
                engine.reset_prefix_cache()
                answer = engine.generate(prompt(LENGTH), lora=lora)
                assert (answer.cached, answer.tokens) == (hit, expected[number])
                cache.wait_until_idle()
