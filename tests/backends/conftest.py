"""Redis and Valkey servers, which share a protocol, and an S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.redis_pool import Start
from tests.rigs.servers.redis import RedisServer
from tests.rigs.servers.running import running
from tests.rigs.servers.s3 import S3Server
from tests.rigs.servers.valkey import ValkeyServer


@pytest.fixture(params=[RedisServer, ValkeyServer], ids=["redis", "valkey"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """Start servers: Redis in one run of the test, Valkey in another. Kill them at the end."""
    kind: type[RedisServer] = request.param
    if reason := kind.missing():
        pytest.skip(reason)
    servers: list[RedisServer] = []

    def start(**options: Any) -> RedisServer:
        folder = tmp_path / str(len(servers))
        folder.mkdir()
        servers.append(kind(folder, **options))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server shared by all tests that do not damage it."""
    with running(S3Server, tmp_path_factory) as server:
        yield server
