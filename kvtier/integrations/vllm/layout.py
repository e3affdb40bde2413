"""Derive a :class:`~kvtier.memory.layout.ChunkLayout` from vLLM's description of its KV cache.

The scheduler and every worker derive it from the same ``KVCacheConfig`` and must get the same result. Pages
are opaque bytes. vLLM may store K transposed inside a block, depending on the processor: everything that
affects this is part of the layout's platform.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvtier.errors import LayoutError
from kvtier.memory.layout import ChunkLayout, GroupLayout, namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Region(NamedTuple):
    """Contiguous pages in a worker's KV memory, one for each block: ``num_blocks`` times ``page_bytes``."""

    layer: str
    """A layer whose tensor shares the storage."""
    offset: int
    page_bytes: int


class ModelLayout(NamedTuple):
    """The layout on which both sides of the connector must agree."""

    layout: ChunkLayout
    namespace: bytes
    regions: tuple[tuple[Region, ...], ...]
    """The regions of each KV-cache group, in the order of the layout's ``page_bytes``."""
    num_blocks: int


def model_layout(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, chunk_tokens: int) -> ModelLayout:
    """Return the layout of this engine's chunks. Raises :class:`LayoutError` if it is unsupported."""
    parallel = vllm_config.parallel_config
    for setting in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "nnodes",
    ):
        if getattr(parallel, setting, 1) > 1:
            raise LayoutError(f"{setting} is {getattr(parallel, setting)}: kvtier only supports 1")
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise LayoutError("the model has no KV cache: serve it without --kv-transfer-config")
    regions = tuple(tuple(_regions(kv_cache_config, group)) for group in groups)
    layout = ChunkLayout(
        chunk_tokens=chunk_tokens,
        groups=tuple(
            GroupLayout(
                group.kv_cache_spec.block_size,
                tuple(region.page_bytes for region in found),
                _window(group),
            )
            for group, found in zip(groups, regions, strict=True)
        ),
        ranks=parallel.tensor_parallel_size,
        platform=_platform(vllm_config, kv_cache_config),
    )
    return ModelLayout(layout, namespace(_model(vllm_config), layout), regions, kv_cache_config.num_blocks)


def _window(group: KVCacheGroupSpec) -> int:
    """Return the group's attention window; 0 for full attention. Raises :class:`LayoutError` for others."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window) + int(spec.extra_retained_tokens)
    if isinstance(spec, FullAttentionSpec):
        return 0
    kind = type(spec).__name__.removesuffix("Spec")
    raise LayoutError(
        f"layers such as {group.layer_names[0]} use {kind}, which kvtier does not support: it supports "
        "full and sliding-window attention; serve this model without --kv-transfer-config"
    )


def _regions(config: KVCacheConfig, group: KVCacheGroupSpec) -> Iterator[Region]:
    """Yield the regions of a group's layers; see vLLM's ``KVCacheTensor`` for the arithmetic."""
    names = set(group.layer_names)
    for tensor in config.kv_cache_tensors:
        if names.intersection(tensor.layers):
            yield from _tensor_regions(config.num_blocks, tensor, names)


def _tensor_regions(num_blocks: int, tensor: KVCacheTensor, names: set[str]) -> list[Region]:
    page_bytes = tensor.block_stride
    run_bytes = num_blocks * page_bytes
    if tensor.layer_stride < run_bytes:
        # Blocks are the outermost dimension: a page holds the block of all layers.
        return [Region(next(layer for layer in tensor.layers if layer in names), 0, page_bytes)]
    runs_per_layer = tensor.layer_stride // run_bytes
    return [
        Region(layer, tensor.offset + index * tensor.layer_stride + run * run_bytes, page_bytes)
        for index, layer in enumerate(tensor.layers)
        if layer in names
        for run in range(runs_per_layer)
    ]


def _platform(vllm_config: VllmConfig, config: KVCacheConfig) -> str:
    device = vllm_config.device_config.device_type
    parts = [
        device,
        str(config.kv_cache_layout),
        str(vllm_config.cache_config.cache_dtype),
        str(vllm_config.model_config.dtype),
        str(vllm_config.attention_config.backend) if hasattr(vllm_config, "attention_config") else "",
    ]
    if device == "cpu":
        parts.append(torch.backends.cpu.get_cpu_capability())
    return "|".join(parts)


def _model(vllm_config: VllmConfig) -> str:
    """Return a string of everything that distinguishes one model's KV from another's."""
    model = vllm_config.model_config
    shape = model.hf_config.to_dict()
    for volatile in ("_name_or_path", "transformers_version"):
        shape.pop(volatile, None)
    return json.dumps([model.model, model.revision, model.quantization, shape], sort_keys=True, default=str)


def page_views(model: ModelLayout, kv_caches: dict[str, torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return a byte view ``(num_blocks, page_bytes)`` of the worker's KV memory for each group and region.

    Raises :class:`LayoutError` if the tensors are smaller than vLLM's description of them.
    """
    views = []
    for regions in model.regions:
        group_views = []
        for region in regions:
            storage = kv_caches[region.layer].untyped_storage()
            raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            stop = region.offset + model.num_blocks * region.page_bytes
            if raw.numel() < stop:
                raise LayoutError(f"the KV memory of {region.layer} has {raw.numel()} bytes, expected {stop}")
            group_views.append(raw[region.offset : stop].view(model.num_blocks, region.page_bytes))
        views.append(group_views)
    return views
