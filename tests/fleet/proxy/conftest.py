"""Stub engines behind a proxy, all in the test's event loop."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from kvtier.fleet.proxy.proxy import Proxy
from kvtier.fleet.proxy.serve import run_proxy
from kvtier.fleet.proxy.settings import ProxySettings
from kvtier.fleet.proxy.upstream import State
from tests.rigs.waiting import until

from .stub import Stub

LONG = "word " * 2000
PROMPT = {"model": "m", "prompt": LONG, "max_tokens": 5}


class Cluster:
    """A proxy, its engines, and a client of the proxy."""

    def __init__(self, proxy: Proxy, url: str, prefillers: list[Stub], decoders: list[Stub]) -> None:
        self.proxy = proxy
        self.url = url
        self.prefillers = prefillers
        self.decoders = decoders
        self.client = httpx.AsyncClient(base_url=url, trust_env=False, verify=False, timeout=30)

    async def complete(self, path: str = "/v1/completions", /, **fields: Any) -> httpx.Response:
        return await self.client.post(path, json={**PROMPT, **fields})

    @asynccontextmanager
    async def stream(self, **fields: Any) -> AsyncIterator[httpx.Response]:
        body = {**PROMPT, "stream": True, **fields}
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            yield response

    async def wait_until_ready(self) -> None:
        await until(lambda: all(engine.state == State.UP for engine in self.proxy.upstreams))

    @property
    def outcomes(self) -> dict[str, int]:
        return dict(self.proxy.statistics.requests)


def settings_of(**settings: Any) -> ProxySettings:
    return ProxySettings.of(**{"listen": "127.0.0.1:0", "check": "100ms", **settings})


@asynccontextmanager
async def running(prefillers: int = 1, decoders: int = 1, **settings: Any) -> AsyncIterator[Cluster]:
    """Run engines and a proxy that has marked them up. At the end the proxy must hold no resources."""
    async with AsyncExitStack() as stack:
        stubs = [await stack.enter_async_context(Stub().serving()) for _ in range(prefillers + decoders)]
        engines = {
            "prefill": [stub.url for stub in stubs[:prefillers]],
            "decode": [stub.url for stub in stubs[prefillers:]],
        }
        async with run_proxy(settings_of(**{**engines, **settings})) as ((host, port), proxy):
            cluster = Cluster(proxy, f"http://{host}:{port}", stubs[:prefillers], stubs[prefillers:])
            async with cluster.client:
                await cluster.wait_until_ready()
                yield cluster
            await until(lambda: not proxy.admission.in_flight)
            assert proxy.admission.held_bytes == 0
            assert [engine.load for engine in proxy.upstreams] == [0] * len(proxy.upstreams)
            await until(lambda: not any(engine.connections.used for engine in proxy.upstreams))
        for stub in stubs:  # The proxy must have closed all connections.
            await until(lambda stub=stub: not stub.connections)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """A proxy with one prefiller and one decoder."""
    async with running() as cluster:
        yield cluster


def events_of(content: bytes) -> list[Any]:
    """Parse the events of a stream."""
    events = [part.removeprefix("data: ") for part in content.decode().split("\n\n") if part]
    return [event if event == "[DONE]" else json.loads(event) for event in events]
