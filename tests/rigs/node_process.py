"""An instance in its own process, whose methods a test calls until it kills the process.

It can advertise another peer address than its own, so that a test can place a relay in between.
"""

from __future__ import annotations

import signal
import subprocess
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio

from kvtier.fleet.member import controller_client
from kvtier.instance import Instance
from kvtier.testing.transport_sides import serve_commands
from tests.rigs.forks import python
from tests.rigs.hosts import CommandProcess
from tests.rigs.nodes import BUILT_IN, TOKEN_BYTES, Node, prompt, rows, settings_of


class NodeProcess:
    """The process of an instance, see :class:`Commands` and :func:`settings_of`. It can be restarted."""

    def __init__(
        self, name: str, url: str | list[str], *, advertise: int | None = None, **settings: Any
    ) -> None:
        self._settings = {"name": name, "url": url, "advertise": advertise, **settings}
        self._process: CommandProcess | None = None

    def start(self) -> None:
        """Start the process, or restart it on the same port."""
        program = "tests.rigs.node_process"
        self._process = CommandProcess(python(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        self.call("open", **self._settings)

    def call(self, method: str, /, **arguments: object) -> Any:
        """Call a method of the instance, and return its result."""
        assert self._process is not None
        return self._process.call(method, **arguments)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL, and wait. Idempotent."""
        if self._process is not None:
            self._process.kill()


class Commands:
    """What a test can do with the instance."""

    _node: Node

    async def open(self, advertise: int | None, disk: str | None = None, **settings: Any) -> None:
        if advertise is not None:
            controller_client.reached_from_elsewhere = lambda *_: f"127.0.0.1:{advertise}"
        chosen = settings_of(disk=None if disk is None else Path(disk), **settings)
        # It stays open until the process is killed.
        self._open = AsyncExitStack()
        instance = await self._open.enter_async_context(Instance.open(chosen, plugins=BUILT_IN))
        self._node = Node(instance)

    async def store(self, chunks: int, number: int = 0) -> int:
        """Store a prompt, as far as there is room. Return how many tokens."""
        tokens = prompt(chunks, number)
        return await self._node.model.store(tokens, rows(tokens))

    async def is_intact(self, chunks: int) -> bool:
        """Whether memory holds the chunks of the prompt as they were stored."""
        return self._node.is_intact(prompt(chunks))

    async def read(self, chunks: int, number: int) -> bool:
        """Whether what it retrieves of a prompt, from any tier and from peers, is what was stored."""
        tokens = prompt(chunks, number)
        found = bytearray(len(rows(tokens)))
        length = await self._node.model.retrieve(tokens, found) * TOKEN_BYTES
        return found[:length] == rows(tokens)[:length]

    async def pinned(self) -> list[str]:
        """Return the keys of the chunks that it does not evict."""
        catalog, now = self._node.cache.catalog, time.monotonic()
        held = {key for tier in self._node.cache.tiers for key in catalog.keys(tier.index)}
        pinned = [key.hex() for key in held if catalog.pins.holds(key, now)]
        assert len(pinned) == catalog.pinned, "nothing else is pinned"
        return pinned

    async def wait_until_idle(self) -> None:
        """Wait until nothing is in flight and nothing is leased."""
        await self._node.wait_until_idle()


if __name__ == "__main__":
    anyio.run(serve_commands, Commands())
