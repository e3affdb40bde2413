"""Compare the codec `lossless` with general compressors, on the KV of a model that is trained here.

::

    python -m benchmarks.codecs                   # trains for 400 s, once; then a minute
    python -m benchmarks.codecs --train 60        # a model that has learned less
    python -m benchmarks.codecs --small           # smoke test: random values

The model is a Llama of 6 layers with 2 KV heads of 64 values, on bytes of the documentation and the source
of Python's standard library; its KV is that of 2,048 tokens that it was not trained on, as 8 chunks of 256
tokens in the order of vLLM's blocks. Random weights would prove speed only. The other compressors are
measured as far as they are installed: ``pip install zstandard lz4 blosc2 pcodec zipnn isal``. Each is given
the bytes of one type, in one thread, with what it offers for such values (a shuffle, the type), in turns.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from pydoc_data import topics
from typing import Any, NamedTuple

import anyio
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import peer
from benchmarks.common import interleave, parse, show, speed
from kvtier import native

TOKENS, CHUNK_TOKENS, BLOCK_TOKENS = 2048, 256, 16
TRAINED_TOKENS, BATCH = 384, 12
TYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8 e4m3": torch.float8_e4m3fn,
    "fp8 e5m2": torch.float8_e5m2,
}
REPEATED = 8
"""Copies of the KV that are encoded in a row: more than the caches hold when it is decoded."""


class Compressor(NamedTuple):
    """Functions on bytes."""

    encode: Callable[[bytes], Any]
    decode: Callable[[Any], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the codec lossless with general compressors.")
    parser.add_argument("--train", type=int, default=400, help="seconds; default: %(default)s")
    parser.add_argument("--runs", type=int, default=5, help="default: %(default)s")
    options = parse(parser, runs=1)
    if options.small:
        keys, values = (torch.randn(2, 2, TOKENS, 64) for _ in range(2))
    else:
        keys, values = kv_of(trained_model(options.train))
    rows: list[tuple[object, ...]] = []
    for name, kind in TYPES.items():
        payload = blocks_of(keys.to(kind), values.to(kind)) * REPEATED
        rows += anyio.run(measure, name, payload, kind.itemsize, options.runs)
    show("KV of a trained model, one thread", ("", "", "ratio", "encode GB/s", "decode GB/s"), rows)


async def measure(name: str, payload: bytes, width: int, runs: int) -> list[tuple[object, ...]]:
    """Return a row for each compressor."""
    found = compressors(width)
    encoded = {label: each.encode(payload) for label, each in found.items()}
    for label, each in found.items():
        assert bytes(each.decode(encoded[label])) == payload, f"{label} does not return what it was given"

    def run(work: Callable[[Any], Any], argument: object) -> Callable[[], Any]:
        async def once() -> None:
            work(argument)

        return once

    encoding = await interleave({label: run(each.encode, payload) for label, each in found.items()}, runs)
    decoding = await interleave(
        {label: run(each.decode, encoded[label]) for label, each in found.items()}, runs
    )
    return [
        (
            name,
            label,
            len(payload) / len(encoded[label]),
            speed(len(payload), encoding[label]),
            speed(len(payload), decoding[label]),
        )
        for label in found
    ]


def compressors(width: int) -> dict[str, Compressor]:
    """Return those that are installed, kvtier's own first, for values of ``width`` bytes."""
    made: dict[str, Callable[[], Compressor]] = {
        "kvtier lossless": lossless,
        "kvtier dense": lambda: lossless(dense=True),
        "zstd -1": lambda: zstd(1),
        "lz4": lz4,
        "isal -1": isal,
        "blosc2, shuffle and zstd -1": lambda: blosc2(width),
    }
    if width == 2:
        made["zipnn"] = zipnn
    if width in (2, 4):
        made["pcodec"] = lambda: pcodec(width)
    found = {}
    for label, make in made.items():
        try:
            found[label] = make()
        except ImportError:
            continue
    return found


