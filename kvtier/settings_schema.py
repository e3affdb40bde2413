"""The settings described: a JSON schema for editors, a page for people. Both are made from the models."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, SecretStr
from pydantic.fields import FieldInfo

from kvtier.plugins import Plugins
from kvtier.settings import LocalTierSettings, Settings, TierSettings
from kvtier.settings_sources import nested_model, variable_name
from kvtier.units import format_duration, format_size, parse_duration, parse_size

_PAGE = """\
# Settings

<!-- Made by `kvtier config schema --markdown` from the models. Do not edit. -->

Where a setting is given more than once, the first of these wins: the command line, code or vLLM's
`kv_connector_extra_config`; the environment variable; the YAML file that `KVTIER_CONFIG_FILE` names; the
default. Lists are replaced as a whole, nested settings are merged. A name that is not known is an error, in
the file and among the `KVTIER_*` variables. Variables hold lists and nested settings as JSON. `kvtier config
show` prints what is in force and where it comes from, `kvtier config check` says whether it is right.

Sizes are written as `5GiB`, `500MB` or a number of bytes; durations as `250ms`, `2s`, `1m` or a number of
seconds. [settings.schema.json](settings.schema.json) lets an editor complete and check a file.

```yaml
{example}```

"""

EXAMPLE = """\
chunk_tokens: 256
tiers:                      # fastest first
  - {name: ram, type: hugepage, capacity: 20GiB}
  - {name: ssd, type: disk, capacity: 500GiB, path: /var/cache/kvtier}
prefetch: {policy: timeout, deadline: 2s}
"""


def json_schema(plugins: Plugins) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of the settings file, with the tier types that ``plugins`` provide."""
    schema = Settings.model_json_schema()
    definitions = schema.setdefault("$defs", {})
    names = []
    for type_name, model in _tier_types(plugins):
        tier = model.model_json_schema()
        definitions.update(tier.pop("$defs", {}))
        tier["title"] = f"Tier of type {type_name}"
        tier["properties"]["type"]["const"] = type_name
        if issubclass(model, LocalTierSettings):
            tier["properties"]["eviction"]["enum"] = plugins.names("kvtier_eviction_policies")
        definitions[f"tier_{type_name}"] = tier
        names.append(f"tier_{type_name}")
    schema["properties"]["tiers"]["items"] = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "kvtier settings"}


def markdown_page(plugins: Plugins) -> str:
    """The page ``docs/settings.md``: every setting with its variable, form, default and meaning."""
    parts = [_PAGE.format(example=EXAMPLE), "## All settings\n"]
    parts += [_entry(key, field, variable_name(key)) for key, field in _fields(Settings)]
    parts.append("## Every tier\n")
    parts += [_entry(key, field) for key, field in _fields(TierSettings)]
    local = [f"`{name}`" for name, model in _tier_types(plugins) if issubclass(model, LocalTierSettings)]
    parts.append(
        f"## Every tier of this host alone\n\nOf type {', '.join(local)}; others are shared pools.\n"
    )
    parts += [_entry(key, field) for key, field in _own_fields(LocalTierSettings, TierSettings)]
    for type_name, model in _tier_types(plugins):
        parts.append(f"## Tiers of type `{type_name}`\n")
        base = LocalTierSettings if issubclass(model, LocalTierSettings) else TierSettings
        own = list(_own_fields(model, base))
        parts += [_entry(key, field) for key, field in own] or ["Nothing besides what every such tier has.\n"]
    for name in plugins.names("kvtier_transports"):
        parts.append(f"## Transport `{name}`\n\nBeside `type`, in `peer.transport`.\n")
        fields = _fields(plugins.transport(name).settings_type)
        parts += [_entry(key, field) for key, field in fields if key != "type"]
    return "\n".join(parts)


def shown(field: FieldInfo, value: object) -> str:
    """A value as a person would write it."""
    parsers = [item.func for item in _metadata(field) if isinstance(item, BeforeValidator)]
    if isinstance(value, int | float) and parse_size in parsers:
        return format_size(value)
    if isinstance(value, int | float) and parse_duration in parsers:
        return format_duration(value)
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _metadata(field: FieldInfo) -> list[Any]:
    """What the field is annotated with, also inside ``| None``."""
    inner = [
        item for argument in get_args(field.annotation) for item in getattr(argument, "__metadata__", ())
    ]
    return [*field.metadata, *inner]


def _tier_types(plugins: Plugins) -> Iterator[tuple[str, type[TierSettings]]]:
    for name in plugins.names("kvtier_backends"):
        yield name, plugins.backend(name).settings_type


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        nested = nested_model(field)
        if nested is None:
            yield prefix + name, field
        else:
            yield from _fields(nested, f"{prefix}{name}.")


def _own_fields(model: type[BaseModel], base: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """The fields that ``model`` has or describes otherwise than ``base``."""
    for key, field in _fields(model):
        common = base.model_fields.get(key)
        if common is None or common.description != field.description:
            yield key, field


def _entry(key: str, field: FieldInfo, variable: str = "") -> str:
    facts = [f"`{variable}`"] if variable else []
    facts.append(_form(field))
    default = "" if field.is_required() else shown(field, field.get_default(call_default_factory=True))
    if default:
        facts.append(f"default `{default}`")
    else:
        facts.append("required" if field.is_required() else "not set by default")
        facts += [f"for example `{example}`" for example in (field.examples or ())[:1]]
    return f"### `{key}`\n\n{' · '.join(facts)}\n\n{field.description}\n"


def _form(field: FieldInfo) -> str:
    """What kind of value a field takes, in a few words."""
    parsers = [item.func for item in _metadata(field) if isinstance(item, BeforeValidator)]
    if parse_size in parsers:
        return "size"
    if parse_duration in parsers:
        return "duration"
    return _named(field.annotation)


def _named(annotation: object) -> str:
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_named(part) for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is not None and hasattr(annotation, "__metadata__"):
        return _named(get_args(annotation)[0])
    if annotation is SecretStr:
        return "text, `{env: NAME}` or `{file: PATH}`"
    names = {
        "dict": "mapping",
        "bool": "true or false",
        "int": "whole number",
        "float": "number",
        "str": "text",
    }
    plain = get_origin(annotation) or annotation
    if isinstance(plain, type) and issubclass(plain, BaseModel):
        return "mapping of " + ", ".join(f"`{name}`" for name in plain.model_fields)
    name = getattr(plain, "__name__", str(plain)).lower()
    return names.get(name, name)
