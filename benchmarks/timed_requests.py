"""Requests that are sent to vLLM at their times, of :mod:`benchmarks.serving` and ``replay_vllm``."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import anyio
import httpx

from kvtier.lab.demo.client import Completion, StreamReader

ANSWER_SECONDS = 600.0


class Answer(NamedTuple):
    """What vLLM answered."""

    late: float
    """Seconds after its time when the request was sent."""
    seconds: float
    """Until its end, from when it was sent."""
    completion: Completion


def http_client(url: str) -> httpx.AsyncClient:
    """Return a client for many requests at once. Close it."""
    # The server closes connections that were idle for some seconds, perhaps while a request is being sent.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS, trust_env=False, limits=limits)


async def send_at(http: httpx.AsyncClient, body: dict[str, Any], due: float) -> Answer:
    """Send a request of :meth:`kvtier.lab.demo.client.Client.request` at its time; return its answer.

    ``due``: as of ``time.perf_counter()``. Raises ``httpx.HTTPError`` and ``DemoFailed``.
    """
    await anyio.sleep(max(0.0, due - time.perf_counter()))
    sent, reader = time.perf_counter(), StreamReader()
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            reader.add(line)
    return Answer(sent - due, time.perf_counter() - sent, reader.completion({}))
