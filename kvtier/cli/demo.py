"""``kvtier demo``: show the whole thing with a real vLLM."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kvtier.cli.terminal import messages, output

NEEDED = ("vllm", "httpx", "tokenizers", "safetensors", "numpy")


def demo(
    vllm_arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- VLLM ARGUMENTS]", help="Further arguments for the vLLM server."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A model's folder or name. Left out: one is made."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=512, help="How many tokens each prompt has.")] = 6000,
    disaggregated: Annotated[
        bool,
        typer.Option("--disaggregated", help="Show a prefiller, a decoder and a proxy beside one engine."),
    ] = False,
    dtype: Annotated[
        str, typer.Option(help="vLLM's dtype. In narrower ones, equal tokens are likely but not certain.")
    ] = "float32",
    work_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where model, logs and disk tier go. Left out: a temporary folder."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave logs, settings and disk tier behind.")] = False,
) -> None:
    """Ask a real vLLM server one long prompt four times: cold, from memory, after kill -9, from disk.

    Starts and stops `kvtier serve` and vLLM's OpenAI server on 127.0.0.1. Ends in a table, and with status 1
    where a warm run did not hit or a token differs; then it shows the warnings in the logs, and keeps these.
    Takes minutes.

    With --disaggregated it starts two vLLM servers and `kvtier proxy`, sends prompts to one engine alone and
    through the proxy, and ends with status 1 where a token differs or was not handed over.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        _say(f"{', '.join(missing)} cannot be imported: install them, or run `make demo` in a clone")
        raise typer.Exit(1)
    from kvtier.demo.disaggregated import run_disaggregated
    from kvtier.demo.run import run_demo
    from kvtier.demo.server import DemoFailed
    from kvtier.demo.work import Options

    options = Options(model, tokens, work_dir, keep, dtype, vllm_arguments or [])
    try:
        shown = (run_disaggregated if disaggregated else run_demo)(options, output())
    except DemoFailed as error:
        _say(str(error))
        raise typer.Exit(1) from error
    if not shown:
        raise typer.Exit(1)


def _say(what: str) -> None:
    messages().print(f"[red]error:[/red] {escape(what)}")
