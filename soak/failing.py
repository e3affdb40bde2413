"""Another connector beside kvtier's: it reports hits for some requests, and each of its loads fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from soak.schedule import fails_to_load


@dataclass
class Failing(KVConnectorMetadata):  # type: ignore[misc]
    """The blocks whose load fails in a step."""

    blocks: set[int] = field(default_factory=set)


class FailingConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Loads synchronously, as vLLM's example connector does, and never delivers anything."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:  # noqa: ANN401 - vLLM's
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_tokens: int = vllm_config.cache_config.block_size
        self._seen: set[str] = set()
        self._blocks: set[int] = set()
        self._failed: set[int] = set()

    # Scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:  # noqa: ANN401
        """Report two thirds of the prompt, once per request."""
        if request.request_id in self._seen or not fails_to_load(request.num_prompt_tokens):
            return 0, False
        tokens = request.num_prompt_tokens * 2 // 3 // self._block_tokens * self._block_tokens
        if tokens <= num_computed_tokens:
            return 0, False
        return tokens - num_computed_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ANN401
        """Remember which blocks are loaded."""
        self._seen.add(request.request_id)
        if num_external_tokens:
            (ids,) = blocks.get_block_ids()
            stop = request.num_prompt_tokens * 2 // 3 // self._block_tokens
            self._blocks.update(ids[stop - num_external_tokens // self._block_tokens : stop])

    def build_connector_meta(self, scheduler_output: Any) -> Failing:  # noqa: ANN401
        """Return the blocks of this step."""
        blocks, self._blocks = self._blocks, set()
        return Failing(blocks)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:  # noqa: ANN401
        """Nothing is sent."""
        self._seen.discard(request.request_id)
        return False, None

    request_finished_all_groups = request_finished

    # Worker

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:  # noqa: ANN401
        """Fail."""
        self._failed |= self._get_connector_metadata().blocks

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks whose load has failed."""
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:  # noqa: ANN401
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""
