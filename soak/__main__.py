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
"""Maximum number of findings of a kind to print."""
LOG_SECONDS = 30.0
"""Interval of progress lines without a terminal."""


class Transports(StrEnum):
    """Values of ``--transport``."""

    tcp = "tcp"
    nixl = "nixl"
    both = "both"

    @property
    def names(self) -> list[str]:
        """The transports, in order of their phases."""
        return ["tcp", "nixl"] if self is Transports.both else [self.value]


def main(
    seconds: Annotated[
        float,
        typer.Option(
            min=10.0, help="Duration of faults and requests. Startup and shutdown take some minutes more."
        ),
    ] = 600.0,
    seed: Annotated[int, typer.Option(help="Random seed of the timeline.")] = 1,
    transport: Annotated[
        Transports,
        typer.Option(help="Transport between the instances. With both, each gets half of the time."),
    ] = Transports.both,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write all findings and counts as JSON."),
    ] = None,
    work_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for logs. Default: a temporary folder."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the logs even without findings.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the timeline and exit.")] = False,
) -> None:
    """Run two instances with real vLLM engines under fault injection, and check every token.

    Faults: kill -9 and SIGSTOP of every process, damaged, removed and full disks, cut connections of engines,
    broken and stalled connections between peers, saturated CPUs, memory pressure, clock jumps, FLUSHALL in
    Redis, an adapter whose files are replaced, requests that name an address of nothing. One engine has two
    more connectors: one whose loads all fail, and a second kvtier whose cache process vLLM starts. Meanwhile
    simulated users chat, and every answer is compared with that of an engine without a connector. At the end
    everything must have recovered, and there must be no leaks: leases, reservations, tickets, descriptors,
    tasks, processes.

    The exit status is 1 if there are findings; the seed and the timeline to reproduce them are printed.
    Everything runs on loopback. Filling disks needs root, and clock jumps need libfaketime (Debian: apt-get
    install faketime). redis-server is required.
    """
    console = Console()
    timeline = schedule.make(seed, seconds, transport.names)
    if dry_run:
        _print_timeline(console, timeline)
        return
    from soak.run import Run  # Takes seconds to import.

    if work_dir is not None:
        work_dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="kvtier-soak-", dir=work_dir))
    record = Record()
    try:
        with _progress(console, record) as show:
            Run(timeline, folder, show, record).run()
    except Exception:
        record.find("run aborted", traceback.format_exc())
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
    command = f"python -m soak --seconds {seconds:g} --seed {seed} --transport {transport.value}"
    console.print(f"\nseed {seed}; to reproduce: {command}\nlogs: {folder}", highlight=False)
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
        console.print("[green]no findings[/green]")
        return
    _print_lines(console, "\nfaults, in seconds since the start of their phase:", *record.timeline())
    for kind, count in record.found.items():
        shown = [finding for finding in record.findings if finding.kind == kind][:SHOWN]
        for finding in shown:
            when = f"\n{kind} ({finding.phase}, {finding.at:.2f} s)"
            _print_lines(console, when, finding.what, *(f"  during: {fault}" for fault in finding.faults))
        if count > len(shown):
            _print_lines(console, f"\n{kind}: {count - len(shown)} more, see --report")


def _print_lines(console: Console, title: str, *lines: str) -> None:
    console.print(title, style="bold", highlight=False, markup=False)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
