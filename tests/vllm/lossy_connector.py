"""A connector whose synchronous loads fail, beside which kvtier runs in vLLM's ``MultiConnector``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


@dataclass
class LossyMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The blocks to load in a step."""

    blocks: list[int] = field(default_factory=list)


class LossyConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Promises the tokens that ``kv_transfer_params["lossy"]`` names, once a request, and loads none."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._asked: set[str] = set()
        self._blocks: list[int] = []
        self._caches: dict[str, Any] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        promised = (request.kv_transfer_params or {}).get("lossy", 0) - num_computed_tokens
        if promised <= 0 or request.request_id in self._asked:
            return 0, False
        self._asked.add(request.request_id)
        return promised, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            count = num_external_tokens // self._vllm_config.cache_config.block_size
            self._blocks += blocks.get_block_ids()[0][:count]

    def build_connector_meta(self, scheduler_output: Any) -> LossyMetadata:
        blocks, self._blocks = self._blocks, []
        return LossyMetadata(blocks)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._blocks = self._get_connector_metadata().blocks
        for cache in self._caches.values():
            cache[self._blocks] = 1.0  # What a load leaves that has failed.

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks, self._blocks = self._blocks, []
        return set(blocks)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *arguments: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
