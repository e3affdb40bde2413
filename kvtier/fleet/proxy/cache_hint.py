"""The hint ``cache`` for the engines, from what clients send: how long to keep a prompt, and its worth.

A client gives it in ``kv_transfer_params``, or with fields of other APIs: Anthropic's ``cache_control`` in a
message, a part of it, the system prompt or a tool, and ``priority``, which vLLM adds to OpenAI's API.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from kvtier.catalog.hints import CacheHint, CacheMode
from kvtier.logs import RateLimitedLog

TTLS = {"5m": 300.0, "1h": 3600.0}
"""Seconds of each ``ttl`` of a ``cache_control``."""
DEFAULT_TTL = "5m"
MARKED = b"cache_control"
_CONTROL = re.compile(rb'"cache_control"\s*:\s*(\{[^{}]*\})')
"""Not within strings, where quotation marks follow a backslash. A tree of all values would take seconds."""
_FIELDS = (MARKED.decode(), "system", "messages", "tools")

_values = msgspec.json.Decoder(Any)
_warn = RateLimitedLog(logging.getLogger("kvtier"))


def cache_hint(fields: Mapping[str, msgspec.Raw], given: msgspec.Raw | None) -> dict[str, object]:
    """Return the hint for a request's fields, empty without one. ``given``: that of the client.

    What the client gives itself counts. It cannot name a tenant, because tenants have quotas: its
    ``cache_salt`` does.
    """
    hint: dict[str, object] = {}
    if (retention := _retention(fields)) is not None:
        hint["retention"] = retention
    if (priority := _priority(fields.get("priority"))) != 0:
        hint["priority"] = priority
    return {**hint, **_given(given)}


def _given(raw: msgspec.Raw | None) -> dict[str, Any]:
    """Return what a client's own hint says. Of an invalid one, only the mode: it may be ``off``."""
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
    return {name: part for name, part in given.items() if name != "tenant"}


def _retention(fields: Mapping[str, msgspec.Raw]) -> float | None:
    """Return the longest time of a ``cache_control`` in the request."""
    controls: list[object] = []
    for name in _FIELDS:
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
    """Return a decoded value; ``None`` if there is none or it is malformed."""
    try:
        return None if raw is None else _values.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
