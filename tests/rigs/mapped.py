"""The flags of mapped memory."""

from __future__ import annotations

from pathlib import Path


def flags_at(address: int) -> list[str]:
    """Return the flags of the mapping of this process that contains an address: ``VmFlags`` of proc(5)."""
    contains = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if first == "VmFlags:" and contains:
            return rest
        if not first.endswith(":"):
            start, stop = (int(number, 16) for number in first.split("-"))
            contains = start <= address < stop
    raise LookupError(hex(address))
