"""Catalog of chunks and eviction policies.

Built-in eviction policies are registered through the same hook as those of plugins.
"""

from __future__ import annotations

from kvtier.catalog.eviction import EvictionPolicy
from kvtier.catalog.policies.adaptive import AdaptivePolicy
from kvtier.catalog.policies.arc import ArcPolicy
from kvtier.catalog.policies.gdsf import GdsfPolicy
from kvtier.catalog.policies.lfu import LfuPolicy
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.catalog.policies.resume import ResumePolicy
from kvtier.catalog.policies.s3fifo import S3FifoPolicy
from kvtier.catalog.policies.sieve import SievePolicy
from kvtier.catalog.policies.tinylfu import TinyLfuPolicy
from kvtier.hookmarkers import hookimpl


@hookimpl
def kvtier_eviction_policies() -> dict[str, type[EvictionPolicy]]:
    """Return the built-in policies by name."""
    return {
        "lru": LruPolicy,
        "lfu": LfuPolicy,
        "arc": ArcPolicy,
        "s3fifo": S3FifoPolicy,
        "sieve": SievePolicy,
        "tinylfu": TinyLfuPolicy,
        "gdsf": GdsfPolicy,
        "resume": ResumePolicy,
        "adaptive": AdaptivePolicy,
    }
