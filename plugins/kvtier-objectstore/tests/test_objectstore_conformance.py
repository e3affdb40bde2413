"""The conformance suite on each kind of store available here."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvtier_objectstore.backend import ObjectStoreBackend
from s3_server import BUCKET, S3Server
from stores import make

from kvtier.backends.base import Backend
from kvtier.memory.keys import ChunkKey
from kvtier.plugins import Plugins
from kvtier.testing.backend import BackendConformance


class TestFolder(BackendConformance):
    persistent = True

    def make_backend(self, path: Path) -> Backend:
        return make(url=f"file://{path}/chunks")

    def corrupt(self, path: Path, key: ChunkKey) -> bool:
        file = path / "chunks" / key.hex()
        value = bytearray(file.read_bytes())
        value[len(value) // 2] ^= 1
        file.write_bytes(value)
        return True


class TestMemory(BackendConformance):
    def make_backend(self, path: Path) -> Backend:
        return make(url="memory://")


class TestS3(BackendConformance):
    persistent = True

    @pytest.fixture(autouse=True)
    def _served_by(self, s3: S3Server) -> None:
        self.server = s3

    def make_backend(self, path: Path) -> Backend:
        return make(**{**self.server.tier(), "url": f"s3://{BUCKET}/{path.name}"})

    def corrupt(self, path: Path, key: ChunkKey) -> bool:
        self.server.flip(f"{path.name}/{key.hex()}")
        return True


def test_kvtier_finds_it() -> None:
    assert Plugins.load(["kvtier-objectstore"]).backend("objectstore") is ObjectStoreBackend
