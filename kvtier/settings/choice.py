"""A setting that selects a component: its name, or a mapping of its settings with the name as ``type``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

MAX_DIGITS = 100


def parse_json(text: str) -> Any:  # noqa: ANN401 - as json.loads
    """Parse the JSON of a variable. Raises ``ValueError``, also if it is nested too deeply for Python."""
    try:
        return json.loads(text, parse_int=_parse_int)
    except RecursionError:
        raise ValueError("too many mappings and lists inside each other") from None


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def parse_choice(value: object) -> object:
    """Return a mapping for a name, and parse the JSON of an environment variable."""
    if not isinstance(value, str):
        return value
    return parse_json(value) if value.lstrip().startswith("{") else {"type": value}


def valid_choice(value: object) -> Mapping[str, Any] | None:
    """Return the mapping of a name or mapping, or ``None`` if it is neither."""
    with suppress(ValueError):
        value = parse_choice(value)
        if isinstance(value, Mapping) and isinstance(value.get("type"), str):
            return value
    return None


def _check(value: dict[str, Any]) -> dict[str, Any]:
    if isinstance(value.get("type"), str):
        return value
    raise ValueError("it has no type: use a name, or a mapping such as {type: NAME, ...}")


Choice = Annotated[
    dict[str, Any],
    BeforeValidator(parse_choice),
    AfterValidator(_check),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]},
            ]
        }
    ),
]
