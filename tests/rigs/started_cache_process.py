"""Cache processes that engines start, as most users run them: without ``kvtier serve``."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvtier.bridge.spawn import default_address
from kvtier.errors import ChannelError
from kvtier.settings import load_settings
from tests.rigs.cache_process import CacheProcess


class StartedCacheProcess(CacheProcess):
    """A cache process that runs from the start of its first engine on. Its engines get no ``socket``."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        del self.settings["socket"]
        self._socket = default_address(load_settings(self.settings))
        self.log = self._socket.with_suffix(".log")

    @property
    def pid(self) -> int | None:
        with suppress(ChannelError):
            return int(self.status()["pid"])
        return None

    @property
    def socket(self) -> Path:
        return self._socket

    def _signal(self, signum: signal.Signals) -> None:
        pid = self.pid
        assert pid is not None, self.tail()
        os.kill(pid, signum)

    def _end(self, signum: signal.Signals) -> None:
        """End the process and remove its files."""
        pid = self.pid
        if pid is not None:
            os.kill(pid, signum)
            self.wait_until_exited(pid)
        for path in self._socket.parent.glob(f"{self._socket.stem}.*"):
            path.unlink()
