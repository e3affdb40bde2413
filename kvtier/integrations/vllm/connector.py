"""vLLM's KV connector interface. ``scheduler.py`` and ``worker.py`` implement the hooks.

The interface is vLLM's ``KVConnectorBase_V1`` (vllm/distributed/kv_transfer/kv_connector/v1/base.py).
All loads are asynchronous, and limited to chunks that have been verified in host memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvtier.bridge import protocol
from kvtier.bridge.client import SchedulerBridge, WorkerBridge
from kvtier.bridge.protocol import Hello, Role
from kvtier.bridge.spawn import CacheProcess, default_address
from kvtier.errors import ChannelError
from kvtier.integrations.vllm.compat import check_version, hit_sources
from kvtier.integrations.vllm.kv_transfer import role_of
from kvtier.integrations.vllm.layout import model_layout
from kvtier.integrations.vllm.log_thread import LogThread
from kvtier.integrations.vllm.metadata import StepMetadata
from kvtier.integrations.vllm.metrics import TransferPromMetrics, TransferStats
from kvtier.integrations.vllm.scheduler import SchedulerSide
from kvtier.integrations.vllm.served import engine_model
from kvtier.integrations.vllm.speculation import lookahead_tokens
from kvtier.integrations.vllm.worker import CONFIRM_SECONDS, WorkerSide
from kvtier.settings import Settings, load_settings

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvtier")

IDLE_TIMEOUT_SECONDS = 10.0
"""Time with ``prefetch.policy: wait`` after which a cache process that does not answer is unresponsive."""


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM creates one instance in its scheduler and one in each worker."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._log = LogThread.of(logger)
        check_version(logger)
        transfer = self._kv_transfer_config
        settings = load_settings(transfer.kv_connector_extra_config)
        settings = settings.model_copy(update={"role": role_of(settings, transfer.kv_role)})
        model = model_layout(vllm_config, kv_cache_config, settings.chunk_tokens, settings.weights_id)
        events = vllm_config.kv_events_config
        wants_events = events is not None and events.enable_kv_cache_events
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._spins = vllm_config.parallel_config.world_size > 1
        """Whether vLLM's workers are separate processes, which spin between steps."""

        def hello(name: Role, rank: int) -> Hello:
            return Hello(
                protocol.VERSION,
                self._kv_transfer_config.engine_id,
                name,
                rank,
                model.layout,
                model.namespace,
                name == "scheduler" and wants_events,
                model=engine_model(vllm_config) if name == "scheduler" else None,
            )

        if role is KVConnectorRole.SCHEDULER:
            # vLLM reads this after the constructor: a failed load must cause recomputation, not an error.
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
            scheduler_bridge = _open(SchedulerBridge, settings, hello("scheduler", 0))
            self._scheduler = SchedulerSide(
                settings,
                model,
                scheduler_bridge,
                events=wants_events,
                lookahead=lookahead_tokens(vllm_config),
            )
        else:
            rank = get_tensor_model_parallel_rank()
            worker_bridge = _open(WorkerBridge, settings, hello("worker", rank))
            stages = settings.kv_transfer.device == "cuda"
            timeout = IDLE_TIMEOUT_SECONDS if _waits(settings) else CONFIRM_SECONDS
            self._worker = WorkerSide(model, worker_bridge, rank, stages=stages, confirm_timeout=timeout)

    @property
    def requires_kv_delivery(self) -> bool:
        """Return ``False``: a dropped save only causes a later miss."""
        return False

    # Scheduler hooks.

    def on_new_request(self, request: Request) -> None:
        """Start to look up a new request."""
        self._scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens of a request can be loaded, and whether the load is asynchronous."""
        return self._scheduler_side.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plan the load of a request that has been allocated blocks."""
        self._scheduler_side.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        """Return the tokens of a hit by vLLM's source types."""
        return hit_sources(self._scheduler_side.hits_by_medium(request))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the loads and saves of this step for the workers."""
        return self._scheduler_side.build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Process the results of the workers."""
        self._scheduler_side.update_from_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Process the end of a request of a model with one KV-cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Process the end of a request."""
        return self._scheduler_side.finished(request, block_ids)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the KV events since the last call."""
        return self._scheduler_side.events()

    def reset_cache(self) -> bool | None:
        """Remove this model's chunks, for example after its weights have changed."""
        return self._scheduler_side.clear()

    # Worker hooks.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the engine's KV memory."""
        self._worker_side.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Let go of the KV memory before vLLM sleeps. Called by vLLM 0.33 and newer."""
        self._worker_side.unregister()

    def restore_kv_caches(self) -> None:
        """Use the KV memory again after vLLM has woken up."""
        self._worker_side.restore()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start the loads of this step."""
        step = self._step()
        self._worker_side.load(step.loads)
        if self._spins and not step.computes:
            self._worker_side.idle_wait()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: requests that are loading are not in the forward pass."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Do nothing: whole chunks are saved after the forward pass."""

    def wait_for_save(self) -> None:
        """Start the saves of this step."""
        self._worker_side.save(self._step().saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose transfers are done."""
        saved, loaded, failed = self._worker_side.take_results()
        return KVConnectorTransferResults(saved, loaded, failed)

    # Common hooks.

    def get_kv_connector_stats(self) -> TransferStats | None:
        """Return the counts since the last call."""
        side = self._scheduler or self._worker
        return None if side is None else side.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        """Deserialize the counts of another process."""
        return TransferStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TransferPromMetrics:
        """Create the counters for vLLM's ``/metrics``."""
        return TransferPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Shut down with the engine."""
        side = self._scheduler or self._worker
        if side is not None:
            side.close()
        self._log.flush()

    @property
    def _scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None, "scheduler hook called in a worker"
        return self._scheduler

    @property
    def _worker_side(self) -> WorkerSide:
        assert self._worker is not None, "worker hook called in the scheduler"
        return self._worker

    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata


BridgeT = TypeVar("BridgeT", SchedulerBridge, WorkerBridge)


def _waits(settings: Settings) -> bool:
    return settings.prefetch.policy == "wait"


def _open(bridge_type: type[BridgeT], settings: Settings, hello: Hello) -> BridgeT:
    """Return a bridge to the cache process, with the limit of its prefetch policy."""
    bridge = _connect(bridge_type, settings, hello)
    if _waits(settings):
        bridge.expect_answers_within(IDLE_TIMEOUT_SECONDS)
    return bridge


def _connect(bridge_type: type[BridgeT], settings: Settings, hello: Hello) -> BridgeT:
    """Connect to the cache process of ``settings.socket``, or start one if that is not set."""
    if settings.socket is None:
        path = default_address(settings)
        process = CacheProcess(settings, path)
        bridge = bridge_type(hello, path, process.start_in_background, logger)
        process.start_and_wait(bridge.connect)
        return bridge
    bridge = bridge_type(hello, settings.socket, logger=logger)
    try:
        bridge.connect()
    except ChannelError as error:
        logger.warning("%s: continuing without a cache until it is reachable (setting `socket`)", error)
    return bridge
