"""Fixtures of the CLI tests, and a Redis server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import _clean_environment, kvtier
from tests.rigs.servers.redis import RedisServer

__all__ = ["_clean_environment", "kvtier"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A real Redis that holds one key of another client."""
    missing = RedisServer.missing()
    if missing:
        pytest.skip(missing)
    folder = tmp_path / "server"
    folder.mkdir()
    with RedisServer(folder) as server:
        server.command("SET", "others", "value")
        yield server
