"""The hint ``cache`` for the engines, from what clients send: how long to keep a prompt, and its worth.

A client gives it in ``kv_transfer_params``, or with fields of other APIs: Anthropic's ``cache_control`` in a
message, a part of it, the system prompt or a tool, and ``priority``, which vLLM adds to OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvtier.catalog.hints import CacheHint

TTLS = {"5m": 300.0, "1h": 3600.0}
"""Seconds of each ``ttl`` of a ``cache_control``."""
DEFAULT_TTL = "5m"
MAX_DEPTH = 4
"""How deeply parts of a message are searched: a tool result in it has parts of its own."""
MARKED = b"cache_control"
_FIELDS = ("system", "messages", "tools")

_values = msgspec.json.Decoder(Any)


def cache_hint(
    content: bytes, fields: Mapping[str, msgspec.Raw], given: msgspec.Raw | None
) -> dict[str, object]:
    """Return the hint for a request body, empty without one. ``given``: that of the client.

    What the client gives itself counts. It cannot name a tenant, because tenants have quotas: its
    ``cache_salt`` does. A body without these fields is not parsed any further.
    """
    hint: dict[str, object] = {}
    if (retention := _retention(content, fields)) is not None:
        hint["retention"] = retention
    if (priority := _priority(fields.get("priority"))) != 0:
        hint["priority"] = priority
    return {**hint, **_given(given)}


def _given(raw: msgspec.Raw | None) -> dict[str, Any]:
    """Return what a client's own hint says; nothing if it is invalid, which engines would ignore, too."""
    value = _decoded(raw)
    given = {"mode": value} if isinstance(value, str) else value
    try:
        msgspec.convert(given, CacheHint)
    except msgspec.ValidationError:
        return {}
    assert isinstance(given, dict)
    return {name: part for name, part in given.items() if name != "tenant"}


def _retention(content: bytes, fields: Mapping[str, msgspec.Raw]) -> float | None:
    """Return the longest time of a ``cache_control`` in the request."""
    if MARKED not in content:
        return None
    controls = [_decoded(fields.get(MARKED.decode()))]
    for name in _FIELDS:
        raw = fields.get(name)
        if raw is not None and MARKED in bytes(raw):
            controls += _controls(_decoded(raw), MAX_DEPTH)
    seconds = [found for control in controls if (found := _seconds(control)) is not None]
    return max(seconds, default=None)


def _controls(value: object, depth: int) -> Iterator[object]:
    """Yield the ``cache_control`` of messages or tools, and of their parts."""
    if not isinstance(value, list) or not depth:
        return
    for part in value:
        if isinstance(part, dict):
            yield part.get(MARKED.decode())
            yield from _controls(part.get("content"), depth - 1)


def _seconds(control: object) -> float | None:
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        return None
    ttl = control.get("ttl", DEFAULT_TTL)
    return TTLS.get(ttl) if isinstance(ttl, str) else None


def _priority(raw: msgspec.Raw | None) -> int:
    """Return the priority of the chunks. Of requests, vLLM handles those with the lowest number first."""
    value = _decoded(raw)
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    return max(-100, min(-value, 100))


def _decoded(raw: msgspec.Raw | None) -> object:
    try:
        return None if raw is None else _values.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
