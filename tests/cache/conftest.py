"""Settings of small caches with real memory and a real disk, and prompts with matching KV."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier import ChunkHints, ModelCache, Settings, TieredCache
from kvtier.memory.header import HEADER_BYTES, ChunkHeader
from kvtier.memory.keys import ChunkKey
from kvtier.plugins import Plugins

Plugins.load([])  # Importing the built-in plugins takes longer than the loop watch allows.

TOKEN_BYTES = 64
CHUNK_TOKENS = 256
CHUNK_OBJECT_BYTES = 20_480
"""256 tokens of 64 bytes and a header, rounded up to whole pages."""
ROOT, NAMESPACE = ChunkKey(bytes(32)), bytes(32)
Prompt = Callable[..., list[int]]
MakeSettings = Callable[..., Settings]


def rows(tokens: list[int], token_bytes: int = TOKEN_BYTES) -> bytearray:
    """Return KV that depends on each token and its prefix, like that of a model."""
    state = 0
    out = bytearray()
    for token in tokens:
        state = (state * 31 + token + 1) % (1 << 64)
        out += state.to_bytes(8, "little") * (token_bytes // 8)
    return out


def headers(keys: Sequence[ChunkKey], parent: ChunkKey = ROOT) -> list[ChunkHeader]:
    """Return the headers of consecutive whole chunks."""
    size = CHUNK_TOKENS * TOKEN_BYTES
    return [ChunkHeader(*pair, NAMESPACE, size) for pair in zip(keys, [parent, *keys], strict=False)]


async def retrieve(model: ModelCache, tokens: list[int], hints: ChunkHints | None = None) -> int:
    """Look a prompt up, as a request does, and check its bytes. Return the number of tokens found."""
    out = bytearray(len(tokens) * TOKEN_BYTES)
    count = await model.retrieve(tokens, out, hints)
    assert out == rows(tokens[:count]).ljust(len(out), b"\0")
    return count


def store(cache: TieredCache, tokens: list[int]) -> list[ChunkKey]:
    """Store a prompt without yielding to the loop: it is READY in memory and not yet written anywhere."""
    model = cache.model("llama", token_bytes=TOKEN_BYTES)
    keys, filling, size = model.keys(tokens), rows(tokens), CHUNK_TOKENS * TOKEN_BYTES
    reservations = [found for found in cache.reserve_all(headers(keys)) if found is not None]
    for at, reservation in enumerate(reservations):
        reservation.lease.view[HEADER_BYTES : HEADER_BYTES + size] = filling[at * size : (at + 1) * size]
    assert len(reservations) == len(keys)
    cache.commit(reservations)
    return keys


@pytest.fixture
def prompt() -> Callable[[int, int], list[int]]:
    """Make a prompt of a number of tokens; each seed gives another prompt."""

    def make(tokens: int, seed: int = 0) -> list[int]:
        return random.Random(seed).choices(range(50_000), k=tokens)

    return make


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., Settings]:
    """Make settings with a memory tier of ``ram`` chunks and a disk tier of ``ssd`` chunks.

    The deadlines suit a busy machine; tests of the deadline itself configure ``prefetch``.
    """

    def make(
        *,
        ram: int = 64,
        ssd: int = 512,
        memory: dict[str, Any] | None = None,
        disk: dict[str, Any] | None = None,
        **more: Any,
    ) -> Settings:
        first = {"name": "ram", "type": "cpu", "capacity": ram * CHUNK_OBJECT_BYTES, **(memory or {})}
        tiers: list[dict[str, Any]] = [first]
        if ssd:
            tiers.append(
                {
                    "name": "ssd",
                    "type": "disk",
                    "path": str(tmp_path / "ssd"),
                    "capacity": ssd * CHUNK_OBJECT_BYTES,
                    "deadline": "60s",
                    **(disk or {}),
                }
            )
        return Settings(chunk_tokens=CHUNK_TOKENS, tiers=tiers, **{"prefetch": {"policy": "wait"}, **more})

    return make