def lossless(*, dense: bool = False) -> Compressor:
    """Return kvtier's codec ``lossless`` or ``dense``, with memory that is used again, as a tier has it."""
    target, result = bytearray(), bytearray()

    def encode(payload: bytes) -> memoryview:
        nonlocal target, result
        if len(result) != len(payload):
            target, result = bytearray(native.core.lossless_bound(len(payload))), bytearray(len(payload))
        view = memoryview(target)
        return view[: native.core.lossless_encode(payload, view, dense)]

    def decode(stored: memoryview) -> bytearray:
        native.core.lossless_decode(stored, memoryview(result))
        return result

    return Compressor(encode, decode)


def zstd(level: int) -> Compressor:
    library = import_module("zstandard")
    writer, reader = library.ZstdCompressor(level=level), library.ZstdDecompressor()
    return Compressor(writer.compress, reader.decompress)


def lz4() -> Compressor:
    library = import_module("lz4.block")
    return Compressor(library.compress, library.decompress)


def isal() -> Compressor:
    library = import_module("isal.isal_zlib")
    return Compressor(lambda payload: library.compress(payload, 1), library.decompress)


def blosc2(width: int) -> Compressor:
    library = import_module("blosc2")
    library.set_nthreads(1)
    options = {"typesize": width, "clevel": 1, "codec": library.Codec.ZSTD, "filter": library.Filter.SHUFFLE}
    return Compressor(lambda payload: library.compress(payload, **options), library.decompress)


def zipnn() -> Compressor:
    library = import_module("zipnn")
    made = library.ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)
    # It changes what it is given, so it gets a copy.
    return Compressor(lambda payload: bytes(made.compress(bytearray(payload))), made.decompress)


def pcodec(width: int) -> Compressor:
    import numpy as np

    library = import_module("pcodec")
    kind, config = {2: np.uint16, 4: np.float32}[width], library.ChunkConfig(compression_level=4)
    return Compressor(
        lambda payload: library.standalone.simple_compress(np.frombuffer(payload, kind), config),
        lambda stored: library.standalone.simple_decompress(stored).tobytes(),
    )


def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the text to train on, and other text, as bytes."""
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = [path.read_text(errors="ignore") for path in sorted(library.glob("*.py"))[:60]]
    text = "\n".join([*topics.topics.values(), *sources]).encode("latin-1", "replace")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    cut = int(0.95 * len(data))
    return data[:cut], data[cut:]


def trained_model(seconds: int) -> LlamaForCausalLM:
    """Train the model, or load the one that was trained before as long."""
    folder = peer.cache_folder() / f"codecs-{seconds}"
    if folder.exists():
        return LlamaForCausalLM.from_pretrained(folder)
    text, _ = corpus()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05, betas=(0.9, 0.95))
    began, step = time.monotonic(), 0
    while (passed := (time.monotonic() - began) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, step / 60) * (1 - 0.95 * passed)
        starts = torch.randint(0, len(text) - TRAINED_TOKENS, (BATCH,)).tolist()
        batch = torch.stack([text[start : start + TRAINED_TOKENS] for start in starts])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if not step % 20:
            print(f"{passed:.0%} trained, loss {loss.item():.2f}", end="\r", flush=True)
    print(f"trained in {step} steps, loss {loss.item():.2f}")
    model.save_pretrained(folder)
    return model


def kv_of(model: LlamaForCausalLM) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of text that the model does not know: layer, head, token, value."""
    _, text = corpus()
    with torch.no_grad():
        cache = model(input_ids=text[None, :TOKENS], use_cache=True).past_key_values
    keys, values = (
        torch.stack([getattr(layer, which)[0] for layer in cache.layers]) for which in ("keys", "values")
    )
    return keys, values


def blocks_of(keys: torch.Tensor, values: torch.Tensor) -> bytes:
    """Return the payloads of all chunks: ``[layer][block][K or V][token][head]``, as in vLLM on a GPU."""
    both = torch.stack([keys, values], dim=1).view(torch.uint8)
    layers, two, heads, tokens, width = both.shape
    cut = both.reshape(layers, two, heads, tokens // CHUNK_TOKENS, -1, BLOCK_TOKENS, width)
    payloads: bytes = cut.permute(3, 0, 4, 1, 5, 2, 6).contiguous().numpy().tobytes()
    return payloads


if __name__ == "__main__":
    main()
