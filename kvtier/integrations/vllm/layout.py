"""Derive a :class:`~kvtier.memory.layout.ChunkLayout` from vLLM's description of its KV cache.

The scheduler and every worker derive it from the same ``KVCacheConfig`` and must get the same result. Pages
are opaque bytes. vLLM may store K transposed inside a block, depending on the processor: everything that
affects this is part of the layout's platform.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from blake3 import blake3
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, UniformTypeKVCacheSpecs

from kvtier.errors import LayoutError
from kvtier.fleet.member.served_models import MODEL
from kvtier.integrations.vllm.compat import block_tokens_of, hit_alignment
from kvtier.integrations.vllm.identity import NAMES_ONLY, Identities, draft_model
from kvtier.integrations.vllm.parts import Part, part_of
from kvtier.integrations.vllm.plain import commit_of, plain
from kvtier.integrations.vllm.specs import check_prefill, needs, shards_of, specs_of
from kvtier.logs import printable
from kvtier.memory.layout import CHUNK_TOKENS, ChunkLayout, GroupLayout, GroupValues, namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

PATTERN = 0xA5
"""What :func:`probe` writes."""
MIN_STATE_TOKENS = 64
MAX_WIDTH = 128
"""The most values of a head that have a scale in common."""
MAX_FACT_CHARACTERS = 160

INPUT_OPTIONS = (
    "media_io_kwargs",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "mm_processor_kwargs",
    "video_pruning_method",
    "video_pruning_rate",
)
"""Options of vLLM's ``MultiModalConfig`` that decide the KV of an image or other input.

The hash of an input covers only the options of its request (``vllm/multimodal/processing/inputs.py``).
"""


class Region(NamedTuple):
    """Pages in a worker's KV memory, one for each block, ``stride`` bytes apart."""

    layer: str
    """A layer whose tensor shares the storage."""
    offset: int
    page_bytes: int
    stride: int
    blocks: int


class ModelLayout(NamedTuple):
    """The layout on which both sides of the connector must agree."""

    layout: ChunkLayout
    namespace: bytes
    regions: tuple[tuple[Region, ...], ...]
    """The regions of each stored KV-cache group, in the order of the layout's ``page_bytes``."""
    group_ids: tuple[int, ...]
    """vLLM's numbers of the groups in the layout."""
    layers: tuple[tuple[str, ...], ...] = ()
    """The names of the layers of each group."""
    part: int = 0
    """The number of this part of the engine, see ``parts.py``."""
    parts: int = 1

    @property
    def num_blocks(self) -> int:
        """The number of blocks of vLLM's pool."""
        return max((region.blocks for group in self.regions for region in group), default=0)

    def blocks(self, tables: Sequence[Sequence[int]]) -> tuple[Sequence[int], ...]:
        """Select the block tables of the groups in the layout."""
        return tuple(tables[group] for group in self.group_ids)

    def blocks_of(self, output: SchedulerOutput) -> Callable[[str], tuple[Sequence[int], ...] | None]:
        """Return a function for the block tables of the requests that are scheduled in this step."""
        block_state = output.kv_connector_block_state

        def blocks_of(request_id: str) -> tuple[Sequence[int], ...] | None:
            tables = None if block_state is None else block_state.get_block_ids(request_id)
            return None if tables is None else self.blocks(tables)

        return blocks_of


