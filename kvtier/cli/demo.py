"""``kvtier demo``: demonstrate kvtier with a real vLLM."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.terminal import output
from kvtier.errors import KVTierError

MODEL_FILES = ("config.json", "params.json")
"""What a folder with a model contains: the configuration of Hugging Face, or that of Mistral."""
NEEDED = ("vllm", "httpx", "tokenizers", "safetensors", "numpy")


def demo(
    vllm_arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- VLLM ARGUMENTS]", help="Further arguments for the vLLM server."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Folder or name of a model. Default: generate a small one."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=512, help="Tokens per prompt.")] = 6000,
    disaggregated: Annotated[
        bool,
        typer.Option(
            "--disaggregated",
            help="Compare a prefill instance, a decode instance and a proxy with a single engine.",
        ),
    ] = False,
    dtype: Annotated[
        str, typer.Option(help="vLLM's dtype. With narrower ones, tokens may differ between runs.")
    ] = "float32",
    work_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            help="Directory for model, logs and disk tier. Default: a temporary one.",
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep logs, settings and disk tier.")] = False,
) -> None:
    """Send one long prompt to a real vLLM server four times: cold, from memory, after kill -9, from disk.

    Starts and stops `kvtier serve` and vLLM's OpenAI server on 127.0.0.1, and prints a table. Exit status 1
    if a warm run missed or a token differs; then the logs are kept and their warnings printed. Takes minutes.

    With --disaggregated, starts two vLLM servers and `kvtier proxy`, and sends prompts to one engine alone
    and through the proxy. Exit status 1 if a token differs or its KV was not transferred.
    """
    if model is not None:
        _check_model(model)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        raise KVTierError(f"{names} cannot be imported: install them, or run `make demo` in a clone")
    from kvtier.lab.demo.disaggregated import run_disaggregated
    from kvtier.lab.demo.run import run_demo
    from kvtier.lab.demo.work import Options

    options = Options(model, tokens, work_dir, keep, dtype, vllm_arguments or [])
    if not (run_disaggregated if disaggregated else run_demo)(options, output()):
        raise typer.Exit(1)


def _check_model(model: str) -> None:
    """Find out before vLLM starts that a folder has no model. Raises ``BadParameter``."""
    path = Path(model)
    if path.is_dir() and not any((path / name).is_file() for name in MODEL_FILES):
        problem = f"the folder {model} has no {MODEL_FILES[0]}"
    elif not path.exists() and "://" not in model and (model[:1] in "/.~" or model.count("/") > 1):
        problem = f"there is no folder {model}"
    else:
        return
    remedy = "name a folder with a model, or a model of the hub such as Qwen/Qwen3-0.6B"
    raise typer.BadParameter(f"{problem}: {remedy}", param_hint="--model")
