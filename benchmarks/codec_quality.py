"""What the codecs with loss cost in quality, with a model that is trained here.

::

    python -m benchmarks.codec_quality            # trains for 400 s, once; then two minutes
    python -m benchmarks.codec_quality --train 60 # a model that has learned less
    python -m benchmarks.codec_quality --small    # smoke test: an untrained model

The model is that of ``benchmarks/codecs.py``. Of text that it was not trained on, it computes the KV of 256
tokens, one chunk, as bfloat16 in the order of vLLM's blocks on a GPU. The chunk is encoded and decoded, and
the model continues with the 128 tokens behind it. What it expects of these is compared with what it expects
after the KV that was not encoded. Larger models lose less with the same codec, and long answers more.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import anyio
import torch
from transformers import DynamicCache, LlamaForCausalLM

from benchmarks.codecs import BLOCK_TOKENS, CHUNK_TOKENS, TRAINED_TOKENS, corpus, trained_model
from benchmarks.common import interleave, parse, show, speed
from kvtier.memory.header import ChunkHeader
from kvtier.memory.keys import ChunkKey
from kvtier.memory.layout import ChunkLayout, GroupLayout, GroupValues
from kvtier.tiers.codec import Codec, CodecSettings, IdentityCodec
from kvtier.tiers.lossless import LosslessCodec
from kvtier.tiers.lossy import Fp8Codec, Int4Codec, Int8Codec

CODECS: dict[str, type[Codec]] = {
    "identity": IdentityCodec,
    "lossless": LosslessCodec,
    "fp8": Fp8Codec,
    "int8": Int8Codec,
    "int4": Int4Codec,
}
REPEATED = 64


class KV(NamedTuple):
    """Layer, head, token, value."""

    keys: torch.Tensor
    values: torch.Tensor


class Encoded(NamedTuple):
    """A chunk, and what a codec makes of it."""

    encode: Callable[[], int]
    decode: Callable[[], None]
    result: bytearray


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the codecs with loss cost in quality.")
    parser.add_argument("--train", type=int, default=400, help="seconds; default: %(default)s")
    parser.add_argument("--texts", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--runs", type=int, default=5, help="default: %(default)s")
    options = parse(parser, train=1, texts=2, runs=1)
    model, (_, text) = trained_model(options.train), corpus()
    count = min(options.texts, len(text) // TRAINED_TOKENS)
    texts = text[: count * TRAINED_TOKENS].reshape(count, 1, TRAINED_TOKENS)
    figures: dict[str, list[tuple[float, ...]]] = {name: [] for name in CODECS}
    for tokens in texts:
        kv = kv_of(model, tokens)
        expected, _ = continued(model, tokens, *kv)
        for name, kind in CODECS.items():
            figures[name].append(compared(model, tokens, kv, expected, kind))
    rows: list[tuple[object, ...]] = []
    payload, layout = chunk_of(*kv_of(model, texts[0]))
    for name, kind in CODECS.items():
        ratio, agree, loss, error = torch.tensor(figures[name]).double().mean(0).tolist()
        speeds = anyio.run(speeds_of, kind, payload, layout, options.runs)
        rows.append(
            (name, ratio, f"{agree:.2%}", f"{torch.tensor(loss).exp().item():.4f}", f"{error:.4f}", *speeds)
        )
    columns = (
        "",
        "ratio",
        "same first choice",
        "perplexity",
        "error of a logit",
        "encode GB/s",
        "decode GB/s",
    )
    show(f"A chunk of bfloat16 before {count * (TRAINED_TOKENS - CHUNK_TOKENS):,} tokens", columns, rows)


def compared(
    model: LlamaForCausalLM, tokens: torch.Tensor, kv: KV, expected: torch.Tensor, kind: type[Codec]
) -> tuple[float, ...]:
    """Return the ratio, the part of tokens with the same first choice, the loss, and the error of logits."""
    payload, layout = chunk_of(*kv)
    chunk = encoded(kind, payload, layout)
    ratio = len(payload) / chunk.encode()
    chunk.decode()
    layers, heads, _, width = kv.keys.shape
    pages = torch.frombuffer(chunk.result, dtype=torch.bfloat16)
    both = pages.reshape(layers, CHUNK_TOKENS, heads, 2, width).permute(3, 0, 2, 1, 4)
    logits, loss = continued(model, tokens, *both)
    agree = (logits.argmax(-1) == expected.argmax(-1)).double().mean().item()
    return ratio, agree, loss, (logits - expected).abs().mean().item()


def continued(
    model: LlamaForCausalLM, tokens: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Return the logits of the tokens behind the chunk with this KV, and the mean loss."""
    cache, rest = DynamicCache(), tokens[:, CHUNK_TOKENS:]
    for layer, pair in enumerate(zip(keys.float(), values.float(), strict=True)):
        cache.update(pair[0][None], pair[1][None], layer)
    with torch.no_grad():
        logits = model(input_ids=rest, past_key_values=cache, use_cache=True).logits[0]
    return logits, torch.nn.functional.cross_entropy(logits[:-1], rest[0, 1:]).item()


