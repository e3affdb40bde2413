"""The rows of a trace in JSON lines, and their ids, which are most of it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from kvtier import native
from kvtier.simulation.traces.blocks import packed_ids
from kvtier.simulation.traces.lines import MALFORMED, decode_line, read_lines

IdsT = TypeVar("IdsT")
"""The type of ``hash_ids``: a list of integers, or :class:`msgspec.Raw`."""


class RawRow(Protocol):
    """A row whose ids are not decoded."""

    @property
    def hash_ids(self) -> msgspec.Raw:
        """The ids as JSON."""


class Row(Protocol):
    """A row whose ids are decoded."""

    @property
    def hash_ids(self) -> list[int]:
        """The ids."""


RawRowT = TypeVar("RawRowT", bound=RawRow)
RowT = TypeVar("RowT", bound=Row)


def decode_rows(
    path: Path, raw_row: type[RawRowT], row: type[RowT]
) -> Iterator[tuple[RawRowT | RowT, array[int]]]:
    """Yield each line as a row, with its ids. Raises :class:`TraceError`, which names the line.

    The native core reads ids without an object for each, in a sixth of the time. Lines that it does not
    understand are decoded as a ``row``: so errors are the same without it.
    """
    quick, thorough = msgspec.json.Decoder(raw_row), msgspec.json.Decoder(row)
    for number, line in read_lines(path):
        if native.available() and (found := _decode_raw(quick, line)):
            yield found
            continue
        decoded = decode_line(thorough, path, number, line)
        yield decoded, packed_ids(path, number, decoded.hash_ids)


def _decode_raw(decoder: msgspec.json.Decoder[RawRowT], line: bytes) -> tuple[RawRowT, array[int]] | None:
    """Return a row and its ids; ``None`` if something may be wrong with it."""
    try:
        row = decoder.decode(line)
    except MALFORMED:
        return None
    packed = native.core.parse_ids(row.hash_ids)
    return None if packed is None else (row, array("Q", packed))
