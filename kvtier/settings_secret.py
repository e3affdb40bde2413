"""Secrets in settings: written where they are, or named where they are kept; never shown."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer, SecretStr, SerializationInfo, WithJsonSchema

REVEALED = object()
"""As the ``context`` of ``model_dump``: write secrets out, for another process of this host to read."""

_FORMS = "write {env: NAME} with a variable that holds it, or {file: PATH} with a file that does"


def resolve(value: object) -> object:
    """The secret that ``value`` is, or that ``{env: NAME}`` or ``{file: PATH}`` names.

    Reads at most one small file; blocks as long as that takes. Raises ``ValueError``, which names the
    variable or the file and never what is in it.
    """
    if not isinstance(value, Mapping):
        return value
    if len(value) != 1 or not all(isinstance(part, str) for part in [*value, *value.values()]):
        raise ValueError(f"a secret is one text or names one place: {_FORMS}")
    ((kind, place),) = value.items()
    if kind == "env":
        return _from_variable(place)
    if kind == "file":
        return _from_file(place)
    raise ValueError(f"{kind!r} is no place for a secret: {_FORMS}")


def _from_variable(name: str) -> str:
    secret = os.environ.get(name, "")
    if not secret:
        raise ValueError(f"the variable {name} that it names is not set, or empty: export it")
    return secret


def _from_file(place: str) -> str:
    path = Path(place).expanduser()
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"the file {path} that it names cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"the file {path} that it names is not text") from None
    if not secret:
        raise ValueError(f"the file {path} that it names is empty")
    return secret


def _written(secret: SecretStr, info: SerializationInfo) -> str:
    return secret.get_secret_value() if info.context is REVEALED else str(secret)


_PLACE = {"type": "object", "minProperties": 1, "maxProperties": 1, "additionalProperties": False}

Secret = Annotated[
    SecretStr,
    BeforeValidator(resolve),
    PlainSerializer(_written, when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {**_PLACE, "properties": {"env": {"type": "string"}, "file": {"type": "string"}}},
            ]
        }
    ),
]
"""A password or the like, in a setting: masked wherever it is printed."""
