"""Beside other connectors in vLLM's ``MultiConnector``: tokens are those of vLLM without a connector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.servers import free_port
from tests.rigs.cache_process import CHUNK, CacheProcess
from tests.rigs.vllm.engine import Engine
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import Engines, MakeCache, Oracle

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
    caches = [make_cache().start() for _ in range(2)]
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


FAILING: dict[str, dict[str, Any]] = {
    "LossyConnector": {"lossy": LOST},
    "NixlConnector": {
        "do_remote_prefill": True,
        "remote_engine_id": "gone",
        "remote_request_id": "gone",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "tp_size": 1,
        "remote_block_ids": [list(range(1, LENGTH // 32 + 1))],
    },
}
"""The hints with which a load of another connector fails."""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("policy", "first"), [("fail", True), ("recompute", False)])
@pytest.mark.parametrize("name", ["KVTierConnector", *FAILING, "ExampleConnector", "OffloadingConnector"])
def test_tokens_beside(
    llama: Path,
    make_cache: MakeCache,
    engines: Engines,
    oracle: Oracle,
    tmp_path: Path,
    name: str,
    first: bool,
    ranks: int,
    policy: str,
) -> None:
    """Cold, warm, without a cache process, with a new one, and after a load of the other has failed.

    ``first``: whether kvtier is the first connector. If not, vLLM schedules asynchronously.
    """
    if name == "ExampleConnector" and ranks == 2:
        pytest.skip("its ranks write to the same files")
    if name == "NixlConnector":
        pytest.importorskip("nixl", reason="NIXL is not installed")
    caches = [make_cache().start() for _ in range(1 + (name == "KVTierConnector"))]
    children = [kvtier(each.connector) for each in caches]
    if name != "KVTierConnector":
        children.append(neighbor(name, tmp_path))
    if not first:
        children.reverse()
    arguments: dict[str, Any] = {
        # The example connector stores prompts that are computed in one step.
        "max_num_batched_tokens": 4096 if name == "ExampleConnector" else 256,
        "tensor_parallel_size": ranks,
        "async_scheduling": not first,
        "connector_type": {**MULTI, "kv_load_failure_policy": policy},
        "environment": {"UCX_TLS": "tcp,sm,self", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
    }
    with engines.engine(llama, {"connectors": children}, **arguments) as engine:
        hits = visit(engine, caches, lambda tokens: oracle(llama, tokens, 16), FAILING.get(name), policy)
    print(f"\n{name}, {first=}, {ranks=}, {policy=}: {hits}")


def visit(
    engine: Engine,
    caches: Sequence[CacheProcess],
    expected: Callable[[list[int]], list[int]],
    failing: dict[str, Any] | None,
    policy: str,
) -> dict[str, int]:
    """Compare tokens in each situation; return the hits."""
    hits: dict[str, int] = {}

    def check(situation: str, tokens: list[int]) -> int:
        engine.reset_prefix_cache()
        answer = engine.generate(tokens)
        assert answer.tokens == expected(tokens), situation
        hits[situation] = answer.cached
        return answer.cached

    tokens, other, lost, fresh = (prompt(LENGTH, start=start) for start in (0, 5_000, 9_000, 13_000))
    whole = LENGTH // CHUNK * CHUNK
    check("cold", tokens)
    for cache in caches:
        cache.wait_until_stored(LENGTH)
    check("warm", tokens)
    caches[0].kill()
    check("killed", tokens)
    check("killed, another prompt", other)
    caches[0].start()
    # An engine looks for a cache process in its steps.
    caches[0].wait_until(lambda status: check("restarted", tokens) >= whole and bool(status["engines"]))
    if failing:
        failed = engine.generate(lost, params=failing)
        assert failed.reason == "error" if policy == "fail" else failed.tokens == expected(lost)
        check("after a failure", lost)
        check("after a failure, warm", lost)
    for cache in caches:  # Loads of the other, failed or not, do not end its saves.
        cache.wait_until(
            lambda status: status["tiers"][1]["chunks"] >= 2 * whole // CHUNK or check("fresh", fresh) < 0
        )
        cache.wait_until_idle()
    engine.wait_until_free()
    assert hits["cold"] == 0
    assert hits["warm"] >= whole
    return hits
