"""The Redis backend on a real server: the contract, over TCP, a Unix socket and TLS, and in its wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvtier.backends.base import Backend
from kvtier.backends.redis import RedisBackend, RedisSettings
from kvtier.backends.sealed import SealedBackend
from kvtier.keys import ChunkKey
from kvtier.testing.backend import BackendConformance
from kvtier.testing.servers.redis import RedisServer


class TestRedis(BackendConformance):
    persistent = True
    server: ClassVar[RedisServer]
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        if reason := RedisServer.missing():
            pytest.skip(reason)
        with RedisServer(tmp_path_factory.mktemp("r"), **cls.options) as cls.server:
            yield

    @pytest.fixture(autouse=True)
    def _empty(self) -> None:
        self.server.tell("FLUSHALL")

    def make_backend(self, path: Path) -> Backend:
        return RedisBackend(RedisSettings(name="pool", **self.server.tier()))

    def corrupt(self, path: Path, key: ChunkKey) -> bool:
        return self.server.corrupt(key)


class TestSealedRedis(TestRedis):
    chunk_objects = True

    def make_backend(self, path: Path) -> Backend:
        return SealedBackend(super().make_backend(path))


class TestRedisOverUnixSocket(TestRedis):
    options: ClassVar = {"unix": True, "password": "sesame"}
