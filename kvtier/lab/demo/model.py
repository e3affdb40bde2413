"""Generate a Llama model of about 100 M parameters, with random weights but a realistic prefill cost.

The tokenizer is a BPE trained on the texts of Python's help (``pydoc_data.topics``), which also serve as
prompts. Nothing is downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

VOCABULARY = 8192
HIDDEN = 768
INTERMEDIATE = 2560
LAYERS = 12
HEADS = 12
KV_HEADS = 4
HEAD_SIZE = HIDDEN // HEADS
MAX_TOKENS = 65_536
WEIGHT_SCALE = 0.06
"""Standard deviation of the weights. With the usual 0.02, the model repeats a single token."""
SEED = 20_26
END = "<|end|>"


def prompt_text() -> str:
    """Return about 470 kB of English text that ships with every Python."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def make_model(directory: Path, layers: int = LAYERS) -> None:
    """Write a model for vLLM into ``directory``. Takes seconds and 400 MB of disk."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(directory)
    save_file(_weights(layers), directory / "model.safetensors", metadata={"format": "pt"})
    # Written last, because is_model takes it as a sign that the model is complete.
    (directory / "config.json").write_text(json.dumps(_config(layers), indent=2))


def is_model(directory: Path) -> bool:
    """Whether ``directory`` contains a complete model of :func:`make_model`."""
    return (directory / "config.json").is_file()


def _config(layers: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 500_000.0,
        "max_position_embeddings": MAX_TOKENS,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(prompt_text().splitlines(keepends=True), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _weights(layers: int) -> dict[str, np.ndarray]:
    import numpy as np

    random = np.random.default_rng(SEED)

    def matrix(rows: int, columns: int) -> np.ndarray:
        values: np.ndarray = random.standard_normal((rows, columns), dtype=np.float32)
        values *= np.float32(WEIGHT_SCALE)
        return values

    weights = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, dtype=np.float32),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": np.ones(HIDDEN, dtype=np.float32),
            f"{name}.post_attention_layernorm.weight": np.ones(HIDDEN, dtype=np.float32),
            f"{name}.self_attn.q_proj.weight": matrix(HEADS * HEAD_SIZE, HIDDEN),
            f"{name}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_SIZE, HIDDEN),
            f"{name}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_SIZE, HIDDEN),
            f"{name}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_SIZE),
            f"{name}.mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{name}.mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{name}.mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    return weights
