"""Reading the bodies of requests: bounded in size, time and number, and parsed where they block nobody.

FastAPI would parse four million token ids in the event loop, which takes half a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import anyio
from fastapi import HTTPException
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from kvtier.threads import WorkerThreads

MOST_BYTES = 64 << 20
SMALL_BYTES = 64 << 10
"""Bodies up to here are parsed where one stands: sooner done than handed to a thread."""
MOST_LARGE = 4
"""Larger bodies that are in memory at once. More wait for their turn."""
SECONDS = 60.0
"""That a body may take to arrive."""

BodyT = TypeVar("BodyT", bound=BaseModel)


class Bodies:
    """Reads all bodies of one application."""

    def __init__(self) -> None:
        self._hop = WorkerThreads(1)
        self._large = anyio.Semaphore(MOST_LARGE)

    def close(self) -> None:
        """End the threads."""
        self._hop.close()

    def of(self, kind: type[BodyT]) -> Callable[[Request], Any]:
        """A dependency that gives a request's body. Answers 408, 413 and 422 where there is none such."""

        async def body(request: Request) -> BodyT:
            length = request.headers.get("content-length", "")
            if length.isdecimal() and int(length) <= SMALL_BYTES:
                return _parse(kind, await _read(request, SMALL_BYTES))
            async with self._large:
                content = await _read(request, MOST_BYTES)
                parsed: list[BodyT] = []
                await self._hop(lambda: parsed.append(_parse(kind, content)))
                return parsed[0]

        return body


def described(kind: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """What OpenAPI says of an operation that has such a body."""
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"required": required, "content": content}}


async def _read(request: Request, most: int) -> bytes:
    content = bytearray()
    try:
        with anyio.fail_after(SECONDS):
            async for piece in request.stream():
                content += piece
                if len(content) > most:
                    raise HTTPException(413, f"the body is longer than {most:,} bytes")
    except TimeoutError:
        raise HTTPException(408, f"the body has not arrived within {SECONDS:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the body was cut off") from None
    return bytes(content)


def _parse(kind: type[BodyT], content: bytes) -> BodyT:
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise HTTPException(422, sentence(error.errors(include_url=False, include_input=False))) from None


def sentence(errors: Sequence[Any]) -> str:
    """What is wrong with a body, at most three things of it, in one sentence."""
    parts = []
    for error in errors[:3]:
        where = ".".join(str(part) for part in error["loc"] if part != "body")
        said = error["msg"].removeprefix("Value error, ")
        parts.append(f"{where}: {said}" if where else said)
    return "; ".join(parts) + (f"; and {len(errors) - 3} more" if len(errors) > 3 else "")
