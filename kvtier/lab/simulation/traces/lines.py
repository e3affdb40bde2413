"""The lines of a trace: plain, gzip or xz."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec

from kvtier.lab.simulation.traces.errors import TraceError
from kvtier.observability.recording.reader import CORRUPT, expanded

MAX_LINE_BYTES = 64 << 20
"""A longer one is not a request. It would be read into memory as a whole."""

RowT = TypeVar("RowT")


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers from 1. Raises :class:`TraceError`."""
    number = 0
    try:
        with path.open("rb") as raw, expanded(raw) as stream:
            while line := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise TraceError(f"{path}: line {number}: is longer than {MAX_LINE_BYTES >> 20} MiB")
                if not line.isspace():
                    yield number, line
    except EOFError as error:
        raise TraceError(
            f"{path}: after line {number}: the compressed file is truncated: copy it again"
        ) from error
    except CORRUPT as error:
        raise TraceError(f"{path}: after line {number}: the compressed file is corrupt: {error}") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error


def first_line(path: Path) -> bytes:
    """Return the first line that is not blank. Raises :class:`TraceError`, also if there is none."""
    for _, line in islice(read_lines(path), 1):
        return line
    raise TraceError(f"{path}: is empty: a trace has one request a line")


def decode_lines(path: Path, row: type[RowT]) -> Iterator[tuple[int, RowT]]:
    """Yield each line as a ``row``, with its number. Raises :class:`TraceError`."""
    decoder = msgspec.json.Decoder(row)
    for number, line in read_lines(path):
        try:
            yield number, decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise TraceError(f"{path}: line {number}: {error}") from error
