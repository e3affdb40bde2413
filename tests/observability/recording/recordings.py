"""Recordings written without a cache."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvtier.catalog.hints import ChunkHints
from kvtier.memory.keys import KEY_BYTES
from kvtier.observability.recording.file import LookedUp, RecordingFile
from kvtier.settings.observability import RecordingSettings
from kvtier.units import MIB

CHUNK_TOKENS = 16
CHUNK_BYTES = 4096


class AnswerEnded(NamedTuple):
    """The end of an answer: what :meth:`RecordingFile.end` takes."""

    time: float
    key: bytes
    signature: Sequence[int]


def looked_up(chunks: int, time: float = 0.0, hints: ChunkHints | None = None) -> LookedUp:
    """Return the lookup of a prompt that no other has a chunk of."""
    return of_keys(secrets.token_bytes(chunks * KEY_BYTES), time, hints)


def of_keys(keys: bytes, time: float = 0.0, hints: ChunkHints | None = None) -> LookedUp:
    tokens = len(keys) // KEY_BYTES * CHUNK_TOKENS
    return LookedUp(time, keys, tokens, CHUNK_TOKENS, CHUNK_BYTES, hints)


def begin(path: Path, max_bytes: int = MIB, files: int = 4) -> RecordingFile:
    return RecordingFile.open(RecordingSettings(path=path, max_bytes=max_bytes, files=files))


def write(path: Path, *batch: LookedUp | AnswerEnded, files: int = 4) -> RecordingFile:
    """Write a recording of one batch. Return its file, which is closed."""
    file = begin(path, files=files)
    file.write([file.end(*seen) if isinstance(seen, AnswerEnded) else seen for seen in batch])
    file.close()
    return file
