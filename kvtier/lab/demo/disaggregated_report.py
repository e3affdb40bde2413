"""Report of the disaggregated demo: a table, and the results that are not as expected."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from kvtier.lab.demo.client import Completion


@dataclass(frozen=True)
class Pushed:
    """KV transferred from the prefill instance to the decode instance."""

    tokens: int
    bytes: int
    seconds: float
    """Time during which at least one transfer was in flight."""

    @property
    def speed(self) -> float:
        """Throughput in GB/s."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(frozen=True)
class Result:
    """Completions of the same prompts in the same order, by one engine and by two.

    The first ``sequential`` prompts were sent one after the other; of the last two, the second was sent while
    the first was being decoded.
    """

    alone: list[Completion]
    together: list[Completion]
    sequential: int
    pushed: Pushed

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that the decoder did not compute."""
        return sum(completion.cached_tokens for completion in self.together)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(completion.prompt_tokens for completion in self.together)

    @property
    def identical(self) -> bool:
        """Whether both ways generated the same tokens."""
        alone = [completion.tokens for completion in self.alone]
        return alone == [completion.tokens for completion in self.together]


def problems(result: Result) -> list[str]:
    """Return one sentence for each result that is not as expected."""
    found = []
    if not result.pushed.bytes:
        found.append("no KV was transferred from the prefiller to the decoder")
    for number, (alone, together) in enumerate(zip(result.alone, result.together, strict=True), 1):
        if alone.tokens != together.tokens:
            found.append(f"prompt {number}: its tokens differ from those of one engine")
        if together.cached_tokens < together.prompt_tokens - 1:
            hit, expected = f"{together.cached_tokens:,}", f"{together.prompt_tokens - 1:,}"
            found.append(f"prompt {number}: {hit} tokens hit at the decoder, {expected} expected")
        if alone.cached_tokens:
            hit = f"{alone.cached_tokens:,}"
            found.append(f"prompt {number}: {hit} tokens hit at one engine, 0 expected")
    return found


def table(result: Result) -> Table:
    """Return a table that compares both ways."""
    shown = Table(box=box.ROUNDED, header_style="bold", caption_justify="left", caption=_caption(result))
    shown.add_column("run")
    for title in ("TTFT", "between tokens", "longest pause", "tokens pushed", "hit tokens", "GB/s"):
        shown.add_column(title, justify="right")
    shown.add_column("identical")
    same = "[green]yes[/]" if result.identical else "[red]no[/]"
    shown.add_row("one engine", *_times(result.alone, result.sequential), "-", "-", "-", "-")
    shown.add_row(
        "prefiller and decoder",
        *_times(result.together, result.sequential),
        f"{result.pushed.tokens:,}",
        f"{result.hit_tokens:,}",
        f"{result.pushed.speed:.2f}",
        same,
    )
    return shown


def _caption(result: Result) -> str:
    each = result.prompt_tokens // len(result.together)
    return (
        f"{len(result.together)} prompts of {each:,} tokens. TTFT and time between tokens: medians of "
        f"{result.sequential} sequential requests. Longest pause: between two tokens of a response while "
        "another prompt was prefilled."
    )


def _times(completions: Sequence[Completion], sequential: int) -> tuple[str, str, str]:
    first = completions[:sequential]
    between = [gap for completion in first for gap in completion.gaps]
    return (
        f"{statistics.median(completion.ttft for completion in first):.2f} s",
        f"{statistics.median(between) * 1e3:.1f} ms",
        f"{max(completions[sequential].gaps) * 1e3:,.0f} ms",
    )
