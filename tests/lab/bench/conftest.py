"""A Redis server that holds one key of another client."""

from __future__ import annotations

import pytest

from tests.cli.conftest import server as server_without_keys
from tests.rigs.servers.redis import RedisServer

__all__ = ["server_without_keys"]


@pytest.fixture
def server(server_without_keys: RedisServer) -> RedisServer:
    server_without_keys.command("SET", "others", "value")
    return server_without_keys
