"""Which of vLLM's KV-cache groups kvtier stores, and what a stored prefix needs of each.

Exact classes are recognised, not subclasses, which may keep something else in their blocks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvtier.errors import LayoutError
from kvtier.integrations.vllm.compat import block_tokens_of, declared_shards
from kvtier.integrations.vllm.identity import draft_model
from kvtier.integrations.vllm.parts import Part

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SUPPORTED = (
    "full, sliding-window, chunked-local and latent (MLA) attention, and states (Mamba, linear attention)"
)


class Needs(NamedTuple):
    """What a hit needs of a group."""

    window: int = 0
    """Only the blocks of the last ``window`` tokens before its end; 0 for all."""
    state: bool = False
    """Only the state at its end."""


def needs(group: KVCacheGroupSpec) -> Needs:
    """Return what a hit needs of a group. Raises :class:`LayoutError` if kvtier does not support it."""
    found = {_needs(spec, group) for spec in specs_of(group)}
    if len(found) > 1:
        raise LayoutError(f"the layers of one KV-cache group differ: {', '.join(map(str, sorted(found)))}")
    return found.pop()


def _needs(spec: KVCacheSpec, group: KVCacheGroupSpec) -> Needs:
    kind = type(spec)
    if kind is FullAttentionSpec or kind is MLAAttentionSpec:
        return Needs()
    if kind is SlidingWindowSpec or kind is SlidingWindowMLASpec:
        return Needs(window=int(spec.sliding_window) + int(spec.extra_retained_tokens))
    if kind is ChunkedLocalAttentionSpec:
        return Needs(window=int(spec.attention_chunk_size))
    if kind is MambaSpec:
        if spec.mamba_cache_mode != "align":
            raise LayoutError(
                f"layers such as {group.layer_names[0]} have states, and mamba_cache_mode is "
                f"{spec.mamba_cache_mode}: serve this model with --enable-prefix-caching and "
                "--mamba-cache-mode align, or without --kv-transfer-config"
            )
        return Needs(state=True)
    name = kind.__name__.removesuffix("Spec")
    raise LayoutError(
        f"layers such as {group.layer_names[0]} use {name}, which kvtier does not support: it supports "
        f"{SUPPORTED}; serve this model without --kv-transfer-config"
    )


def shards_of(
    vllm_config: VllmConfig, config: KVCacheConfig, group: KVCacheGroupSpec, part: Part
) -> tuple[int, ...]:
    """Return for each rank of a part a number of what it holds of a group; empty if all differ.

    Latent attention has one head, that all ranks hold. With fewer KV heads than ranks, vLLM gives each head
    to consecutive ranks (``QKVParallelLinear``). The model's configuration states one number of heads, so
    this is only certain if all layers have as many. Context parallelism divides the tokens of each head.
    """
    shape = part.shape
    heads = math.lcm(*(_shards(spec, vllm_config, config, group) for spec in specs_of(group)))
    if shape.tp % heads:
        heads = shape.tp  # Ranks share parts of heads then: no two of them are known to hold the same.
    divided = block_tokens_of(group, shape.dcp) > group.kv_cache_spec.block_size
    held = [
        (shape.tp_rank(rank) * heads // shape.tp, shape.dcp_rank(rank) if divided else 0)
        for rank in part.ranks
    ]
    numbers = {shard: number for number, shard in enumerate(dict.fromkeys(held))}
    return () if len(numbers) == len(held) else tuple(numbers[shard] for shard in held)


def _shards(spec: Any, vllm_config: VllmConfig, config: KVCacheConfig, group: KVCacheGroupSpec) -> int:
    """Return into how many different parts the ranks divide a layer's KV heads."""
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    if isinstance(spec, MambaSpec):
        return 1 if spec.tp_replicated else ranks
    declared = declared_shards(spec)
    if declared is not None or type(spec) is MLAAttentionSpec:
        return min(ranks, int(declared or 1))
    every = [spec for each in config.kv_cache_groups for spec in specs_of(each)]
    heads = {(spec.num_kv_heads, spec.head_size) for spec in every if isinstance(spec, AttentionSpec)}
    if len(heads) > 1 or draft_model(vllm_config) is not None:  # Whose number of heads may differ.
        return ranks
    return min(ranks, int(vllm_config.model_config.get_total_num_kv_heads()))


def specs_of(group: KVCacheGroupSpec) -> list[Any]:
    """Return the specs of a group's layers, or the one that all have."""
    spec = group.kv_cache_spec
    return list(spec.kv_cache_specs.values()) if type(spec) is UniformTypeKVCacheSpecs else [spec]


def check_prefill(vllm_config: VllmConfig) -> None:
    """Raise :class:`LayoutError` if this engine cannot compute the rest of a prompt after loaded KV.

    vLLM then disables both chunked prefill and prefix caching: for MLA and RISC-V on CPUs
    (``CpuPlatform.check_and_update_config``), and for pooling, encoder and attention-free models
    (``ModelConfig.is_prefix_caching_supported``). With MLA on a CPU, tokens would be wrong.
    """
    model = vllm_config.model_config
    caching = vllm_config.cache_config.enable_prefix_caching
    chunked = vllm_config.scheduler_config.enable_chunked_prefill
    on_cpu = vllm_config.device_config.device_type == "cpu"
    if on_cpu and not caching and not chunked:
        what = "MLA (latent attention)" if model.use_mla else "this model"
        raise LayoutError(
            f"vLLM cannot continue {what} after cached tokens on this CPU, and disables chunked prefill and "
            "prefix caching for it: a load would give wrong tokens; serve it without --kv-transfer-config"
        )
    if not model.is_prefix_caching_supported and not caching:
        raise LayoutError(
            "vLLM does not support prefix caching for this model, so nothing that kvtier stores could be "
            "used: serve it without --kv-transfer-config"
        )
