"""What a request may tell this engine in ``kv_transfer_params["kvtier"]``: hints, followed or passed over.

To a prefiller ``{"hand_over": {"to": "HOST:PORT"}}``: push the prompt's chunks there while it is computed.
To a decoder ``{"expect": {"tokens": 1000, "seconds": 5}}``: so much of the prompt is being pushed here; wait
for it as long as that. To either ``{}``: say where this instance listens for peers, which every answer to a
request with any of these does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import msgspec

from kvtier.settings_peer import split_address

NAME = "kvtier"
MOST_CHARACTERS = 300
"""Of an address: a host name has 253 at most."""
MOST_TOKENS = 1 << 31


class HandOverHint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Push this prompt's chunks to the peer at ``HOST:PORT``."""

    to: Annotated[str, msgspec.Meta(max_length=MOST_CHARACTERS)]


class ExpectHint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first ``tokens`` tokens of this prompt are being pushed here."""

    tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
    seconds: float | None = None
    """How long to wait for them at most; ``None`` for as long as the settings allow."""


class Hints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a request has told."""

    hand_over: HandOverHint | None = None
    expect: ExpectHint | None = None


NO_HINTS = Hints()


def has_hints(params: Mapping[str, object] | None) -> bool:
    """Whether a request's ``kv_transfer_params`` have anything for kvtier, be it right or not."""
    return isinstance(params, Mapping) and NAME in params


def read_hints(params: Mapping[str, object]) -> Hints:
    """What a request has told. Raises ``ValueError`` with what is wrong: it comes from a client."""
    hints = msgspec.convert(params[NAME], Hints)
    if hints.hand_over is not None:
        _, port = split_address(hints.hand_over.to)
        if not port or not hints.hand_over.to.isprintable():
            raise ValueError("hand_over.to is no address that can be connected to")
    seconds = None if hints.expect is None else hints.expect.seconds
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise ValueError("expect.seconds is no length of time")
    return hints
