"""Commands, as the tests of the command line run them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.testing.servers.redis import RedisServer
from tests.cli.conftest import _no_variables, kvtier

__all__ = ["_no_variables", "kvtier"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A real Redis that holds one key of somebody else."""
    missing = RedisServer.missing()
    if missing:
        pytest.skip(missing)
    folder = tmp_path / "server"
    folder.mkdir()
    with RedisServer(folder) as server:
        server.tell("SET", "others", "value")
        yield server
