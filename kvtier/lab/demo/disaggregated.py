"""``kvtier demo --disaggregated``: compare a prefiller and a decoder behind a proxy with a single engine.

The single engine is the decoder, used directly: it gets the same prompts with a salt, so that neither way
hits cache entries of the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import anyio
from rich import box
from rich.console import Console
from rich.table import Table

from kvtier.concurrency.processes import exit_on_signals
from kvtier.lab.demo.client import Client, Completion
from kvtier.lab.demo.disaggregated_serving import Pushed, Serving, serving
from kvtier.lab.demo.work import Options, Steps, conclude, work_folder

PROMPTS = 3
"""Prompts sent sequentially."""
NEW_TOKENS = 32
CONCURRENT_TOKENS = 96
"""Tokens of the response that is decoded while another prompt is prefilled."""
STARTED_TOKENS = 8
"""The other prompt is sent after this many of them."""
SALT = "one engine"


def run_disaggregated(options: Options, console: Console) -> bool:
    """Run the demo, print its results, and return whether they are as expected.

    All subprocesses are stopped, however it ends. Files are kept if the user asked for them, or a result is
    not as expected. Raises :class:`kvtier.lab.demo.server.DemoFailed`.
    """
    with exit_on_signals(), work_folder(options) as work:
        steps = Steps(console)
        with serving(options, work, steps, prompts=PROMPTS + 2, new_tokens=CONCURRENT_TOKENS) as running:
            result = _measure(running, steps)
            with steps.step("stopping all processes"):
                running.servers.stop()
        console.print(table(result))
        found = problems(result)
        conclude(found, work, console, "logs and settings")
    return not found


def _measure(running: Serving, steps: Steps) -> Result:
    alone: list[Completion] = []
    together: list[Completion] = []
    # Interleaved, so that other load on the machine affects both alike.
    for number, prompt in enumerate(running.prompts[:PROMPTS], 1):
        with steps.step(f"prompt {number} of {PROMPTS}, {len(prompt):,} tokens: one engine"):
            alone.append(running.decoder.complete(prompt, NEW_TOKENS, salt=SALT))
        with steps.step(f"prompt {number} of {PROMPTS}, {len(prompt):,} tokens: prefiller and decoder"):
            together.append(running.proxy.complete(prompt, NEW_TOKENS))
    with steps.step("decoding during another prompt's prefill: one engine"):
        alone += anyio.run(_complete_concurrently, running, running.decoder, SALT)
    with steps.step("decoding during another prompt's prefill: prefiller and decoder"):
        together += anyio.run(_complete_concurrently, running, running.proxy, None)
    return Result(alone, together, PROMPTS, running.pushed())


async def _complete_concurrently(running: Serving, client: Client, salt: str | None) -> list[Completion]:
    """Complete two prompts; the second is sent while the first is being decoded."""
    completions: list[Completion | None] = [None, None]
    first, second = running.prompts[PROMPTS:]
    started = anyio.Event()

    async def complete_first() -> None:
        def on_token(count: int) -> None:
            if count >= STARTED_TOKENS:
                started.set()

        completions[0] = await client.stream(first, CONCURRENT_TOKENS, salt=salt, on_token=on_token)
        started.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(complete_first)
        await started.wait()
        completions[1] = await client.stream(second, NEW_TOKENS, salt=salt)
    return [completion for completion in completions if completion is not None]


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
