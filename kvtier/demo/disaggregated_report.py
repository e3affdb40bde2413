"""What the disaggregated demo shows: one table, and what was not as it should be."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from kvtier.demo.client import Completion


@dataclass(frozen=True)
class Pushed:
    """What went from the prefiller's instance to the decoder's."""

    tokens: int
    bytes: int
    seconds: float
    """In which anything was under way."""

    @property
    def speed(self) -> float:
        """GB/s."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(frozen=True)
class Result:
    """The same prompts in the same order, once answered by one engine and once by two.

    The first ``apart`` were sent one after the other; of the last two the second was sent while the first was
    being answered.
    """

    alone: list[Completion]
    together: list[Completion]
    apart: int
    pushed: Pushed

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that the decoder did not compute."""
        return sum(answer.cached_tokens for answer in self.together)

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(answer.prompt_tokens for answer in self.together)

    @property
    def identical(self) -> bool:
        """Whether both ways have given the same tokens."""
        return [answer.tokens for answer in self.alone] == [answer.tokens for answer in self.together]


def problems(result: Result) -> list[str]:
    """Why the demo did not show what it is to show: a sentence each, none where all is well."""
    found = []
    if not result.pushed.bytes:
        found.append("nothing was pushed from the prefiller to the decoder")
    for number, (alone, together) in enumerate(zip(result.alone, result.together, strict=True), 1):
        if alone.tokens != together.tokens:
            found.append(f"prompt {number}: its tokens differ from those of one engine")
        if together.cached_tokens < together.prompt_tokens - 1:
            hit, least = f"{together.cached_tokens:,}", f"{together.prompt_tokens - 1:,}"
            found.append(f"prompt {number}: {hit} tokens hit at the decoder, {least} should have")
        if alone.cached_tokens:
            hit = f"{alone.cached_tokens:,}"
            found.append(
                f"prompt {number}: {hit} tokens hit at one engine, where nothing can have been stored"
            )
    return found


def table(result: Result) -> Table:
    """Both ways side by side."""
    shown = Table(box=box.ROUNDED, header_style="bold", caption_justify="left", caption=_caption(result))
    shown.add_column("run")
    for title in ("TTFT", "between tokens", "longest pause", "tokens pushed", "hit tokens", "GB/s"):
        shown.add_column(title, justify="right")
    shown.add_column("identical")
    same = "[green]yes[/]" if result.identical else "[red]no[/]"
    shown.add_row("one engine", *_times(result.alone, result.apart), "-", "-", "-", "-")
    shown.add_row(
        "prefiller and decoder",
        *_times(result.together, result.apart),
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
        f"{result.apart} that were sent one after the other. Longest pause: between two tokens of an answer "
        "while another prompt was computed."
    )


def _times(answers: Sequence[Completion], apart: int) -> tuple[str, str, str]:
    first = answers[:apart]
    between = [gap for answer in first for gap in answer.gaps]
    return (
        f"{statistics.median(answer.ttft for answer in first):.2f} s",
        f"{statistics.median(between) * 1e3:.1f} ms",
        f"{max(answers[apart].gaps) * 1e3:,.0f} ms",
    )
