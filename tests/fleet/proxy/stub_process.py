"""A stub engine in its own process, served by uvicorn like vLLM.

``python -m tests.fleet.proxy.stub_process PORT`` prints ``ready`` once it listens. A stream has
``max_tokens`` events, ``pause`` seconds apart.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

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
    answer = {"id": "cmpl-1", "object": "text_completion", "choices": [{"index": 0, "text": " hello"}]}
    params = (body.get("kv_transfer_params") or {}).get("kvtier")
    if params is not None:
        result: dict[str, Any] = {"peer": "0.0.0.0:55555"}
        if "kv_transfer" in params:
            result["transferred"] = {"tokens": 300, "from": "127.0.0.1:55556"}
        answer["kv_transfer_params"] = {"kvtier": result}
    return JSONResponse(answer)


async def _events(count: int, pause: float) -> AsyncIterator[str]:
    for number in range(count):
        yield f"data: {json.dumps({'choices': [{'index': 0, 'text': f' {number}'}]})}\n\n"
        await asyncio.sleep(pause)
    yield "data: [DONE]\n\n"


class Server(uvicorn.Server):
    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        print("ready", flush=True)


if __name__ == "__main__":
    Server(uvicorn.Config(app, port=int(sys.argv[1]), log_level="error")).run()
