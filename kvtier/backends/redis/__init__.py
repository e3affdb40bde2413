"""A Redis, a primary that sentinels know, or a cluster: one value per chunk, under its key."""

from kvtier.backends.redis.backend import RedisBackend
from kvtier.backends.redis.settings import RedisSettings

__all__ = ["RedisBackend", "RedisSettings"]
