"""A controller that does as a test says: for what a real one would not do at a test's word.

It speaks the same HTTP as the real one (:mod:`kvtier.controller.api`), from data that the test sets.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectSendStream
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from kvtier.controller import page
from kvtier.http import serving

GIB = 1 << 30
RESULT: dict[str, Any] = {"tokens": 0, "chunks": 0, "bytes": 0, "removed": 0, "reason": None}


def tier(name: str, kind: str, capacity: int | None, used: int, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "type": kind,
        "capacity": capacity,
        "used": used,
        "chunks": used >> 23,
        "available": True,
        "shared": capacity is None,
        "found": used >> 20,
    } | more


def instance(name: str, *tiers: dict[str, Any], **more: Any) -> dict[str, Any]:
    now = time.time()
    return {
        "instance": name,
        "state": "connected",
        "version": "0.1.0",
        "host": "gpu-01",
        "process": 4711,
        "peer": "10.0.0.11:8200",
        "transport": "tcp",
        "registered_at": now - 4000,
        "last_heartbeat": now,
        "in_step": True,
        "models": ["meta-llama/Llama-3.1-8B-Instruct"],
        "engines": ["engine-0"],
        "tiers": list(tiers or [tier("ram", "cpu", 20 * GIB, 9 * GIB)]),
        "looked_up": 10_000,
        "hit_rate": 0.8,
    } | more


def event(number: str, kind: str = "move", state: str = "running", **more: Any) -> dict[str, Any]:
    now = time.time()
    ended = state in {"done", "failed"}
    return {
        "event_id": number,
        "kind": kind,
        "state": state,
        "source": ["decode-1", "ram"] if kind in {"move", "copy"} else None,
        "target": ["decode-2", "ram"],
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "num_tokens": 2048,
        "chunks": 8,
        "chunks_done": 0,
        "bytes_done": 0,
        "created_at": now - 2,
        "started_at": None if state == "queued" else now - 2,
        "ended_at": now if ended else None,
        "error": "decode-2 · ram is full" if state == "failed" else None,
        "result": RESULT,
    } | more


class ScriptedController:
    """Its data may be changed at any time; the page learns of it by :meth:`tell`."""

    def __init__(self, token: str | None = None) -> None:
        self.token = token
        self.instances: list[dict[str, Any]] = []
        self.histories: dict[str, list[dict[str, Any]]] = {}
        self.events: list[dict[str, Any]] = []
        self.answers: dict[str, tuple[int, Any]] = {}
        """By path: the status and body of the answer to a POST."""
        self.asked: list[tuple[str, Any]] = []
        """The POSTs: path and body."""
        self.streams: set[MemoryObjectSendStream[bytes]] = set()
        self.refuse_streams: int | None = None
        """The status that streams are refused with, if any."""
        self.app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        self._add_routes()
        page.mount(self.app)

    def tell_instances(self) -> None:
        self.tell("instances", {"instances": self.instances})

    def tell_event(self, value: dict[str, Any]) -> None:
        self.events = [value, *(known for known in self.events if known["event_id"] != value["event_id"])]
        self.tell("event", value)

    def tell(self, name: str, value: Any) -> None:
        self.send(f"event: {name}\ndata: {json.dumps(value)}\n\n".encode())

    def send(self, text: bytes) -> None:
        for stream in self.streams:
            stream.send_nowait(text)

    def cut(self) -> None:
        """End every stream."""
        for stream in tuple(self.streams):
            stream.close()

    def _add_routes(self) -> None:
        @self.app.middleware("http")
        async def check(request: Request, go_on: Any) -> Any:
            public = request.url.path in {"/", "/healthz"} or request.url.path.startswith("/page/")
            given = request.headers.get("Authorization")
            if self.token and not public and given != f"Bearer {self.token}":
                return JSONResponse({"detail": "the token is missing or wrong"}, 401)
            return await go_on(request)

        @self.app.get("/instances")
        async def instances() -> Any:
            return {"instances": self.instances}

        @self.app.get("/instances/{name}")
        async def one(name: str) -> Any:
            for known in self.instances:
                if known["instance"] == name:
                    return known | {"history": self.histories.get(name, [])}
            return JSONResponse({"detail": f"there is no instance {name!r}", "known": []}, 404)

        @self.app.get("/events")
        async def events() -> Any:
            return {"events": self.events}

        @self.app.get("/healthz")
        async def healthz() -> Any:
            return {"status": "ok", "version": "0.1.0", "instances": len(self.instances)}

        @self.app.get("/stream")
        async def stream() -> Any:
            if self.refuse_streams:
                return JSONResponse({"detail": "not now"}, self.refuse_streams)
            return StreamingResponse(self._stream(), media_type="text/event-stream")

        @self.app.post("/{path}")
        async def post(path: str, request: Request) -> Any:
            self.asked.append((path, await request.json()))
            status, answer = self.answers[path]
            return JSONResponse(answer() if callable(answer) else answer, status)

    async def _stream(self) -> AsyncIterator[bytes]:
        send, receive = anyio.create_memory_object_stream[bytes](1000)
        self.streams.add(send)
        try:
            yield f"event: instances\ndata: {json.dumps({'instances': self.instances})}\n\n".encode()
            async for text in receive:
                yield text
        finally:
            self.streams.discard(send)
            send.close()
            receive.close()

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        """Serve on loopback until the block is left; the URL."""
        async with serving(self.app, ("127.0.0.1", port)) as (host, bound):
            try:
                yield f"http://{host}:{bound}"
            finally:
                self.cut()
