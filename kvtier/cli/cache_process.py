"""Address of the cache process that a command asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from kvtier.errors import ChannelError

Socket = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="Socket of the cache process, instead of the one in the settings."),
]


@contextmanager
def cache_process(config: Path | None, socket: Path | None) -> Iterator[Path]:
    """Yield the socket of an option or the settings, and add what to do to a :class:`ChannelError`."""
    from kvtier.bridge.spawn import default_address
    from kvtier.settings import load_settings

    if socket is None:
        settings = load_settings(file=config)
        socket = settings.socket or default_address(settings)
    try:
        yield socket
    except ChannelError as error:
        if socket.exists():
            raise ChannelError(f"{error}: see its log") from error
        raise ChannelError(f"{error}: start one with `kvtier serve`, or set --socket") from error
