"""Stub engine for :mod:`benchmarks.proxy`, run as ``python -m benchmarks.proxy_engine``. Prints its port.

It answers at once with minimal work, because the proxy in front of it is measured. A stream has
``max_tokens`` events, each with the time at which it was written, and ``pause`` seconds between events.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

BACKLOG = 4096
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n"
PLAIN, STREAM = HEAD % b"application/json", HEAD % b"text/event-stream"
STREAM += b"transfer-encoding: chunked\r\n\r\n"
EVENT = '{"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" hello"}],"time":%.6f}'


class Engine(asyncio.Protocol):
    """One connection."""

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

    def _answer(self, request: dict[str, object]) -> None:
        if request.get("stream"):
            self._transport.write(STREAM)
            self._stream(int(str(request["max_tokens"])), float(str(request.get("pause", 0))))
            return
        answer: dict[str, object] = {"data": [{"id": "stub"}], "choices": [{"index": 0, "text": " hello"}]}
        params = request.get("kv_transfer_params")
        if isinstance(params, dict):
            result = {"peer": "127.0.0.1:1", "transferred": {"tokens": 2000, "from": "127.0.0.1:2"}}
            answer["kv_transfer_params"] = {"kvtier": result}
        content = json.dumps(answer).encode()
        self._transport.write(PLAIN + b"content-length: %d\r\n\r\n" % len(content) + content)

    def _stream(self, remaining: int, pause: float) -> None:
        while remaining:
            self._write(b"data: " + (EVENT % time.monotonic()).encode() + b"\n\n")
            remaining -= 1
            if pause:
                asyncio.get_running_loop().call_later(pause, self._stream, remaining, pause)
                return
        self._write(b"data: [DONE]\n\n")
        self._transport.write(b"0\r\n\r\n")

    def _write(self, piece: bytes) -> None:
        self._transport.write(b"%x\r\n%s\r\n" % (len(piece), piece))


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0, backlog=BACKLOG)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
