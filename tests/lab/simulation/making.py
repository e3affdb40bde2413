"""Traces and caches for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from kvtier.lab.simulation.replay import Model, Outcome, replay
from kvtier.lab.simulation.trace import Trace
from kvtier.observability.recording.reader import TraceRequest
from kvtier.observability.whatif.simulated_cache import SimulatedTiers, configured, one_tier
from kvtier.plugins import Plugins
from kvtier.settings import Settings

CHUNK_TOKENS = 16
MODEL = Model(token_bytes=1024, prefill_tokens_per_second=1000.0)
PLUGINS = Plugins.load([])
FULL = {"high_watermark": 1.0, "low_watermark": 1.0}


def trace_of(*prompts: Sequence[int], name: str = "made") -> Trace:
    """Return a trace of one prompt a second."""
    requests = (
        TraceRequest(time=float(at), chunks=chunks, tokens=len(chunks) * CHUNK_TOKENS)
        for at, chunks in enumerate(prompts)
    )
    return Trace.load(name, requests, CHUNK_TOKENS)


def size_of(chunks: int) -> int:
    """Return the size of so many chunks."""
    return chunks * MODEL.chunk_bytes(trace_of([0]))


def in_one_tier(trace: Trace, chunks: int, policy: str = "lru", windows: int = 0) -> Outcome:
    """Replay a trace on a memory tier of so many chunks."""
    return replay(trace, PLUGINS, one_tier(PLUGINS, policy, size_of(chunks), {}), MODEL, windows=windows)


def two_tiers(memory: int, disk: int, folder: Path, write: str) -> SimulatedTiers:
    """Return memory and a disk of so many chunks."""
    settings = Settings(
        tiers=[
            {"name": "ram", "type": "cpu", "capacity": size_of(memory), **FULL},
            {
                "name": "disk",
                "type": "disk",
                "path": str(folder),
                "capacity": size_of(disk),
                "write": write,
                **FULL,
            },
        ]
    )
    return configured(PLUGINS, settings, None, {})


def in_tiers(trace: Trace, tiers: SimulatedTiers) -> Outcome:
    """Replay a trace on the tiers."""
    return replay(trace, PLUGINS, tiers, MODEL)


def mooncake_line(at: float, ids: Sequence[int], **more: object) -> str:
    """Return a request in the format of Mooncake."""
    row = {"timestamp": at, "input_length": 512 * len(ids), "output_length": 7, "hash_ids": list(ids)}
    return json.dumps(row | more) + "\n"


def bailian_line(at: float, ids: Sequence[int], **more: object) -> str:
    """Return a request in the format of Bailian."""
    row = {
        "chat_id": 159,
        "parent_chat_id": -1,
        "timestamp": at,
        "input_length": 16 * len(ids),
        "output_length": 132,
        "type": "text",
        "turn": 1,
        "hash_ids": list(ids),
    }
    return json.dumps(row | more) + "\n"
