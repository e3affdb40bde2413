"""Catalog of chunks and eviction policies.

Built-in eviction policies are registered through the same hook as those of plugins.
"""

from __future__ import annotations

from kvtier.catalog.eviction import EvictionPolicy
from kvtier.catalog.lru import LruPolicy
from kvtier.hookmarkers import hookimpl


@hookimpl
def kvtier_eviction_policies() -> dict[str, type[EvictionPolicy]]:
    """Return the built-in policies by name."""
    return {"lru": LruPolicy}
