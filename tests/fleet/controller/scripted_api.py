"""A scripted controller, for cases that a real one cannot produce on demand.

It has the HTTP API of the real one (:mod:`kvtier.fleet.controller.answers`), with data that the test sets.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectSendStream
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from kvtier.fleet.controller.app import mount_page
from kvtier.http import serving

GIB = 1 << 30
RESULT: dict[str, Any] = {"tokens": 0, "chunks": 0, "bytes": 0, "removed": 0, "unpinned": 0, "reason": None}


def tier(name: str, kind: str, capacity: int | None, used: int, **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "type": kind,
        "capacity": capacity,
        "used": used,
        "chunks": used >> 23,
        "available": True,
        "shared": capacity is None,
        "found": used >> 20,
    } | fields


def instance(name: str, *tiers: dict[str, Any], **fields: Any) -> dict[str, Any]:
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
        "up_to_date": True,
        "models": ["meta-llama/Llama-3.1-8B-Instruct"],
        "engines": ["engine-0"],
        "tiers": list(tiers or [tier("ram", "cpu", 20 * GIB, 9 * GIB)]),
        "looked_up_tokens": 10_000,
        "hit_rate": 0.8,
        "pinned": 0,
        "what_if_at": None,
    } | fields


def event(number: str, kind: str = "move", state: str = "running", **fields: Any) -> dict[str, Any]:
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
    } | fields


def sample(time: float, **fields: Any) -> dict[str, Any]:
    """Return a sample of ten seconds in which half of 1,000 tokens were hit."""
    return {
        "time": time,
        "seconds": 10,
        "looked_up_tokens": 1000,
        "hit_tokens": {"ram": 500},
        "missed_tokens": {},
        "saved_seconds": 1.0,
        "gpu_seconds": 4.0,
        "moved_bytes": {"ssd → ram": 1 << 20},
        "outages": 0,
        "corrupt": 0,
        "failed": 0,
        "instances": 2,
        "used_bytes": {"ram": 9 * GIB},
        "capacity_bytes": {"ram": 20 * GIB},
    } | fields


def missed(tokens: int, reason: str, text: str = "", **fields: Any) -> dict[str, Any]:
    """Return a reason for tokens that were not hit."""
    return {
        "reason": reason,
        "tokens": tokens,
        "text": text or f"{tokens} {reason}",
        "advice": "do this",
    } | fields


def asked(request: str, instance: str, hits: Any, *misses: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return what became of a request of 1,000 tokens."""
    return {
        "instance": instance,
        "at": time.time(),
        "request": request,
        "engine": "vllm",
        "model": "llama",
        "tokens": 1000,
        "engine_tokens": 0,
        "hits": hits,
        "misses": list(misses),
        "waited": 0.1,
        "text": "",
    } | fields


def breaker(position: int, **fields: Any) -> dict[str, Any]:
    """Return a place at which three of four prompts part."""
    return {
        "position": position,
        "parted": 75,
        "passed": 100,
        "again": 60,
        "tokens_per_day": 2e6,
        "seconds_per_day": 1860.0,
        "place": "ab",
        "text": "",
    } | fields


def what_if(name: str, basis: list[str], findings: list[str]) -> dict[str, Any]:
    """Return an estimate for one tier, whose hit rate grows with its capacity."""
    points = [{"capacity_bytes": n * GIB, "hit_rate": n / 100} for n in (10, 20, 40, 80)]
    curve = {"tier": name, "policy": "lru", "capacity_bytes": 20 * GIB, "hit_rate": 0.2, "points": points}
    return {"what_if_at": time.time(), "basis": basis, "findings": findings, "report": {"tiers": [curve]}}


