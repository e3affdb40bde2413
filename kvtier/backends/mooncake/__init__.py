"""A pool of memory that the hosts of a cluster give, kept together by Mooncake's master."""

from kvtier.backends.mooncake.backend import MooncakeBackend
from kvtier.backends.mooncake.settings import MooncakeSettings

__all__ = ["MooncakeBackend", "MooncakeSettings"]
