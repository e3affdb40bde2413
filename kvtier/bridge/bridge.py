"""What the scheduler's and the workers' ends of the bridge have in common. Called from vLLM's hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvtier.bridge import protocol
from kvtier.bridge.protocol import Hello, Welcome
from kvtier.rpc.client import Client
from kvtier.rpc.unix import UnixConnection

SERVER = "the cache process"


def open_connection(path: Path, hello: Hello) -> UnixConnection[Welcome]:
    """Connect without waiting for the welcome. Raises :class:`ChannelError`."""
    return UnixConnection(path, hello, Welcome, protocol.VERSION, protocol.decode_from_cache, SERVER)


class Bridge(Client[Welcome]):
    """A connection to the cache process that is replaced when it is lost."""

    def __init__(
        self,
        hello: Hello,
        path: Path,
        start: Callable[[], None] | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        """``start`` starts a cache process on ``path`` without blocking, for when the connection is lost."""
        super().__init__(path, SERVER, start, logger)
        self._hello = hello
        self.welcome: Welcome | None = None
        """The last greeting."""
        self.epoch = 0
        """Identifies the connected cache process; 0 if none is connected."""

    @property
    def last_epoch(self) -> int:
        """Identifies the cache process that is, or was last, connected."""
        return 0 if self.welcome is None else self.welcome.epoch

    def expect_answers_within(self, seconds: float) -> None:
        """Set how long the cache process may not answer until it counts as unresponsive. 1 s by default."""
        self._health.limit = seconds

    def _make_hello(self) -> Hello:
        return msgspec.structs.replace(self._hello, epoch=self.last_epoch)

    def _open(self) -> UnixConnection[Welcome]:
        return open_connection(self._path, self._make_hello())

    def _connected(self, connection: UnixConnection[Welcome]) -> None:
        assert connection.welcome is not None
        self.welcome = connection.welcome
        self.epoch = connection.welcome.epoch

    def _lost(self) -> None:
        self.epoch = 0
