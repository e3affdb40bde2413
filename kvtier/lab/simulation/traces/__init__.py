"""Readers of traces, one module for each format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvtier.lab.simulation.traces.bailian import read_bailian
from kvtier.lab.simulation.traces.lines import TraceError, first_line
from kvtier.lab.simulation.traces.mooncake import read_mooncake
from kvtier.observability.recording.reader import TraceRequest, is_recording, read_recording


class _Fields(msgspec.Struct):
    """The fields by which formats differ."""

    hash_ids: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    chat_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def read_trace(path: Path, chunk_tokens: int) -> tuple[Iterator[TraceRequest], bool]:
    """Return the requests of a trace, in whatever format, and whether it is a recording. Blocks.

    ``chunk_tokens``: the tokens of a chunk, into which the blocks of a trace are folded; a recording has
    chunks. Raises :class:`KVTierError`, also while the requests are read; it names file, line and reason.
    """
    try:
        recorded = is_recording(path)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    if recorded:
        return read_recording(path), True
    try:
        fields = msgspec.json.decode(first_line(path), type=_Fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(
            f"{path}: line 1: is neither a JSON object nor the beginning of a recording: {error}"
        ) from error
    if fields.hash_ids is msgspec.UNSET:
        raise TraceError(
            f"{path}: line 1: has no hash_ids: known formats are Mooncake, Bailian and recordings of kvtier"
        )
    read = read_mooncake if fields.chat_id is msgspec.UNSET else read_bailian
    return read(path, chunk_tokens), False
