"""Tiny random models, and prompts of real text whose tokens are its bytes.

``initializer_range=0.15`` matters: with the default of 0.02 a random model repeats one token forever, and
equal tokens would prove nothing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

VOCABULARY = 512
"""Tokens 0 to 255 are bytes of text; a model may generate any of the 512."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

WINDOW = 128
"""The attention window of the hybrid model, in tokens."""


def make_llama(directory: Path) -> Path:
    """Make a Llama: full attention in four layers, one KV-cache group, 4 KiB of KV per token in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _save(LlamaForCausalLM, LlamaConfig(num_hidden_layers=4, **_COMMON), directory)


def make_hybrid(directory: Path) -> Path:
    """Make a Gemma 3 text model with alternating sliding and full attention: at least two KV-cache groups."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        num_hidden_layers=4, layer_types=kinds, sliding_window=WINDOW, query_pre_attn_scalar=64, **_COMMON
    )
    return _save(Gemma3ForCausalLM, config, directory)


def make_mamba(directory: Path) -> Path:
    """Make a Mamba 2 model, whose layers keep a state and no KV."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=64,
        n_groups=1,
        state_size=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return _save(Mamba2ForCausalLM, config, directory)


def _save(model_type: Any, config: Any, directory: Path) -> Path:
    import torch

    torch.manual_seed(7)
    model_type(config).to(torch.float32).save_pretrained(directory)
    return directory


def make_lora(directory: Path, *, seed: int) -> Path:
    """Make a rank-8 adapter for :func:`make_llama`, strong enough to change every answer."""
    import json

    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(4):
        for name, rows in (("q_proj", 256), ("v_proj", 128)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(8, 256, generator=generator) * 0.1
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, 8, generator=generator) * 0.1
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(adapter))
    return directory


@cache
def _text() -> bytes:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


def prompt(length: int, *, start: int = 0) -> list[int]:
    """Return ``length`` tokens of real text, starting at token ``start``."""
    tokens = list(_text()[start : start + length])
    assert len(tokens) == length, "the text is too short for this prompt"
    return tokens
