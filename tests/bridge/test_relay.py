"""Schedulers that reach the cache process of another host through that of their own."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvtier.bridge import protocol
from kvtier.bridge.protocol import Hello, Welcome
from kvtier.peers import backend, dialing, kv_transfer, server
from kvtier.peers.staging import buffers
from kvtier.rpc.frames import Ping, Pong, Refused
from kvtier.testing.servers import free_port
from tests.rigs.scripted_engine import KEYS, LAYOUT, NAMESPACE, Host, open_host, store

pytestmark = pytest.mark.anyio

SECRET = "sixteen or more characters"
IMPORTED = backend, kv_transfer, server, buffers
"""By an instance with peers when it is opened, which would block the event loop of the first test."""


def peer(port: int, secret: str = SECRET) -> dict[str, Any]:
    return {"listen": f"127.0.0.1:{port}", "secret": secret}


@asynccontextmanager
async def open_hosts(tmp_path: Path, secret: str = SECRET) -> AsyncIterator[tuple[Host, Host, str]]:
    """Open two hosts, the second one with its own secret; yield them and the second one's address."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    port = free_port()
    async with (
        open_host(tmp_path / "here", peer=peer(free_port())) as here,
        open_host(tmp_path / "there", peer=peer(port, secret)) as there,
    ):
        yield here, there, f"127.0.0.1:{port}"


def hello(to: str, **more: Any) -> Hello:
    fields: dict[str, Any] = {"engine": "engine/1", "role": "scheduler", "rank": 0} | more
    return Hello(protocol.VERSION, layout=LAYOUT, namespace=NAMESPACE, to=to, **fields)


async def test_scheduler_uses_the_other_host(tmp_path: Path) -> None:
    async with (
        open_hosts(tmp_path) as (here, there, address),
        here.peer() as scheduler,
        there.peer("worker", 0, engine="engine/1") as worker0,
        there.peer("worker", 1, engine="engine/1") as worker1,
    ):
        welcome = await scheduler.request(hello(address), Welcome)
        assert welcome.epoch == there.server.epoch != here.server.epoch
        leases = await store(scheduler, [worker0], KEYS)
        await worker1.commit(leases)
        found = await scheduler.look_up(KEYS, 6)
        assert len(found.leases) == len(KEYS)
        assert await scheduler.request(Ping(9)) == Pong(9)
        assert (here.server.engines, there.server.engines) == (0, 1)


async def test_end_of_either_side_ends_the_other(tmp_path: Path) -> None:
    async with open_hosts(tmp_path) as (here, there, address):
        async with here.peer() as scheduler:
            await scheduler.request(hello(address))
            assert there.server.engines == 1
        await there.wait_until_idle()
        async with here.peer() as scheduler:
            await scheduler.request(hello(address))
            async with there.peer("scheduler", engine="engine/1"):  # It replaces the other connection.
                with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                    await scheduler.receive()


async def refusal(host: Host, message: Hello) -> str:
    async with host.peer() as scheduler:
        answer = await scheduler.request(message, Refused)
    return answer.reason


async def test_what_is_refused(tmp_path: Path) -> None:
    async with open_hosts(tmp_path, "another secret, as long") as (here, there, address):
        assert "peer.secret differs" in await refusal(here, hello(address))
        assert "cannot connect to" in await refusal(here, hello(f"127.0.0.1:{free_port()}"))
        assert "is not an address" in await refusal(here, hello("nowhere"))
        assert there.server.engines == 0
    (tmp_path / "alone").mkdir()
    async with open_host(tmp_path / "alone") as alone:
        assert "set peer.secret or peer.tls" in await refusal(alone, hello("127.0.0.1:1"))


@pytest.mark.parametrize("role", ["worker", "observer"])
async def test_only_schedulers_come_from_other_hosts(tmp_path: Path, role: str) -> None:
    async with open_hosts(tmp_path) as (here, there, address):
        assert "may only connect a scheduler" in await refusal(here, hello(address, role=role))
        assert there.server.engines == 0


async def test_host_that_accepts_and_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialing, "CONNECT_SECONDS", 0.2)
    (tmp_path / "here").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with open_host(tmp_path / "here", peer=peer(free_port())) as here:
            assert "did not answer within" in await refusal(
                here, hello(f"127.0.0.1:{silent.getsockname()[1]}")
            )
