"""What all commands share: where they print to, how they log, the options that they have in common."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

PIPE_COLUMNS = 1 << 16
"""Wider than any row, however long a path in it: a table that is piped keeps a row on a line."""

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="The YAML file with the settings. Left out: the one that KVTIER_CONFIG_FILE names, if any.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def output() -> Console:
    """For results."""
    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False)


def messages() -> Console:
    """For progress, questions and errors."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: object) -> None:
    """Print a value that JSON can hold."""
    typer.echo(json.dumps(value, indent=2))


def table(*columns: str) -> Table:
    """An empty table that folds long cells instead of cutting them."""
    result = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        result.add_column(column, overflow="fold")
    return result


def set_up_logging(level: str) -> None:
    """Send the log to standard error: in colour on a terminal, in plain lines otherwise."""
    handler: logging.Handler
    if sys.stderr.isatty():
        from rich.logging import RichHandler

        handler = RichHandler(console=Console(stderr=True), show_path=False, rich_tracebacks=False)
        handler.setFormatter(logging.Formatter("%(message)s", "%X"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("kvtier").setLevel(level)


@contextmanager
def ends_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack like Ctrl-C does, so that nothing is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
