"""Connections to an engine, by themselves."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator

import anyio
import httpx
import pytest

from kvtier.proxy.connections import Connections

from .stub import Stub

pytestmark = pytest.mark.anyio


@pytest.fixture
def _nothing_is_collected() -> Iterator[None]:
    """What only the collector would close stays open."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_nothing_is_collected")
async def test_what_connects_in_the_moment_in_which_it_is_given_up_is_closed() -> None:
    connections, moments = Connections(None), random.Random(1)
    async with Stub().serving() as stub:
        given_up = 0
        for _ in range(400):
            with anyio.move_on_after(moments.uniform(0.0001, 0.002)) as scope:
                async with connections.exchange(httpx.Request("GET", f"{stub.url}/health"), 5.0) as response:
                    await response.aread()
            given_up += scope.cancelled_caught
            await connections.aclose()
        assert given_up
        await stub.until(lambda: not stub.connections)
