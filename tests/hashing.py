"""A hook around the checksum of payloads: counts, and holds back on demand."""

from __future__ import annotations

import threading

import anyio
import pytest

from kvtier import header


class Hashing:
    """Counts hashes of payloads. While :attr:`may_go_on` is cleared they wait, each in its thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self._lock = threading.Lock()
        real = header._checksum

        def checksum(payload: memoryview) -> bytes:
            with self._lock:
                self.count += 1
            assert self.may_go_on.wait(30)
            return real(payload)

        monkeypatch.setattr(header, "_checksum", checksum)

    async def until_begun(self, count: int) -> None:
        """Wait until so many have begun."""
        with anyio.fail_after(10):
            while self.count < count:
                await anyio.sleep(0.005)
