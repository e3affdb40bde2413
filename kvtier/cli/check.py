"""What a check of ``kvtier doctor`` results in."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Check(NamedTuple):
    """The result of a check, and its remedy."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""