def model_layout(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    chunk_tokens: int | Literal["auto"],
    weights_id: str = "",
    rank: int = 0,
    identities: Identities = NAMES_ONLY,
    *,
    accept_lossy: bool = False,
) -> ModelLayout:
    """Return the layout of the chunks of a rank's part. Raises :class:`LayoutError` if it is unsupported.

    ``chunk_tokens``: with ``auto``, see :func:`automatic_chunk_tokens`. ``weights_id``: see the setting.
    ``identities``: of the weights that the engine has started with. ``accept_lossy``: see the setting.
    """
    check_prefill(vllm_config)
    part = part_of(vllm_config, rank)
    # vLLM rebuilds the other groups, and declares them so.
    group_ids = tuple(kv_cache_config.prefix_cacheable_group_ids)
    stored = [kv_cache_config.kv_cache_groups[number] for number in group_ids]
    regions = tuple(tuple(_regions(kv_cache_config, group)) for group in stored)
    if not any(regions):
        where = f"rank {rank}" if part.shape.parts > 1 else "this model"
        raise LayoutError(f"{where} has no KV cache to store: serve it without --kv-transfer-config")
    groups = []
    for group, found in zip(stored, regions, strict=True):
        window, state = needs(group)
        page_bytes = tuple(region.page_bytes for region in found)
        shards = shards_of(vllm_config, kv_cache_config, group, part)
        block_tokens = block_tokens_of(group, part.shape.dcp)
        groups.append(GroupLayout(block_tokens, page_bytes, window, state, shards))
    if vllm_config.speculative_config is not None and any(group.state for group in groups):
        raise LayoutError(
            "kvtier does not support speculative decoding of models with states (Mamba, linear attention): "
            "vLLM runs it on GPUs only, where it is untested with kvtier; serve this model without "
            "--speculative-config, or without --kv-transfer-config"
        )
    if chunk_tokens == "auto":
        chunk_tokens = automatic_chunk_tokens(groups, kv_cache_config)
    layout = ChunkLayout(
        chunk_tokens=chunk_tokens,
        groups=tuple(groups),
        ranks=len(part.ranks),
        platform=_platform(vllm_config, kv_cache_config, part),
        values=tuple(_values(vllm_config, kv_cache_config, group) for group in stored)
        if accept_lossy
        else (),
    )
    layers = tuple(tuple(group.layer_names) for group in stored)
    name = namespaces(vllm_config, layout, identities)(weights_id)
    return ModelLayout(layout, name, regions, group_ids, layers, part.number, part.shape.parts)


def namespaces(
    vllm_config: VllmConfig, layout: ChunkLayout, identities: Identities
) -> Callable[[str], bytes]:
    """Return a function that returns the namespace of this engine's chunks by the id of its weights.

    Without an id, these are the weights at startup, which their content identifies. Call this at startup:
    ``reload_weights`` changes the model's path in ``vllm_config``.
    """
    drafter = identities.drafter.key
    named = _model(vllm_config, (), () if identities.drafter == identities.model else drafter)
    unnamed = _model(vllm_config, identities.model.key, drafter)
    return lambda weights_id: namespace(named if weights_id else unnamed, layout, weights_id)


def facts(vllm_config: VllmConfig, identities: Identities) -> dict[str, str]:
    """Return what a namespace covers besides the layout and the setting ``weights_id``, by what to set."""
    model = vllm_config.model_config
    weights = identities.model if identities.model.key else f"{model.model} {commit_of(model.revision) or ''}"
    return {
        "files or --revision": printable(str(weights))[-MAX_FACT_CHARACTERS:],
        "--quantization": str(model.quantization),
        MODEL: blake3(_model(vllm_config, ("",), ("",)).encode()).hexdigest(8),
    }


