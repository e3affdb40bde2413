"""Everything that differs between the supported versions of vLLM."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import vllm

from kvtier.errors import UnsupportedEngine
from kvtier.integrations.versions import RANGE, REQUIREMENT, support

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # Before 0.32, hits are not counted by source.
    CacheHitSource = None


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


def hit_alignment(config: KVCacheConfig) -> int:
    """Return the number of tokens of which a hit is a multiple."""
    alignment = getattr(config, "cache_hit_alignment_tokens", None)  # From 0.32 on.
    return alignment or math.lcm(*(group.kv_cache_spec.block_size for group in config.kv_cache_groups))


def declared_shards(spec: KVCacheSpec) -> int | None:
    """Return into how many parts tensor parallelism divides a layer's KV; ``None`` if it is not declared."""
    return getattr(spec, "max_tp_shards", None)  # From 0.31 on.


def prefill_lookahead(vllm_config: VllmConfig) -> int:
    """Return how many tokens a drafter reads ahead of the tokens whose KV it computes."""
    declared = getattr(vllm_config, "num_prefill_lookahead_tokens", None)  # From 0.31 on.
    if declared is not None:
        return int(declared)
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle():
        return 0
    return int(speculative.num_speculative_tokens) if speculative.use_multi_module_mtp() else 1
