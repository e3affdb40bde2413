"""Parse and rewrite the JSON bodies of requests and responses, and derive the hint ``cache`` from them.

Only the outer object is decoded. Values stay raw bytes, so that every field passes through unchanged, whether
the proxy knows it or not.

The hint ``cache`` tells how long to keep a prompt, and its priority. A client gives it in
``kv_transfer_params``, or with fields of other APIs: Anthropic's ``cache_control`` in a message, a part of
it, the system prompt or a tool, and ``priority``, which vLLM adds to OpenAI's API.
"""

from __future__ import annotations

import json
import logging
import re
from typing import Any, TypeGuard, get_args

import msgspec
from xxhash import xxh3_128

from kvtier.catalog.hints import CacheHint, CacheMode
from kvtier.fleet.proxy.client import Refused
from kvtier.fleet.proxy.prompt import Prompt
from kvtier.logs import RateLimitedLog

Fields = dict[str, msgspec.Raw]

PARAMS = "kv_transfer_params"
KVTIER = "kvtier"
CHAT_PATH = "/v1/chat/completions"
NOT_FOR_PREFILL = ("stream_options", "min_tokens", "best_of", "use_beam_search", "echo")
"""Fields dropped from prefill requests: they ask for more than ``max_tokens: 1``, or conflict with it."""
PREFIX_FIELDS = ("model", "cache_salt", "tools", "documents", "chat_template", "chat_template_kwargs")
"""Fields other than the prompt that change its first tokens, and therefore its prefix digests."""
TOKENIZE_FIELDS = (
    "model",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
)
"""Fields of a chat request that vLLM's ``/tokenize`` accepts."""
UNREADABLE = f"{PARAMS} cannot be read: send JSON in UTF-8 without a byte order mark, NaN and lone surrogates"
TTLS = {"5m": 300.0, "1h": 3600.0}
"""Seconds of each ``ttl`` of a ``cache_control``."""
DEFAULT_TTL = "5m"
MARKED = b"cache_control"
_CONTROL = re.compile(rb'"cache_control"\s*:\s*(\{[^{}]*\})')
"""Not within strings, where quotation marks follow a backslash. A tree of all values would take seconds."""
_MARKABLE = (MARKED.decode(), "system", "messages", "tools")
_ONE, _FALSE = msgspec.Raw(b"1"), msgspec.Raw(b"false")
_fields = msgspec.json.Decoder(Fields)
_values = msgspec.json.Decoder(Any)
_encode = msgspec.json.encode
_warn = RateLimitedLog(logging.getLogger("kvtier"))


class Params(msgspec.Struct, frozen=True):
    """``kv_transfer_params["kvtier"]`` of an engine's response."""

    peer: str | None = None
    transferred: dict[str, msgspec.Raw] | None = None

    @property
    def tokens(self) -> int:
        """Tokens in flight to the decode instance; 0 if absent or malformed."""
        tokens = decoded((self.transferred or {}).get("tokens"))
        if not isinstance(tokens, int) or isinstance(tokens, bool):
            return 0
        return max(0, tokens)


_params = msgspec.json.Decoder(Params)


class Body:
    """A request body. One that is not JSON is forwarded to the engine unchanged."""

    def __init__(self, path: str, content: bytes) -> None:
        """Raise :class:`Refused` if only the engine could read hints in it, which are the proxy's to set."""
        self.path = path
        self.content = content
        self.fields = _parse_object(content)
        if _hides_params(content, self.fields):
            raise Refused(400, UNREADABLE)
        self.prompt = self._prompt()
        self.cache = self._cache_hint()
        """The hint ``cache`` for the engines."""

    @property
    def may_be_prefilled(self) -> bool:
        """Whether the decoder can use a remote prefill.

        A request for prompt log-probabilities cannot: the decoder has to compute the whole prompt anyway.
        """
        fields = self.fields
        if self.prompt is None or not _is_object(fields.get(PARAMS)):
            return False
        if self.cache.get("mode", "both") != "both":  # KV is neither stored for it, nor loaded.
            return False
        echoes_logprobs = _truthy(fields.get("echo")) and _is_set(fields.get("logprobs"))
        return not (_is_set(fields.get("prompt_logprobs")) or echoes_logprobs)

    @property
    def wants_params(self) -> bool:
        """Whether the client gets the response's ``kv_transfer_params``."""
        return _is_set(self.fields.get(PARAMS))

    def text(self, name: str) -> str | None:
        """Return a string field; ``None`` if it is missing or not a string."""
        value = decoded(self.fields.get(name))
        return value if isinstance(value, str) else None

    def for_prefill(self, to: str) -> bytes:
        """Return the prefill request: generate one token, and transfer the KV to the peer address ``to``."""
        fields = {name: raw for name, raw in self.fields.items() if name not in NOT_FOR_PREFILL}
        fields |= {"max_tokens": _ONE, "n": _ONE, "stream": _FALSE}
        if "max_completion_tokens" in fields or self.path == CHAT_PATH:
            fields["max_completion_tokens"] = _ONE
        return self._with(fields, {"kv_transfer": {"to": to}})

    def for_decode(self, tokens: int, seconds: float) -> bytes:
        """Return the decode request: the client's body, plus the number of tokens to wait for if not 0.

        ``seconds`` is how long the decoder waits for them. Of ``kvtier`` hints in the client's
        ``kv_transfer_params``, only ``cache`` is kept: only the proxy may set the others.
        """
        if tokens:
            return self._with(self.fields, {"expect": {"tokens": tokens, "seconds": seconds}})
        if self.cache or KVTIER in self._client_params():
            return self._with(self.fields, {})
        return self.content

    def for_tokenizing(self) -> bytes:
        """Return the body of a ``/tokenize`` request for this chat."""
        return _encode({name: self.fields[name] for name in TOKENIZE_FIELDS if name in self.fields})

    def _with(self, fields: Fields, hints: dict[str, object]) -> bytes:
        hints = {**hints, "cache": self.cache} if self.cache else hints
        return _encode({**fields, PARAMS: {**self._client_params(), KVTIER: hints}})

    def _client_params(self) -> Fields:
        return _parse_object(self.fields.get(PARAMS))

    def _cache_hint(self) -> dict[str, object]:
        """Return the hint for the engines, empty without one. What the client gives itself counts."""
        if not _is_object(self.fields.get(PARAMS)):
            return {}  # For the engine to refuse.
        hint: dict[str, object] = {}
        if (retention := _retention(self.fields)) is not None:
            hint["retention"] = retention
        if (priority := _priority(self.fields.get("priority"))) != 0:
            hint["priority"] = priority
        return hint | _given(_parse_object(self._client_params().get(KVTIER)).get("cache"))

    def _prompt(self) -> Prompt | None:
        raw = self.fields.get("messages" if self.path == CHAT_PATH else "prompt")
        if not _is_set(raw):
            return None
        seed = xxh3_128(self.path.encode())
        for name in PREFIX_FIELDS:
            seed.update(b"\0" + bytes(self.fields.get(name, b"")))
        return Prompt(bytes(raw), seed.digest())


