"""How much a model's KV takes in the cache, from vLLM's description of its layers. No weights are loaded."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

from kvtier.integrations.vllm.specs import Needs, needs
from kvtier.memory.layout import CHUNK_TOKENS, STATE_TOKENS, ChunkLayout, GroupLayout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig

BLOCK_TOKENS = 16
STATES_PER_PROMPT = 2
"""Those at the last two boundaries of a prompt, as vLLM keeps them by default."""


class ModelSizes(NamedTuple):
    """What a model stores, in bytes of all ranks together."""

    layers: Mapping[str, int]
    """The number of layers of each kind."""
    chunk: int
    """A chunk of :data:`CHUNK_TOKENS` tokens, without states."""
    state: int
    """All states after one token; 0 for a model without them."""

    def stored(self, tokens: int) -> int:
        """Return the bytes that are stored of a prompt of ``tokens`` tokens: whole chunks, and states."""
        states = STATES_PER_PROMPT * self.state if tokens >= CHUNK_TOKENS else 0
        return tokens // CHUNK_TOKENS * self.chunk + states

    def per_token(self, tokens: int) -> float:
        """Return the bytes per token that a second prompt with this beginning can reuse."""
        return self.stored(tokens) / (tokens // CHUNK_TOKENS * CHUNK_TOKENS)


def model_sizes(model: str) -> ModelSizes:
    """Return the sizes of a model by its folder or name.

    Downloads the configuration of a name, and takes some seconds. The process can describe one model only.
    Raises :class:`kvtier.errors.LayoutError` if kvtier does not support a layer, and vLLM's errors.
    """
    config = EngineArgs(model=model, skip_tokenizer_init=True, enforce_eager=True).create_engine_config()
    kinds: dict[str, int] = defaultdict(int)
    pages: dict[Needs, list[int]] = defaultdict(list)
    for name, spec in _specs(config).items():
        kinds[type(spec).__name__.removesuffix("Spec")] += 1
        need = needs(KVCacheGroupSpec([name], spec))
        if need.state:
            pages[need].append(spec.state_content_size_bytes)
        else:
            pages[need].append(spec.real_page_size_bytes // spec.block_size * BLOCK_TOKENS)
    groups = [GroupLayout(BLOCK_TOKENS, tuple(sizes), *need) for need, sizes in pages.items()]
    layout = ChunkLayout(CHUNK_TOKENS, tuple(groups))
    return ModelSizes(dict(kinds), layout.payload_bytes(CHUNK_TOKENS), layout.payload_bytes(STATE_TOKENS))


def _specs(config: VllmConfig) -> dict[str, Any]:
    """Return what each layer keeps, of a model whose weights are not allocated."""
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1, backend="gloo")
        before = torch.get_default_dtype()
        torch.set_default_dtype(config.model_config.dtype)
        try:
            with torch.device("meta"):
                initialize_model(vllm_config=config)
        finally:
            torch.set_default_dtype(before)
    layers = config.compilation_config.static_forward_context.items()
    specs = {
        name: layer.get_kv_cache_spec(config)
        for name, layer in layers
        if isinstance(layer, AttentionLayerBase)
    }
    return {name: spec for name, spec in specs.items() if spec is not None}
