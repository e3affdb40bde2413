"""Real servers of shared pools on loopback, for tests and benchmarks: start, kill, pause, corrupt."""

from __future__ import annotations

from kvtier.testing.servers.base import Server
from kvtier.testing.servers.infinistore import InfiniStoreServer
from kvtier.testing.servers.mooncake import MooncakeServer
from kvtier.testing.servers.redis import RedisServer
from kvtier.testing.servers.valkey import ValkeyServer

_ALL: tuple[type[Server], ...] = (RedisServer, ValkeyServer, InfiniStoreServer, MooncakeServer)

SERVERS = {server.type: server for server in _ALL}
"""Servers by tier type."""
