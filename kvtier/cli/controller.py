"""``kvtier controller``: run the one place that knows what every instance holds."""

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
        typer.Option(metavar="HOST:PORT", help="Where it is reached.", show_default="127.0.0.1:9000"),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "The file with the token that instances and clients must have. Needed where others than this "
                "host reach it. Left out: `controller.token` of the settings, if any."
            ),
        ),
    ] = None,
    silence: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="An instance that says nothing for so long is dropped.", show_default="10s"
        ),
    ] = None,
    heartbeat: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="How often instances say that they are there.", show_default="2s"),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where it remembers events and pins.",
            show_default="$XDG_STATE_HOME/kvtier/controller.sqlite",
        ),
    ] = None,
    keep_events: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="How long events are kept after their end.", show_default="1h"),
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Serve HTTPS with this certificate, in PEM.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The certificate's private key, in PEM.")
    ] = None,
    config: SettingsFile = None,
    log_level: Annotated[str, typer.Option(metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Run the controller: instances register with it, and it looks up, moves, pins and clears what they hold.

    A page for people is at `/`, a description of all calls at `/docs`. Stop it with Ctrl-C or SIGTERM: what
    is under way then has some seconds to end; a second signal ends it at once. Instances do without it
    meanwhile, and it learns everything anew from them.
    """
    set_up_logging(_level(log_level))

    import anyio

    from kvtier.controller.serve import serve
    from kvtier.controller.settings import service_settings

    settings = service_settings(
        listen=listen,
        token=_token(token_file, config),
        silence=silence,
        heartbeat=heartbeat,
        state=state,
        keep_events=keep_events,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
    )
    anyio.run(partial(serve, settings))


def _token(file: Path | None, config: Path | None) -> object:
    """As clients find it: who runs both has one place for it."""
    from kvtier.settings import load_settings
    from kvtier.settings_secret import resolve

    if file is None:
        return load_settings(file=config).controller.token
    try:
        return resolve({"file": str(file)})
    except ValueError as error:
        raise SettingsError(f"--token-file: {error}") from error


def _level(text: str) -> str:
    level = text.upper()
    if level not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
        raise typer.BadParameter(
            f"{text!r} is none of DEBUG, INFO, WARNING and ERROR", param_hint="--log-level"
        )
    return level
