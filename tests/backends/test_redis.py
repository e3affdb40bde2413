"""Redis and Valkey with real servers: the contract over TCP, a Unix socket and TLS, and in a wrapper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvtier.backends.base import Backend
from kvtier.memory.keys import ChunkKey
from kvtier.testing.backend import BackendConformance
from tests.rigs.certificates import make_certificate
from tests.rigs.composed_backends import EncodedSuite, EncryptedSuite, SealedSuite
from tests.rigs.redis_pool import backend_on
from tests.rigs.servers.redis import RedisServer
from tests.rigs.servers.valkey import ValkeyServer


class TestRedis(BackendConformance):
    persistent = True
    kind: ClassVar[type[RedisServer]] = RedisServer
    server: ClassVar[RedisServer]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        if reason := cls.kind.missing():
            pytest.skip(reason)
        folder = tmp_path_factory.mktemp("r")
        with cls.kind(folder, **cls.options(folder)) as cls.server:
            yield

    @classmethod
    def options(cls, folder: Path) -> dict[str, Any]:
        """Options of ``RedisServer``."""
        return {}

    @pytest.fixture(autouse=True)
    def _empty(self) -> None:
        self.server.command("FLUSHALL")

    def make_backend(self, path: Path) -> Backend:
        return backend_on(self.server)

    def corrupt(self, path: Path, key: ChunkKey) -> bool:
        return self.server.corrupt(key)


class TestSealedRedis(SealedSuite, TestRedis): ...


class TestEncodedRedis(EncodedSuite, TestRedis): ...


class TestEncryptedRedis(EncryptedSuite, TestRedis): ...


class TestRedisOverUnixSocket(TestRedis):
    @classmethod
    def options(cls, folder: Path) -> dict[str, Any]:
        return {"unix": True, "password": "sesame"}


class TestRedisOverTLS(TestRedis):
    @classmethod
    def options(cls, folder: Path) -> dict[str, Any]:
        return {"tls": make_certificate(folder / "tls")}


class TestValkey(TestRedis):
    kind = ValkeyServer
