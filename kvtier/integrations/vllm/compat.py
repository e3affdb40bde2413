"""Everything that differs between the supported versions of vLLM."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
)
from vllm.v1.request import RequestStatus

from kvtier.errors import LayoutError, UnsupportedEngine
from kvtier.integrations.versions import RANGE, REQUIREMENT, support

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import BlockStored
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHash, ExternalBlockHash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
    from vllm.v1.request import Request

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # Before 0.32, hits are not counted by source.
    CacheHitSource = None

FAILED = {RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_IGNORED}


def check_version(logger: logging.Logger) -> None:
    """Raise :class:`UnsupportedEngine` if this version cannot work. Warn of one that is newer than tested."""
    version = vllm.__version__
    found = support(version)
    if found == "unsupported":
        raise UnsupportedEngine(
            f"this kvtier supports vLLM {RANGE}, and vLLM {version} is installed: "
            f'run `pip install "{REQUIREMENT}"`, or install a kvtier for {version}'
        )
    if found == "newer":
        logger.warning("this kvtier was tested with vLLM %s, and vLLM %s is installed", RANGE, version)


def hit_sources(tokens_by_medium: dict[str, int]) -> dict[Any, int]:
    """Return the tokens of a hit by vLLM's types of sources. Called by vLLM 0.32 and newer only."""
    types = {"cpu": CacheHitSource.HOST, "hugepage": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
    sources: dict[Any, int] = {}
    for medium, tokens in tokens_by_medium.items():
        source = types.get(medium, CacheHitSource.EXTERNAL_UNSPECIFIED)
        sources[source] = sources.get(source, 0) + tokens
    return sources


def writes_before_hooks(config: VllmConfig, cache: KVCacheConfig) -> bool:
    """Whether a step may zero or copy blocks before it calls the first hook of a worker's connector.

    Model Runner V2 does, for states, KV of several precisions and hits within a block (``update_requests`` in
    ``vllm/v1/worker/gpu/model_runner.py``). Other versions may do what they do not declare.
    """
    within_blocks = getattr(config.cache_config, "prefix_match_unit", None) is not None
    zeroes = getattr(cache, "needs_kv_cache_zeroing", True)
    return bool(getattr(config, "use_v2_model_runner", True) and (zeroes or within_blocks))


def numbers_inputs(config: VllmConfig) -> bool:
    """Whether vLLM numbers images and other inputs in their order of arrival, instead of hashing them.

    It does if none of its caches needs hashes (``_process_mm_uuids`` in ``vllm/renderers/base.py``).
    The numbers start again with each API process, so they identify an input in one process only.
    """
    inputs = config.model_config.multimodal_config
    caching = config.cache_config.enable_prefix_caching
    return inputs is not None and inputs.mm_processor_cache_gb == 0 and not caching


def hits_end_at_blocks(config: VllmConfig) -> bool:
    """Whether vLLM drops a hit of a connector that ends within a block, or contains a prompt's last token.

    It does with auxiliary outputs, from 0.33 on (``AuxOutputSchedulerConnector.cap_external_hit``).
    """
    auxiliary = getattr(config, "aux_output_config", None)
    return bool(auxiliary and auxiliary.enabled)


def hit_alignment(config: KVCacheConfig) -> int:
    """Return the number of tokens of which a hit is a multiple."""
    alignment = getattr(config, "cache_hit_alignment_tokens", None)  # From 0.32 on.
    return alignment or math.lcm(*(group.kv_cache_spec.block_size for group in config.kv_cache_groups))


def declared_shards(spec: KVCacheSpec) -> int | None:
    """Return into how many parts tensor parallelism divides a layer's KV; ``None`` if it is not declared."""
    return getattr(spec, "max_tp_shards", None)  # From 0.31 on.


def block_tokens_of(group: KVCacheGroupSpec, dcp: int) -> int:
    """Return the tokens of one block of a group: those of all ranks that divide it between them.

    Raises :class:`LayoutError` with decode context parallelism before vLLM 0.31: groups do not declare it.
    """
    spec = group.kv_cache_spec
    if dcp == 1:
        return int(spec.block_size)
    if not hasattr(spec, "dcp_sharded"):
        raise LayoutError(
            f"decode_context_parallel_size is {dcp}: with vLLM {vllm.__version__}, kvtier only supports 1; "
            "install vLLM 0.31 or newer"
        )
    return int(spec.block_size) * (dcp if spec.dcp_sharded else 1)


def block_stored(
    pool: BlockPool, request: Request, group: int, block_tokens: int, first: int, last: int
) -> BlockStored | None:
    """Return the event with which vLLM publishes blocks ``first`` to ``last`` of a request.

    ``None`` if they are not hashed yet. vLLM's pool builds it, as for the blocks that it caches itself
    (``BlockPool.emit_cached_block_events``), so it has the fields of this version.
    """
    hashes = resolve_block_hashes(request.block_hashes, pool.hash_block_size, block_tokens)
    if last > len(hashes):
        return None
    ends = range((first + 1) * block_tokens, (last + 1) * block_tokens, block_tokens)
    return pool._build_block_stored_event(
        request,
        block_hashes=_external(hashes[first:last]),
        parent_block_hash=maybe_convert_block_hash(hashes[first - 1]) if first else None,
        start_token_idx=first * block_tokens,
        end_token_idx=last * block_tokens,
        block_size=block_tokens,
        kv_cache_group_id=group,
        extra_keys_list=_extra_keys(pool, request, block_tokens, ends),
        **_lookahead(pool, request, ends),
    )


def _external(hashes: Sequence[BlockHash]) -> list[ExternalBlockHash]:
    """Return hashes as vLLM publishes them: 64 bits of each, or all."""
    # vLLM reads an environment variable for each hash, which takes most of the time of an event.
    published = maybe_convert_block_hash(hashes[0])
    if published is hashes[0]:
        return list(hashes)
    if published == int.from_bytes(hashes[0][-8:], "big"):
        return [int.from_bytes(block_hash[-8:], "big") for block_hash in hashes]
    return [maybe_convert_block_hash(block_hash) for block_hash in hashes]


def _extra_keys(pool: BlockPool, request: Request, block_tokens: int, ends: range) -> list[Any]:
    if not (request.lora_request or request.mm_features or request.cache_salt):
        return [None] * len(ends)
    generate = getattr(pool, "_generate_event_extra_keys", None)  # From 0.33 on.
    generate = generate or generate_block_hash_extra_keys
    found, feature = [], 0
    for end in ends:
        keys, feature = generate(request, end - block_tokens, end, feature)
        found.append(keys)
    return found


def _lookahead(pool: BlockPool, request: Request, ends: range) -> dict[str, Any]:
    """Return the argument with the tokens after each block that its hash covers, from 0.33 on."""
    tokens = getattr(pool, "num_hash_lookahead_tokens", None)
    if tokens is None:
        return {}
    return {
        "lookahead_token_ids": [request.all_token_ids[end : end + tokens] for end in ends] if tokens else None
    }


def has_failed(request: Request) -> bool:
    """Return whether a request has ended so that its KV may not have been loaded or computed."""
    return request.status in FAILED


def end_of_answer(request: Request) -> str:
    """Return how an answer has ended: ``stop``, ``length``, ``abort`` and so on; empty without one."""
    # A stop string is found outside of the engine, where the request is aborted then.
    began = request.num_tokens > request.num_prompt_tokens
    if has_failed(request) and not (request.status == RequestStatus.FINISHED_ABORTED and began):
        return ""
    reason = str(RequestStatus.get_finished_reason(request.status))
    return reason if request.structured_output_request is None else f"{reason}+structured"


def connectors(scheduler: Scheduler) -> list[Any]:
    """Return the connector of a scheduler, and those that a ``MultiConnector`` contains."""
    found = [scheduler.get_kv_connector()]
    for each in found:
        if isinstance(each, MultiConnector):
            found += each._connectors
    return found


def block_index(pool: BlockPool) -> object:
    """Return the object that a reset of vLLM's own cache replaces."""
    index: object = pool.cached_block_hash_to_block
    return index


def is_empty(pool: BlockPool) -> bool:
    """Return whether no block is in use or cached, as after a successful ``reset_prefix_cache``."""
    used = pool.num_gpu_blocks - pool.get_num_free_blocks()
    return used <= 1 and not len(pool.cached_block_hash_to_block)  # The null block is always in use.


def enable_tiles() -> bool:
    """Request the registers of AMX for this process; ``False`` if that fails. ``True`` on CPUs without AMX.

    Without, Linux ends a process that uses them with SIGILL (Documentation/arch/x86/xstate.rst). vLLM 0.32's
    attention on CPUs uses them in bfloat16 without a request: it relies on a matrix product of several tokens
    before, which makes one. The first step of an engine that hits a whole prompt computes one token.
    """
    return not torch.cpu._is_amx_tile_supported() or bool(torch.cpu._init_amx())


def lookahead_tokens(vllm_config: VllmConfig) -> int:
    """Return on how many tokens after it the KV of a token depends: 0 without EAGLE and MTP.

    These drafters read ahead: their KV at a position also depends on the tokens after it, one per module. So
    the KV of a chunk's last token depends on tokens after the chunk, and the chunk's key covers them as well.
    vLLM's own prefix cache computes the last block of a hit again instead; since 0.33, its hashes cover them
    too (``VllmConfig.num_hash_lookahead_tokens``), but not in an engine with a KV connector.
    """
    declared = getattr(vllm_config, "num_prefill_lookahead_tokens", None)  # From 0.31 on.
    if declared is not None:
        return int(declared)
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle():
        return 0
    return int(speculative.num_speculative_tokens) if speculative.use_multi_module_mtp() else 1
