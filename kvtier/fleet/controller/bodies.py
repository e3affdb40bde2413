"""Request bodies: their fields, and how they are read and decoded without blocking the event loop.

A body is limited in size, time and number. Four million token ids take half a second to decode. So they are
decoded while they arrive, in slices between which the event loop serves other clients; the rest of a body is
small. A body is refused at its first error.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

import anyio
import msgspec
from fastapi import HTTPException
from msgspec import Meta
from msgspec.structs import replace
from starlette.requests import ClientDisconnect, Request

from kvtier.fleet.member.protocol import TokenID
from kvtier.units import Duration, parse_duration

MAX_TOKENS = 4_000_000
MAX_PROMPT_BYTES = (4 << 20) - 4096
"""The text is sent to the tokenizing instance in one message, which is limited to 4 MiB."""
MAX_NAME_CHARACTERS = 1024
MAX_BODY_BYTES = 64 << 20
"""Of a body with token ids."""
MAX_PROMPT_BODY_BYTES = 8 << 20
"""Of a body with a prompt as text, of which JSON may escape every character. Decoding takes up to 20 ms."""
MAX_SMALL_BYTES = 64 << 10
"""Of a body without its token ids or its prompt."""
SLICE_BYTES = 32 << 10
"""Of token ids, decoded without a pause. Takes up to 0.4 ms."""
MAX_LARGE = 4
"""Larger bodies in memory at once. More wait."""
RECEIVE_SECONDS = 60.0
"""Timeout for receiving a body."""
MAX_MESSAGE_CHARACTERS = 200
"""Of an error, which may have the name of an unknown field."""

_TOKENS = [128000, 849, 21435, 279, 26431]

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
PositionBody = tuple[Name, Name]
_Duration = float | str | None
_DURATION = Duration.__metadata__[-1].json_schema  # type: ignore[attr-defined]


def _field(description: str, example: object, schema: dict[str, Any] | None = None) -> Meta:
    return Meta(description=description, examples=[example], extra_json_schema=schema)


_Instance = Annotated[Name, _field("The instance's `controller.instance_id`.", "instance-1")]
_BEGIN_OF_TOKENS = re.compile(rb'"tokens"[ \t\r\n]*:[ \t\r\n]*\[')
decode_ids = msgspec.json.Decoder(list[TokenID]).decode


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all request bodies: decoding stops at the first error, also of unknown fields."""


class PromptBody(_Body, frozen=True, kw_only=True):
    """A prompt, given as token ids or as text."""

    tokens: Annotated[
        Annotated[Sequence[TokenID], Meta(max_length=MAX_TOKENS)] | None,
        _field(f"The prompt's token ids, at most {MAX_TOKENS:,}. Required unless `prompt` is set.", _TOKENS),
    ] = None
    prompt: Annotated[
        str | None,
        _field(
            f"The prompt as text, at most {MAX_PROMPT_BYTES:,} bytes. An instance that serves the model "
            "tokenizes it. Chat templates are not applied.",
            "Explain the significance of KV cache in language models.",
        ),
    ] = None
    messages: Annotated[
        list[dict[str, Any]] | None,
        _field(
            "The prompt as chat messages, as sent to the engine. An instance that serves the model applies "
            "its chat template.",
            [{"role": "user", "content": "Hello"}],
        ),
    ] = None
    model: Annotated[
        Name | None,
        _field(
            "The model's name, as in requests to the engine. Default: the only model that the named "
            "instance serves, or else the only model of all instances.",
            "meta-llama/Llama-3.1-8B-Instruct",
        ),
    ] = None
    salt: Annotated[
        Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)] | None,
        _field(
            "The `cache_salt` of the requests, if any. Chunks of different salts are separate.", "tenant-1"
        ),
    ] = None
    _prompt_optional: ClassVar[bool] = False

    def __post_init__(self) -> None:
        given = 3 - [self.tokens, self.prompt, self.messages].count(None)
        if not (given or self._prompt_optional):
            raise ValueError("set `tokens`, `prompt` or `messages`")
        if given > 1:
            raise ValueError("set only one of `tokens`, `prompt` and `messages`")
        if self.prompt is not None and len(self.prompt.encode()) > MAX_PROMPT_BYTES:
            raise ValueError(f"`prompt` is longer than {MAX_PROMPT_BYTES:,} bytes: send `tokens` instead")

    @property
    def has_prompt(self) -> bool:
        """Whether there is a prompt, in any form."""
        return not (self.tokens is None and self.prompt is None and self.messages is None)


class LookupBody(PromptBody, frozen=True, kw_only=True):
    """Find the tiers that hold a prefix of a prompt."""


class WhyBody(PromptBody, frozen=True, kw_only=True):
    """Find why tokens of a prompt are not held."""


