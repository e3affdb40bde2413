"""vLLM's KV connector interface, name by name. What is done is in ``scheduler.py`` and ``worker.py``.

The interface is vLLM 0.32's ``KVConnectorBase_V1`` (vllm/distributed/kv_transfer/kv_connector/v1/base.py).
Loads are asynchronous only, and only of chunks that have been verified in host memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import vllm
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.bridge import protocol
from kvtier.bridge.client import SchedulerBridge, WorkerBridge
from kvtier.bridge.protocol import Hello, Role
from kvtier.bridge.spawn import CacheProcess, default_address
from kvtier.errors import ChannelError, UnsupportedEngine
from kvtier.integrations.vllm.handing import role_of
from kvtier.integrations.vllm.layout import model_layout
from kvtier.integrations.vllm.log_thread import LogThread
from kvtier.integrations.vllm.metadata import StepMetadata
from kvtier.integrations.vllm.metrics import TransferPromMetrics, TransferStats
from kvtier.integrations.vllm.scheduler import SILENCE_SECONDS, SchedulerSide
from kvtier.integrations.vllm.served import engine_model
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

SUPPORTED_VLLM = "0.32"
SOURCES = {"cpu": CacheHitSource.HOST, "hugepage": CacheHitSource.HOST, "disk": CacheHitSource.DISK}


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One in vLLM's scheduler and one in each worker."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._log = LogThread.of(logger)
        _check_version()
        transfer = self._kv_transfer_config
        settings = load_settings(transfer.kv_connector_extra_config)
        settings = settings.model_copy(update={"role": role_of(settings, transfer.kv_role)})
        model = model_layout(vllm_config, kv_cache_config, settings.chunk_tokens)
        events = vllm_config.kv_events_config
        wants_events = events is not None and events.enable_kv_cache_events
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._spins = vllm_config.parallel_config.world_size > 1
        """Whether vLLM's workers have processes of their own, which spin between steps."""

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
            # vLLM reads it right after this: a load that failed must cost a recomputation, not an error.
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
            scheduler_bridge = _open(SchedulerBridge, settings, hello("scheduler", 0))
            self._scheduler = SchedulerSide(
                settings,
                model,
                scheduler_bridge,
                speculative=vllm_config.speculative_config is not None,
                events=wants_events,
            )
        else:
            rank = get_tensor_model_parallel_rank()
            worker_bridge = _open(WorkerBridge, settings, hello("worker", rank))
            stages = settings.hand_over.device == "cuda"
            timeout = SILENCE_SECONDS if settings.prefetch.policy == "wait" else CONFIRM_SECONDS
            self._worker = WorkerSide(model, worker_bridge, rank, stages=stages, confirm_timeout=timeout)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a later miss, nothing more."""
        return False

    # The scheduler's hooks.

    def on_new_request(self, request: Request) -> None:
        """A request has come."""
        self._scheduling.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How much of a request can be loaded."""
        return self._scheduling.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A request has its blocks."""
        self._scheduling.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Which tiers a hit came from, in vLLM's words."""
        sources: dict[CacheHitSource, int] = {}
        for medium, tokens in self._scheduling.hits_by_medium(request).items():
            source = SOURCES.get(medium, CacheHitSource.EXTERNAL_UNSPECIFIED)
            sources[source] = sources.get(source, 0) + tokens
        return sources

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the workers are to do in this step."""
        return self._scheduling.build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers have done."""
        self._scheduling.worked(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request of a model with one KV-cache group has ended."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended."""
        return self._scheduling.finished(request, block_ids)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What came into the tiers and left them."""
        return self._scheduling.events()

    def reset_cache(self) -> bool | None:
        """Remove this model's chunks, as when its weights have changed."""
        return self._scheduling.clear()

    # The workers' hooks.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine's KV memory is there."""
        self._working.register(kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Load what this step is to load."""
        step = self._step()
        self._working.load(step.loads)
        if self._spins and not step.computes:
            self._working.rest()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: requests that load are not in the forward pass."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing to do for a layer: chunks are saved whole, after the forward pass."""

    def wait_for_save(self) -> None:
        """Save what this step has completed."""
        self._working.save(self._step().saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Which requests' transfers are done."""
        saved, loaded, failed = self._working.take_results()
        return KVConnectorTransferResults(saved, loaded, failed)

    # Both sides' hooks.

    def get_kv_connector_stats(self) -> TransferStats | None:
        """What was counted since the last call."""
        side = self._scheduler or self._worker
        return None if side is None else side.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        """Counts that came from another process."""
        return TransferStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TransferPromMetrics:
        """The counters in vLLM's ``/metrics``."""
        return TransferPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """The engine ends."""
        side = self._scheduler or self._worker
        if side is not None:
            side.close()
        self._log.flush()

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "a worker's connector was called as the scheduler's"
        return self._scheduler

    @property
    def _working(self) -> WorkerSide:
        assert self._worker is not None, "the scheduler's connector was called as a worker's"
        return self._worker

    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata


BridgeT = TypeVar("BridgeT", SchedulerBridge, WorkerBridge)


def _open(bridge_type: type[BridgeT], settings: Settings, hello: Hello) -> BridgeT:
    """A bridge to the cache process that the settings name, or that this engine starts."""
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
        logger.warning("%s: going on without a cache until there is one (setting `socket`)", error)
    return bridge


def _check_version() -> None:
    version = vllm.__version__
    if not version.startswith(f"{SUPPORTED_VLLM}."):
        raise UnsupportedEngine(
            f"this kvtier works with vLLM {SUPPORTED_VLLM} and this is vLLM {version}: "
            f'type `pip install "vllm=={SUPPORTED_VLLM}.*"`, or install a kvtier made for {version}'
        )
