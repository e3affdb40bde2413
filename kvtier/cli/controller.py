"""``kvtier controller``: run the controller."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.controller_options import SettingsFile
from kvtier.cli.terminal import set_up_logging
from kvtier.errors import SettingsError

EXAMPLES = """
Examples:

  kvtier controller

  kvtier controller --listen 0.0.0.0:9000 --token-file /etc/kvtier/controller-token
"""


def controller(
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address to listen on.", show_default="127.0.0.1:9000"),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "File with the token that instances and clients must send. Required unless listening on "
                "loopback. Default: `controller.token` of the settings, if any."
            ),
        ),
    ] = None,
    instance_timeout: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Drop an instance after this time without messages.", show_default="10s"
        ),
    ] = None,
    heartbeat: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Heartbeat interval of instances.", show_default="2s"),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File to store events and pins in.",
            show_default="$XDG_STATE_HOME/kvtier/controller.sqlite",
        ),
    ] = None,
    keep_events: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Time to keep events after their end.", show_default="1h"),
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Serve HTTPS with this PEM certificate.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The certificate's PEM private key.")
    ] = None,
    config: SettingsFile = None,
    log_level: Annotated[str, typer.Option(metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Run the controller: instances register with it, and it looks up, moves, pins and clears their chunks.

    The web page is at `/`, the API documentation at `/docs`. Stop it with Ctrl-C or SIGTERM: operations in
    flight get a few seconds to finish; a second signal stops it at once. Instances keep serving without it,
    and report their chunks again after a restart.
    """
    set_up_logging(_level(log_level))

    import anyio

    from kvtier.controller.serve import serve
    from kvtier.controller.settings import service_settings

    settings = service_settings(
        listen=listen,
        token=_token(token_file, config),
        instance_timeout=instance_timeout,
        heartbeat=heartbeat,
        state=state,
        keep_events=keep_events,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
    )
    anyio.run(partial(serve, settings))


def _token(file: Path | None, config: Path | None) -> object:
    """Return the token, with the same default as for clients."""
    from kvtier.settings import load_settings
    from kvtier.settings.secret import resolve

    if file is None:
        return load_settings(file=config).controller.token
    try:
        return resolve({"file": str(file)})
    except ValueError as error:
        raise SettingsError(f"--token-file: {error}") from error


def _level(text: str) -> str:
    level = text.upper()
    if level not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
        raise typer.BadParameter(f"{text!r} is not DEBUG, INFO, WARNING or ERROR", param_hint="--log-level")
    return level
