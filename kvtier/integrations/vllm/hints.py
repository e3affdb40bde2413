"""Hints that a request may give this engine in ``kv_transfer_params["kvtier"]``. Invalid ones are ignored.

- ``{"kv_transfer": {"to": "HOST:PORT"}}``, for a prefill instance: push the prompt's chunks there while it is
  computed.
- ``{"expect": {"tokens": 1000, "seconds": 5}}``, for a decode instance: that many leading tokens of the
  prompt are being pushed here; wait up to 5 s for them.
- ``{"cache": {"tenant": "a", "priority": 1, "retention": 600, "resume": 30, "recompute": 0.2}}``: what is
  known about the future of the prompt's chunks, for the tiers' eviction policies. Each part is optional.
- ``{"cache": "off"}``, ``"read"`` or ``"write"``: what the request may use the cache for. In the form above:
  ``{"cache": {"mode": "write", "tenant": "a"}}``.
- ``{"canary": {"id": "4f1e…", "tier": "ssd"}}`` (:mod:`kvtier.observability.canary`): prompts with one id
  share their chunks, whatever their ``cache_salt``, and no others. The answer reports what was loaded.
- ``{}``: return the address on which this instance listens for peers. The others return it as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import msgspec

from kvtier.catalog.hints import CacheHint, CacheMode, ChunkHints
from kvtier.catalog.tenants import tenant_of_salt
from kvtier.integrations.vllm.plain import plain
from kvtier.settings.peer import split_address

NAME = "kvtier"
MAX_CHARACTERS = 300
"""Maximum length of an address. A host name has up to 253 characters."""
MAX_TOKENS = 1 << 31


class KVTransferHint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Push this prompt's chunks to the peer at ``HOST:PORT``."""

    to: Annotated[str, msgspec.Meta(max_length=MAX_CHARACTERS)]


class ExpectHint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first ``tokens`` tokens of this prompt are being pushed here."""

    tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    seconds: float | None = None
    """Maximum time to wait for them; ``None`` for the limit in the settings."""


class CanaryHint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request is that of a canary."""

    id: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._-]{1,64}\Z")]
    tier: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._-]{0,64}\Z")] = ""


class Hints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All hints of a request."""

    kv_transfer: KVTransferHint | None = None
    expect: ExpectHint | None = None
    cache: CacheHint | CacheMode | None = None
    canary: CanaryHint | None = None

    @property
    def mode(self) -> CacheMode:
        """What the request may use the cache for."""
        if isinstance(self.cache, CacheHint):
            return self.cache.mode
        return self.cache or "both"

    def for_chunks(self, salt: str) -> ChunkHints | None:
        """Return the hints to store with the prompt's chunks. The tenant is theirs, or else the salt's."""
        given = None
        if isinstance(self.cache, CacheHint):
            fields = msgspec.structs.asdict(self.cache)
            del fields["mode"]
            given = ChunkHints(**fields)
        if not salt or (given is not None and given.tenant):
            return given
        return msgspec.structs.replace(given or ChunkHints(), tenant=tenant_of_salt(salt))


NO_HINTS = Hints()


def has_hints(params: Mapping[str, object] | None) -> bool:
    """Return whether a request's ``kv_transfer_params`` contain hints, valid or not."""
    return isinstance(params, Mapping) and NAME in params


def read_hints(params: Mapping[str, object]) -> Hints:
    """Parse a request's hints, which are client input. Raises ``ValueError`` if they are invalid."""
    hints = msgspec.convert(plain(params[NAME]), Hints)
    if hints.kv_transfer is not None:
        _, port = split_address(hints.kv_transfer.to)
        if not port or not hints.kv_transfer.to.isprintable():
            raise ValueError("kv_transfer.to is not a HOST:PORT address")
    seconds = None if hints.expect is None else hints.expect.seconds
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise ValueError("expect.seconds is not a positive, finite number")
    return hints
