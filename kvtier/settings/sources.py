"""Sources of settings: the YAML file and the ``KVTIER_*`` environment variables."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource

from kvtier.errors import SettingsError
from kvtier.native import VARIABLE as NATIVE_VARIABLE

PREFIX = "KVTIER_"
DELIMITER = "__"
FILE_VARIABLE = "KVTIER_CONFIG_FILE"

_ORCHESTRATOR_NAME = re.compile(r".*_SERVICE_(HOST|PORT(_.*)?)|.*_PORT_\d+_(TCP|UDP|SCTP)(_.*)?")
_ORCHESTRATOR_VALUE = re.compile(r"(tcp|udp|sctp)://.*")


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
            yield prefix + name


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


def read_file(path: Path) -> dict[str, Any]:
    """Read the settings from a YAML file. Blocks. Raises :class:`SettingsError`."""
    try:
        content = yaml.load(path.read_bytes(), _UniqueKeyLoader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise SettingsError(
            f"cannot read the settings file {path} ({error.strerror}): "
            f"create it, or set another with {FILE_VARIABLE} or --config"
        ) from error
    except yaml.YAMLError as error:
        raise SettingsError(f"the settings file {path} is not YAML: {_place(error)}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise SettingsError(
            f"the settings file {path} is not a mapping of settings: use lines such as chunk_tokens: 256"
        )
    return content


def read_environment(settings: type[BaseSettings]) -> dict[str, Any]:
    """Read the settings from ``KVTIER_*`` variables. Raises :class:`SettingsError` for unknown ones."""
    known = [*(variable_name(name) for name in field_names(settings)), FILE_VARIABLE, NATIVE_VARIABLE]
    for name, value in os.environ.items():
        upper = name.upper()
        if upper.startswith(PREFIX) and upper not in known and not _is_foreign(upper, value):
            raise SettingsError(f"the variable {name} is not a setting: {suggestion(upper, known)}")
    return _Environment(settings)()


class _Environment(EnvSettingsSource):
    """Environment source whose error names the variable that is not valid JSON."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: object) -> object:
        """Decode JSON. Raises :class:`SettingsError`."""
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError as error:
            # For a nested setting, field_name is only the last part of its key.
            nested = f".{field_name}"
            names = (name for name in field_names(self.settings_cls) if f".{name}".endswith(nested))
            name = variable_name(next(names, field_name))
            example = (field.examples or ["{...}"])[0]
            raise SettingsError(
                f"{name} is not JSON ({error}): use for example {name}='{example}'"
            ) from error


class _UniqueKeyLoader(yaml.SafeLoader):
    """Loader that rejects duplicate keys in a mapping; PyYAML would silently keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping. Raises ``yaml.YAMLError`` with the line of a duplicate key."""
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key.value!r}", key.start_mark
                )
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _place(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def _is_foreign(name: str, value: str) -> bool:
    """Whether Kubernetes or Docker links set the variable, such as KVTIER_PORT for a service named kvtier."""
    return bool(_ORCHESTRATOR_NAME.fullmatch(name) or _ORCHESTRATOR_VALUE.fullmatch(value))
