"""A stub engine in a process of its own, served by uvicorn as vLLM is.

``python -m tests.proxy.stub_process PORT`` says ``ready`` when it listens. A stream has
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
    asked = await request.json()
    if asked.get("stream"):
        return StreamingResponse(
            _events(asked.get("max_tokens", 16), asked.get("pause", 0)), media_type="text/event-stream"
        )
    answer = {"id": "cmpl-1", "object": "text_completion", "choices": [{"index": 0, "text": " hello"}]}
    ours = (asked.get("kv_transfer_params") or {}).get("kvtier")
    if ours is not None:
        said: dict[str, Any] = {"peer": "0.0.0.0:55555"}
        if "hand_over" in ours:
            said["handed_over"] = {"tokens": 300, "from": "127.0.0.1:55556"}
        answer["kv_transfer_params"] = {"kvtier": said}
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
