"""Connections to one engine."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator

import anyio
import httpx
import pytest

from kvtier.fleet.proxy.connections import Connections

from .stub import Stub

pytestmark = pytest.mark.anyio


@pytest.fixture
def _no_garbage_collection() -> Iterator[None]:
    """Keep open what only the garbage collector would close."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_garbage_collection")
async def test_connection_cancelled_while_connecting_is_closed() -> None:
    connections, delays = Connections(None), random.Random(1)
    async with Stub().serving() as stub:
        cancelled = 0
        for _ in range(400):
            with anyio.move_on_after(delays.uniform(0.0001, 0.002)) as scope:
                async with connections.exchange(httpx.Request("GET", f"{stub.url}/health"), 5.0) as response:
                    await response.aread()
            cancelled += scope.cancelled_caught
            await connections.aclose()
        assert cancelled
        await stub.wait_until(lambda: not stub.connections)
