"""Output of the demo: progress of its steps, and the table of results."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from kvtier.lab.demo.client import Completion

TIERS = {"device": "vLLM itself", "host": "memory", "disk": "disk", "p2p": "another host"}
"""Display names for vLLM's cache sources."""


@dataclass(frozen=True)
class Run:
    """One of the four requests. ``expected``: the source that must have supplied the prompt's KV, if any."""

    name: str
    completion: Completion
    expected: str | None = None


def problems(runs: Sequence[Run], min_hit: int) -> list[str]:
    """Return one sentence for each result that is not as expected."""
    found = []
    cold = runs[0].completion
    for run in runs[1:]:
        completion = run.completion
        supplied = completion.sources.get(run.expected or "", 0)
        if completion.cached_tokens < min_hit:
            found.append(f"{run.name}: {completion.cached_tokens} tokens hit, {min_hit} expected")
        elif supplied < min_hit:
            source = TIERS.get(run.expected or "", "")
            found.append(f"{run.name}: {supplied} tokens came from {source}, {min_hit} expected")
        if completion.tokens != cold.tokens:
            found.append(f"{run.name}: its tokens differ from the cold run's")
    if cold.cached_tokens:
        found.append(f"{runs[0].name}: {cold.cached_tokens} tokens hit, 0 expected")
    return found


def table(runs: Sequence[Run]) -> Table:
    """Return a table with one row per run."""
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
        completion = run.completion
        same = completion.tokens == cold.tokens
        sources = [TIERS.get(source, source) for source, count in completion.sources.items() if count]
        shown.add_row(
            run.name,
            f"{completion.prompt_tokens:,}",
            f"{completion.cached_tokens:,}",
            " + ".join(sources) or "-",
            f"{completion.ttft:.2f} s",
            "-" if run is runs[0] else f"{cold.ttft / completion.ttft:.1f} x",
            "-" if run is runs[0] else ("[green]yes[/]" if same else "[red]no[/]"),
        )
    return shown


class Steps:
    """Shows progress and the duration of each step: a spinner on a terminal, else plain lines."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Show ``what`` as in progress while the block runs."""
        started = time.perf_counter()
        if self._console.is_terminal:
            with self._console.status(what):
                yield
        else:
            self._console.print(f"… {what}", highlight=False)
            yield
        seconds = time.perf_counter() - started
        self._console.print(f"[green]✓[/] {what} [dim]({seconds:.1f} s)[/]", highlight=False)
