"""``kvtier serve``, ``controller`` and ``proxy``. The last two have an option per field of their settings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import Parameter
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import typer
from pydantic import BeforeValidator, SecretStr
from pydantic.fields import FieldInfo

from kvtier.cli.options import Command, make_command, option, own_parameters, read_secret
from kvtier.cli.settings_reference import format_value
from kvtier.cli.terminal import ConfigFile, set_up_logging
from kvtier.fleet.controller.settings import ServiceSettings
from kvtier.fleet.proxy.settings import ProxySettings
from kvtier.settings.command import CommandSettings

EXIT_SECONDS = 30.0
"""What a cache process may need to exit, beside `drain_timeout`, before systemd kills it."""

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
LOG_LEVEL = option("log_level", str, default="INFO", metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR.")

CONTROLLER_EXAMPLES = (
    "kvtier controller",
    "kvtier controller --listen 0.0.0.0:9000 --token-file /etc/kvtier/controller-token",
)
PROXY_EXAMPLES = (
    "kvtier proxy --prefill http://localhost:8100 --decode http://localhost:8200",
    "kvtier proxy --listen 0.0.0.0:9000 --prefill http://gpu-1:8000 --prefill http://gpu-2:8000 "
    "--decode http://gpu-3:8000=10.0.0.3:55555",
)


def service_command(model: type[CommandSettings]) -> Callable[[Command], Command]:
    """Make a function a command with an option per field of ``model``. It gets their values, by field."""
    fields = model.model_fields
    files = {name: f"{name}_file" for name, field in fields.items() if _kind(field) is SecretStr}
    shared = [_option(files.get(name, name), field) for name, field in fields.items()]

    def decorate(function: Command) -> Command:
        def run(values: dict[str, Any]) -> None:
            set_up_logging(_level(values.pop("log_level")))
            given = {name: values.pop(files.get(name, name)) for name in fields}
            for name, file in files.items():
                if given[name] is not None:
                    given[name] = read_secret(given[name], f"--{file.replace('_', '-')}")
            function(given, **values)

        return make_command(function, [*shared, *own_parameters(function), LOG_LEVEL], run)

    return decorate


def _option(name: str, field: FieldInfo) -> Parameter:
    kind, extra = _kind(field), field.json_schema_extra
    assert isinstance(extra, dict)
    return option(
        name,
        (Path if kind is SecretStr else kind) | None,
        metavar=extra["metavar"],
        help=field.description,
        rich_help_panel=extra["panel"],
        show_default=extra["shown"] or (format_value(field, field.default) if field.default else False),
    )


def _kind(field: FieldInfo) -> Any:  # noqa: ANN401 - a type
    """Return the type that the command line checks; the settings parse the rest."""
    if any(isinstance(item, BeforeValidator) for item in field.metadata):
        return str  # A size or a duration.
    kind = field.annotation
    while (arguments := get_args(kind)) and get_origin(kind) is not tuple:
        kind = next(argument for argument in arguments if argument is not NoneType)
    return list[str] if get_origin(kind) is tuple else kind  # To Typer, a tuple has a fixed length.


def _level(text: str) -> str:
    level = text.upper()
    if level not in LEVELS:
        raise typer.BadParameter(f"{text!r} is not DEBUG, INFO, WARNING or ERROR", param_hint="--log-level")
    return level


@service_command(ServiceSettings)
def controller(given: dict[str, Any], config: ConfigFile = None) -> None:
    """Run the controller: instances register with it, and it looks up, moves, pins and clears their chunks.

    The web page is at `/`, the API documentation at `/docs`. Stop it with Ctrl-C or SIGTERM: operations in
    flight get a few seconds to finish; a second signal stops it at once. Instances keep serving without it,
    and report their chunks again after a restart.
    """
    import anyio

    from kvtier.fleet.controller.serve import serve
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

    from kvtier.fleet.proxy.serve import serve

    if not given["decode"]:
        raise typer.BadParameter("no decode instance: use --decode http://HOST:PORT")
    statistics = anyio.run(partial(serve, ProxySettings.of(**given)))
    typer.echo(statistics.report())


def serve(
    config: ConfigFile = None,
    socket: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Unix socket to serve on, instead of the one in the settings."),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Record the lookups of engines, without their tokens: see docs/recording.md."
        ),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR.")
    ] = None,
) -> None:
    """Run a cache process: hold chunks in the configured tiers, and serve this host's engines.

    Set `socket` in the settings of your engines to its socket. Started by systemd, it serves on the socket of
    its socket unit, if there is one. Stop it with Ctrl-C or SIGTERM: it then finishes pending writes, for at
    most `drain_timeout`; a second signal stops it at once.
    """
    from kvtier.settings import load_settings

    recording = None if record is None else {"path": record}
    options = {"socket": socket, "recording": recording, "log_level": log_level}
    given = {name: value for name, value in options.items() if value is not None}
    settings = load_settings(given, file=config)
    set_up_logging(settings.log_level)

    # After the settings, so that an invalid one is reported at once.
    import anyio

    from kvtier.bridge.serve import serve as serve_engines
    from kvtier.concurrency import systemd

    anyio.run(
        partial(
            serve_engines,
            settings,
            listener=systemd.inherited_listener(),
            on_serving=partial(systemd.notify, "READY=1"),
            on_stopping=partial(systemd.notify_stopping, settings.drain_timeout + EXIT_SECONDS),
        )
    )
