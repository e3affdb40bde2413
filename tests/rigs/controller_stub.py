"""An HTTP server on loopback with scripted answers, for cases that a real controller cannot produce."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

EVENT: dict[str, Any] = {
    "event_id": "e1",
    "kind": "move",
    "state": "done",
    "source": ["a", "ram"],
    "target": ["b", "ram"],
    "model": "m",
    "num_tokens": 12,
    "chunks": 4,
    "chunks_done": 4,
    "bytes_done": 4096,
    "created_at": 1.7e9,
    "started_at": 1.7e9,
    "ended_at": 1.7e9 + 2,
    "error": None,
    "result": {"tokens": 12, "chunks": 4, "bytes": 4096, "removed": 4, "unpinned": 0, "reason": None},
}


class StubRequest(NamedTuple):
    """One received request."""

    call: str
    """``METHOD PATH``."""
    query: str
    body: Any
    authorization: str | None


class Raw(NamedTuple):
    """An answer that is not JSON."""

    content: bytes
    kind: str = "text/plain"


class Stub:
    """Answers each call with the next of its scripted answers, and repeats the last.

    Other calls are answered with 404. The answer ``None`` closes the connection without a response. A
    function returns the answer to a body.
    """

    def __init__(self, port: int = 0) -> None:
        self.requests: list[StubRequest] = []
        self._answers: dict[str, deque[tuple[int, Any]]] = {}
        self._server = _Server(("127.0.0.1", port), _handler(self))
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def respond(self, call: str, *answers: Any, status: int = 200) -> None:
        """Set the answers to a call; the last of ``answers`` is repeated."""
        self._answers[call] = deque((status, answer) for answer in answers)

    def answer(self, request: StubRequest) -> tuple[int, Any]:
        self.requests.append(request)
        answers = self._answers.get(request.call)
        if answers is None:
            return 404, {"detail": f"no answer is set for {request.call}", "known": []}
        status, answer = answers.popleft() if len(answers) > 1 else answers[0]
        return status, answer(request.body) if callable(answer) else answer

    @contextmanager
    def serving(self) -> Iterator[Stub]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


class _Server(ThreadingHTTPServer):
    request_queue_size = 64


def _handler(stub: Stub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: Any) -> None:
            parts = urlsplit(self.path)
            request = StubRequest(
                f"{self.command} {parts.path}", parts.query, body, self.headers["Authorization"]
            )
            status, answer = stub.answer(request)
            if answer is None:
                return
            raw = answer if isinstance(answer, Raw) else Raw(json.dumps(answer).encode(), "application/json")
            self.send_response(status)
            self.send_header("Content-Type", raw.kind)
            self.end_headers()
            self.wfile.write(raw.content)

        def log_message(self, *_: object) -> None:
            """Log nothing: standard error belongs to the command."""

    return Handler