class ScriptedAPI:
    """The test may change its data at any time; :meth:`publish` sends it to the page."""

    def __init__(self, token: str | None = None) -> None:
        self.token = token
        self.instances: list[dict[str, Any]] = []
        self.histories: dict[str, list[dict[str, Any]]] = {}
        """Samples by instance; of the whole fleet by an empty name."""
        self.totals: dict[str, dict[str, dict[str, Any]]] = {"model": {}, "tenant": {}}
        self.lists: dict[str, Any] = {
            "peers": {"peers": [], "total": 0},
            "pins": {"pins": [], "total": 0},
            "whatif": {"improvements": [], "estimating": 0},
            "findings": {"findings": []},
            "about": {"version": "0.1.0", "grafana": None},
            "why": {"requests": [], "breakers": [], "unanswered": {}},
        }
        self.spans_asked: list[str] = []
        self.what_ifs: dict[str, dict[str, Any]] = {}
        """The response to a request for an estimate, by instance."""
        self.what_ifs_asked: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.answers: dict[str, tuple[int, Any]] = {"why": (200, {"prompts": [], "unanswered": {}})}
        """Status and body of the response to a POST, by path."""
        self.requests: list[tuple[str, Any]] = []
        """Path and body of each POST."""
        self.streams: set[MemoryObjectSendStream[bytes]] = set()
        self.refuse_streams: int | None = None
        """The status with which streams are refused, if any."""
        self.app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        self._add_routes()
        mount_page(self.app)

    def publish_instances(self) -> None:
        self.publish("instances", {"instances": self.instances})

    def publish_event(self, value: dict[str, Any]) -> None:
        self.events = [value, *(known for known in self.events if known["event_id"] != value["event_id"])]
        self.publish("event", value)

    def publish(self, name: str, value: Any) -> None:
        self.send(f"event: {name}\ndata: {json.dumps(value)}\n\n".encode())

    def send(self, text: bytes) -> None:
        for stream in self.streams:
            stream.send_nowait(text)

    def cut_streams(self) -> None:
        """End every stream."""
        for stream in tuple(self.streams):
            stream.close()

    def _add_routes(self) -> None:
        @self.app.middleware("http")
        async def check(request: Request, call_next: Any) -> Any:
            public = request.url.path in {"/", "/healthz"} or request.url.path.startswith("/page/")
            authorization = request.headers.get("Authorization")
            if self.token and not public and authorization != f"Bearer {self.token}":
                return JSONResponse({"detail": "the token is missing or wrong"}, 401)
            return await call_next(request)

        @self.app.get("/instances")
        async def instances() -> Any:
            return {"instances": self.instances}

        @self.app.get("/instances/{name}")
        async def one_instance(name: str) -> Any:
            for known in self.instances:
                if known["instance"] == name:
                    return known | {"history": []}
            return JSONResponse({"detail": f"there is no instance {name!r}", "known": []}, 404)

        @self.app.get("/instances/{name}/whatif")
        async def what_if(name: str) -> Any:
            self.what_ifs_asked.append(name)
            if name in self.what_ifs:
                return self.what_ifs[name]
            return JSONResponse({"detail": f"there is no instance {name!r}", "known": []}, 404)

        @self.app.get("/history")
        async def history(span: str = "hour", of: str = "fleet", name: str = "", total: bool = False) -> Any:
            self.spans_asked.append(span)
            found = {name: self.histories[name]} if name in self.histories else {}
            if total:
                found = {name: [sample] for name, sample in self.totals[of].items()}
            return {"span": span, "step": {"hour": 10, "day": 600, "week": 3600}[span], "history": found}

        @self.app.get("/events")
        async def events() -> Any:
            return {"events": self.events}

        for path in self.lists:
            self.app.get(f"/{path}")(partial(self._list, path))

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
            if path != "why":  # Asked with each lookup.
                self.requests.append((path, await request.json()))
            status, answer = self.answers[path]
            return JSONResponse(answer() if callable(answer) else answer, status)

    async def _list(self, path: str) -> Any:
        return self.lists[path]

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
        """Serve on loopback for the duration of the block, and yield the URL."""
        async with serving(self.app, f"127.0.0.1:{port}") as (host, bound):
            try:
                yield f"http://{host}:{bound}"
            finally:
                self.cut_streams()
