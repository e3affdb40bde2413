"""Kinds of values in settings: a path, a secret, and the choice of a component."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    SecretStr,
    SerializationInfo,
    WithJsonSchema,
)

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)
"""A URL, also one that :class:`pathlib.Path` has read, which keeps a single slash."""


REVEALED = object()
"""``context`` of ``model_dump`` that serializes secrets in clear text, for a process on this host."""
_USAGE = "use a string, {env: NAME} or {file: PATH}"
_SOURCE = {"type": "object", "minProperties": 1, "maxProperties": 1, "additionalProperties": False}
MAX_DIGITS = 100


class SettingsModel(BaseModel):
    """Base class of groups of settings. Unknown names are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _check_path(value: object) -> object:
    """Reject an empty path, which would mean the current folder, often because of an unset variable.

    Also reject a URL, which would mean a folder such as ``file:`` in the current one.
    """
    if value == "":
        raise ValueError("the path is empty")
    if isinstance(value, str | Path) and "\0" in str(value):
        raise ValueError("the path contains a NUL character")
    if isinstance(value, str | Path) and (url := _URL.match(str(value))):
        scheme, rest = url.groups()
        remedy = f"use /{rest}" if scheme.lower() in ("file", "unix") else "use a path on this host"
        raise ValueError(f"{str(value)!r} is a URL, not a path: {remedy}")
    return value


def _expand(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:  # HOME is not set, and the user is not in the password file.
        raise ValueError(f"cannot expand {str(path)!r}: {error}") from error


LocalPath = Annotated[Path, BeforeValidator(_check_path), AfterValidator(_expand)]
"""A setting that is a path on this host. `~` is expanded; an empty path and a URL are refused."""


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
