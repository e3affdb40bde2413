"""Names and tokenizer of the model that a vLLM engine serves."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.fleet.member.served_models import EngineModel, TokenizerSource
from kvtier.integrations.vllm.plain import commit_of, text

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.kvtier")


def engine_model(vllm_config: VllmConfig) -> EngineModel:
    """Return the names and the tokenizer of an engine's model. vLLM only keeps the first served name here."""
    model = vllm_config.model_config
    served = model.served_model_name
    names = [served] if isinstance(served, str) else list(served or ())
    return EngineModel(list(dict.fromkeys(map(text, [*names, model.model]))), _tokenizer(model))


def _tokenizer(model: Any) -> TokenizerSource | None:
    """Return the tokenizer's location and mode, as vLLM resolves them; ``None`` if they are unknown."""
    if model.skip_tokenizer_init:
        return None
    try:
        from vllm.tokenizers.registry import (
            _MODEL_TYPES_WITH_INCORRECT_TOKENIZER_CLASS,
            tokenizer_args_from_config,
        )

        if model.hf_config.model_type in _MODEL_TYPES_WITH_INCORRECT_TOKENIZER_CLASS:
            return None  # Loaded as its repository declares, it would not match vLLM's tokens.
        mode, path, _, _ = tokenizer_args_from_config(model)
    except Exception:  # Optional: clients of the controller can send token ids instead of text.
        logger.debug("cannot locate the tokenizer", exc_info=True)
        return None
    commit = commit_of(model.tokenizer_revision)
    folder = _downloaded(text(path), commit)
    return TokenizerSource(folder, text(mode), commit, bool(model.trust_remote_code))


def _downloaded(path: str, revision: str | None) -> str:
    """Return the folder of a hub's tokenizer, which vLLM has loaded; the path itself if it is one.

    vLLM resolves it itself from 0.32 on. A cache process may have no access to the hub.
    """
    if Path(path).is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(path, revision=revision, local_files_only=True))
    except Exception:  # Such as a download to another folder.
        logger.debug("the tokenizer %s is not in the folder of downloads", path, exc_info=True)
        return path
