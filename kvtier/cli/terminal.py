"""Output, logging and options shared by all commands."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.segment import Segment
from rich.table import Table

PIPE_COLUMNS = 1 << 16
"""Wider than any row: in a pipe, each row of a table stays on one line."""
_PADDING = re.compile(r" +(?=\n)")

CONFIG_HELP = "YAML file with the settings. Default: the file named by KVTIER_CONFIG_FILE, if any."
ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", metavar="FILE", help=CONFIG_HELP)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def output() -> Console:
    """Return the console for results: standard output. In a pipe, lines do not end in spaces."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return _PipeConsole(width=PIPE_COLUMNS, highlight=False)


class _PipeConsole(Console):
    """A console that leaves out the padding at the end of the rows of tables."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return _PADDING.sub("", super()._render_buffer(buffer))


def messages() -> Console:
    """Return the console for progress, questions and errors: standard error."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: object) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2))


def table(*columns: str) -> Table:
    """Return an empty table that folds long cells instead of truncating them."""
    result = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        result.add_column(column, overflow="fold")
    return result


def set_up_logging(level: str) -> None:
    """Log to standard error: in colour on a terminal, otherwise as plain lines."""
    handler: logging.Handler
    if sys.stderr.isatty():
        from rich.logging import RichHandler

        handler = RichHandler(console=Console(stderr=True), show_path=False, rich_tracebacks=False)
        handler.setFormatter(logging.Formatter("%(message)s", "%X"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    # Libraries log warnings alone, whatever the level of kvtier.
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("kvtier").setLevel(level)
