"""Beside other connectors in vLLM's ``MultiConnector``: tokens are those of vLLM without a connector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.servers import free_port
from tests.vllm.cache_process import CHUNK
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


def neighbor(name: str, folder: Path) -> dict[str, Any]:
    """Return the settings of another connector that runs on a CPU."""
    extra: dict[str, dict[str, Any]] = {
        "ExampleConnector": {"shared_storage_path": str(folder)},
        "NixlConnector": {},
        "OffloadingConnector": {
            "spec_name": "CopyingOffloadingSpec",
            "spec_module_path": "benchmarks.compare.offload_spec",
            "cpu_bytes_to_use": 64 << 20,
        },
    }
    if name == "LossyConnector":
        return LOSSY
    buffer = {"kv_buffer_device": "cpu"} if name == "NixlConnector" else {}
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra[name], **buffer}


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


REMOTE = {
    "do_remote_prefill": True,
    "remote_engine_id": "gone",
    "remote_request_id": "gone",
    "remote_host": "127.0.0.1",
    "tp_size": 1,
    "remote_block_ids": [list(range(1, LENGTH // 32 + 1))],
}
"""NIXL's hints for KV of an engine that does not exist."""


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("first", ["kvtier-first", "kvtier-last"])
@pytest.mark.parametrize(
    "name", ["KVTierConnector", "LossyConnector", "ExampleConnector", "OffloadingConnector", "NixlConnector"]
)
def test_tokens_beside(
    llama: Path,
    make_cache: MakeCache,
    engines: Engines,
    oracle: Oracle,
    tmp_path: Path,
    name: str,
    first: str,
    ranks: int,
    policy: str,
) -> None:
    """Cold, warm, with a dead cache process, with a new one, and after a load of the other has failed."""
    if name == "ExampleConnector" and ranks == 2:
        pytest.skip("its ranks write to the same files")
    if name == "NixlConnector":
        pytest.importorskip("nixl", reason="NIXL is not installed")
    caches = [make_cache() for _ in range(1 + (name == "KVTierConnector"))]
    for cache in caches:
        cache.start()
    children = [kvtier(each.connector) for each in caches]
    if name != "KVTierConnector":
        children.append(neighbor(name, tmp_path))
    if first == "kvtier-last":
        children.reverse()
    # The example connector stores prompts that are computed in one step.
    arguments: dict[str, Any] = {
        "max_num_batched_tokens": 4096 if name == "ExampleConnector" else 256,
        "tensor_parallel_size": ranks,
        "connector_type": {**MULTI, "kv_load_failure_policy": policy},
        "environment": {"UCX_TLS": "tcp,sm,self", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
    }
    whole = LENGTH // CHUNK * CHUNK
    with engines.engine(llama, {"connectors": children}, **arguments) as engine:
        tokens = prompt(LENGTH)
        hits = {}

        def check(situation: str, tokens: list[int]) -> None:
            engine.reset_prefix_cache()
            answer = engine.generate(tokens)
            assert answer.tokens == oracle(llama, tokens, 16), situation
            hits[situation] = answer.cached

        check("cold", tokens)
        for cache in caches:
            cache.wait_until_stored(LENGTH)
        check("warm", tokens)
        caches[0].kill()
        check("killed", tokens)
        check("killed, other prompt", prompt(LENGTH, start=5000))
        caches[0].start()
        caches[0].wait_until(lambda status: bool(status["engines"]))
        check("restarted", tokens)
        for params in ({"lossy": LOST}, {**REMOTE, "remote_port": free_port()}):
            if name != ("LossyConnector" if "lossy" in params else "NixlConnector"):
                continue
            failing = prompt(LENGTH, start=9000)
            failed = engine.generate(failing, params=params)
            if policy == "fail":
                assert failed.reason == "error"
            else:
                assert failed.tokens == oracle(llama, failing, 16)
            check("after failure", failing)
            check("after failure, warm", failing)
        for cache in caches:
            cache.wait_until_idle()
        engine.wait_until_free()
        assert hits["cold"] == 0
        assert min(hits["warm"], hits["restarted"]) >= whole
        print(name, first, ranks, policy, hits)
