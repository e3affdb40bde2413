"""What the demo shows: its steps while they run, and the table at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from kvtier.demo.client import Completion

TIERS = {"device": "vLLM itself", "host": "memory", "disk": "disk", "p2p": "another host"}
"""What people call vLLM's sources."""


@dataclass(frozen=True)
class Run:
    """One of the four requests. ``expected`` is the source that must have supplied it, or none."""

    name: str
    completion: Completion
    expected: str | None = None


def problems(runs: Sequence[Run], least_hit: int) -> list[str]:
    """Why the demo did not show what it is to show: a sentence each, none where all is well."""
    found = []
    cold = runs[0].completion
    for run in runs[1:]:
        got = run.completion
        supplied = got.sources.get(run.expected or "", 0)
        if got.cached_tokens < least_hit:
            found.append(f"{run.name}: {got.cached_tokens} tokens hit, {least_hit} should have")
        elif supplied < least_hit:
            source = TIERS.get(run.expected or "", "")
            found.append(f"{run.name}: {supplied} tokens came from {source}, {least_hit} should have")
        if got.tokens != cold.tokens:
            found.append(f"{run.name}: its tokens differ from the cold run's")
    if cold.cached_tokens:
        found.append(f"{runs[0].name}: {cold.cached_tokens} tokens hit where nothing can have been stored")
    return found


def table(runs: Sequence[Run]) -> Table:
    """The runs side by side."""
    cold = runs[0].completion
    shown = Table(box=box.ROUNDED, header_style="bold")
    shown.add_column("run")
    for title in ("tokens", "hit tokens"):
        shown.add_column(title, justify="right")
    shown.add_column("source tier")
    for title in ("TTFT", "speed-up"):
        shown.add_column(title, justify="right")
    shown.add_column("tokens identical")
    for run in runs:
        got = run.completion
        same = got.tokens == cold.tokens
        shown.add_row(
            run.name,
            f"{got.prompt_tokens:,}",
            f"{got.cached_tokens:,}",
            " + ".join(TIERS.get(source, source) for source, count in got.sources.items() if count) or "-",
            f"{got.ttft:.2f} s",
            "-" if run is runs[0] else f"{cold.ttft / got.ttft:.1f} x",
            "-" if run is runs[0] else ("[green]yes[/]" if same else "[red]no[/]"),
        )
    return shown


class Steps:
    """Tells what is being done and how long it took: a spinner on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """``what`` is under way until the block is left."""
        started = time.perf_counter()
        if self._console.is_terminal:
            with self._console.status(what):
                yield
        else:
            self._console.print(f"… {what}", highlight=False)
            yield
        seconds = time.perf_counter() - started
        self._console.print(f"[green]✓[/] {what} [dim]({seconds:.1f} s)[/]", highlight=False)
