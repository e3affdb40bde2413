"""``kvtier doctor``: what this machine offers, what is missing, and what to type to mend it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from kvtier.cli.terminal import AsJson, ConfigFile, messages, output, print_json, table

if TYPE_CHECKING:
    from kvtier.cli.checks import Check, Wanted

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
HINT = "kvtier doctor --backend all writes and reads one chunk on each tier."

BackendNames = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        "-b",
        metavar="NAME",
        help="Write, read and time one chunk on this tier, by its name or type; repeatable; `all`: on each.",
    ),
]
ChunkSize = Annotated[
    str | None, typer.Option("--size", metavar="SIZE", help="How large that chunk is. Left out: 4MiB.")
]


def doctor(
    config: ConfigFile = None, backend: BackendNames = None, size: ChunkSize = None, as_json: AsJson = False
) -> None:
    """Say what this machine offers, what is missing, and what to type to mend it.

    Exit status 1 where something fails that the settings need; what only warns works, slower or not yet.
    Every peer of the settings is called. A tier that a running cache process has is not disturbed.
    """
    from kvtier.cli.checks import check_machine, check_settings
    from kvtier.cli.checks_backend import end_threads

    threads = threading.enumerate()
    if size is not None and not backend:
        raise typer.BadParameter("goes with --backend", param_hint="--size")
    with messages().status("looking at this machine") as status:
        checks, wanted = check_settings(config)
        trials = _trials(wanted, backend or [], size)
        checks = [*checks, *check_machine(wanted)]
        if wanted.plugins is not None and wanted.settings is not None and wanted.settings.peer.used:
            from kvtier.cli.checks_peers import check_peers

            status.update("calling the peers")
            checks += check_peers(wanted.plugins, wanted.settings)
        status.update("writing and reading chunks")
        checks += trials
    failed = any(check.status == "fail" for check in checks)
    _print(checks, failed=failed, as_json=as_json, hint="" if backend else HINT)
    if backend and not end_threads(threads):
        leave(1 if failed else 0)
    if failed:
        raise typer.Exit(1)


def _trials(wanted: Wanted, names: list[str], size: str | None) -> Iterator[Check]:
    """A check for each tier that is named, made when it is asked for; nothing where settings are wrong."""
    from kvtier.cli.checks_backend import DEFAULT_SIZE, LARGEST_SIZE, check_backend, chosen
    from kvtier.errors import SettingsError
    from kvtier.units import format_size, parse_size

    try:
        length = parse_size(DEFAULT_SIZE if size is None else size)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--size") from error
    if not 0 < length <= LARGEST_SIZE:
        largest = format_size(LARGEST_SIZE)
        raise typer.BadParameter(f"write a size from 1 to {largest}", param_hint="--size")
    plugins, settings = wanted.plugins, wanted.settings
    if plugins is None or settings is None:
        return iter(())
    try:
        tiers = chosen(wanted.tiers, names)
    except SettingsError as error:
        raise typer.BadParameter(str(error), param_hint="--backend") from error
    return (check_backend(plugins, tier, length, checksum=settings.checksum) for tier in tiers)


def _print(checks: list[Check], *, failed: bool, as_json: bool, hint: str) -> None:
    if as_json:
        print_json({"ok": not failed, "checks": [check._asdict() for check in checks]})
        return
    rows = table("", "what", "found", "to mend it")
    for check in checks:
        mark = f"[{COLOURS[check.status]}]{check.status.upper()}[/]"
        rows.add_row(mark, escape(check.name), escape(check.found), escape(check.remedy))
    output().print(rows)
    if hint:
        output().print(escape(hint))


def leave(status: int) -> None:
    """End this process though threads go on that Python would wait for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
