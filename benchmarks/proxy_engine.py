"""Stub engine for :mod:`benchmarks.proxy`, run as ``python -m benchmarks.proxy_engine``. Prints its port.

It answers at once with minimal work, because the proxy in front of it is measured. A stream has
``max_tokens`` events, each with its request's ``tag``, its number and the time at which it was written, and
``pause`` seconds between events. Other responses contain the number of open streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import ClassVar

BACKLOG = 4096
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n"
PLAIN, STREAM = HEAD % b"application/json", HEAD % b"text/event-stream"
STREAM += b"transfer-encoding: chunked\r\n\r\n"
EVENT = '{"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" %s.%d"}],"time":%.6f}'


class Engine(asyncio.Protocol):
    """One connection."""

    streams: ClassVar[set[Engine]] = set()
    """Connections with a stream that has not ended."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            start = head.find(b"content-length: ")
            length = int(head[start + 16 :].split(b"\r\n", 1)[0]) if start >= 0 else 0
            if len(self._received) < end + 4 + length:
                return
            body = self._received[end + 4 : end + 4 + length]
            self._received = self._received[end + 4 + length :]
            self._answer(json.loads(body) if body else {})

    def connection_lost(self, exc: Exception | None) -> None:
        self.streams.discard(self)

    def _answer(self, request: dict[str, object]) -> None:
        if request.get("stream"):
            self.streams.add(self)
            self._transport.write(STREAM)
            self._tag, self._tokens = str(request.get("tag", "")), int(str(request["max_tokens"]))
            self._stream(0, float(str(request.get("pause", 0))))
            return
        answer: dict[str, object] = {"data": [{"id": "stub"}], "choices": [{"index": 0, "text": " hello"}]}
        answer["streams"] = len(self.streams)
        params = request.get("kv_transfer_params")
        if isinstance(params, dict):
            result = {"peer": "127.0.0.1:1", "transferred": {"tokens": 2000, "from": "127.0.0.1:2"}}
            answer["kv_transfer_params"] = {"kvtier": result}
        content = json.dumps(answer).encode()
        self._transport.write(PLAIN + b"content-length: %d\r\n\r\n" % len(content) + content)

    def _stream(self, first: int, pause: float) -> None:
        for number in range(first, self._tokens):
            if self not in self.streams:
                return
            self._write(b"data: " + (EVENT % (self._tag, number, time.monotonic())).encode() + b"\n\n")
            if pause:
                asyncio.get_running_loop().call_later(pause, self._stream, number + 1, pause)
                return
        self._write(b"data: [DONE]\n\n")
        self._transport.write(b"0\r\n\r\n")
        self.streams.discard(self)

    def _write(self, piece: bytes) -> None:
        self._transport.write(b"%x\r\n%s\r\n" % (len(piece), piece))


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0, backlog=BACKLOG)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
