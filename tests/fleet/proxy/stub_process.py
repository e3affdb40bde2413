"""A stub engine in its own process, served by uvicorn like vLLM.

``python -m tests.fleet.proxy.stub_process PORT`` prints ``ready`` once it listens. A stream has
``max_tokens`` events, ``pause`` seconds apart.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from tests.fleet.proxy.stub import DONE, completion, event

app = FastAPI()


@app.get("/health")
async def health() -> Response:
    return Response()


@app.get("/v1/models")
async def models() -> dict[str, Any]:
    return {"object": "list", "data": [{"id": "m", "object": "model"}]}


@app.post("/v1/completions")
@app.post("/v1/chat/completions")
async def complete(request: Request) -> Response:
    body = await request.json()
    if body.get("stream"):
        return StreamingResponse(
            _events(body.get("max_tokens", 16), body.get("pause", 0)), media_type="text/event-stream"
        )
    params = (body.get("kv_transfer_params") or {}).get("kvtier")
    return JSONResponse(completion(params, "0.0.0.0:55555", 300))


async def _events(count: int, pause: float) -> AsyncIterator[bytes]:
    for number in range(count):
        yield event(number)
        await asyncio.sleep(pause)
    yield DONE


class Server(uvicorn.Server):
    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        print("ready", flush=True)


if __name__ == "__main__":
    Server(uvicorn.Config(app, port=int(sys.argv[1]), log_level="error")).run()
