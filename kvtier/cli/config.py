"""``kvtier config``: show, check and describe the settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape

from kvtier.cli.terminal import AsJson, ConfigFile, output, print_json, table

if TYPE_CHECKING:
    from pydantic import BaseModel

    from kvtier.settings import Origin, Settings, TierSettings

app = typer.Typer(name="config", no_args_is_help=True, help="Show, check and describe the settings.")


class Value(NamedTuple):
    """One setting as it is in force."""

    key: str
    value: Any
    source: str
    shown: str
    """The value as a person would write it."""


@app.command()
def show(config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Print every setting, its value and where the value comes from. Secrets are masked."""
    values = list(_values(*_load(config)))
    if as_json:
        print_json({value.key: {"value": value.value, "source": value.source} for value in values})
        return
    rows = table("setting", "value", "from")
    for value in values:
        rows.add_row(escape(value.key), escape(value.shown) or "[dim]not set[/dim]", escape(value.source))
    output().print(rows)


@app.command()
def check(config: ConfigFile = None) -> None:
    """Say whether the settings are right: exit status 0, or 1 and what to write instead.

    Nothing is opened: whether a path can be written is found by `kvtier doctor` and `kvtier serve`.
    """
    _, tiers = _load(config)
    names = ", ".join(f"{tier.name} ({tier.type})" for tier in tiers)
    output().print(f"The settings are right. Tiers, fastest first: {escape(names)}.")


@app.command()
def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a page for people instead.")] = False,
) -> None:
    """Print the JSON schema of the settings, with the tier types of all installed plugins.

    Editors complete and check a YAML file that names it: `# yaml-language-server: $schema=FILE`.
    """
    from kvtier.plugins import Plugins
    from kvtier.settings_schema import json_schema, markdown_page

    plugins = Plugins.load()
    if markdown:
        typer.echo(markdown_page(plugins), nl=False)
    else:
        print_json(json_schema(plugins))


def _load(file: Path | None) -> tuple[Settings, list[TierSettings]]:
    from kvtier.plugins import Plugins
    from kvtier.settings import load_settings

    settings = load_settings(file=file)
    return settings, Plugins.load(settings.plugins).tier_settings(settings)


def _values(settings: Settings, tiers: list[TierSettings]) -> Iterator[Value]:
    for key, value, text in _dumped(settings):
        if key != "tiers":
            yield Value(key, value, _source(settings.origin(key)), text)
    for index, tier in enumerate(tiers):
        for key, value, text in _dumped(tier):
            source = _source(settings.origin("tiers")) if key in settings.tiers[index] else "default"
            yield Value(f"tiers[{index}].{key}", value, source, text)


def _dumped(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Each setting's name, its value as JSON holds it and as a person writes it; secrets masked in both."""
    from kvtier.settings_schema import shown
    from kvtier.settings_sources import nested_model

    values = model.model_dump(mode="json")
    for name, field in type(model).model_fields.items():
        if nested_model(field) is not None:
            yield from _dumped(getattr(model, name), f"{prefix}{name}.")
        else:
            yield prefix + name, values[name], shown(field, values[name])


def _source(origin: Origin) -> str:
    return f"{origin.kind} {origin.where}".rstrip()
