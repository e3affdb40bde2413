"""The bodies of requests and answers: what is read of them, and what is written into them.

Values stay as their bytes: only the object around them is taken apart, so that nothing a client or an engine
has written is changed, be it known here or not.
"""

from __future__ import annotations

from typing import Any

import msgspec
from xxhash import xxh3_128

from kvtier.proxy.prompt import Prompt

Fields = dict[str, msgspec.Raw]

PARAMS = "kv_transfer_params"
OURS = "kvtier"
CHAT_PATH = "/v1/chat/completions"
NOT_FOR_PREFILL = ("stream_options", "min_tokens", "best_of", "use_beam_search", "echo")
"""They ask for more than the one token that a prefiller computes, and some contradict it."""
SHAPING = ("model", "cache_salt", "tools", "documents", "chat_template", "chat_template_kwargs")
"""What else makes two prompts different from their very first token."""
TOKENIZED = (
    "model",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
)
"""What a vLLM needs to know of a chat to say its token ids."""
_ONE, _NOT = msgspec.Raw(b"1"), msgspec.Raw(b"false")

_fields = msgspec.json.Decoder(Fields)
_values = msgspec.json.Decoder(Any)
_encode = msgspec.json.encode


class Params(msgspec.Struct, frozen=True):
    """What an engine says of itself and of a request."""

    peer: str | None = None
    handed_over: dict[str, msgspec.Raw] | None = None

    @property
    def tokens(self) -> int:
        """How many tokens are on their way to the decoder; 0 for none, and for what makes no sense."""
        try:
            tokens = _values.decode((self.handed_over or {})["tokens"])
        except (KeyError, msgspec.DecodeError):
            return 0
        if not isinstance(tokens, int) or isinstance(tokens, bool):
            return 0
        return max(0, tokens)


_params = msgspec.json.Decoder(Params)


class Body:
    """A request's body, as far as it can be read. What cannot be read goes to the engine as it is."""

    def __init__(self, path: str, content: bytes) -> None:
        self.path = path
        self.content = content
        self.fields = _read(content)
        self.prompt = self._prompt()

    @property
    def may_be_prefilled(self) -> bool:
        """Whether computing the prompt elsewhere is of any use to the decoder.

        What asks for log-probabilities of the prompt is computed by it in any case.
        """
        fields = self.fields
        if self.prompt is None or not _is_object(fields.get(PARAMS)):
            return False
        echoes = _truthy(fields.get("echo")) and _given(fields.get("logprobs"))
        return not (_given(fields.get("prompt_logprobs")) or echoes)

    @property
    def wants_params(self) -> bool:
        """Whether the client is to see the answer's ``kv_transfer_params``."""
        return _given(self.fields.get(PARAMS))

    @property
    def streams(self) -> bool:
        """Whether the answer is to be a stream."""
        return _truthy(self.fields.get("stream"))

    def text(self, name: str) -> str | None:
        """A field that is a text."""
        value = self.value(name)
        return value if isinstance(value, str) else None

    def value(self, name: str) -> object:
        """A field, decoded; ``None`` where it is not there."""
        raw = self.fields.get(name)
        return None if raw is None else _values.decode(raw)

    def for_prefill(self, to: str) -> bytes:
        """A copy that has the prompt computed, pushed to the peer ``to``, and one token answered."""
        fields = {name: raw for name, raw in self.fields.items() if name not in NOT_FOR_PREFILL}
        fields |= {"max_tokens": _ONE, "n": _ONE, "stream": _NOT}
        if "max_completion_tokens" in fields or self.path == CHAT_PATH:
            fields["max_completion_tokens"] = _ONE
        return self._with(fields, {"hand_over": {"to": to}})

    def for_decode(self, tokens: int, seconds: float) -> bytes:
        """What the decoder gets: the client's own, and which tokens to wait for, if any.

        Hints that a client has written are left out: they are between proxy and engines.
        """
        if tokens:
            return self._with(self.fields, {"expect": {"tokens": tokens, "seconds": seconds}})
        params = self.fields.get(PARAMS)
        if _given(params) and _is_object(params) and OURS in (_read(bytes(params or b""))):
            return self._with(self.fields, {})
        return self.content

    def for_tokenizing(self) -> bytes:
        """What a vLLM's ``/tokenize`` is asked to turn a chat into token ids."""
        return _encode({name: self.fields[name] for name in TOKENIZED if name in self.fields})

    def _with(self, fields: Fields, ours: dict[str, object]) -> bytes:
        params = self.fields.get(PARAMS)
        given = _read(bytes(params)) if _given(params) and params is not None else {}
        return _encode({**fields, PARAMS: {**given, OURS: ours}})

    def _prompt(self) -> Prompt | None:
        written = self.fields.get("messages" if self.path == CHAT_PATH else "prompt")
        if not _given(written) or written is None:
            return None
        seed = xxh3_128(self.path.encode())
        for name in SHAPING:
            seed.update(b"\0" + bytes(self.fields.get(name, b"")))
        return Prompt(bytes(written), seed.digest())


def answered_params(content: bytes) -> Params:
    """What an engine's answer says in ``kv_transfer_params``; all empty where that is nothing or nonsense."""
    try:
        return _params.decode(_read(bytes(_read(content)[PARAMS]))[OURS])
    except (KeyError, msgspec.DecodeError, RecursionError):
        return Params()


def without_params(content: bytes) -> bytes:
    """An answer without its ``kv_transfer_params``, and otherwise as it is."""
    fields = _read(content)
    if not _given(fields.get(PARAMS)):
        return content
    del fields[PARAMS]
    return _encode(fields)


def _read(content: bytes) -> Fields:
    try:
        return _fields.decode(content)
    except (msgspec.DecodeError, RecursionError):
        return {}


def _given(raw: msgspec.Raw | None) -> bool:
    return raw is not None and bytes(raw) != b"null"


def _truthy(raw: msgspec.Raw | None) -> bool:
    """As pydantic reads a bool, mostly."""
    return raw is not None and bytes(raw).strip(b'"').lower() in {b"true", b"1", b"yes", b"on"}


def _is_object(raw: msgspec.Raw | None) -> bool:
    return not _given(raw) or bytes(raw or b"")[:1] == b"{"
