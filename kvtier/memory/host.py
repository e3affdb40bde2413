"""The memory of this host, and of the cgroups that limit this process.

cgroups(7), https://docs.kernel.org/admin-guide/cgroup-v2.html,
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from shutil import disk_usage
from typing import NamedTuple

from kvtier.errors import SettingsError
from kvtier.memory.large_pages import LARGE_PAGE_BYTES
from kvtier.settings import LocalTierSettings, TierSettings
from kvtier.units import format_size

_MEMINFO = Path("/proc/meminfo")
_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNTS = Path("/proc/self/mountinfo")
_CGROUPS = Path("/sys/fs/cgroup")


class Limit(NamedTuple):
    """The memory of the host, or the limit of a cgroup, without reserved huge pages."""

    limit_bytes: int
    file: Path
    available_bytes: int

    def __str__(self) -> str:
        size = format_size(self.limit_bytes)
        return f"this host has {size} of memory" if self.file == _MEMINFO else f"{self.file} allows {size}"


def memory_info() -> dict[str, int]:
    """Parse /proc/meminfo. Sizes are in bytes."""
    info = {}
    for line in _MEMINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        info[name] = int(number) * (1024 if unit == "kB" else 1)
    return info


def smallest_limit() -> Limit:
    """Return what limits the normal pages that this process could have, if no other process had any."""
    return min(_limits())


def available_bytes() -> int:
    """Return the memory that is available to this process now."""
    return max(0, min(limit.available_bytes for limit in _limits()))


def huge_page_bytes(tiers: Sequence[LocalTierSettings], info: dict[str, int]) -> int:
    """Return the bytes that tiers take from reserved huge pages.

    Neither MemAvailable nor the limit of a cgroup includes them.
    """
    wanted = sum(tier.capacity for tier in tiers if tier.type == "hugepage")
    return min(wanted, info.get("HugePages_Free", 0) * LARGE_PAGE_BYTES)


def folder_of(tier: LocalTierSettings) -> Path | None:
    """Return the folder of a tier on a disk; ``None`` for any other."""
    path = getattr(tier, "path", None)
    return path if isinstance(path, Path) else None


def nearest_folder(path: Path) -> Path:
    """Return the folder itself, or its nearest existing parent."""
    folders = (path, *path.parents)
    return next((each for each in folders if os.path.isdir(each)), Path("/"))  # noqa: PTH112 - pathlib raises


class Room(NamedTuple):
    """What a file system has for the tiers on it."""

    tiers: str
    free_bytes: int
    held_bytes: int
    capacity: int

    def __str__(self) -> str:
        free, held, capacity = map(format_size, self[1:])
        return f"{free} free and {held} held, capacity {capacity}"

    @property
    def remedy(self) -> str:
        """What to type; empty if their capacity fits."""
        fits = self.free_bytes + self.held_bytes
        if self.capacity <= fits:
            return ""
        return f"set a `capacity` of at most {format_size(fits)} in all, or free disk space"


def rooms(tiers: Sequence[tuple[LocalTierSettings, int]]) -> list[Room]:
    """Return the room of each file system, given what each tier holds. Blocks. Raises ``OSError``."""
    found: dict[int, Room] = {}
    for tier, held in tiers:
        if (path := folder_of(tier)) is not None:
            folder = nearest_folder(path)
            room = found.setdefault(folder.stat().st_dev, Room("", disk_usage(folder).free, 0, 0))
            names = f"{room.tiers}, {tier.name}" if room.tiers else f"tier {tier.name}"
            room = Room(names, room.free_bytes, room.held_bytes + held, room.capacity + tier.capacity)
            found[folder.stat().st_dev] = room
    return list(found.values())


def tmpfs_bytes(tier: TierSettings) -> int:
    """Return how much memory a tier may take because its folder is on a tmpfs; 0 if it is not."""
    if not isinstance(tier, LocalTierSettings) or (path := folder_of(tier)) is None:
        return 0
    try:
        folder = nearest_folder(path)
        device = folder.stat().st_dev
        mounts = [line.partition(" - ") for line in _MOUNTS.read_text().splitlines()]
        number = f"{os.major(device)}:{os.minor(device)}"
        types = [rest.split(" ")[0] for fields, _, rest in mounts if fields.split(" ")[2] == number]
        return min(tier.capacity, disk_usage(folder).total) if "tmpfs" in types else 0
    except OSError:
        return 0  # What it cannot use, it does not fill.


def check_memory(tiers: Sequence[TierSettings]) -> None:
    """Raise :class:`SettingsError` if tiers take more memory than there is: a late page would kill processes.

    ``tiers``: those in memory, and those whose folder is on a tmpfs. Whether that much is available now is
    checked by ``kvtier doctor``.
    """
    local = [tier for tier in tiers if isinstance(tier, LocalTierSettings)]
    wanted, smallest = sum(tmpfs_bytes(tier) or tier.capacity for tier in local), smallest_limit()
    huge = huge_page_bytes(local, memory_info())
    if wanted - huge > smallest.limit_bytes:
        names = " and ".join(f"tier {tier.name!r}" for tier in local)
        in_huge_pages = f", {format_size(huge)} of it in huge pages" if huge else ""
        raise SettingsError(
            f"the `capacity` of {names} is {format_size(wanted)}{in_huge_pages}, and {smallest}: lower it"
        )


def _limits() -> Iterator[Limit]:
    """Yield the memory of the host, and the limits of the cgroup of this process and of all its ancestors."""
    info = memory_info()
    yield Limit(info["MemTotal"] - info.get("Hugetlb", 0), _MEMINFO, info["MemAvailable"])
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = _CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = _CGROUPS / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container, the path may be the host's, and only the root exists: that of the container.
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(root) and (limit := _limit(folder, *names)) is not None:
                yield limit


def _limit(folder: Path, name: str, usage: str, cache: str) -> Limit | None:
    """Return the limit of one cgroup, or None. Page cache counts as usage, but is reclaimed when needed."""
    try:
        text = (folder / name).read_text().strip()
        if text == "max":
            return None
        used = int((folder / usage).read_text())
        stat = dict(line.split(" ") for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return Limit(int(text), folder / name, int(text) - used + int(stat.get(cache, 0)))
