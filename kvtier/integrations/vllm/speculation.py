"""What vLLM's speculative decoding changes for stored KV.

vLLM verifies drafts before they become tokens of a request (``Request.all_token_ids``), so tokens that may be
rejected are never counted, and their KV is never stored. Drafters with KV of their own (EAGLE, MTP, draft
models) add layers to vLLM's KV-cache groups, which are stored like any others.

EAGLE and MTP read ahead: their KV at a position also depends on the tokens after it, one per module. So the
KV of a chunk's last token depends on tokens after the chunk, and the chunk's key covers these as well. vLLM's
own prefix cache computes the last block of a hit again instead; since 0.33, its hashes cover them too
(``VllmConfig.num_hash_lookahead_tokens``), but not in an engine with a KV connector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier.integrations.vllm.compat import prefill_lookahead

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def lookahead_tokens(vllm_config: VllmConfig) -> int:
    """Return on how many tokens after it the KV of a token depends: 0 without EAGLE and MTP."""
    return prefill_lookahead(vllm_config)


def draft_model(vllm_config: VllmConfig) -> Any:
    """Return vLLM's configuration of the model that drafts, if it has KV of its own; otherwise ``None``."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.uses_draft_kv_cache():
        return None
    return speculative.draft_model_config
