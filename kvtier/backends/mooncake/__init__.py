"""Mooncake backend: a memory pool contributed by the hosts of a cluster and managed by Mooncake's master."""

from kvtier.backends.mooncake.backend import MooncakeBackend
from kvtier.backends.mooncake.settings import MooncakeSettings

__all__ = ["MooncakeBackend", "MooncakeSettings"]
