"""``kvtier doctor``: what this machine offers, what is missing, and what to type to mend it."""

from __future__ import annotations

import typer
from rich.markup import escape

from kvtier.cli.terminal import AsJson, ConfigFile, messages, output, print_json, table

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Say what this machine offers, what is missing, and what to type to mend it.

    Exit status 1 where something fails that the settings need; what only warns works, slower or not yet.
    """
    from kvtier.cli.checks import check_machine, check_settings

    with messages().status("looking at this machine"):
        checks, wanted = check_settings(config)
        checks = [*checks, *check_machine(wanted)]
    failed = any(check.status == "fail" for check in checks)
    if as_json:
        print_json({"ok": not failed, "checks": [check._asdict() for check in checks]})
    else:
        rows = table("", "what", "found", "to mend it")
        for check in checks:
            mark = f"[{COLOURS[check.status]}]{check.status.upper()}[/]"
            rows.add_row(mark, escape(check.name), escape(check.found), escape(check.remedy))
        output().print(rows)
    if failed:
        raise typer.Exit(1)
