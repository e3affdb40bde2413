"""Secrets in settings: given inline, or by environment variable or file; masked when printed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer, SecretStr, SerializationInfo, WithJsonSchema

REVEALED = object()
"""``context`` of ``model_dump`` that serializes secrets in clear text, for a process on this host."""

_USAGE = "use a string, {env: NAME} or {file: PATH}"


def resolve(value: object) -> object:
    """Return the secret given by ``value``: a string, ``{env: NAME}`` or ``{file: PATH}``.

    Blocks while it reads a small file. Raises ``ValueError``, which names the variable or the file but never
    contains the secret.
    """
    if not isinstance(value, Mapping):
        return value
    if len(value) != 1 or not all(isinstance(part, str) for part in [*value, *value.values()]):
        raise ValueError(f"a secret has exactly one source: {_USAGE}")
    ((kind, name),) = value.items()
    if kind == "env":
        return _from_variable(name)
    if kind == "file":
        return _from_file(name)
    raise ValueError(f"{kind!r} is not a source of secrets: {_USAGE}")


def _from_variable(name: str) -> str:
    secret = os.environ.get(name, "")
    if not secret:
        raise ValueError(f"the environment variable {name} is not set or empty")
    return secret


def _from_file(name: str) -> str:
    path = Path(name).expanduser()
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"cannot read the file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"the file {path} is not text") from None
    if not secret:
        raise ValueError(f"the file {path} is empty")
    return secret


def _serialize(secret: SecretStr, info: SerializationInfo) -> str:
    return secret.get_secret_value() if info.context is REVEALED else str(secret)


_SOURCE = {"type": "object", "minProperties": 1, "maxProperties": 1, "additionalProperties": False}

Secret = Annotated[
    SecretStr,
    BeforeValidator(resolve),
    PlainSerializer(_serialize, when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {**_SOURCE, "properties": {"env": {"type": "string"}, "file": {"type": "string"}}},
            ]
        }
    ),
]
"""A secret in a setting, masked when printed."""
