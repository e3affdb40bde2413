"""Reading of request bodies, limited in size, time and number, and parsed outside the event loop.

FastAPI would parse four million token ids in the event loop, which takes half a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import anyio
from fastapi import HTTPException
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from kvtier.concurrency.threads import WorkerThreads

MAX_BYTES = 64 << 20
INLINE_BYTES = 64 << 10
"""Bodies up to this size are parsed in the event loop: faster than a call in a worker thread."""
MAX_LARGE = 4
"""Larger bodies in memory at once. More wait."""
SECONDS = 60.0
"""Timeout for receiving a body."""

BodyT = TypeVar("BodyT", bound=BaseModel)


class Bodies:
    """Reads the request bodies of one application."""

    def __init__(self) -> None:
        self._executor = WorkerThreads(1)
        self._large = anyio.Semaphore(MAX_LARGE)

    def close(self) -> None:
        """Stop the worker thread."""
        self._executor.close()

    def of(self, kind: type[BodyT]) -> Callable[[Request], Any]:
        """Return a dependency that parses a request's body. It responds 400, 408, 413 or 422 on errors."""

        async def body(request: Request) -> BodyT:
            length = request.headers.get("content-length", "")
            if length.isdecimal() and int(length) <= INLINE_BYTES:
                return _parse(kind, await _read(request, INLINE_BYTES))
            async with self._large:
                content = await _read(request, MAX_BYTES)
                parsed: list[BodyT] = []
                await self._executor(lambda: parsed.append(_parse(kind, content)))
                return parsed[0]

        return body


def request_body_schema(kind: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """Return the OpenAPI description of an endpoint with such a body."""
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"required": required, "content": content}}


async def _read(request: Request, max_bytes: int) -> bytes:
    content = bytearray()
    try:
        with anyio.fail_after(SECONDS):
            async for piece in request.stream():
                content += piece
                if len(content) > max_bytes:
                    raise HTTPException(413, f"the body is longer than {max_bytes:,} bytes")
    except TimeoutError:
        raise HTTPException(408, f"the body was not received within {SECONDS:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the body was cut off") from None
    return bytes(content)


def _parse(kind: type[BodyT], content: bytes) -> BodyT:
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise HTTPException(
            422, describe_errors(error.errors(include_url=False, include_input=False))
        ) from None


def describe_errors(errors: Sequence[Any]) -> str:
    """Return the first three validation errors as one sentence."""
    parts = []
    for error in errors[:3]:
        where = ".".join(str(part) for part in error["loc"] if part != "body")
        message = error["msg"].removeprefix("Value error, ")
        parts.append(f"{where}: {message}" if where else message)
    return "; ".join(parts) + (f"; and {len(errors) - 3} more" if len(errors) > 3 else "")
