"""A proxy with few file descriptors: it refuses what it cannot serve, and recovers."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from contextlib import suppress
from typing import Any

import anyio
import httpx
import pytest

from kvtier.fleet.proxy.checks import MAX_FAILED
from kvtier.fleet.proxy.connections import Connections
from kvtier.fleet.proxy.upstream import State
from tests.rigs.waiting import until

from .conftest import LONG, Cluster
from .proxy_process import ProxyProcess, Start, start
from .stub import DONE

__all__ = ["start"]  # A fixture.

FILES = 128
CLIENTS = 3 * FILES


def outcomes(proxy: ProxyProcess, clients: int, tokens: int) -> Counter[str]:
    """Request that many streams at once; return how many got each status, or were closed without one."""
    body = {"model": "m", "prompt": "x", "stream": True, "max_tokens": tokens, "pause": 0.1}
    found: Counter[str] = Counter()

    async def request(client: httpx.AsyncClient) -> None:
        status, content = "closed", b""
        with suppress(httpx.NetworkError, httpx.RemoteProtocolError):
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                status = str(answer.status_code)
                content = await answer.aread()
        found["cut off" if status == "200" and not content.endswith(DONE) else status] += 1

    async def request_all() -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(
                base_url=proxy.client.base_url, trust_env=False, verify=False, timeout=60, limits=limits
            ) as client,
            anyio.create_task_group() as tasks,
        ):
            for _ in range(clients):
                tasks.start_soon(request, client)

    anyio.run(request_all)
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
        await until(lambda: all(tried[port] > MAX_FAILED for port in ports))  # Health checks.
        answers = [await cluster.complete(prompt=prompt) for prompt in ("x", LONG)]
        for answer in (*answers, await cluster.client.get("/v1/models")):
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
