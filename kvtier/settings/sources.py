"""Sources of settings: the YAML file and the ``KVTIER_*`` variables, and where each value was set."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode

from kvtier.errors import SettingsError
from kvtier.native import VARIABLE as NATIVE_VARIABLE
from kvtier.settings.values import parse_json
from kvtier.settings.yaml_file import MAX_BYTES, SettingsFile, parse_file

PREFIX = "KVTIER_"
DELIMITER = "__"
FILE_VARIABLE = "KVTIER_CONFIG_FILE"

_ORCHESTRATOR_NAME = re.compile(r".*_SERVICE_(HOST|PORT(_.*)?)|.*_PORT_\d+_(TCP|UDP|SCTP)(_.*)?")
_ORCHESTRATOR_VALUE = re.compile(r"(tcp|udp|sctp)://.*")


_UNREADABLE = object()
"""In place of a variable's value, so that the others are read, and reported, too."""


def configured_file() -> Path | None:
    """Return the path in ``KVTIER_CONFIG_FILE``, if set."""
    name = os.environ.get(FILE_VARIABLE, "")
    return Path(name).expanduser() if name else None


def nested_model(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a nested setting such as ``prefetch``, or ``None``."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def variable_name(key: str) -> str:
    """Return the environment variable of the dotted ``key``."""
    return PREFIX + key.upper().replace(".", DELIMITER)


def field_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings, parents before their nested settings."""
    for name, field in model.model_fields.items():
        yield prefix + name
        nested = nested_model(field)
        if nested is not None:
            yield from field_names(nested, f"{prefix}{name}.")


def given_names(model: type[BaseModel], values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of the leaves in ``values``."""
    for name, value in values.items():
        field = model.model_fields.get(name)
        nested = nested_model(field) if field is not None else None
        if nested is not None and isinstance(value, Mapping):
            yield from given_names(nested, value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def suggestion(name: str, known: Sequence[str]) -> str:
    """Return the remedy for an unknown name: the closest known one, or all of them."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"use one of {', '.join(known)}"


def merged(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``lower`` overridden by ``upper``: mappings are merged, other values are replaced."""
    both = dict(lower)
    for name, value in upper.items():
        below = both.get(name)
        both[name] = (
            merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
        )
    return both


def read_file(path: Path) -> SettingsFile:
    """Read the settings from a YAML file. Blocks. Raises :class:`SettingsError`."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SettingsError(
            f"cannot read the settings file {path} ({error.strerror}): "
            f"create it, or set another with {FILE_VARIABLE} or --config"
        ) from error
    return parse_file(path, data)


def read_environment(settings: type[BaseSettings]) -> tuple[dict[str, Any], list[str]]:
    """Read the settings from ``KVTIER_*`` variables. Return them, and what is wrong with others."""
    problems = []
    known = [*(variable_name(name) for name in field_names(settings)), FILE_VARIABLE, NATIVE_VARIABLE]
    for name, value in os.environ.items():
        upper = name.upper()
        if upper.startswith(PREFIX) and upper not in known and not _is_foreign(upper, value):
            problems.append(f"the variable {name} is not a setting: {suggestion(upper, known)}")
    source = _Environment(settings, known)
    values = _without_unreadable(source())
    return values, problems + source.problems


def _without_unreadable(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_unreadable(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if value is not _UNREADABLE
    }


class _Environment(EnvSettingsSource):
    """Environment source that names the variables that are not valid JSON."""

    def __init__(self, settings: type[BaseSettings], known: Sequence[str]) -> None:
        super().__init__(settings)
        self.env_vars = {name: value for name, value in self.env_vars.items() if name.upper() in known}
        self.problems: list[str] = []

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: object) -> object:
        """Decode JSON."""
        try:
            return value if NoDecode in field.metadata else parse_json(str(value))
        except ValueError as error:
            # For a nested setting, field_name is only the last part of its key.
            nested = f".{field_name}"
            names = (name for name in field_names(self.settings_cls) if f".{name}".endswith(nested))
            name = variable_name(next(names, field_name))
            example = (field.examples or ["{...}"])[0]
            self.problems.append(f"{name} is not JSON ({error}): use for example {name}='{example}'")
            return _UNREADABLE


def _is_foreign(name: str, value: str) -> bool:
    """Whether Kubernetes or Docker links set the variable, such as KVTIER_PORT for a service named kvtier."""
    return bool(_ORCHESTRATOR_NAME.fullmatch(name) or _ORCHESTRATOR_VALUE.fullmatch(value))


class Origin(NamedTuple):
    """The source of a value."""

    kind: Literal["default", "file", "environment", "override"]
    where: str = ""
    """Path of the file, name of the variable, or empty."""
    line: int = 0
    """Line in the file, from 1."""


@dataclass
class Origins:
    """The sources of all values."""

    given: dict[str, Origin] = dataclasses.field(default_factory=dict)
    """By dotted key, without lines. A list such as ``tiers`` has one source."""
    lines: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Lines in the file, also of keys within lists, such as ``tiers[1].path``."""

    def of(self, key: str) -> Origin:
        """Return the source of the dotted ``key``, or of what encloses it."""
        origin = next((self.given[name] for name in _enclosing(key) if name in self.given), Origin("default"))
        if origin.kind != "file":
            return origin
        line = next((self.lines[name] for name in _enclosing(key) if name in self.lines), 0)
        return origin._replace(line=line)

    def at(self, key: str) -> str:
        """Return the dotted ``key`` and where it was set, for a message."""
        origin = self.of(key)
        if origin.kind == "override":
            return f"{key} (set on the command line, in code or in kv_connector_extra_config)"
        line = f", line {origin.line}" if origin.line else ""
        return f"{key} (in {origin.where}{line})" if origin.where else key


def _enclosing(key: str) -> Iterator[str]:
    """Yield the key and those that enclose it: ``tiers[1].path``, ``tiers[1]``, ``tiers``."""
    while key:
        yield key
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
