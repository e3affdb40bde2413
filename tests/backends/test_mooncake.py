"""The Mooncake backend with a real master and a real client that provides memory: the contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from kvtier.backends.base import Backend
from kvtier.backends.mooncake import MooncakeBackend, MooncakeSettings
from kvtier.memory.keys import ChunkKey
from kvtier.testing.backend import BackendConformance
from tests.rigs.composed_backends import EncodedSuite, EncryptedSuite
from tests.rigs.servers.mooncake import MooncakeServer


class TestMooncake(BackendConformance):
    persistent = True
    server: ClassVar[MooncakeServer]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        if reason := MooncakeServer.missing():
            pytest.skip(reason)
        with MooncakeServer(tmp_path_factory.mktemp("pool")) as cls.server:
            yield

    @pytest.fixture(autouse=True)
    def _unique_prefix(self, tmp_path: Path) -> None:
        """Use a separate prefix for each test."""
        self.server.prefix = f"{tmp_path.name}:"

    def make_backend(self, path: Path) -> Backend:
        return MooncakeBackend(MooncakeSettings(name="pool", **self.server.tier()))

    def corrupt(self, path: Path, key: ChunkKey) -> bool:
        return self.server.corrupt(key)


@pytest.mark.slow
class TestEncodedMooncake(EncodedSuite, TestMooncake): ...


@pytest.mark.slow
class TestEncryptedMooncake(EncryptedSuite, TestMooncake): ...
