"""``kvtier controller`` and ``kvtier proxy``. Their options are the fields of their settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import typer
from pydantic import SecretStr

from kvtier.cli.options import Command, make_command, option, own_parameters, read_secret
from kvtier.cli.terminal import ConfigFile, set_up_logging
from kvtier.controller.settings import ServiceSettings
from kvtier.proxy.settings import ProxySettings
from kvtier.settings.command import CommandSettings, Option
from kvtier.units import format_duration, format_size

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
LOG_LEVEL = option("log_level", str, default="INFO", metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR.")
FORMATS: dict[str, Callable[[Any], str]] = {"TIME": format_duration, "SIZE": format_size}
"""How the help shows a default, by metavar."""


def service_command(model: type[CommandSettings]) -> Callable[[Command], Command]:
    """Make a function a command with an option per field of ``model``. It gets their values, by field."""
    options = dict(_options(model))
    files = {name: f"{name}_file" for name, field in options.items() if field.kind is SecretStr}
    shared = [
        option(
            files.get(name, name),
            (Path if name in files else field.kind) | None,
            metavar=field.metavar,
            help=field.help,
            rich_help_panel=field.panel,
            show_default=field.shown or _default(model, name, field.metavar),
        )
        for name, field in options.items()
    ]

    def decorate(function: Command) -> Command:
        def run(values: dict[str, Any]) -> None:
            set_up_logging(_level(values.pop("log_level")))
            given = {name: values.pop(files.get(name, name)) for name in options}
            for name, file in files.items():
                if given[name] is not None:
                    given[name] = read_secret(given[name], f"--{file.replace('_', '-')}")
            function(given, **values)

        return make_command(function, [*shared, *own_parameters(function), LOG_LEVEL], run)

    return decorate


@service_command(ServiceSettings)
def controller(given: dict[str, Any], config: ConfigFile = None) -> None:
    """Run the controller: instances register with it, and it looks up, moves, pins and clears their chunks.

    The web page is at `/`, the API documentation at `/docs`. Stop it with Ctrl-C or SIGTERM: operations in
    flight get a few seconds to finish; a second signal stops it at once. Instances keep serving without it,
    and report their chunks again after a restart.
    """
    import anyio

    from kvtier.controller.serve import serve
    from kvtier.settings import load_settings

    if given["token"] is None:  # The same default as for clients.
        given["token"] = load_settings(file=config).controller.token
    anyio.run(partial(serve, ServiceSettings.of(**given)))


@service_command(ProxySettings)
def proxy(given: dict[str, Any]) -> None:
    """Run a proxy for OpenAI's API, in front of prefill instances and decode instances.

    Stop it with Ctrl-C or SIGTERM: it refuses new requests, waits for those in flight, and prints how long
    prefills took; a second signal stops it at once.
    """
    import anyio

    from kvtier.proxy.serve import serve

    if not given["decode"]:
        raise typer.BadParameter("no decode instance: use --decode http://HOST:PORT")
    statistics = anyio.run(partial(serve, ProxySettings.of(**given)))
    typer.echo(statistics.report())


CONTROLLER_EXAMPLES = (
    "kvtier controller",
    "kvtier controller --listen 0.0.0.0:9000 --token-file /etc/kvtier/controller-token",
)
PROXY_EXAMPLES = (
    "kvtier proxy --prefill http://localhost:8100 --decode http://localhost:8200",
    "kvtier proxy --listen 0.0.0.0:9000 --prefill http://gpu-1:8000 --prefill http://gpu-2:8000 "
    "--decode http://gpu-3:8000=10.0.0.3:55555",
)


def _options(model: type[CommandSettings]) -> Iterator[tuple[str, Option]]:
    for name, field in model.model_fields.items():
        (shown,) = (item for item in field.metadata if isinstance(item, Option))
        yield name, shown


def _default(model: type[CommandSettings], name: str, metavar: str) -> str | bool:
    """Return a field's default as shown in the help. Typer shows none for ``False``."""
    value = model.model_fields[name].default
    return FORMATS.get(metavar, str)(value) if value else False


def _level(text: str) -> str:
    level = text.upper()
    if level not in LEVELS:
        raise typer.BadParameter(f"{text!r} is not DEBUG, INFO, WARNING or ERROR", param_hint="--log-level")
    return level
