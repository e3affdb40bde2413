"""Reading of request bodies: limited in size, time and number, and decoded without blocking the event loop.

Four million token ids take half a second to decode. So they are decoded while they arrive, in slices between
which the event loop serves other clients; the rest of a body is small. A body is refused at its first error.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import anyio
import msgspec
from fastapi import HTTPException
from msgspec.structs import replace
from starlette.requests import ClientDisconnect, Request

from kvtier.fleet.controller.api import MAX_TOKENS, PromptBody, TokenID

MAX_BYTES = 64 << 20
"""Of a body with token ids."""
MAX_PROMPT_BODY_BYTES = 8 << 20
"""Of a body with a prompt as text, of which JSON may escape every character. Decoding takes up to 20 ms."""
MAX_SMALL_BYTES = 64 << 10
"""Of a body without its token ids or its prompt."""
SLICE_BYTES = 32 << 10
"""Of token ids, decoded without a pause. Takes up to 0.4 ms."""
MAX_LARGE = 4
"""Larger bodies in memory at once. More wait."""
SECONDS = 60.0
"""Timeout for receiving a body."""
MAX_MESSAGE_CHARACTERS = 200
"""Of an error, which may have the name of an unknown field."""

_BEGIN_OF_TOKENS = re.compile(rb'"tokens"[ \t\r\n]*:[ \t\r\n]*\[')

BodyT = TypeVar("BodyT", bound=PromptBody)
Decoder: TypeAlias = Callable[[bytes | bytearray], BodyT]
_decode_ids = msgspec.json.Decoder(list[TokenID]).decode


class Bodies:
    """Reads the request bodies of one application."""

    def __init__(self) -> None:
        self._large = anyio.Semaphore(MAX_LARGE)
        self._turn = anyio.Lock()
        """Held while a slice is decoded: however many bodies arrive, the event loop waits for one slice."""

    def of(self, kind: type[BodyT]) -> Callable[[Request], Any]:
        """Return a dependency that decodes a request's body. It responds 400, 408, 413 or 422 on errors."""
        decode = msgspec.json.Decoder(kind).decode

        async def body(request: Request) -> BodyT:
            pieces = _pieces(request)
            content = await _read(pieces, bytearray(), MAX_SMALL_BYTES)
            if len(content) <= MAX_SMALL_BYTES:
                return _decoded(decode, content)
            async with self._large:
                tokens = _BEGIN_OF_TOKENS.search(content, 0, MAX_SMALL_BYTES)
                if tokens is not None:
                    return await self._with_tokens(decode, content, tokens.end(), pieces)
                limit = MAX_PROMPT_BODY_BYTES if b'"prompt"' in content else MAX_SMALL_BYTES
                content = await _read(pieces, content, limit)
                _check_length(len(content), limit)
                async with self._turn:
                    return _decoded(decode, content)

        return body

    async def _with_tokens(
        self,
        decode: Decoder[BodyT],
        content: bytearray,
        begin: int,
        pieces: AsyncIterator[bytes],
    ) -> BodyT:
        """Decode a body whose token ids begin at ``begin``: the ids first, then the body without them."""
        ids = array("I")
        received, content, rest = len(content), content[:begin], content[begin:]
        searched = 0
        while (end := rest.find(b"]", searched)) < 0:
            rest = await self._decode_ids(ids, rest)
            searched = len(rest)
            piece = await anext(pieces, b"")
            if not piece:
                raise HTTPException(422, "the body is not valid JSON: it ends within `tokens`")
            received += len(piece)
            _check_length(received, MAX_BYTES)
            rest += piece
        rest, content = await self._decode_ids(ids, rest[:end]), content + rest[end:]
        if rest.strip() or ids:
            _append(ids, rest)
        content = await _read(pieces, content, MAX_SMALL_BYTES)
        _check_length(len(content), MAX_SMALL_BYTES)
        body = _decoded(decode, content)
        if body.tokens:
            raise HTTPException(422, "the body has `tokens` twice")
        return replace(body, tokens=ids)

    async def _decode_ids(self, ids: array[int], text: bytearray) -> bytearray:
        """Decode all ids that are followed by a comma. Return the rest."""
        begin = 0
        while (end := text.rfind(b",", begin, begin + SLICE_BYTES)) >= 0:
            async with self._turn:
                _append(ids, text[begin:end])
            begin = end + 1
        if len(text) - begin > SLICE_BYTES:
            raise HTTPException(422, f"tokens[{len(ids)}]: Expected `int`")
        return text[begin:]


def _append(ids: array[int], text: bytearray) -> None:
    try:
        decoded = _decode_ids(b"[%b]" % bytes(text))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HTTPException(422, _describe(error, len(ids))) from None
    if not decoded:
        raise HTTPException(422, f"the body is not valid JSON: tokens[{len(ids)}] is missing")
    ids.fromlist(decoded)
    if len(ids) > MAX_TOKENS:
        raise HTTPException(422, f"tokens: Expected at most {MAX_TOKENS:,} token ids")


def request_body_schema(kind: type[PromptBody], *, required: bool = True) -> dict[str, Any]:
    """Return the OpenAPI description of an endpoint with such a body."""
    _, schemas = msgspec.json.schema_components([kind])
    content = {"application/json": {"schema": schemas[kind.__name__]}}
    return {"requestBody": {"required": required, "content": content}}


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    deadline = anyio.current_time() + SECONDS
    stream = aiter(request.stream())
    while True:
        try:
            with anyio.fail_after(deadline - anyio.current_time()):
                piece = await anext(stream, None)
        except TimeoutError:
            raise HTTPException(408, f"the body was not received within {SECONDS:g} s") from None
        except ClientDisconnect:
            raise HTTPException(400, "the body was cut off") from None
        if piece is None:
            return
        if piece:
            yield piece


async def _read(pieces: AsyncIterator[bytes], content: bytearray, enough: int) -> bytearray:
    """Append to ``content`` what is received, up to the end or to the first piece beyond ``enough`` bytes."""
    while len(content) <= enough and (piece := await anext(pieces, b"")):
        content += piece
    return content


def _check_length(length: int, limit: int) -> None:
    if length > limit:
        raise HTTPException(413, f"the body is longer than {limit:,} bytes")


def _decoded(decode: Decoder[BodyT], content: bytearray) -> BodyT:
    try:
        return decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HTTPException(422, _describe(error)) from None


def _describe(error: Exception, decoded_ids: int = 0) -> str:
    """Return an error as one sentence. Its index is that of a slice, after ``decoded_ids`` ids."""
    if not isinstance(error, msgspec.ValidationError):
        return f"the body is not valid JSON: {error}"
    message, _, where = str(error).partition(" - at `$")
    if where.startswith("["):
        where = f".tokens[{decoded_ids + int(where[1:-2])}]`"
    return f"{where[1:-1]}: {message}" if where else message[:MAX_MESSAGE_CHARACTERS]


def describe_errors(errors: Sequence[Any]) -> str:
    """Return the first three validation errors as one sentence."""
    parts = []
    for error in errors[:3]:
        where = ".".join(str(part) for part in error["loc"] if part != "body")
        message = error["msg"].removeprefix("Value error, ")
        parts.append(f"{where}: {message}" if where else message)
    return "; ".join(parts) + (f"; and {len(errors) - 3} more" if len(errors) > 3 else "")
