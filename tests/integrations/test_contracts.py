"""The connector against the interfaces of vLLM versions that cannot run here, recorded from their sources.

``tools/vllm_contract.py`` writes them. Nothing is imported from vLLM.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "contracts"
CONNECTOR = Path(__file__).parents[2] / "kvtier" / "integrations" / "vllm" / "connector.py"
USED = {
    "EngineCore": {"add_lora", "remove_lora", "scheduler", "set_weight_version"},
    "Scheduler": {"get_kv_connector"},
    "AttentionSpec": {"num_kv_heads", "head_size"},
    "BlockPool": {"cached_block_hash_to_block", "get_num_free_blocks", "hash_block_size", "num_gpu_blocks"},
    "BlockStored": {"kv_cache_spec_kind", "kv_cache_spec_sliding_window", "medium"},
    "ChunkedLocalAttentionSpec": {"attention_chunk_size"},
    "KVCacheConfig": {
        "kv_cache_groups",
        "kv_cache_layout",
        "kv_cache_tensors",
        "num_blocks_of",
        "prefix_cacheable_group_ids",
    },
    "KVCacheManager": {"block_pool", "kv_cache_event_metadata"},
    "KVCacheGroupSpec": {"is_eagle_group", "kv_cache_spec", "layer_names"},
    "KVCacheSpec": {"block_size"},
    "KVCacheTensor": {"block_stride", "layer_stride", "layers", "offset"},
    "KVConnectorBlockState": {"boundary_state_offloads", "get_block_ids"},
    "KVConnectorOutput": {"failed_recving", "finished_recving", "invalid_block_ids"},
    "MambaSpec": {"mamba_cache_mode", "state_content_size_bytes", "tp_replicated"},
    "Request": {
        "all_token_ids",
        "block_hashes",
        "cache_salt",
        "kv_transfer_params",
        "lora_request",
        "mm_features",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "prompt_embeds",
        "prompt_token_ids",
        "request_id",
        "shared_prefix_boundary",
        "skip_reading_prefix_cache",
        "status",
        "structured_output_request",
    },
    "SchedulerOutput": {
        "has_sync_kv_loads",
        "kv_connector_block_state",
        "num_scheduled_tokens",
        "preempted_req_ids",
        "total_num_scheduled_tokens",
    },
    "SlidingWindowSpec": {"extra_retained_tokens", "sliding_window"},
    "UniformTypeKVCacheSpecs": {"kv_cache_specs"},
}
"""What the connector reads, by class, besides what ``compat.py`` looks for."""

versions = pytest.mark.parametrize("version", ["0.30", "0.31", "0.33"])


def contract(version: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"vllm-{version}.json").read_text())
    return found


def hooks() -> dict[str, ast.arguments]:
    """Return the arguments of the connector's public methods."""
    classes = [node for node in ast.parse(CONNECTOR.read_text()).body if isinstance(node, ast.ClassDef)]
    (connector,) = [node for node in classes if node.name == "KVTierConnector"]
    return {
        item.name: item.args
        for item in connector.body
        if isinstance(item, ast.FunctionDef) and not item.name.startswith("_")
    }


@versions
def test_every_abstract_hook_is_implemented(version: str) -> None:
    methods = contract(version)["connector"]
    abstract = {name for name, method in methods.items() if method["abstract"]}
    assert abstract
    assert abstract <= hooks().keys()


@versions
def test_hooks_take_the_arguments_of_this_version(version: str) -> None:
    for name, method in contract(version)["connector"].items():
        own = hooks().get(name)
        if own is None:
            continue
        names = [argument.arg for argument in own.args[1:]]
        given = method["arguments"]
        assert names[: len(given)] == given, name
        required = len(names) - len(own.defaults)
        assert required <= len(given) or own.vararg is not None, name


@versions
@pytest.mark.parametrize("name", USED)
def test_attributes_that_are_read_exist(version: str, name: str) -> None:
    attributes = set(contract(version)["attributes"][name])
    assert attributes
    assert USED[name] <= attributes


@versions
def test_vllm_builds_events_from_the_arguments_that_it_is_given(version: str) -> None:
    tree = ast.parse((CONNECTOR.parent / "compat.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    (call,) = [call for call in calls if ast.unparse(call.func) == "pool._build_block_stored_event"]
    given = {"request"} | {keyword.arg for keyword in call.keywords if keyword.arg is not None}
    if "num_hash_lookahead_tokens" in contract(version)["attributes"]["BlockPool"]:
        given.add("lookahead_token_ids")
    assert given == set(contract(version)["event_builder"])
