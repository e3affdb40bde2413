"""A proxy with few file descriptors: it refuses what it cannot serve, and recovers."""

from __future__ import annotations

import asyncio
import errno
import json
import selectors
import socket
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from kvtier.fleet.proxy.checks import MAX_FAILED
from kvtier.fleet.proxy.connections import Connections
from kvtier.fleet.proxy.upstream import State
from tests.rigs.waiting import LIMIT_SECONDS

from .conftest import LONG, Cluster
from .proxy_process import ProxyProcess, Start, start

__all__ = ["start"]  # A fixture.

FILES = 128
CLIENTS = 3 * FILES


def outcomes(proxy: ProxyProcess, clients: int, tokens: int) -> Counter[str]:
    """Request that many streams at once; return how many got each status, or were closed without one."""
    body = {"model": "m", "prompt": "x", "stream": True, "max_tokens": tokens, "pause": 0.1}
    content = json.dumps(body).encode()
    request = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    address = (proxy.client.base_url.host, proxy.client.base_url.port)
    found: Counter[str] = Counter()
    received: dict[socket.socket, bytes] = {}
    with selectors.DefaultSelector() as selector:
        for _ in range(clients):
            client = socket.create_connection(address, timeout=LIMIT_SECONDS)
            received[client] = b""
            selector.register(client, selectors.EVENT_READ)
            with suppress(OSError):  # Closed by the proxy already, as is found below.
                client.sendall(request + content)
        while received:
            ready = selector.select(LIMIT_SECONDS)
            assert ready, f"{len(received)} clients wait without a response"
            for key, _ in ready:
                client = key.fileobj
                assert isinstance(client, socket.socket)
                try:
                    piece = client.recv(65536)
                except ConnectionError:
                    piece = b""
                received[client] += piece
                content, whole = received[client], b"data: [DONE]\n\n" in received[client]
                if not piece or whole or content[9:12] not in (b"", b"200"):
                    found["200" if whole else content[9:12].decode() or "closed"] += 1
                    selector.unregister(client)
                    client.close()
                    del received[client]
    return found


@pytest.mark.anyio
async def test_lack_of_descriptors_is_not_a_fault_of_the_engines(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_connection = asyncio.BaseEventLoop.create_connection
    ports = {stub.port for stub in (*cluster.prefillers, *cluster.decoders)}
    tried: Counter[int] = Counter()

    async def fail(self: asyncio.BaseEventLoop, factory: Any, host: Any, port: Any, **options: Any) -> Any:
        if port not in ports:
            return await create_connection(self, factory, host, port, **options)
        tried[port] += 1
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.BaseEventLoop, "create_connection", fail)
        patch.setattr(Connections, "_reusable", lambda _: None)
        await cluster.wait_until(lambda: all(tried[port] > MAX_FAILED for port in ports))  # Health checks.
        for prompt in ("x", LONG):
            answer = await cluster.complete(prompt=prompt)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "this proxy has too many open files" in answer.json()["error"]["message"]
        assert [(engine.state, engine.failed) for engine in cluster.proxy.upstreams] == [(State.UP, 0)] * 2
    assert (await cluster.complete()).status_code == 200
    assert cluster.outcomes == {"refused": 2, "ok": 1}


def test_streams_beyond_the_limit_of_open_files_are_refused_at_once(start: Start) -> None:
    proxy, _, _ = start(0, 1, fork=False, files=FILES)
    for _ in range(2):
        found = outcomes(proxy, CLIENTS, 50)
        assert found["200"] >= FILES / 4
        assert found["429"] > 0
        assert found.total() == CLIENTS
        assert set(found) <= {"200", "429", "503", "closed"}
        # It may still be closing the connections of clients that have gone.
        proxy.wait_until(lambda: outcomes(proxy, FILES // 4, 2) == {"200": FILES // 4})
    log = proxy.log.read_text()
    assert "lower --max-requests" in log
    assert "Traceback" not in log
    assert "cannot be reached" not in log, "a lack of descriptors is blamed on the engine"
