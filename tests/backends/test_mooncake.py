"""Mooncake proves itself on its real master and a real client that gives memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.backends.base import Backend
from kvtier.backends.guarded import GuardedBackend
from kvtier.backends.mooncake import MooncakeBackend, MooncakeSettings
from kvtier.backends.sealed import SealedBackend
from kvtier.keys import ChunkKey
from kvtier.testing.backend import BackendConformance
from kvtier.testing.servers.mooncake import MooncakeServer

if reason := MooncakeServer.missing():
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServer]:
    with MooncakeServer(tmp_path_factory.mktemp("mooncake")) as server:
        yield server


class TestMooncake(BackendConformance):
    persistent = True

    @pytest.fixture(autouse=True)
    def _server(self, server: MooncakeServer, tmp_path: Path) -> None:
        # Every test has names of its own: nothing is left of another's.
        server.prefix = f"{tmp_path}:"
        self.server = server

    def make_backend(self, path: Path) -> Backend:
        return MooncakeBackend(MooncakeSettings(name="pool", **self.server.tier()))

    def corrupt(self, path: Path, key: ChunkKey) -> bool:
        return self.server.corrupt(key)
