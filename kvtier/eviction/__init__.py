"""Which chunk goes first. Built-in policies come in by the same hook as third parties'."""

from __future__ import annotations

from kvtier.eviction.base import EvictionPolicy
from kvtier.eviction.lru import LruPolicy
from kvtier.hookspecs import hookimpl


@hookimpl
def kvtier_eviction_policies() -> dict[str, type[EvictionPolicy]]:
    """The policies that are built in."""
    return {"lru": LruPolicy}
