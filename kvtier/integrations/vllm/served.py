"""What clients call the model that a vLLM serves, and where its tokenizer is."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kvtier.agent.served import EngineModel, TokenizerSource

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.kvtier")


def engine_model(vllm_config: VllmConfig) -> EngineModel:
    """The names and the tokenizer of an engine's model. Of several served names vLLM keeps the first here."""
    model = vllm_config.model_config
    served = model.served_model_name
    names = [served] if isinstance(served, str) else list(served or ())
    return EngineModel(list(dict.fromkeys([*names, str(model.model)])), _tokenizer(model))


def _tokenizer(model: Any) -> TokenizerSource | None:
    """Where the tokenizer is and of which kind, as vLLM resolves it; ``None`` where that cannot be told."""
    if model.skip_tokenizer_init:
        return None
    try:
        from vllm.tokenizers.registry import (
            _MODEL_TYPES_WITH_INCORRECT_TOKENIZER_CLASS,
            tokenizer_args_from_config,
        )

        if model.hf_config.model_type in _MODEL_TYPES_WITH_INCORRECT_TOKENIZER_CLASS:
            return None  # Loaded as the repository says it would make other tokens than vLLM's.
        mode, path, _, _ = tokenizer_args_from_config(model)
    except Exception:  # Nobody needs it to serve: the controller can be asked with token ids.
        logger.debug("where the tokenizer is cannot be told", exc_info=True)
        return None
    return TokenizerSource(str(path), mode, model.tokenizer_revision, bool(model.trust_remote_code))