def response_params(content: bytes) -> Params:
    """Return kvtier's part of a response's ``kv_transfer_params``; empty if absent or malformed."""
    try:
        return _params.decode(_parse_object(_parse_object(content)[PARAMS])[KVTIER])
    except (KeyError, msgspec.DecodeError, RecursionError):
        return Params()


def without_params(content: bytes) -> bytes:
    """Return a response body without ``kv_transfer_params``, otherwise unchanged."""
    fields = _parse_object(content)
    if not _is_set(fields.get(PARAMS)):
        return content
    del fields[PARAMS]
    return _encode(fields)


def _parse_object(content: bytes | msgspec.Raw | None) -> Fields:
    """Return the fields of an object; none if it is missing, malformed or something else."""
    try:
        return {} if content is None else _fields.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def _hides_params(content: bytes, fields: Fields) -> bool:
    """Whether engines would find parameters that the proxy cannot read.

    Python's parser accepts NaN, lone surrogates, UTF-16 and byte order marks, and engines use it.
    """
    if fields:
        raw = fields.get(PARAMS)
        return _is_set(raw) and _is_object(raw) and not _parse_object(raw) and decoded(raw) != {}
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(body, dict) and PARAMS in body


def _is_set(raw: msgspec.Raw | None) -> TypeGuard[msgspec.Raw]:
    return raw is not None and bytes(raw) != b"null"


def _truthy(raw: msgspec.Raw | None) -> bool:
    """Approximate how pydantic parses a bool."""
    return raw is not None and bytes(raw).strip(b'"').lower() in {b"true", b"1", b"yes", b"on"}


def _is_object(raw: msgspec.Raw | None) -> bool:
    return not _is_set(raw) or bytes(raw)[:1] == b"{"


def _given(raw: msgspec.Raw | None) -> dict[str, Any]:
    """Return a client's own hint. Of an invalid one, only the mode: it may be ``off``."""
    if raw is None:
        return {}
    value = decoded(raw)
    given = value if isinstance(value, dict) else {"mode": value}
    try:
        msgspec.convert(given, CacheHint)
    except msgspec.ValidationError as error:
        _warn("ignoring an invalid hint `cache` of a request, except its mode: %s", error)
        mode = given.get("mode")
        return {"mode": mode} if mode in get_args(CacheMode) else {}
    # Tenants have quotas, so a client cannot name one: its cache_salt does.
    return {name: part for name, part in given.items() if name != "tenant"}


def _retention(fields: Fields) -> float | None:
    """Return the longest time of a ``cache_control`` in the request."""
    controls: list[object] = []
    for name in _MARKABLE:
        raw = fields.get(name)
        if raw is None:
            continue
        if name == MARKED.decode():
            controls.append(decoded(raw))
        elif MARKED in (content := bytes(raw)):
            controls += map(decoded, _CONTROL.findall(content))
    seconds = [found for control in controls if (found := _seconds(control)) is not None]
    return max(seconds, default=None)


def _seconds(control: object) -> float | None:
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        return None
    ttl = control.get("ttl", DEFAULT_TTL)
    return TTLS.get(ttl) if isinstance(ttl, str) else None


def _priority(raw: msgspec.Raw | None) -> int:
    """Return the priority of the chunks. Of requests, vLLM handles those with the lowest number first."""
    value = decoded(raw)
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    return max(-100, min(-value, 100))


def decoded(raw: msgspec.Raw | bytes | None) -> object:
    """Return a decoded value; ``None`` if it is missing or malformed."""
    try:
        return None if raw is None else _values.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
