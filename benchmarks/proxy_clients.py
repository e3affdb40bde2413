"""Clients of :mod:`benchmarks.proxy_streams`: many streams from one process.

``python -m benchmarks.proxy_clients PORT STREAMS TOKENS PAUSE RATE`` starts ``RATE`` streams a second, or all
at once with 0. It prints ``open`` once every stream has its first byte or has failed, and its result at the
end. On a line with a number it drops that many streams without a word. With ``RATE`` -1 it starts all at
once, and reads no more than the beginning of each.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections import Counter
from typing import Any

from kvtier.concurrency.processes import raise_file_limit

END = b"0\r\n\r\n"
EVENT = re.compile(rb'"text":" (\d+)\.(\d+)"')
PROMPT = "word " * 300
"""Above ``--min-prefill``."""
CONNECT_SECONDS = 120.0


class Load:
    """All streams."""

    def __init__(self, port: int, streams: int, tokens: int, pause: float, rate: float) -> None:
        self._port, self._count, self._rate = port, streams, rate
        self.tokens, self.pause, self.unread = tokens, pause, rate < 0
        self.outcomes: Counter[str] = Counter()
        self.first_byte: list[float] = []
        self.errors: Counter[str] = Counter()
        self._streams: list[Stream] = []
        self._waiting = streams
        self._left = streams
        self._ended = asyncio.Event()

    async def run(self) -> dict[str, Any]:
        """Run all streams to their end."""
        began = time.monotonic()
        connects = [asyncio.create_task(self._connect(number)) for number in range(self._count)]
        commands = asyncio.create_task(self._read_commands())
        await self._ended.wait()
        await asyncio.gather(*connects)
        commands.cancel()
        return {
            "seconds": time.monotonic() - began,
            "outcomes": self.outcomes,
            "errors": self.errors,
            "first_byte": sorted(self.first_byte),
        }

    async def _connect(self, number: int) -> None:
        if self._rate > 0:
            await asyncio.sleep(number / self._rate)
        stream = Stream(self, number)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await loop.create_connection(lambda: stream, "127.0.0.1", self._port)
        except (OSError, TimeoutError) as error:
            self.errors[type(error).__name__] += 1
            self.note_answer(None)
            self.note_end("not connected")
        else:
            self._streams.append(stream)

    async def _read_commands(self) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            running = [stream for stream in self._streams if not stream.outcome]
            for stream in running[: int(line)]:
                stream.drop()

    def note_answer(self, seconds: float | None) -> None:
        """Note the first byte of a stream, or that it has failed before."""
        if seconds is not None:
            self.first_byte.append(seconds)
        self._waiting -= 1
        if not self._waiting:
            print("open", flush=True)

    def note_end(self, outcome: str) -> None:
        """Note the end of a stream."""
        self.outcomes[outcome] += 1
        self._left -= 1
        if not self._left:
            self._ended.set()


class Stream(asyncio.Protocol):
    """One stream on its own connection."""

    def __init__(self, load: Load, number: int) -> None:
        self._load, self._number = load, number
        self._received = bytearray()
        self._began = time.monotonic()
        self.outcome = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        request = {
            "model": "stub",
            "prompt": f"{self._number} {PROMPT}",
            "tag": self._number,
            "max_tokens": self._load.tokens,
            "pause": self._load.pause,
            "stream": True,
        }
        content = json.dumps(request).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        transport.write(head.encode() + content)

    def data_received(self, data: bytes) -> None:
        if not self._received:
            self._load.note_answer(time.monotonic() - self._began)
        self._received += data
        if self._load.unread:
            self._transport.pause_reading()
        elif self._received.endswith(END):
            expected = [(self._number, event) for event in range(self._load.tokens)]
            found = [(int(tag), int(number)) for tag, number in EVENT.findall(self._received)]
            self._end("right" if found == expected else "wrong")
        elif not self._received.startswith(b"HTTP/1.1 200"):
            status = self._received[9:12].decode()
            self._load.errors[bytes(self._received).partition(b'"message":"')[2][:120].decode()] += 1
            self._end(status)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._received and not self.outcome:
            self._load.note_answer(None)
        self._end("cut")

    def drop(self) -> None:
        """Close the connection, as a client that exits."""
        self._end("dropped")

    def _end(self, outcome: str) -> None:
        if not self.outcome:
            self.outcome = outcome
            self._load.note_end(outcome)
            self._transport.abort()


async def main() -> None:
    raise_file_limit()
    port, streams, tokens, pause, rate = map(float, sys.argv[1:])
    print(json.dumps(await Load(int(port), int(streams), int(tokens), pause, rate).run()), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
