"""Storage backends. The built-in ones register through the same hook as plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.hookmarkers import hookimpl

if TYPE_CHECKING:
    from kvtier.backends.base import Backend


@hookimpl
def kvtier_backends() -> dict[str, type[Backend]]:
    """Return the built-in backends. Imports them lazily."""
    from kvtier.backends.cpu import CpuBackend, HugePageBackend
    from kvtier.backends.disk.backend import DiskBackend
    from kvtier.backends.infinistore import InfiniStoreBackend
    from kvtier.backends.mooncake import MooncakeBackend
    from kvtier.backends.redis import RedisBackend
    from kvtier.backends.s3 import S3Backend
    from kvtier.backends.valkey import ValkeyBackend

    return {
        "cpu": CpuBackend,
        "hugepage": HugePageBackend,
        "disk": DiskBackend,
        "redis": RedisBackend,
        "valkey": ValkeyBackend,
        "infinistore": InfiniStoreBackend,
        "mooncake": MooncakeBackend,
        "s3": S3Backend,
    }
