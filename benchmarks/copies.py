"""Compare the connector's page copies, native and by torch, with one memcpy of as many bytes.

::

    python -m benchmarks.copies                   # needs 3 GiB of memory
    python -m benchmarks.copies --small           # smoke test with some megabytes

A load copies the pages of a prompt from the arena into the engine's KV memory; a save copies them back. The
engine's blocks are in random order, as after hours of serving. memcpy copies one buffer in one thread, in the
same run, between pages of 4 KiB that have been touched before. Prompts have 32,768 tokens, or fewer if these
need more than `--gib`; the table shows how many.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import statistics
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import torch

from benchmarks.common import interleave, parse, ratio, show, speed
from kvtier import native
from kvtier.integrations.vllm.copies import ChunkCopy, NativeCopies, PageCopies, TorchCopies
from kvtier.memory.arena import Arena, ArenaMap, address_of
from kvtier.memory.header import object_bytes
from kvtier.memory.layout import ChunkLayout, GroupLayout

TOKENS = 32_768
CHUNK_TOKENS = 256


LAYOUTS = {
    # The model of `kvtier demo`: float32, K and V of a block in one page.
    "Llama 100M, f32": GroupLayout(32, (2 * 4 * 64 * 4 * 32,) * 12),
    "Llama 3.1 8B, bf16": GroupLayout(16, (2 * 8 * 128 * 2 * 16,) * 32),
    "70B, TP=4, bf16": GroupLayout(16, (2 * 2 * 128 * 2 * 16,) * 80),
    "MLA, bf16": GroupLayout(16, (576 * 2 * 16,) * 61),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the connector's copies with memcpy.")
    parser.add_argument("--runs", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--gib", type=float, default=1, help="maximum amount to copy; default: %(default)s")
    options = parse(parser, runs=1)
    max_bytes = 16 << 20 if options.small else int(options.gib * (1 << 30))
    runs = options.runs
    rows = [row for name, group in LAYOUTS.items() for row in measure(name, group, max_bytes, runs)]
    columns = ("", "page", "tokens", "memcpy GB/s", "torch", "native", "native, one thread", "native ms")
    show("page copies: speed relative to memcpy", columns, rows)


def measure(name: str, group: GroupLayout, max_bytes: int, runs: int) -> list[tuple[object, ...]]:
    """Return a row for loads and one for saves."""
    layout = ChunkLayout(CHUNK_TOKENS, (group,))
    chunk_bytes = object_bytes(layout.payload_bytes(CHUNK_TOKENS))
    count = max(1, min(TOKENS // CHUNK_TOKENS, max_bytes // chunk_bytes))
    per_chunk = len(group.blocks(CHUNK_TOKENS))
    arena = Arena.create(count * chunk_bytes)
    mapped = ArenaMap(os.dup(arena.fd), arena.capacity)
    memory = mapped.view(0, mapped.capacity)
    ctypes.memset(address_of(memory), 1, len(memory))
    num_blocks = count * per_chunk + 1
    pages = [[torch.ones(num_blocks, page_bytes, dtype=torch.uint8) for page_bytes in group.page_bytes]]
    order = random.Random(1).sample(range(1, num_blocks), num_blocks - 1)
    chunks = [
        ChunkCopy(0, index * chunk_bytes, CHUNK_TOKENS, (order[index * per_chunk : (index + 1) * per_chunk],))
        for index in range(count)
    ]
    length = count * layout.payload_bytes(CHUNK_TOKENS)
    buffer = torch.ones(length, dtype=torch.uint8)
    contestants: dict[str, PageCopies] = {"torch": TorchCopies(layout, 0, pages)}
    if native.available():
        contestants["native"] = NativeCopies(layout, 0, pages)
        contestants["one"] = NativeCopies(layout, 0, pages, threads=1)
    rows: list[tuple[object, ...]] = []
    for verb in ("load", "save"):
        addresses = buffer.data_ptr(), address_of(memory)
        target, source = addresses if verb == "save" else addresses[::-1]
        calls = {"memcpy": sync(partial(ctypes.memmove, target, source, length))}
        for title, copies in contestants.items():
            calls[title] = sync(partial(getattr(copies, verb), mapped, chunks))
        seconds = anyio.run(partial(interleave, calls, runs))
        limit = seconds["memcpy"]
        figures = [
            ratio(seconds[title], limit) if title in seconds else "" for title in ("torch", "native", "one")
        ]
        took = statistics.median(seconds["native"]) * 1e3 if "native" in seconds else ""
        page = f"{group.page_bytes[0] / 1024:.0f} KiB"
        tokens = f"{count * CHUNK_TOKENS:,}"
        rows.append((f"{name}, {verb}", page, tokens, speed(length, limit), *figures, took))
    memory.release()
    mapped.close()
    arena.close()
    return rows


def sync(function: Callable[[], object]) -> Callable[[], Awaitable[object]]:
    async def call() -> None:
        function()

    return call


if __name__ == "__main__":
    main()