class MoveBody(PromptBody, frozen=True, kw_only=True):
    """Move a prompt's chunks to another tier, of the same or another instance."""

    old_position: Annotated[
        PositionBody,
        _field("The source: an instance and the name or type of one of its tiers.", ["instance-1", "cpu"]),
    ]
    new_position: Annotated[
        PositionBody,
        _field("The target: an instance and the name or type of one of its tiers.", ["instance-2", "cpu"]),
    ]
    copy: Annotated[
        bool,
        Meta(
            description=(
                "Keep the chunks at the source. By default, each is removed from the source once the target "
                "has confirmed it."
            )
        ),
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.old_position == self.new_position:
            raise ValueError("`old_position` and `new_position` are the same")


class TierBody(PromptBody, frozen=True, kw_only=True):
    """Base of the bodies about one tier."""

    instance: _Instance
    tier: Annotated[
        Name, _field("The name of one of its tiers, or a type that only one of its tiers has.", "cpu")
    ]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seconds()  # Else an invalid duration would be found after the body is accepted.

    def seconds(self) -> float | None:
        """Return the duration of the operation, if it has one. Raises ``ValueError`` if it is invalid."""
        return None


class PrefetchBody(TierBody, frozen=True, kw_only=True):
    """Prefetch a prompt's chunks into a tier: from other tiers, shared pools or another instance."""

    deadline: Annotated[
        _Duration,
        _field(
            "Maximum duration. Chunks that have arrived by then stay. Default: unlimited.", "5s", _DURATION
        ),
    ] = None

    def seconds(self) -> float | None:
        """Return the deadline in seconds."""
        return _positive("deadline", self.deadline)


class PinBody(TierBody, frozen=True, kw_only=True):
    """Protect a prompt's chunks from eviction."""

    ttl: Annotated[
        _Duration, _field("Duration of the pin. Default: until it is unpinned.", "10m", _DURATION)
    ] = None

    def seconds(self) -> float | None:
        """Return the duration in seconds."""
        return _positive("ttl", self.ttl)


class UnpinBody(TierBody, frozen=True, kw_only=True):
    """Allow a prompt's chunks to be evicted again."""


class ClearBody(PromptBody, frozen=True, kw_only=True):
    """Remove a prompt's chunks, or all chunks, from one tier or all tiers of an instance."""

    instance: _Instance
    tier: Annotated[
        Name | None,
        _field("The name or type of the tier to clear. Default: all tiers of the instance.", "cpu"),
    ] = None
    _prompt_optional: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.has_prompt and (self.model or self.salt):
            raise ValueError("`model` and `salt` require a prompt: set `tokens` or `prompt` as well")


def _positive(name: str, value: float | str | None) -> float | None:
    if value is None:
        return None
    try:
        seconds = parse_duration(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if not seconds:
        raise ValueError(f"{name}: it must be greater than 0")
    return seconds


BodyT = TypeVar("BodyT", bound=PromptBody)
Decoder: TypeAlias = Callable[[bytes | bytearray], BodyT]


class Bodies:
    """Reads the request bodies of one application."""

    def __init__(self) -> None:
        self._large = anyio.Semaphore(MAX_LARGE)
        self._turn = anyio.Lock()
        """Held while a slice is decoded: however many bodies arrive, the event loop waits for one slice."""

    def of(
        self, kind: type[BodyT], decoder: Callable[[type[BodyT]], Decoder[BodyT]] | None = None
    ) -> Callable[[Request], Any]:
        """Return a dependency that decodes a request's body. It responds 400, 408, 413 or 422 on errors."""
        decode = msgspec.json.Decoder(kind).decode if decoder is None else decoder(kind)

        async def body(request: Request) -> BodyT:
            pieces = _pieces(request)
            content = await _read(pieces, bytearray(), MAX_SMALL_BYTES)
            if len(content) <= MAX_SMALL_BYTES:
                return _decoded(decode, content)
            async with self._large:
                tokens = _BEGIN_OF_TOKENS.search(content, 0, MAX_SMALL_BYTES)
                if tokens is not None:
                    return await self._with_tokens(decode, content, tokens.end(), pieces)
                is_text = b'"prompt"' in content or b'"messages"' in content
                limit = MAX_PROMPT_BODY_BYTES if is_text else MAX_SMALL_BYTES
                content = await _read(pieces, content, limit)
                _check_length(len(content), limit)
                async with self._turn:
                    return _decoded(decode, content)

        return body

    async def _with_tokens(
        self, decode: Decoder[BodyT], content: bytearray, begin: int, pieces: AsyncIterator[bytes]
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
            _check_length(received, MAX_BODY_BYTES)
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
        decoded = decode_ids(b"[%b]" % bytes(text))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HTTPException(422, _describe(error, len(ids))) from None
    if not decoded:
        raise HTTPException(422, f"the body is not valid JSON: tokens[{len(ids)}] is missing")
    ids.fromlist(decoded)
    if len(ids) > MAX_TOKENS:
        raise HTTPException(422, f"tokens: Expected at most {MAX_TOKENS:,} token ids")


def request_body_schema(kind: type[PromptBody]) -> dict[str, Any]:
    """Return the OpenAPI description of an endpoint with such a body."""
    _, schemas = msgspec.json.schema_components([kind])
    content = {"application/json": {"schema": schemas[kind.__name__]}}
    return {"requestBody": {"required": True, "content": content}}


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    deadline = anyio.current_time() + RECEIVE_SECONDS
    stream = aiter(request.stream())
    while True:
        try:
            with anyio.fail_after(deadline - anyio.current_time()):
                piece = await anext(stream, None)
        except TimeoutError:
            raise HTTPException(408, f"the body was not received within {RECEIVE_SECONDS:g} s") from None
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
