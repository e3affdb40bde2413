"""vLLM's KV connector interface. ``scheduler.py`` and ``worker.py`` implement the hooks.

The interface is vLLM's ``KVConnectorBase_V1`` (vllm/distributed/kv_transfer/kv_connector/v1/base.py).
All loads are asynchronous, and limited to chunks that have been verified in host memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvtier.integrations.vllm.adapters import follow_loads
from kvtier.integrations.vllm.bridges import IDLE_TIMEOUT_SECONDS, Bridges, engine_model
from kvtier.integrations.vllm.compat import (
    check_version,
    enable_tiles,
    hit_sources,
    hits_end_at_blocks,
    lookahead_tokens,
    numbers_inputs,
    writes_before_hooks,
)
from kvtier.integrations.vllm.identity import Identities
from kvtier.integrations.vllm.layout import ModelLayout, facts, kv_dtype, model_layout, namespaces
from kvtier.integrations.vllm.logs import LogThread
from kvtier.integrations.vllm.metadata import StepMetadata
from kvtier.integrations.vllm.metrics import TransferPromMetrics, TransferStats
from kvtier.integrations.vllm.multi_part import MultiPartMetadata, SchedulerSides, other_parts, part_metadata
from kvtier.integrations.vllm.parts import engine_rank
from kvtier.integrations.vllm.patches import finish_before_resets, follow_engine, recompute_failed_loads
from kvtier.integrations.vllm.plain import plain, text
from kvtier.integrations.vllm.prompt_transfers import role_of
from kvtier.integrations.vllm.scheduler import SchedulerSide
from kvtier.integrations.vllm.weights import EngineWeights
from kvtier.integrations.vllm.worker import CONFIRM_SECONDS, WorkerSide
from kvtier.settings import load_settings
from kvtier.settings.lmcache import warn_of_variables

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.lora.request import LoRARequest
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvtier")


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM creates one instance in its scheduler and one in each worker."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._log = LogThread.of(logger)
        check_version(logger)
        transfer = self._kv_transfer_config
        settings = load_settings(plain(transfer.kv_connector_extra_config))
        settings = settings.model_copy(update={"role": role_of(settings, transfer.kv_role)})
        events = vllm_config.kv_events_config
        self._publishes_events = events is not None and events.enable_kv_cache_events
        self._bridges = Bridges(settings, text(transfer.engine_id))
        self._scheduler: SchedulerSides | None = None
        self._worker: WorkerSide | None = None
        self._pool: BlockPool | None = None
        self._spins = vllm_config.parallel_config.world_size > 1
        """Whether vLLM's workers are separate processes, which spin between steps."""
        backend = vllm_config.parallel_config.distributed_executor_backend
        rank = 0 if role is KVConnectorRole.SCHEDULER else engine_rank()
        weights_id = settings.weights_id
        self._identities = Identities.of(vllm_config, weights_id)
        self._model = model_layout(
            vllm_config,
            kv_cache_config,
            settings.chunk_tokens,
            weights_id,
            rank,
            self._identities,
            accept_lossy=settings.accept_lossy,
        )
        self._kv_dtype = kv_dtype(kv_cache_config, self._model.group_ids)
        self._reports_part = self._model.parts > 1 or (self._spins and backend not in ("mp", "uni"))
        if role is KVConnectorRole.SCHEDULER:
            self._identities.log(vllm_config, weights_id)
            warn_of_variables(logger)
            self._scheduler = SchedulerSides([self._open_part(self._model)], self._model.layout)
            recompute_failed_loads()
            follow_engine()
            finish_before_resets()
            if numbers_inputs(vllm_config):
                logger.warning(
                    "prompts with images, audio or video are not cached: with --no-enable-prefix-caching and "
                    "--mm-processor-cache-gb 0, vLLM does not hash these inputs; remove one of the two flags"
                )
        else:
            if vllm_config.lora_config is not None:
                follow_loads()
            rank %= self._model.layout.ranks  # Within its part, as the cache process of its host counts.
            self._worker_bridge = self._bridges.worker(self._model, rank)
            self._worker = WorkerSide(
                self._model,
                self._worker_bridge,
                rank,
                stages=settings.kv_transfer.device == "cuda",
                confirm_timeout=IDLE_TIMEOUT_SECONDS if self._bridges.waits else CONFIRM_SECONDS,
                writes_before_hooks=writes_before_hooks(vllm_config, kv_cache_config),
            )

    def _open_part(self, model: ModelLayout, to: str = "") -> SchedulerSide:
        """Return the scheduler's side of a part of the engine, whose cache process may be at an address."""
        config = self._vllm_config
        settings = self._bridges.settings
        named = namespaces(config, model.layout, self._identities)

        def namespace_of(weights_id: str) -> bytes:
            # Another host has files of its own.
            return model.namespace if weights_id == settings.weights_id else named(weights_id)

        weights = EngineWeights(settings.weights_id, namespace_of, self._identities.are_current)
        served = engine_model(config, facts(config, self._identities))
        bridge = self._bridges.scheduler(model, served, weights.current, to=to)
        if self._pool is not None:
            weights.bind(self._pool)
        return SchedulerSide(
            settings,
            model,
            bridge,
            weights=weights,
            lookahead=lookahead_tokens(config),
            deferred=config.device_config.device_type != "cpu",
            numbered=numbers_inputs(config),
            whole_blocks=hits_end_at_blocks(config),
            step_tokens=int(config.scheduler_config.max_num_batched_tokens),
            kv_dtype=self._kv_dtype,
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """Return ``False``: a dropped save only causes a later miss."""
        return False

    # Scheduler hooks.

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Called before the first request, by vLLM's scheduler."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._publishes_events:
            self._sides.first.publish_events(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        """Start to look up a new request."""
        for side in self._sides.sides:
            side.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens of a request can be loaded, and whether the load is asynchronous."""
        return self._sides.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plan the load of a request that has been allocated blocks."""
        for side in self._sides.sides:
            side.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        """Return the tokens of a hit by vLLM's source types."""
        return hit_sources(self._sides.first.hits_by_medium(request))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the loads and saves of this step for the workers."""
        return self._sides.build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Process the results of the workers."""
        self._sides.update_from_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Process the end of a request of a model with one KV-cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Process the end of a request."""
        return self._sides.finished(request, block_ids)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the KV events since the last call."""
        # Of every side: each counts the steps of other connectors' loads by these calls.
        events = [side.events() for side in self._sides.sides]
        return events[0]

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Keep vLLM's block pool, to know whether it holds blocks of earlier weights."""
        self._pool = gpu_block_pool
        for side in self._sides.sides:
            side.bind(gpu_block_pool)

    def reset_cache(self) -> bool | None:
        """Use nothing that was stored so far: the weights have changed, or will before the next step."""
        for side in self._sides.sides:
            side.reset()
        return True

    def loads_request(self, request_id: str) -> bool:
        """Return whether a request waits for a load from here. Not a hook: see ``patches.py``."""
        return self._sides.first.loads(request_id)  # A load begins in every part.

    def set_weight_version(self, version: str) -> None:
        """Use the chunks of the weights that the engine has now. Not a hook: see ``patches.py``."""
        for side in self._sides.sides:
            side.set_weight_version(text(version))

    def adapter_loads(self, lora: LoRARequest) -> None:
        """Note that the engine loads an adapter. Not a hook: see ``adapters.py``."""
        for side in self._sides.sides:
            side.adapters.loads(lora)

    def adapter_removed(self, number: int) -> None:
        """Note that the engine has removed an adapter."""
        for side in self._sides.sides:
            side.adapters.removes(number)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Open the other parts of the engine. Blocks until their cache processes answer, up to 5 s each."""
        first = self._sides.first
        if len(self._sides.sides) > 1:  # vLLM 0.33 calls this again when it wakes up.
            return
        others = other_parts(self._model, metadata.values(), first.epoch)
        sides = [first, *(self._open_part(model, address) for model, address in others)]
        self._scheduler = SchedulerSides(sides, self._model.layout)

    # Worker hooks.

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return what the scheduler must know of this rank's part, if the engine may be on several hosts.

        Otherwise nothing: vLLM's ``MultiConnector`` gives it to other connectors in place of theirs.
        """
        return part_metadata(self._model, self._worker_bridge) if self._reports_part else None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the engine's KV memory."""
        on_cpu = self._vllm_config.device_config.device_type == "cpu"
        if on_cpu and not enable_tiles():
            logger.warning(
                "Linux does not let this process use AMX, which vLLM uses in bfloat16: serve with "
                "--dtype float32 if the engine ends with SIGILL"
            )
        self._worker_side.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Release the KV memory before vLLM sleeps. Called by vLLM 0.33 and newer."""
        self._worker_side.unregister()

    def restore_kv_caches(self) -> None:
        """Use the KV memory again after vLLM has woken up."""
        self._worker_side.restore()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Protect blocks that are still being saved. Called before every step, not just after preemptions."""
        self._worker_side.protect(self._step(kv_connector_metadata).written)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start the loads of this step."""
        step = self._step(self._get_connector_metadata())
        self._worker_side.load(step.loads)
        if not step.computes:  # In such a step, vLLM 0.30 does not call wait_for_save().
            self._worker_side.save(step.saves)
            self._worker_side.idle()
            if self._spins:
                self._worker_side.idle_wait()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: requests that are loading are not in the forward pass."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Do nothing: whole chunks are saved after the forward pass."""

    def wait_for_save(self) -> None:
        """Start the saves of this step, unless it computes nothing: then :meth:`start_load_kv` has."""
        step = self._step(self._get_connector_metadata())
        if step.computes:
            self._worker_side.save(step.saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose transfers are done."""
        saved, loaded, failed = self._worker_side.take_results()
        return KVConnectorTransferResults(saved, loaded, failed)

    # Common hooks.

    def get_kv_connector_stats(self) -> TransferStats | None:
        """Return the counts since the last call."""
        if self._worker is not None:
            return self._worker.take_stats()
        # Of every side, or what is not reported would add up for as long as the engine runs.
        stats = [side.take_stats() for side in self._scheduler.sides] if self._scheduler else [None]
        return stats[0]

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
        sides = self._scheduler.sides if self._scheduler else [self._worker] if self._worker else []
        for side in sides:
            side.close()
        self._log.flush()  # Last: what closing has logged is in its queue, and its thread is a daemon.

    @property
    def _sides(self) -> SchedulerSides:
        assert self._scheduler is not None, "scheduler hook called in a worker"
        return self._scheduler

    @property
    def _worker_side(self) -> WorkerSide:
        assert self._worker is not None, "worker hook called in the scheduler"
        return self._worker

    def _step(self, metadata: KVConnectorMetadata) -> StepMetadata:
        if isinstance(metadata, MultiPartMetadata):
            return metadata.steps[self._model.part]
        assert isinstance(metadata, StepMetadata)
        return metadata