def kv_of(model: LlamaForCausalLM, tokens: torch.Tensor) -> KV:
    """Return keys and values of the first chunk."""
    with torch.no_grad():
        layers = model(input_ids=tokens[:, :CHUNK_TOKENS], use_cache=True).past_key_values.layers
    keys, values = (torch.stack([getattr(layer, name)[0] for layer in layers]) for name in ("keys", "values"))
    return KV(keys.bfloat16(), values.bfloat16())


def chunk_of(keys: torch.Tensor, values: torch.Tensor) -> tuple[bytes, ChunkLayout]:
    """Return the payload of the chunk, ``[layer][block][token][head][K or V]``, and its layout."""
    layers, heads, _, width = keys.shape
    both = torch.stack([keys, values], dim=3).permute(0, 2, 1, 3, 4).contiguous()
    row = heads * 2 * width
    group = GroupLayout(BLOCK_TOKENS, (BLOCK_TOKENS * row * 2,) * layers)
    described = (GroupValues("bfloat16", BLOCK_TOKENS, row, width),)
    return both.view(torch.uint8).numpy().tobytes(), ChunkLayout(CHUNK_TOKENS, (group,), values=described)


def encoded(kind: type[Codec], payload: bytes, layout: ChunkLayout) -> Encoded:
    """Return functions with memory that is used again, as a tier has it."""
    codec = kind(CodecSettings(type="measured"))
    key = ChunkKey(bytes(32))
    chunk = ChunkHeader(key, key, bytes(32), len(payload), tokens=layout.chunk_tokens)
    target, result = bytearray(codec.max_encoded_bytes(chunk, layout)), bytearray(len(payload))
    stored = 0

    def encode() -> int:
        nonlocal stored
        stored = codec.encode(chunk, layout, memoryview(payload), memoryview(target))
        return stored

    return Encoded(
        encode,
        lambda: codec.decode(chunk, None, memoryview(target)[:stored], memoryview(result)),
        result,
    )


async def speeds_of(kind: type[Codec], payload: bytes, layout: ChunkLayout, runs: int) -> tuple[float, float]:
    """Return how fast one thread encodes and decodes, in GB/s: copies of the chunk, more than caches hold."""
    copies = [encoded(kind, bytes(bytearray(payload)), layout) for _ in range(REPEATED)]

    def every(name: str) -> Callable[[], Any]:
        async def once() -> None:
            for copy in copies:
                getattr(copy, name)()

        return once

    seconds = await interleave({name: every(name) for name in ("encode", "decode")}, runs)
    length = len(payload) * len(copies)
    return speed(length, seconds["encode"]), speed(length, seconds["decode"])


if __name__ == "__main__":
    main()
