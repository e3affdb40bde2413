"""``kvtier bench --model``: how much a model's KV takes in the cache."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import typer

from kvtier.cli.terminal import output, table
from kvtier.errors import LayoutError
from kvtier.memory.layout import CHUNK_TOKENS
from kvtier.units import format_size

if TYPE_CHECKING:
    from kvtier.integrations.vllm.sizes import ModelSizes

PROMPTS = (1_024, 8_192, 32_768)


def describe_model(model: str, *, shown: bool) -> dict[str, object]:
    """Return what a model stores, for JSON, and print it if ``shown``. Raises :class:`LayoutError`."""
    sizes = _sizes(model)
    if shown:
        _print(model, sizes)
    prompts = {
        tokens: {"stored": sizes.stored(tokens), "per_token": sizes.per_token(tokens)} for tokens in PROMPTS
    }
    return {"model": model, **sizes._asdict(), "prompts": prompts}


def _print(model: str, sizes: ModelSizes) -> None:
    layers = ", ".join(f"{count} {kind}" for kind, count in sizes.layers.items())
    output().print(f"{model}: {layers}", soft_wrap=True)
    output().print(f"a chunk of {CHUNK_TOKENS} tokens takes {format_size(sizes.chunk)}")
    if sizes.state:
        output().print(f"a state takes {format_size(sizes.state)}; a prompt stores two")
    result = table("prompt", "stored", "per reusable token")
    for tokens in PROMPTS:
        stored, each = format_size(sizes.stored(tokens)), format_size(round(sizes.per_token(tokens)))
        result.add_row(f"{tokens:,}", stored, each)
    output().print(result)


def _sizes(model: str) -> ModelSizes:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from kvtier.integrations.vllm.sizes import model_sizes
    except ImportError as error:
        raise typer.BadParameter(f"--model needs vLLM, which cannot be imported: {error}") from error
    try:
        return model_sizes(model)
    except LayoutError:
        raise
    except Exception as error:  # Whatever vLLM raises for a model that it cannot describe.
        raise LayoutError(f"vLLM cannot describe {model}: {error}") from error
