"""``kvtier demo --disaggregated``: a prefiller, a decoder and a proxy, beside one engine that does both.

The one engine is the decoder, asked directly: the same prompts with a salt, so that nothing of either way is
hit by the other.
"""

from __future__ import annotations

import anyio
import httpx
from rich.console import Console

from kvtier.cli.terminal import ends_on_signals
from kvtier.demo import disaggregated_report as report
from kvtier.demo.client import Client, Completion
from kvtier.demo.disaggregated_serving import Serving, serving
from kvtier.demo.report import Steps
from kvtier.demo.work import Options, conclude, work_folder
from kvtier.errors import ChannelError

PROMPTS = 3
"""Sent one after the other."""
NEW_TOKENS = 32
MEANWHILE_TOKENS = 96
"""Of the answer that is being written while another prompt is computed."""
BEGUN_TOKENS = 8
"""When so many of them have come the other prompt is sent."""
SALT = "one engine"


def run_disaggregated(options: Options, console: Console) -> bool:
    """Run the demo and print what it finds; whether it found what it should.

    Raises :class:`kvtier.demo.server.DemoFailed`. However it ends, no process of it is left. Files
    are, where the user asked for them or something was not as it should be.
    """
    with ends_on_signals(), work_folder(options) as work:
        steps = Steps(console)
        with serving(options, work, steps, prompts=PROMPTS + 2, new_tokens=MEANWHILE_TOKENS) as running:
            try:
                result = _measure(running, steps)
            except (httpx.HTTPError, ChannelError, ExceptionGroup) as error:
                raise running.failure(error) from error
            with steps.step("stopping all of it"):
                running.stop()
        console.print(report.table(result))
        found = report.problems(result)
        conclude(found, work, console, "logs and settings")
    return not found


def _measure(running: Serving, steps: Steps) -> report.Result:
    alone: list[Completion] = []
    together: list[Completion] = []
    # In turns: whatever else the machine does slows both down.
    for number, prompt in enumerate(running.prompts[:PROMPTS], 1):
        with steps.step(f"prompt {number} of {PROMPTS}, {len(prompt):,} tokens: one engine"):
            alone.append(running.decoder.complete(prompt, NEW_TOKENS, salt=SALT))
        with steps.step(f"prompt {number} of {PROMPTS}, {len(prompt):,} tokens: prefiller and decoder"):
            together.append(running.proxy.complete(prompt, NEW_TOKENS))
    with steps.step("an answer while another prompt is computed: one engine"):
        alone += anyio.run(_meanwhile, running, running.decoder, SALT)
    with steps.step("an answer while another prompt is computed: prefiller and decoder"):
        together += anyio.run(_meanwhile, running, running.proxy, None)
    return report.Result(alone, together, PROMPTS, running.pushed())


async def _meanwhile(running: Serving, client: Client, salt: str | None) -> list[Completion]:
    """An answer, and the one to a prompt that is sent while the first is being written."""
    answers: list[Completion | None] = [None, None]
    first, second = running.prompts[PROMPTS:]
    begun = anyio.Event()

    async def answer_first() -> None:
        def on_token(count: int) -> None:
            if count >= BEGUN_TOKENS:
                begun.set()

        answers[0] = await client.stream(first, MEANWHILE_TOKENS, salt=salt, on_token=on_token)
        begun.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(answer_first)
        await begun.wait()
        answers[1] = await client.stream(second, NEW_TOKENS, salt=salt)
    return [answer for answer in answers if answer is not None]
