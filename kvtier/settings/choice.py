"""A setting that selects a component: its name, or a mapping of its settings with the name as ``type``."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema


def parse_choice(value: object) -> object:
    """Return a mapping for a name, and parse the JSON of an environment variable."""
    if not isinstance(value, str):
        return value
    return json.loads(value) if value.lstrip().startswith("{") else {"type": value}


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
