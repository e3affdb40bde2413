"""Tiny targets and drafters. Where the architecture allows, a drafter computes nearly what its target does.

So it is right most of the time, as long as its KV is: if the KV of earlier tokens is missing or belongs to
other tokens, it is not. All targets have one layer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.rigs.vllm.models import _COMMON

HIDDEN, HEAD = _COMMON["hidden_size"], 64


def make_target(
    directory: Path, architecture: str = "LlamaForCausalLM", embedding: float = 1.0, **config: Any
) -> Path:
    """Make a Llama that the drafters below predict. ``embedding``: the length of its embeddings."""
    weights = _weights(embedding)
    mtp = {}
    if architecture == "MiMoForCausalLM":
        weights |= {f"model.layers.0.self_attn.{name}_proj.bias": _bias(name) for name in "qkv"}
        mtp = _mtp_weights(weights)
    shape = {"model_type": "llama", "num_hidden_layers": 1, "architectures": [architecture]}
    return _save(directory, shape | config, weights | mtp)


def make_mimo(directory: Path) -> Path:
    """Make a MiMo, which drafts with a layer of its own (MTP): a copy of its only other layer."""
    more = {"model_type": "qwen2", "num_nextn_predict_layers": 1}
    return make_target(directory, "MiMoForCausalLM", **more)


def make_eagle(directory: Path) -> Path:
    """Make an EAGLE head for :func:`make_target`: its layer without the norm before it."""
    import torch

    target, prefix = _weights(), "model.layers.0."
    weights = {name.replace("model.", ""): weight for name, weight in target.items() if prefix in name}
    del weights["layers.0.input_layernorm.weight"]
    weights["fc.weight"] = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)
    shape = {"model_type": "llama", "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    return _save(directory, shape, weights)


EMBEDDING_OF_EAGLE3 = 1e-3
"""The embeddings of the target of :func:`make_eagle3`: too short to matter where no norm precedes."""


def make_eagle3(directory: Path) -> Path:
    """Make an EAGLE-3 head, with attention to embeddings only, and nothing else."""
    import torch

    target, layer = _weights(EMBEDDING_OF_EAGLE3), "model.layers.0."
    weights = {name.replace(layer, "midlayer."): weight for name, weight in target.items() if layer in name}
    for name in "qkv":
        key = f"midlayer.self_attn.{name}_proj.weight"
        weights[key] = torch.cat([weights[key], torch.zeros_like(weights[key])], dim=1)
    weights["midlayer.hidden_norm.weight"] = torch.ones(HIDDEN)
    weights["norm.weight"] = torch.ones(HIDDEN)
    weights["fc.weight"] = torch.zeros(HIDDEN, 2 * HIDDEN)
    weights["lm_head.weight"] = target["lm_head.weight"]
    shape = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": _COMMON["vocab_size"],
        "num_aux_hidden_states": 2,
        "eagle_aux_hidden_state_layer_ids": [0, 1],
    }
    return _save(directory, shape, weights)


def _weights(embedding: float = 1.0) -> dict[str, Any]:
    """Return the weights of a Llama of one layer."""
    import torch

    generator = torch.Generator().manual_seed(11)
    inner, vocabulary = _COMMON["intermediate_size"], _COMMON["vocab_size"]
    rows = {"q": _COMMON["num_attention_heads"] * HEAD, "k": _COMMON["num_key_value_heads"] * HEAD}
    rows["v"] = rows["k"]

    def normal(*shape: int, scale: float = 0.1) -> Any:
        return torch.randn(*shape, generator=generator) * scale

    embeddings = normal(vocabulary, HIDDEN)
    layer = {f"self_attn.{name}_proj.weight": normal(rows[name], HIDDEN) for name in "qkv"}
    layer |= {
        "self_attn.o_proj.weight": normal(HIDDEN, rows["q"], scale=0.3),
        "mlp.gate_proj.weight": normal(inner, HIDDEN),
        "mlp.up_proj.weight": normal(inner, HIDDEN),
        "mlp.down_proj.weight": normal(HIDDEN, inner),
        "input_layernorm.weight": torch.ones(HIDDEN),
        "post_attention_layernorm.weight": torch.ones(HIDDEN),
    }
    return {
        "model.embed_tokens.weight": embedding * embeddings / embeddings.pow(2).mean(-1, keepdim=True).sqrt(),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": normal(vocabulary, HIDDEN),
        **{f"model.layers.0.{name}": weight for name, weight in layer.items()},
    }


def _bias(name: str) -> Any:
    import torch

    heads = _COMMON["num_attention_heads" if name == "q" else "num_key_value_heads"]
    return torch.zeros(heads * HEAD)


def _mtp_weights(target: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of a layer that predicts from the embedding of the next token, like the target."""
    import torch

    prefix = "model.mtp_layers.0."
    norms = {f"{prefix}{name}.weight": torch.ones(HIDDEN) for name in _MTP_NORMS}
    layer = {name.replace("model.layers.0.", prefix): w for name, w in target.items() if "layers.0." in name}
    projection = torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], dim=1)
    return norms | layer | {f"{prefix}input_proj.weight": projection}


_MTP_NORMS = ("token_layernorm", "hidden_layernorm", "final_layernorm")


def _save(directory: Path, shape: dict[str, Any], weights: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    config = {
        **_COMMON,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-12,
        "torch_dtype": "float32",
        **shape,
    }
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {name: weight.clone() for name, weight in weights.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
