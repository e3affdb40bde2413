"""``kvtier demo --disaggregated``: compare a prefiller and a decoder behind a proxy with a single engine.

The single engine is the decoder, used directly: it gets the same prompts with a salt, so that neither way
hits cache entries of the other.
"""

from __future__ import annotations

import anyio
import httpx
from rich.console import Console

from kvtier.concurrency.signals import exit_on_signals
from kvtier.errors import ChannelError
from kvtier.lab.demo import disaggregated_report as report
from kvtier.lab.demo.client import Client, Completion
from kvtier.lab.demo.disaggregated_serving import Serving, serving
from kvtier.lab.demo.report import Steps
from kvtier.lab.demo.work import Options, conclude, work_folder

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
            try:
                result = _measure(running, steps)
            except (httpx.HTTPError, ChannelError, ExceptionGroup) as error:
                raise running.failure(error) from error
            with steps.step("stopping all processes"):
                running.stop()
        console.print(report.table(result))
        found = report.problems(result)
        conclude(found, work, console, "logs and settings")
    return not found


def _measure(running: Serving, steps: Steps) -> report.Result:
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
    return report.Result(alone, together, PROMPTS, running.pushed())


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
