"""Parse and format sizes and durations such as ``5GiB`` and ``250ms``.

Sizes may have the suffixes of Kubernetes: ``5Gi`` is ``5GiB``, ``5G`` is ``5GB``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from reprlib import repr as _shown
from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_BINARY = {letter: 1 << (10 * power) for power, letter in enumerate("KMGTPE", 1)}
_DECIMAL = {letter: 10 ** (3 * power) for power, letter in enumerate("kMGTPE", 1)}

SIZE_UNITS = {
    "B": 1,
    **{f"{letter}iB": scale for letter, scale in _BINARY.items()},
    **{f"{letter}B": scale for letter, scale in _DECIMAL.items()},
    "KB": 10**3,
    **{f"{letter}i": scale for letter, scale in _BINARY.items()},
    **_DECIMAL,
}
DURATION_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

MAX_INTEGER = (1 << 63) - 1
"""Limit of sizes and whole numbers: what the operating system and the native core can express."""
MAX_SECONDS = 100 * 365 * 24 * 3600
"""Limit of durations: Python cannot wait for 300 years."""
MAX_CHARACTERS = 100

_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size(value: object) -> int:
    """Parse a size such as ``"5GiB"``, ``"4096"`` or ``4096``. Raises ``ValueError`` with the remedy."""
    amount = _quantity(value, SIZE_UNITS)
    if amount is None:
        raise ValueError(
            f"{_shown(value)} is not a size: use a number of bytes, or for example 5GiB or 500MB"
        )
    if amount > MAX_INTEGER:
        raise ValueError(f"{_shown(value)} is more than 8191PiB: use for example 5GiB or 500MB")
    written = str(value).strip()
    if "." in written and written[-1].isdigit() and amount < KIB:
        raise ValueError(f"{written} has no unit: use for example {written}GiB, or a whole number of bytes")
    return int(amount)


def parse_duration(value: object) -> float:
    """Parse a duration such as ``"250ms"``, ``"2s"`` or ``0.5`` as seconds. Raises ``ValueError``."""
    amount = _quantity(value, DURATION_UNITS)
    if amount is None:
        raise ValueError(
            f"{_shown(value)} is not a duration: use a number of seconds, or for example 250ms, 2s or 1m"
        )
    if amount > MAX_SECONDS:
        raise ValueError(f"{_shown(value)} is more than {MAX_SECONDS // 3600}h: use for example 2s or 1m")
    return amount


def format_size(count: float) -> str:
    """Format bytes in the largest binary unit not above the value: ``"1.5GiB"``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count >= SIZE_UNITS[unit]:
            return f"{_short(count / SIZE_UNITS[unit])}{unit}"
    return f"{_short(count)}B"


def format_duration(seconds: float) -> str:
    """Format seconds as ``"250ms"``, ``"2s"``, ``"1m"`` or ``"1h"``."""
    for unit in ("h", "m", "s", "ms"):
        if seconds >= DURATION_UNITS[unit]:
            return f"{_short(seconds / DURATION_UNITS[unit])}{unit}"
    return f"{_short(seconds / DURATION_UNITS['us'])}us" if seconds else "0s"


def _quantity(value: object, units: Mapping[str, float]) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if value >= 0 else None
    if isinstance(value, float):
        return value if value >= 0 and math.isfinite(value) else None
    if not isinstance(value, str) or len(value) > MAX_CHARACTERS:
        return None
    match = _QUANTITY.fullmatch(value)
    if match is None:
        return None
    number, unit = match.groups()
    scale = units.get(unit) if unit else 1
    if scale is None:
        return None
    # Integers stay exact: a float would round sizes beyond 2**53.
    return (int(number) if number.isdecimal() else float(number)) * scale


def _short(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def check_number(value: object) -> object:
    """Reject ``true`` and ``false``, which Python takes for 1 and 0, and integers of more than 64 bits."""
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a number")  # noqa: TRY004 - for pydantic
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise ValueError(f"the number is too large: use at most {MAX_INTEGER}")
    return value


def _schema(number: str, units: Iterable[str]) -> WithJsonSchema:
    """Return the JSON schema of a number, or text with one of these units."""
    pattern = rf"^\s*[0-9]+(\.[0-9]+)?\s*({'|'.join(units)})?\s*$"
    return WithJsonSchema({"anyOf": [{"type": "string", "pattern": pattern}, {"type": number, "minimum": 0}]})


Size = Annotated[int, BeforeValidator(parse_size), _schema("integer", SIZE_UNITS)]
"""A setting in bytes."""

Duration = Annotated[float, BeforeValidator(parse_duration), _schema("number", DURATION_UNITS)]
"""A setting in seconds."""

Integer = Annotated[int, BeforeValidator(check_number)]
"""A setting that is a whole number."""

Number = Annotated[float, BeforeValidator(check_number)]
"""A setting that is a number."""

Fraction = Annotated[float, Field(gt=0, le=1), BeforeValidator(check_number)]
"""A setting that is a part of a whole, above 0."""
