"""``python -m soak``: see ``--help``."""

from __future__ import annotations

import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from soak import schedule
from soak.findings import Record

SHOWN = 5
"""Findings of a kind that are printed."""
LOG_SECONDS = 30.0
"""Without a terminal, how often a line says how far it is."""


class Transports(StrEnum):
    """What ``--transport`` takes."""

    tcp = "tcp"
    nixl = "nixl"
    both = "both"

    @property
    def names(self) -> list[str]:
        """The transports, in the order of their phases."""
        return ["tcp", "nixl"] if self is Transports.both else [self.value]


def main(
    seconds: Annotated[
        float,
        typer.Option(
            min=10.0, help="How long faults and requests last; starting and ending take minutes more."
        ),
    ] = 600.0,
    seed: Annotated[int, typer.Option(help="What the timeline derives from.")] = 1,
    transport: Annotated[
        Transports,
        typer.Option(help="How the instances fetch from each other; half of the time each for both."),
    ] = Transports.both,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write everything that was found and counted, as JSON."),
    ] = None,
    work_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where logs go. Left out: a temporary folder.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the logs also where nothing was found.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the timeline and do nothing.")] = False,
) -> None:
    """Run two instances with real vLLM engines through a storm of faults, and check every token.

    kill -9 and SIGSTOP of every process, damaged and full disks, cut and delayed connections between peers,
    saturated CPUs, memory pressure, clock jumps, an emptied Redis: while chats run, and every answer is
    compared with that of an engine without a connector. In the end everything must have recovered and
    nothing may be held: leases, reservations, tickets, descriptors, tasks, processes.

    Ends with status 1 where anything was found, and prints the seed and the timeline that reproduce it.
    Everything runs on loopback. Disks are filled and mounted as root only; clocks jump where libfaketime is
    installed (Debian: apt-get install faketime); redis-server must be there.
    """
    console = Console()
    timeline = schedule.make(seed, seconds, transport.names)
    if dry_run:
        _print_timeline(console, timeline)
        return
    from soak.run import Run  # It takes seconds to import.

    folder = Path(tempfile.mkdtemp(prefix="kvtier-soak-", dir=work_dir))
    record = Record()
    try:
        with _progress(console, record) as show:
            Run(timeline, folder, show, record).run()
    except Exception:
        record.find("run cut short", traceback.format_exc())
    except KeyboardInterrupt:
        console.print(f"interrupted; logs are in {folder}")
        raise typer.Exit(130) from None
    finally:
        if report is not None:
            record.write(report, seed=seed, seconds=seconds, transport=transport.value, logs=str(folder))
    _print_result(console, record)
    if not record.found:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        return
    again = f"python -m soak --seconds {seconds:g} --seed {seed} --transport {transport.value}"
    console.print(f"\nseed {seed}; again: {again}\nlogs: {folder}", highlight=False)
    raise typer.Exit(1)


@contextmanager
def _progress(console: Console, record: Record) -> Iterator[Callable[[str, float, float], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=None, state="")
        last: tuple[str, float] = ("", 0.0)

        def show(what: str, done: float, total: float) -> None:
            nonlocal last
            counts = record.counts
            state = (
                f"{counts['answers']} answers, {counts['cached tokens']} of {counts['prompt tokens']} tokens "
                f"cached, {len(record.applied)} faults, {record.found.total()} findings"
            )
            progress.update(task, description=what, completed=done, total=total or None, state=state)
            if not console.is_terminal and (what != last[0] or time.monotonic() - last[1] > LOG_SECONDS):
                last = (what, time.monotonic())
                line = f"{time.strftime('%X')} {what} {done:.0f}/{total:.0f}: {state}"
                console.print(line, highlight=False, soft_wrap=True)

        yield show


def _print_timeline(console: Console, timeline: schedule.Schedule) -> None:
    for phase in timeline.phases:
        console.print(f"{phase.transport}, {phase.seconds:g} s", style="bold", highlight=False)
        events: list[tuple[float, str]] = [(fault.at, str(fault)) for fault in phase.faults]
        for turn in phase.turns:
            aborted = "" if turn.abort_after is None else f", aborted after {turn.abort_after:.2f} s"
            what = (
                f"engine-{turn.host} user {turn.user}: conversation {turn.conversation}, turn {turn.exchange}"
            )
            events.append((turn.at, what + aborted))
        for at, what in sorted(events):
            console.print(f"{at:8.2f}  {what}", highlight=False)


def _print_result(console: Console, record: Record) -> None:
    counts = ", ".join(f"{count} {what}" for what, count in sorted(record.counts.items()))
    console.print(f"{counts}, {len(record.applied)} faults", highlight=False)
    if not record.found:
        console.print("[green]nothing was found[/green]")
        return
    _print_lines(console, "\nfaults, in seconds since their phase began:", *record.timeline())
    for kind, count in record.found.items():
        shown = [finding for finding in record.findings if finding.kind == kind][:SHOWN]
        for finding in shown:
            when = f"\n{kind} ({finding.phase}, {finding.at:.2f} s)"
            _print_lines(console, when, finding.what, *(f"  beside: {fault}" for fault in finding.faults))
        if count > len(shown):
            _print_lines(console, f"\n{kind}: {count - len(shown)} more; --report has them")


def _print_lines(console: Console, title: str, *lines: str) -> None:
    console.print(title, style="bold", highlight=False, markup=False)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