def automatic_chunk_tokens(groups: Sequence[GroupLayout], config: KVCacheConfig) -> int:
    """Return the multiple of all block sizes that is nearest to :data:`CHUNK_TOKENS`.

    With states, a hit ends where one is stored, at a multiple of vLLM's alignment of hits: chunks are as
    short as that, but not shorter than :data:`MIN_STATE_TOKENS`.
    """
    unit = math.lcm(*(group.block_tokens for group in groups), hit_alignment(config))
    if any(group.state for group in groups):
        return -(-MIN_STATE_TOKENS // unit) * unit
    return max(1, round(CHUNK_TOKENS / unit)) * unit


def _regions(config: KVCacheConfig, group: KVCacheGroupSpec) -> Iterator[Region]:
    """Yield the regions of a group's layers; see vLLM's ``KVCacheTensor`` for the arithmetic."""
    names = set(group.layer_names)
    for tensor in config.kv_cache_tensors:
        if names.intersection(tensor.layers):
            yield from _tensor_regions(config.num_blocks_of(tensor), tensor, group)


def _tensor_regions(num_blocks: int, tensor: KVCacheTensor, group: KVCacheGroupSpec) -> Iterator[Region]:
    """Yield the regions of a group's layers in one tensor: of states, without the padding after them."""
    page_bytes = int(tensor.block_stride)
    run_bytes = num_blocks * page_bytes
    layers = [(index, layer) for index, layer in enumerate(tensor.layers) if layer in group.layer_names]
    if needs(group).state:
        for index, layer in layers:
            state_bytes = int(_spec_of(group, layer).state_content_size_bytes)
            offset = tensor.offset + index * tensor.layer_stride
            yield Region(layer, offset, state_bytes, page_bytes, num_blocks)
    elif tensor.layer_stride < run_bytes:
        # Blocks are the outermost dimension: a page holds the block of all layers.
        yield Region(layers[0][1], 0, page_bytes, page_bytes, num_blocks)
    else:
        for index, layer in layers:
            for run in range(tensor.layer_stride // run_bytes):
                offset = tensor.offset + index * tensor.layer_stride + run * run_bytes
                yield Region(layer, offset, page_bytes, page_bytes, num_blocks)


def _spec_of(group: KVCacheGroupSpec, layer: str) -> Any:
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def kv_dtype(config: KVCacheConfig, group_ids: Sequence[int]) -> str:
    """Return the type of the values in the pages of all groups; ``uint8`` if they are quantized or differ."""
    specs = [spec for number in group_ids for spec in specs_of(config.kv_cache_groups[number])]
    quantized = any(getattr(spec, "kv_quant_mode", 0) for spec in specs)
    # A state may have parts of several types.
    found = [getattr(spec, "dtypes", ()) or [getattr(spec, "dtype", torch.uint8)] for spec in specs]
    dtypes = {str(dtype).removeprefix("torch.") for dtype in chain.from_iterable(found)}
    return "uint8" if quantized or len(dtypes) > 1 else dtypes.pop()


def _values(vllm_config: VllmConfig, config: KVCacheConfig, group: KVCacheGroupSpec) -> GroupValues:
    """Describe the values of a group to codecs with loss.

    Key and value of a token and head follow each other, and a block has the tokens of each head, or the
    heads of each token. On CPUs, the order depends on the kernel.
    """
    specs = specs_of(group)
    if needs(group).state or any(getattr(spec, "kv_quant_mode", 0) for spec in specs):
        return GroupValues()
    shapes = {
        (
            each.dtype,
            each.block_size,
            each.num_kv_heads,
            each.head_size,
            getattr(each, "head_size_v", each.head_size),
        )
        for each in specs
    }
    dtypes = {str(dtype).removeprefix("torch.") for dtype, *_ in shapes}
    if len(shapes) > 1 or vllm_config.device_config.device_type == "cpu":
        return GroupValues(dtypes.pop() if len(dtypes) == 1 else "")
    [(_, tokens, heads, key, value)] = shapes
    row = (key + value) * (heads if str(config.kv_cache_layout).endswith("NHC") else 1)
    common = math.gcd(key, value)
    width = max(size for size in range(1, MAX_WIDTH + 1) if not common % size)
    return GroupValues(dtypes.pop(), tokens, row, width)


def _platform(vllm_config: VllmConfig, config: KVCacheConfig, part: Part) -> str:
    device = vllm_config.device_config.device_type
    parts = [  # See PLATFORM_FIELDS.
        str(device),
        str(config.kv_cache_layout),
        str(vllm_config.cache_config.cache_dtype),
        str(vllm_config.model_config.dtype),
        str(vllm_config.attention_config.backend) if hasattr(vllm_config, "attention_config") else "",
    ]
    if device == "cpu":
        parts.append(torch.backends.cpu.get_cpu_capability())
    if str(part):
        parts.append(str(part))
    return "|".join(parts)


def _model(vllm_config: VllmConfig, weights: tuple[str, ...], drafts: tuple[str, ...]) -> str:
    """Return a string of everything that distinguishes one model's KV from another's.

    ``weights`` and ``drafts`` identify the weights of the model and of its drafter; if empty, their names do.
    """
    model = vllm_config.model_config
    shape = model.hf_config.to_dict()
    for volatile in ("_name_or_path", "transformers_version"):
        shape.pop(volatile, None)
    parts = [*(weights or (model.model, commit_of(model.revision))), model.quantization, shape]
    if (drafter := draft_model(vllm_config)) is not None:
        # Not its shape: vLLM's workers change that when they load an EAGLE head.
        method = vllm_config.speculative_config.method
        parts += [method, *(drafts or (drafter.model, commit_of(drafter.revision))), drafter.quantization]
    if model.multimodal_config is not None:
        parts += [[name, getattr(model.multimodal_config, name)] for name in INPUT_OPTIONS]
    lora = vllm_config.lora_config
    if lora is not None and lora.lora_dtype != model.dtype:
        parts.append({"lora_dtype": lora.lora_dtype})
    return json.dumps(plain(parts), sort_keys=True)


def page_views(
    model: ModelLayout, kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    """Return a byte view ``(blocks, page_bytes)`` of the worker's KV memory for each group and region.

    Raises :class:`LayoutError` if the tensors are not as vLLM describes them.
    """
    views = []
    for number, regions, layers in zip(model.group_ids, model.regions, model.layers, strict=True):
        group_views = []
        for region in regions:
            storage = _tensors(kv_caches[region.layer])[0].untyped_storage()
            raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            stop = region.offset + (region.blocks - 1) * region.stride + region.page_bytes
            if raw.numel() < stop:
                raise LayoutError(f"the KV memory of {region.layer} has {raw.numel()} bytes, expected {stop}")
            shape, strides = (region.blocks, region.page_bytes), (region.stride, 1)
            group_views.append(raw.as_strided(shape, strides, region.offset))
        tensors = [(name, tensor) for name in layers for tensor in _tensors(kv_caches[name])]
        if regions:  # A pipeline stage may have no layer of a group.
            probe(number, tensors, group_views, regions[0].blocks)
        views.append(group_views)
    return views


def _tensors(cache: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the tensors of a layer: states may have several in the same memory."""
    return [cache] if isinstance(cache, torch.Tensor) else cache


def probe(
    group: int, layers: Sequence[tuple[str, torch.Tensor]], pages: Sequence[torch.Tensor], blocks: int
) -> None:
    """Check that kvtier's views of the KV memory mean the same as vLLM's tensors, for one KV-cache group.

    The views are computed from vLLM's description of the memory, whose meaning may change with its version,
    and a wrong view would load wrong KV. So before the first request, one block of each layer is written
    through either side and read through the other one. The block is restored.

    ``layers``: the names and tensors of the group's layers. ``pages``: the views ``(blocks, page_bytes)``.

    Raises :class:`LayoutError` with the name of the group and of a layer.
    """
    # It has a neighbour on either side, where wrong views would write as well.
    block = max(0, blocks - 2)
    views = [page[block] for page in pages]
    before = [view.clone() for view in views]
    selected = [(name, _block_of(group, name, tensor, block, blocks)) for name, tensor in layers]
    others = [
        (name, part, part.clone())
        for name, tensor in layers
        for other in (block - 1, block + 1)
        if 0 <= other < blocks
        for part in [_block_of(group, name, tensor, other, blocks)]
    ]
    try:
        for view in views:
            view.fill_(PATTERN)
        for name, part in selected:
            if not bool((_bytes(part) == PATTERN).all()):
                raise _mismatch(group, name, "vLLM reads more from a block than kvtier writes to it")
        for name, part, content in others:
            if not torch.equal(_bytes(part), _bytes(content)):
                raise _mismatch(group, name, "kvtier writes to two blocks at once")
        for _, part in selected:
            part.zero_()
        read = sum(int((view == 0).sum()) for view in views)
        written = sum(part.numel() * part.element_size() for _, part in selected)
        if read != written:
            problem = f"vLLM writes {written} bytes to a block, and kvtier reads {read} of them"
            raise _mismatch(group, selected[0][0], problem)
    finally:
        for view, content in zip(views, before, strict=True):
            view.copy_(content)


def _block_of(group: int, name: str, tensor: torch.Tensor, block: int, blocks: int) -> torch.Tensor:
    """Return one block of a layer. A kernel may use smaller blocks, several of which are one of vLLM's."""
    for dimension, size in enumerate(tensor.shape):
        parts, rest = divmod(size, blocks)
        if parts and not rest:
            return tensor.narrow(dimension, block * parts, parts)
    raise _mismatch(group, name, f"its tensor has the shape {tuple(tensor.shape)}, without {blocks} blocks")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _mismatch(group: int, name: str, problem: str) -> LayoutError:
    return LayoutError(
        f"the KV memory of group {group} (layer {name}) is not laid out as kvtier expects: {problem}; report "
        "this with the versions of vLLM and kvtier, and serve without --kv-transfer-config"
    )
