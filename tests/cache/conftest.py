"""Caches of a few megabytes over real memory and a real disk, and tokens to put into them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier import Settings
from kvtier.plugins import Plugins

Plugins.load([])  # What is built in takes longer to import than an event loop may be blocked.

TOKEN_BYTES = 64
CHUNK_TOKENS = 256
CHUNK_OBJECT_BYTES = 20_480
"""256 tokens of 64 bytes behind a header, in whole pages."""


def rows(tokens: list[int], token_bytes: int = TOKEN_BYTES) -> bytearray:
    """KV that tells which token it belongs to and what came before: as a model's would."""
    state = 0
    out = bytearray()
    for token in tokens:
        state = (state * 31 + token + 1) % (1 << 64)
        out += state.to_bytes(8, "little") * (token_bytes // 8)
    return out


@pytest.fixture
def prompt() -> Callable[[int, int], list[int]]:
    """A prompt of so many tokens, another for each seed."""

    def make(tokens: int, seed: int = 0) -> list[int]:
        return random.Random(seed).choices(range(50_000), k=tokens)

    return make


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., Settings]:
    """Settings with a memory tier of ``ram`` chunks and a disk tier of ``ssd`` chunks.

    Requests wait for as long as a busy machine takes; tests of the wait itself configure ``prefetch``.
    """

    def make(*, ram: int = 64, ssd: int = 512, disk: dict[str, Any] | None = None, **more: Any) -> Settings:
        tiers: list[dict[str, Any]] = [{"name": "ram", "type": "cpu", "capacity": ram * CHUNK_OBJECT_BYTES}]
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
