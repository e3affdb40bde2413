"""A NIXL link to a peer that has no agent at present. Runs without NIXL."""

from __future__ import annotations

import socket
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from kvtier.concurrency.tasks import DetachedTask
from kvtier.concurrency.threads import WorkerThreads, in_thread
from kvtier.errors import PeerError
from kvtier.memory.arena import Arena
from kvtier.testing.transport_sides import dial_to
from kvtier.transports.nixl.link import ARENA_BYTES, Endpoint, NixlLink
from kvtier.transports.nixl.process import NixlProcess
from kvtier.transports.nixl.protocol import Opened

pytestmark = pytest.mark.anyio

CAPACITY = 1 << 20
LIMIT_SECONDS = 30
AGENT = SimpleNamespace(name="agent", capacity=CAPACITY, opened=Opened(1, "", 4096, b"metadata"))
ENDPOINT = Endpoint.of(bytes(ARENA_BYTES), cast("NixlProcess", AGENT))


class ProcessWithoutPeer:
    """A NIXL process that does not find the peer's agent, which has exited."""

    def __init__(self) -> None:
        self.exited = anyio.Event()

    async def add_peer(self, *_: object) -> None:
        raise PeerError("the agent does not answer")

    async def end(self) -> None:
        """Do nothing: there is no process."""


async def start() -> NixlProcess:
    return cast("Any", ProcessWithoutPeer())


async def test_nothing_waits_for_a_link_that_waits_for_the_next_agent_of_its_peer() -> None:
    """Neither another link's work, nor the start of the agent here, nor its own end."""
    executor = WorkerThreads(1)
    with socket.create_server(("127.0.0.1", 0)) as listener, closing(Arena.create(CAPACITY)) as arena:
        listener.setblocking(False)
        dial = dial_to(listener.getsockname()[1])
        link = NixlLink(arena, 2 * LIMIT_SECONDS, executor, start, ENDPOINT, dial)
        connecting = DetachedTask(link.connect())
        with anyio.fail_after(LIMIT_SECONDS):
            await anyio.wait_readable(listener)
            await in_thread(lambda: None, executor)
            await link.close()
            await connecting.wait()
        assert connecting.cancelled
    executor.close()
