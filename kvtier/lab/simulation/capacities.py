"""Capacities of a simulated cache: in bytes, or as a percentage of what a trace stores."""

from __future__ import annotations

import re
from typing import NamedTuple

from kvtier.errors import KVTierError
from kvtier.units import format_size, parse_size

_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*", re.ASCII)


class Capacity(NamedTuple):
    """One of both is given."""

    bytes: int | None = None
    percent: float | None = None

    def of(self, unique_chunks: int, chunk_bytes: int) -> int:
        """Return the capacity in bytes. A percentage is rounded down to whole chunks, but at least one.

        Raises :class:`SimulationError` if no chunk fits.
        """
        if self.bytes is not None:
            if self.bytes < chunk_bytes:
                size, chunk = format_size(self.bytes), format_size(chunk_bytes)
                raise SimulationError(f"--capacity {size} holds no chunk of {chunk}: use a larger one")
            return self.bytes
        assert self.percent is not None
        # As an integer, because 0.07 * 100 is more than 7.
        chunks = unique_chunks * round(self.percent * 1_000_000) // 100_000_000
        return max(1, chunks) * chunk_bytes


def parse_capacities(text: str) -> list[Capacity]:
    """Parse a list such as ``"1%,5%,20GiB"``. Raises :class:`SimulationError`."""
    return [_parse(part) for part in text.split(",")]


def _parse(text: str) -> Capacity:
    if match := _PERCENT.fullmatch(text):
        percent = float(match[1])
        if not 0 < percent <= 1000:
            raise SimulationError(f"--capacity {text.strip()}: use a percentage above 0, up to 1000 %")
        return Capacity(percent=percent)
    try:
        size = parse_size(text.strip())
    except ValueError as error:
        raise SimulationError(f"--capacity: {error}; or a percentage such as 5%") from error
    return Capacity(bytes=size)


class SimulationError(KVTierError):
    """An option of a simulation is unusable. The message names it."""
