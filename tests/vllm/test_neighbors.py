"""Beside other connectors in vLLM's ``MultiConnector``: tokens are those of vLLM without a connector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import Engines, MakeCache, Oracle
from tests.vllm.models import prompt

LENGTH, LOST = 1000, 768
MULTI: dict[str, Any] = {
    "kv_connector": "MultiConnector",
    "kv_connector_module_path": None,
    "kv_load_failure_policy": "recompute",
}
LOSSY = {
    "kv_connector": "LossyConnector",
    "kv_connector_module_path": "tests.vllm.lossy_connector",
    "kv_role": "kv_both",
}


def kvtier(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.integrations.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }


@pytest.mark.parametrize("lossy_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_failed_load_of_another_connector_stores_nothing_wrong(
    llama: Path, make_cache: MakeCache, engines: Engines, oracle: Oracle, lossy_first: bool
) -> None:
    """vLLM computes the lost blocks again over several steps. Two kvtier get the request and its hints."""
    caches = [make_cache() for _ in range(2)]
    for cache in caches:
        cache.start()
    ours = [kvtier(cache.connector) for cache in caches]
    children = [LOSSY, *ours] if lossy_first else [*ours, LOSSY]
    arguments: dict[str, Any] = {"max_num_batched_tokens": 256, "connector_type": MULTI}
    with engines.engine(llama, {"connectors": children}, **arguments) as engine:
        tokens = prompt(LENGTH)
        expected = oracle(llama, tokens, 16)
        lost = engine.generate(tokens, params={"lossy": LOST, "kvtier": {}})
        assert lost.tokens == expected
        assert lost.params is not None
        assert set(lost.params) == {"kvtier"}
        for _ in range(2):
            engine.reset_prefix_cache()
            warm = engine.generate(tokens)
            assert warm.tokens == expected
        assert warm.cached > LOST
