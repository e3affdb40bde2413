"""``kvtier config``: show, check and describe the settings. ``kvtier plugins``: list the loaded plugins."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape

from kvtier.cli.terminal import AsJson, ConfigFile, messages, output, print_json, table
from kvtier.errors import SettingsError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from kvtier.settings import Origin, Settings, TierSettings

FROM_FILE = "LMCache's YAML file, or a file with the JSON of `--kv-transfer-config`."
app = typer.Typer(name="config", no_args_is_help=True, help="Show, check and describe the settings.")


class Value(NamedTuple):
    """One effective setting."""

    key: str
    value: Any
    source: str
    shown: str
    """The value as written in a settings file."""


@app.command()
def show(config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Print all settings, their values and sources. Secrets are masked."""
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
    """Validate the settings. Exit status 1, with an explanation, if they are invalid.

    Paths and servers are not opened; use `kvtier doctor` to check them.
    """
    from kvtier.plugins import load_all

    _, _, tiers, problems = load_all(config)
    if problems:
        raise SettingsError("\n".join(problems))
    names = ", ".join(f"{tier.name} ({tier.type})" for tier in tiers)
    output().print(f"The settings are valid. Tiers, fastest first: {escape(names)}.")


@app.command()
def schema(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown documentation instead.")
    ] = False,
) -> None:
    """Print the JSON schema of the settings, including the tier types of all installed plugins.

    Editors use it to complete and validate YAML files: `# yaml-language-server: $schema=FILE`.
    """
    from kvtier.cli.settings_reference import json_schema, markdown_page
    from kvtier.plugins import Plugins

    plugins = Plugins.load()
    if markdown:
        typer.echo(markdown_page(plugins), nl=False)
    else:
        print_json(json_schema(plugins))


@app.command("from-lmcache")
def from_lmcache(
    file: Annotated[Path | None, typer.Argument(help=FROM_FILE)] = None,
    environment: Annotated[bool, typer.Option("--env", help="Read `LMCACHE_*` variables.")] = False,
    server: Annotated[str, typer.Option(metavar="TEXT", help="Options of `lmcache server` (MP mode).")] = "",
) -> None:
    """Print the settings that mean the same as a configuration of LMCache, with all else as comments.

    Variables replace what is in the file. Secrets are not printed.
    """
    from kvtier.cli import lmcache

    if file is None and not environment and not server:
        raise SettingsError("name LMCache's file, or add --env or --server")
    values = lmcache.read(file, os.environ if environment else {}, server)
    translation = lmcache.Translation(values)
    typer.echo(lmcache.render(translation), nl=False)
    for outcome in (lmcache.UNKNOWN, lmcache.NO_COUNTERPART):
        if keys := translation.keys.get(outcome):
            names = ", ".join(key.partition(": ")[0] for key in keys)
            messages().print(f"[yellow]{outcome}:[/yellow] {escape(names)}")


def _load(file: Path | None) -> tuple[Settings, list[TierSettings]]:
    from kvtier.plugins import Plugins
    from kvtier.settings import load_settings

    settings = load_settings(file=file)
    plugins = Plugins.load(settings.plugins)
    plugins.transport_settings(settings)  # Reports those that are invalid.
    plugins.peer_codecs(settings)
    return settings, plugins.tier_settings(settings)


def _values(settings: Settings, tiers: list[TierSettings]) -> Iterator[Value]:
    for key, value, text in _dumped(settings):
        if key != "tiers":
            yield Value(key, value, _source(settings.origin(key)), text)
    for index, tier in enumerate(tiers):
        for key, value, text in _dumped(tier):
            source = _source(settings.origin("tiers")) if key in settings.tiers[index] else "default"
            yield Value(f"tiers[{index}].{key}", value, source, text)


def _dumped(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield each setting's name, JSON value, and text as in a settings file. Secrets are masked."""
    from kvtier.cli.settings_reference import format_value
    from kvtier.settings.sources import nested_model

    values = model.model_dump(mode="json")
    for name, field in type(model).model_fields.items():
        if nested_model(field) is not None:
            yield from _dumped(getattr(model, name), f"{prefix}{name}.")
        else:
            yield prefix + name, values[name], format_value(field, values[name])


def _source(origin: Origin) -> str:
    return f"{origin.kind} {origin.where}".rstrip()


def plugins(config: ConfigFile = None, as_json: AsJson = False) -> None:
    """List the loaded plugins, their sources and what they provide.

    The setting `plugins` limits which installed plugins are loaded.
    """
    from kvtier.plugins import Plugins
    from kvtier.settings import load_settings

    loaded = Plugins.load(load_settings(file=config).plugins).loaded()
    if as_json:
        print_json([plugin._asdict() for plugin in loaded])
        return
    rows = table("name", "from", "hooks", "provides")
    for plugin in loaded:
        rows.add_row(
            escape(plugin.name),
            escape(plugin.source),
            ", ".join(plugin.hooks),
            escape(", ".join(plugin.provides)),
        )
    output().print(rows)
