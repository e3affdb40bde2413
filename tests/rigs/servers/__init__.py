"""Real servers of the shared pools on loopback, for tests and benchmarks."""

from __future__ import annotations

from kvtier.testing.servers import Server
from tests.rigs.servers.infinistore import InfiniStoreServer
from tests.rigs.servers.mooncake import MooncakeServer
from tests.rigs.servers.redis import RedisServer
from tests.rigs.servers.s3 import S3Server
from tests.rigs.servers.valkey import ValkeyServer

_ALL: tuple[type[Server], ...] = (RedisServer, ValkeyServer, InfiniStoreServer, MooncakeServer, S3Server)

SERVERS = {server.type: server for server in _ALL}
"""Servers by tier type."""
