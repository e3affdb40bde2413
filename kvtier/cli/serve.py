"""``kvtier serve``: run a cache process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.cli.terminal import ConfigFile, set_up_logging


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

    Set `socket` in the settings of your engines to its socket. Stop it with Ctrl-C or SIGTERM: it then
    finishes pending writes, for at most `drain_timeout`; a second signal stops it at once.
    """
    from kvtier.settings import load_settings

    overrides: dict[str, Any] = {}
    if socket is not None:
        overrides["socket"] = socket
    if record is not None:
        overrides["recording"] = {"path": record}
    if log_level is not None:
        overrides["log_level"] = log_level
    settings = load_settings(overrides, file=config)
    set_up_logging(settings.log_level)

    import anyio

    from kvtier.bridge.serve import serve as serve_engines

    anyio.run(partial(serve_engines, settings, socket=settings.socket))
