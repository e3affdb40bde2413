"""Redis backend: one value per chunk, on a single server, behind sentinels, or in a cluster."""

from kvtier.backends.redis.backend import RedisBackend
from kvtier.backends.redis.settings import RedisSettings

__all__ = ["RedisBackend", "RedisSettings"]
