"""The media that hold chunks. Those that come with kvtier register as a plugin's would."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from kvtier.backends.base import Backend

# Not from kvtier.hookspecs, which imports this package's base module and so would find itself half made.
hookimpl = pluggy.HookimplMarker("kvtier")


@hookimpl
def kvtier_backends() -> dict[str, type[Backend]]:
    """The built-in backends, imported when they are asked for."""
    from kvtier.backends.cpu import CpuBackend
    from kvtier.backends.disk import DiskBackend
    from kvtier.backends.hugepage import HugePageBackend
    from kvtier.backends.infinistore import InfiniStoreBackend
    from kvtier.backends.mooncake import MooncakeBackend
    from kvtier.backends.redis import RedisBackend
    from kvtier.backends.valkey import ValkeyBackend

    return {
        "cpu": CpuBackend,
        "hugepage": HugePageBackend,
        "disk": DiskBackend,
        "redis": RedisBackend,
        "valkey": ValkeyBackend,
        "infinistore": InfiniStoreBackend,
        "mooncake": MooncakeBackend,
    }
