"""The conformance suite for every built-in local backend, plain, behind a seal, and in a tier."""

from __future__ import annotations

import os
from pathlib import Path

from kvtier.backends.base import Backend
from kvtier.backends.cpu import CpuBackend, HugePageBackend, HugePageSettings
from kvtier.backends.disk.backend import DiskBackend, DiskSettings, object_path
from kvtier.memory.keys import ChunkKey
from kvtier.settings import LocalTierSettings
from kvtier.testing.backend import BackendConformance
from tests.rigs.composed_backends import EncodedSuite, EncryptedSuite, SealedSuite, TierSuite

CAPACITY = 256 << 20


class TestCpu(BackendConformance):
    def make_backend(self, path: Path) -> Backend:
        return CpuBackend(LocalTierSettings(name="ram", type="cpu", capacity=CAPACITY))


class TestSealedCpu(SealedSuite, TestCpu): ...


class TestEncodedCpu(EncodedSuite, TestCpu): ...


class TestCpuTier(TierSuite, TestCpu): ...


class TestHugePage(BackendConformance):
    def make_backend(self, path: Path) -> Backend:
        return HugePageBackend(HugePageSettings(name="ram", type="hugepage", capacity=CAPACITY))


class TestDisk(BackendConformance):
    """Uses io_uring if available."""

    persistent = True
    direct = True
    io = "auto"

    def make_backend(self, path: Path) -> Backend:
        return DiskBackend(
            DiskSettings(
                name="ssd",
                type="disk",
                capacity=CAPACITY,
                path=path / "ssd",
                direct=self.direct,
                io=self.io,
            )
        )

    def corrupt(self, path: Path, key: ChunkKey) -> bool:
        with object_path(path / "ssd", key).open("r+b") as file:
            at = 5000 if file.seek(0, os.SEEK_END) > 5000 else 600
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 0x10]))
        return True


class TestBufferedDisk(TestDisk):
    direct = False


class TestThreadsDisk(TestDisk):
    io = "threads"


class TestBufferedThreadsDisk(TestThreadsDisk):
    direct = False


class TestSealedDisk(SealedSuite, TestDisk): ...


class TestEncodedDisk(EncodedSuite, TestDisk): ...


class TestEncryptedDisk(EncryptedSuite, TestDisk): ...


class TestDiskTier(TierSuite, TestDisk): ...


class TestUncheckedDiskTier(TierSuite, TestDisk):
    """Without a checksum, a bit flip in the payload is not detected."""

    checksum = False

    def corrupt(self, path: Path, key: ChunkKey) -> bool:
        return False
