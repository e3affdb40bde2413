"""The memory of this host, or of the cgroup that limits this process (cgroup v2)."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_info() -> dict[str, int]:
    """Parse /proc/meminfo. Sizes are in bytes."""
    info = {}
    for line in _MEMINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        info[name] = int(number) * (1024 if unit == "kB" else 1)
    return info


def total_bytes() -> int:
    """Return the memory that this process could have, if no other process had any."""
    total, limit = memory_info()["MemTotal"], _cgroup_limit()
    return total if limit is None else min(total, limit)


def available_bytes() -> int:
    """Return the memory that is available to this process now."""
    available, limit = memory_info()["MemAvailable"], _cgroup_limit()
    if limit is None:
        return available
    return min(available, limit - int(_CGROUP_LIMIT.with_name("memory.current").read_text()))


def _cgroup_limit() -> int | None:
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return None
    return None if limit == "max" else int(limit)
