"""Measure the cost of the proxy: the same requests through it and directly to the engine.

::

    python -m benchmarks.proxy
    python -m benchmarks.proxy --small

The engine is a stub that answers at once (:mod:`benchmarks.proxy_engine`). Engine, proxy (``kvtier proxy``)
and client are separate processes that share the cores of the machine: with two cores, the proxy has less than
one at full load.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import partial
from typing import NamedTuple

import anyio
from anyio.abc import SocketStream

from benchmarks.common import interleave, parse, show
from benchmarks.proxy_processes import engine_process, proxy_process
from kvtier.concurrency.processes import raise_file_limit

TOKENS = 50
"""Tokens per stream, for many concurrent streams."""
CONCURRENT = (100, 500, 1000)
PAUSE_SECONDS = 0.005
FILES = 16_384
END = b"0\r\n\r\n"
WRITTEN = re.compile(rb'"time":([\d.]+)}')
SHORT, LONG = "short", "word " * 2000


class LoadResult(NamedTuple):
    """Measurements of many concurrent streams."""

    seconds: float
    first_byte: Sequence[float]
    """Seconds until the first byte of each stream."""
    failed: int


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of the proxy.")
    options = parse(parser)
    raise_file_limit(FILES)
    with ExitStack() as stack:
        engine, prefiller = stack.enter_context(engine_process()), stack.enter_context(engine_process())
        proxy = stack.enter_context(proxy_process(engine, prefiller))
        anyio.run(measure, engine, proxy.port, options.small)


async def measure(engine: int, proxy: int, quick: bool) -> None:
    runs, number = (2, 5) if quick else (15, 100)
    await each_request(engine, proxy, runs, number)
    await each_token(engine, proxy, runs, 100 if quick else 2000)
    await latency(engine, proxy, 20 if quick else 400)
    await throughput(engine, proxy, (10,) if quick else CONCURRENT, 1 if quick else 3)


async def each_request(engine: int, proxy: int, runs: int, number: int) -> None:
    """Measure sequential requests on one connection, without streaming."""
    direct = partial(requests, engine, number, SHORT)
    through = partial(requests, proxy, number, SHORT)
    prefilled = partial(requests, proxy, number, LONG)
    seconds = await interleave({"direct": direct, "proxy": through, "prefilled": prefilled}, runs)
    each = {name: statistics.median(values) / number * 1e6 for name, values in seconds.items()}
    overhead = {name: value - each["direct"] for name, value in each.items()}
    show(
        "time per request, µs",
        ("way", "median", "over direct"),
        (
            ("direct", each["direct"], 0.0),
            ("through the proxy, decode instance only", each["proxy"], overhead["proxy"]),
            ("through the proxy, prefilled by another engine", each["prefilled"], overhead["prefilled"]),
        ),
    )


async def each_token(engine: int, proxy: int, runs: int, tokens: int) -> None:
    """Measure one stream of tokens without pauses."""
    direct, through = partial(stream, engine, tokens), partial(stream, proxy, tokens)
    seconds = await interleave({"direct": direct, "proxy": through}, runs)
    each = {name: statistics.median(values) / tokens * 1e6 for name, values in seconds.items()}
    rows = [
        ("direct", each["direct"], 0.0),
        ("through the proxy", each["proxy"], each["proxy"] - each["direct"]),
    ]
    show(f"time per token of a stream of {tokens}, µs", ("way", "median", "over direct"), rows)


async def latency(engine: int, proxy: int, tokens: int) -> None:
    """Measure the delay from the engine's write of a token to the client's read, in a slow stream."""
    rows = []
    for way, port in (("direct", engine), ("through the proxy", proxy)):
        delays = sorted(await stream(port, tokens, PAUSE_SECONDS))
        rows.append((way, statistics.median(delays) * 1e6, delays[int(len(delays) * 0.99)] * 1e6))
    pause = f"{PAUSE_SECONDS * 1000:g}"
    show(f"delay of a token, one every {pause} ms, µs", ("way", "median", "p99"), rows)


async def throughput(engine: int, proxy: int, concurrent: Sequence[int], rounds: int) -> None:
    """Measure concurrent streams, each on its own connection."""
    rows = []
    for count in concurrent:
        for way, port in (("direct", engine), ("through the proxy", proxy)):
            results = [await run_load(port, count) for _ in range(rounds)]
            seconds = statistics.median(result.seconds for result in results)
            first_byte = statistics.median(value for result in results for value in result.first_byte)
            failed = sum(result.failed for result in results)
            rows.append(
                (
                    way,
                    count,
                    round(count / seconds),
                    round(count * TOKENS / seconds),
                    first_byte * 1000,
                    failed,
                )
            )
    columns = ("way", "streams", "requests/s", "tokens/s", "first byte, ms", "failed")
    show(f"concurrent streams of {TOKENS} tokens each", columns, rows)


async def requests(port: int, number: int, prompt: str) -> None:
    """Send requests sequentially. All prompts differ, so that none is held already."""
    async with await anyio.connect_tcp("127.0.0.1", port) as connection:
        for _ in range(number):
            await connection.send(request_bytes(prompt=f"{time.monotonic_ns()} {prompt}", max_tokens=1))
            received = b""
            while b"choices" not in received or not received.endswith(b"}"):
                received += await connection.receive()


async def stream(port: int, tokens: int, pause: float = 0) -> list[float]:
    """Run one stream; return the delay of each token in seconds, if the stream has pauses."""
    delays, tail = [], b""
    async with await anyio.connect_tcp("127.0.0.1", port) as connection:
        await connection.send(request_bytes(prompt=SHORT, max_tokens=tokens, stream=True, pause=pause))
        while not tail.endswith(END):
            piece = await connection.receive()
            tail = tail[-len(END) :] + piece
            if pause:
                delays += [time.monotonic() - float(written) for written in WRITTEN.findall(piece)]
    return delays


async def run_load(port: int, count: int) -> LoadResult:
    """Start all streams at once, on connections that are already open."""
    async with AsyncExitStack() as stack:
        connections = []
        for _ in range(count):
            connection = await anyio.connect_tcp("127.0.0.1", port)
            connections.append(await stack.enter_async_context(connection))
        first_byte: list[float] = []
        complete: list[bool] = []
        started = time.monotonic()
        async with anyio.create_task_group() as tasks:
            for connection in connections:
                tasks.start_soon(_run_stream, connection, first_byte, complete)
        return LoadResult(time.monotonic() - started, first_byte, count - sum(complete))


async def _run_stream(connection: SocketStream, first_byte: list[float], complete: list[bool]) -> None:
    started = time.monotonic()
    await connection.send(request_bytes(prompt=SHORT, max_tokens=TOKENS, stream=True))
    received = bytearray(await connection.receive())
    first_byte.append(time.monotonic() - started)
    with suppress(anyio.EndOfStream):
        while not received.endswith(END):
            received += await connection.receive()
    complete.append(received.count(b"data: ") == TOKENS + 1)


def request_bytes(**fields: object) -> bytes:
    """Return an HTTP request for a completion."""
    content = json.dumps({"model": "stub", **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


if __name__ == "__main__":
    main()
