"""A hook around the checksum of payloads: it counts the calls, and blocks them on demand."""

from __future__ import annotations

import threading

import pytest

from kvtier.memory import header
from tests.rigs.waiting import until


class Hashing:
    """Count payload hashes. While :attr:`resume` is cleared, each hash blocks in its thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.resume = threading.Event()
        self.resume.set()
        self._lock = threading.Lock()
        real = header._checksum

        def checksum(payload: memoryview) -> bytes:
            with self._lock:
                self.count += 1
            assert self.resume.wait(30)
            return real(payload)

        monkeypatch.setattr(header, "_checksum", checksum)

    async def wait_until_started(self, count: int) -> None:
        """Wait until ``count`` hashes have started."""
        await until(lambda: self.count >= count)
