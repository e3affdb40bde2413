"""The conformance suite with a real S3 server."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.backends.base import Backend
from kvtier.memory.keys import ChunkKey
from kvtier.testing.backend import BackendConformance
from tests.rigs.composed_backends import EncodedSuite, EncryptedSuite
from tests.rigs.s3_stores import make
from tests.rigs.servers.s3 import BUCKET, S3Server


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


@pytest.mark.slow
class TestEncodedS3(EncodedSuite, TestS3): ...


@pytest.mark.slow
class TestEncryptedS3(EncryptedSuite, TestS3): ...
