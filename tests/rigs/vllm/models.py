"""Tiny random models, and prompts of real text whose tokens are its bytes.

``initializer_range=0.15`` matters: with the default of 0.02 a random model repeats one token forever, and
equal tokens would prove nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any, ParamSpec

from tests.rigs.forks import forks_with_vllm

P = ParamSpec("P")

VOCABULARY = 512
"""Tokens 0 to 255 are bytes of text; a model may generate any of the 512."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

WINDOW = 128
"""The attention window of the hybrid model, in tokens."""


def forked(make: Callable[P, Path]) -> Callable[P, Path]:
    """Have a model made by a forked process, which has transformers: it takes seconds to import."""

    @wraps(make)
    def run(*arguments: P.args, **options: P.kwargs) -> Path:
        if "transformers" in sys.modules:
            return make(*arguments, **options)
        process = forks_with_vllm().Process(target=_make, args=(make.__name__, arguments, options))
        process.start()
        process.join()
        assert process.exitcode == 0, f"{make.__name__} has failed"
        return Path(str(arguments[0]))

    return run


def _make(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Main function of the process."""
    globals()[name](*arguments, **options)


@forked
def make_llama(directory: Path, *, kv_heads: int = 2, width: int = 256, seed: int = 7) -> Path:
    """Make a Llama: full attention in four layers, one KV-cache group, 2 KiB per token and head.

    With ``width`` a token takes longer to compute, and its KV has the same size.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_key_value_heads": kv_heads, "hidden_size": width, "intermediate_size": 2 * width}
    config = LlamaConfig(num_hidden_layers=4, head_dim=64, **_COMMON | sizes)
    return _save(LlamaForCausalLM, config, directory, seed)


@forked
def make(directory: Path, *, family: str, shape: dict[str, Any], config: str = "") -> Path:
    """Make a model of a family of transformers. ``config``: the name of its configuration, if another."""
    import transformers

    made = getattr(transformers, f"{config or family}Config")(**shape)
    return _save(getattr(transformers, f"{family}ForCausalLM"), made, directory)


_SMALL = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 8192}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}

_GEMMA = {
    "num_hidden_layers": 4,
    "head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 64,
}
make_hybrid = partial(make, family="Gemma3", config="Gemma3Text", shape=_COMMON | _GEMMA)
"""A Gemma 3 text model with alternating sliding and full attention: at least two KV-cache groups."""

_MAMBA2 = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 64,
    "n_groups": 1,
    "state_size": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
make_mamba = partial(make, family="Mamba2", shape=_MAMBA2)
"""A Mamba 2 model, whose layers keep a state and no KV."""

_GRANITE = {
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "shared_intermediate_size": 256,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "position_embedding_type": "rope",
}
make_granite = partial(make, family="GraniteMoeHybrid", shape=_COMMON | _SMALL | _MAMBA | _GRANITE)
"""A Granite 4 hybrid: three Mamba 2 layers and one of full attention, four KV-cache groups."""

_FALCON = {"head_dim": 32, "num_hidden_layers": 3, "mamba_d_ssm": 256}
make_falcon = partial(make, family="FalconH1", shape=_COMMON | _SMALL | _MAMBA | _FALCON)
"""A Falcon-H1: every layer has both attention and a Mamba 2 state."""

_ZAMBA = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "attention_head_dim": 64,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_ngroups": 1,
    "n_mamba_heads": 8,
    "num_mem_blocks": 1,
    "chunk_size": 64,
    "use_mem_rope": True,
    "adapter_rank": 16,
}
make_zamba = partial(make, family="Zamba2", shape=_COMMON | _SMALL | _ZAMBA)
"""A Zamba2: Mamba 2 layers, some with attention that they share."""

_DEEPSEEK = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
}
make_deepseek = partial(make, family="DeepseekV2", shape=_COMMON | _DEEPSEEK)
"""A DeepSeek-V2: latent attention (MLA), without experts."""

_QWEN = {
    "num_hidden_layers": 4,
    "head_dim": 64,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
}
make_qwen3_next = partial(make, family="Qwen3Next", shape=_COMMON | _SMALL | _QWEN)
"""A Qwen3-Next: three layers of gated delta net and one of full attention."""


def add_tokenizer(directory: Path) -> Path:
    """Give a model a tokenizer: byte pairs of the texts of Python's help."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    text = _text()[:100_000].decode(errors="replace")
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return directory


def _save(model_type: Any, config: Any, directory: Path, seed: int = 7) -> Path:
    import torch

    torch.manual_seed(seed)
    model = model_type(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not torch.isfinite(weight).all():
                weight.normal_(0, 0.15)  # Some layers are left uninitialised.
            if "embed" in name and model_type.__name__ not in ("LlamaForCausalLM", "Gemma3ForCausalLM"):
                weight.normal_(0, 1.0)
    model.to(torch.float32).save_pretrained(directory)
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


def write_tokenizer(directory: Path, *, reverse: bool = False) -> None:
    """Write a tokenizer whose tokens are the bytes of a text, as in :func:`prompt`; or ``255 - byte``."""
    import json

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # GPT-2's characters for bytes: those that can be printed for themselves, then 256 and up for the others.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted({*range(256)} - {*printable})
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    tokens = {character: 255 - byte if reverse else byte for byte, character in characters.items()}
    tokens |= {f"<{number}>": number for number in range(256, VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(tokens, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@cache
def _text() -> bytes:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


def prompt(length: int, *, start: int = 0) -> list[int]:
    """Return ``length`` tokens of real text, starting at token ``start``."""
    tokens = list(_text()[start : start + length])
    assert len(tokens) == length, "the text is too short for this prompt"
    return tokens
