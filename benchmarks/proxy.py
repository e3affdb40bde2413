"""What the proxy costs, against the same requests sent to the engine directly.

::

    python -m benchmarks.proxy
    python -m benchmarks.proxy --quick

The engine is a stub that answers at once (:mod:`benchmarks.proxy_engine`). Engine, proxy (``kvtier proxy``)
and client are processes of their own that share the machine's cores: with two of them, at full load, the
proxy has less than one.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from functools import partial
from typing import NamedTuple

import anyio
from anyio.abc import SocketStream

from benchmarks.common import show, take_turns

TOKENS = 50
"""In each of many streams."""
CONCURRENT = (100, 500, 1000)
PAUSE_SECONDS = 0.005
FILES = 16_384
END = b"0\r\n\r\n"
WRITTEN = re.compile(rb'"time":([\d.]+)}')
SHORT, LONG = "short", "word " * 2000


class Load(NamedTuple):
    """What came of many streams at once."""

    seconds: float
    first: Sequence[float]
    """Seconds until the first byte, of each."""
    failed: int


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What the proxy costs.")
    parser.add_argument("--quick", action="store_true", help="see that it runs: the figures mean nothing")
    options = parser.parse_args(arguments)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    with ExitStack() as stack:
        engine, prefiller = stack.enter_context(engine_process()), stack.enter_context(engine_process())
        proxy = stack.enter_context(proxy_process(engine, prefiller))
        anyio.run(measure, engine, proxy, options.quick)


@contextmanager
def engine_process() -> Iterator[int]:
    """A stub engine, and its port."""
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.proxy_engine"], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


@contextmanager
def proxy_process(engine: int, prefiller: int) -> Iterator[int]:
    """A proxy before both, and its port."""
    command = [sys.executable, "-m", "kvtier", "proxy", "--listen", "127.0.0.1:0", "--most-requests", "2000"]
    command += ["--decode", f"http://127.0.0.1:{engine}", "--prefill", f"http://127.0.0.1:{prefiller}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        port, up = 0, 0
        while not (port and up == 2):
            line = process.stderr.readline()
            assert line, "the proxy has not started"
            found = re.search(r"the proxy is at http://127.0.0.1:(\d+)", line)
            port = int(found[1]) if found else port
            up += " is up" in line
        yield port
    finally:
        process.kill()
        process.communicate()


async def measure(engine: int, proxy: int, quick: bool) -> None:
    runs, number = (2, 5) if quick else (15, 100)
    await each_request(engine, proxy, runs, number)
    await each_token(engine, proxy, runs, 100 if quick else 2000)
    await latency(engine, proxy, 20 if quick else 400)
    await throughput(engine, proxy, (10,) if quick else CONCURRENT, 1 if quick else 3)


async def each_request(engine: int, proxy: int, runs: int, number: int) -> None:
    """One after the other on one connection, the answers no streams."""
    direct = partial(requests, engine, number, SHORT)
    through = partial(requests, proxy, number, SHORT)
    prefilled = partial(requests, proxy, number, LONG)
    seconds = await take_turns({"direct": direct, "proxy": through, "prefilled": prefilled}, runs)
    each = {name: statistics.median(values) / number * 1e6 for name, values in seconds.items()}
    more = {name: value - each["direct"] for name, value in each.items()}
    show(
        "a request, µs",
        ("way", "median", "over direct"),
        (
            ("direct", each["direct"], 0.0),
            ("through the proxy, to the decoder alone", each["proxy"], more["proxy"]),
            ("through the proxy, prefilled at another engine", each["prefilled"], more["prefilled"]),
        ),
    )


async def each_token(engine: int, proxy: int, runs: int, tokens: int) -> None:
    """One stream whose tokens come as fast as they can."""
    direct, through = partial(stream, engine, tokens), partial(stream, proxy, tokens)
    seconds = await take_turns({"direct": direct, "proxy": through}, runs)
    each = {name: statistics.median(values) / tokens * 1e6 for name, values in seconds.items()}
    rows = [
        ("direct", each["direct"], 0.0),
        ("through the proxy", each["proxy"], each["proxy"] - each["direct"]),
    ]
    show(f"a token of a stream of {tokens}, µs", ("way", "median", "over direct"), rows)


async def latency(engine: int, proxy: int, tokens: int) -> None:
    """How long a token is on its way, from the engine's write to the client's read, in a calm stream."""
    rows = []
    for way, port in (("direct", engine), ("through the proxy", proxy)):
        late = sorted(await stream(port, tokens, PAUSE_SECONDS))
        rows.append((way, statistics.median(late) * 1e6, late[int(len(late) * 0.99)] * 1e6))
    pause = f"{PAUSE_SECONDS * 1000:g}"
    show(f"a token's way, one each {pause} ms, µs", ("way", "median", "99 %"), rows)


async def throughput(engine: int, proxy: int, concurrent: Sequence[int], rounds: int) -> None:
    """So many streams at once, each on a connection of its own, again and again."""
    rows = []
    for count in concurrent:
        for way, port in (("direct", engine), ("through the proxy", proxy)):
            loads = [await load(port, count) for _ in range(rounds)]
            seconds = statistics.median(one.seconds for one in loads)
            first = statistics.median(value for one in loads for value in one.first)
            failed = sum(one.failed for one in loads)
            rows.append(
                (way, count, round(count / seconds), round(count * TOKENS / seconds), first * 1000, failed)
            )
    columns = ("way", "streams", "requests/s", "tokens/s", "first byte, ms", "failed")
    show(f"many streams at once, {TOKENS} tokens each", columns, rows)


async def requests(port: int, number: int, prompt: str) -> None:
    """One after the other. Each prompt is another, so that none is held already."""
    async with await anyio.connect_tcp("127.0.0.1", port) as connection:
        for _ in range(number):
            await connection.send(asked(prompt=f"{time.monotonic_ns()} {prompt}", max_tokens=1))
            received = b""
            while b"choices" not in received or not received.endswith(b"}"):
                received += await connection.receive()


async def stream(port: int, tokens: int, pause: float = 0) -> list[float]:
    """One stream; how many seconds each of its tokens was on its way."""
    late, rest = [], b""
    async with await anyio.connect_tcp("127.0.0.1", port) as connection:
        await connection.send(asked(prompt=SHORT, max_tokens=tokens, stream=True, pause=pause))
        while not rest.endswith(END):
            piece = await connection.receive()
            rest = rest[-len(END) :] + piece
            if pause:
                late += [time.monotonic() - float(written) for written in WRITTEN.findall(piece)]
    return late


async def load(port: int, count: int) -> Load:
    """Streams that all begin at once, on connections that are there already."""
    async with AsyncExitStack() as stack:
        connections = []
        for _ in range(count):
            connection = await anyio.connect_tcp("127.0.0.1", port)
            connections.append(await stack.enter_async_context(connection))
        first: list[float] = []
        complete: list[bool] = []
        started = time.monotonic()
        async with anyio.create_task_group() as tasks:
            for connection in connections:
                tasks.start_soon(_one_of_many, connection, first, complete)
        return Load(time.monotonic() - started, first, count - sum(complete))


async def _one_of_many(connection: SocketStream, first: list[float], complete: list[bool]) -> None:
    begun = time.monotonic()
    await connection.send(asked(prompt=SHORT, max_tokens=TOKENS, stream=True))
    received = bytearray(await connection.receive())
    first.append(time.monotonic() - begun)
    with suppress(anyio.EndOfStream):
        while not received.endswith(END):
            received += await connection.receive()
    complete.append(received.count(b"data: ") == TOKENS + 1)


def asked(**fields: object) -> bytes:
    """A request."""
    content = json.dumps({"model": "stub", **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


if __name__ == "__main__":
    main()
