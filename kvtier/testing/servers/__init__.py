"""Real servers of shared pools on loopback, for tests and benchmarks: started, killed, paused, damaged."""

from __future__ import annotations

from kvtier.testing.servers.base import Server
from kvtier.testing.servers.mooncake import MooncakeServer
from kvtier.testing.servers.redis import RedisServer

SERVERS: dict[str, type[Server]] = {server.type: server for server in (RedisServer, MooncakeServer)}
"""By the tier type that each serves."""
