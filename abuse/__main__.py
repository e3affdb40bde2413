"""``python -m abuse``: see ``--help``."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from abuse.run import KINDS, Results, Run
from abuse.stack import running

PROGRESS_SECONDS = 20.0


def main(
    seconds: Annotated[float, typer.Option(min=1.0, help="Duration.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Random seed of the rounds.")] = 1,
    rounds: Annotated[int, typer.Option(min=0, help="Number of rounds, whatever the time; 0: no limit.")] = 0,
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="Only kinds of rounds whose name contains this.")
    ] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the result.")
    ] = None,
) -> None:
    """Abuse real processes of kvtier in rounds: hostile messages, floods, kills, stops and damaged disks.

    Two cache processes that are peers, a controller and a proxy serve engines that behave well meanwhile.
    After each round everything must answer, no process may have died, and each engine must read back what it
    stored, or a miss. The exit status is 1 if there are findings.
    """
    if not any(only in kind for kind in KINDS):
        raise typer.BadParameter("no kind contains it: " + ", ".join(KINDS), param_hint="--only")
    logging.getLogger("kvtier").setLevel(logging.CRITICAL)  # Of the engines here, which lose connections.
    console, results = Console(), Results()
    folder = Path(tempfile.mkdtemp(prefix="kva-"))
    run = None
    try:
        with running(folder) as stack:
            run = Run(stack, seed, only, results)
            deadline, shown = time.monotonic() + seconds, 0.0
            while run.number < rounds if rounds else time.monotonic() < deadline:
                run.round()
                if time.monotonic() > shown + PROGRESS_SECONDS:
                    shown = time.monotonic()
                    _print(console, f"{time.strftime('%X')} {_progress(run)}")
    except KeyboardInterrupt:
        console.print("interrupted")
    done = 0 if run is None else run.number
    if json_file is not None:
        findings = [asdict(finding) for finding in results.findings]
        found = {"seed": seed, "rounds_done": done, **vars(results), "findings": findings}
        json_file.write_text(json.dumps(found, indent=2) + "\n")
    _print_table(console, results)
    if run is not None:
        _print(console, _progress(run))
        for name, first in results.first_bytes.items():
            peak = results.peak_bytes[name]
            _print(console, f"{name}: {first >> 20} MiB of memory at first, at most {peak >> 20}")
    for finding in results.findings:
        _print(console, f"\nround {finding.round}, {finding.kind}: {finding.what}")
    if results.findings:
        again = f" --only '{only}'" if only else ""
        last = results.findings[0].round
        _print(console, f"\nseed {seed}; to repeat: python -m abuse --seed {seed} --rounds {last}{again}")
        _print(console, f"logs: {folder}")
        raise typer.Exit(1)
    shutil.rmtree(folder, ignore_errors=True)


def _print(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _progress(run: Run) -> str:
    results = run.results
    counts = ", ".join(f"{count} {what}" for what, count in sorted(results.counts.items()))
    return f"{run.number} rounds, {sum(results.found.values())} findings, {counts}"


def _print_table(console: Console, results: Results) -> None:
    table = Table("kind", "rounds", "count", "slowest answer", "findings", box=None)
    for column in table.columns:
        column.no_wrap = True
    for kind in [*KINDS, "start"]:
        if results.rounds[kind] or results.found[kind]:
            slowest = f"{results.slowest[kind]:.2f} s" if kind in results.slowest else ""
            counts = str(results.rounds[kind]), str(results.sent[kind]), slowest, str(results.found[kind])
            table.add_row(kind, *counts)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
