"""A small disk for a tier, which can be filled without filling the machine's disk."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FILL_BYTES = 1 << 20
PAGE_BYTES = 4096


class Disk:
    """The folder of a disk tier. :mod:`soak.damage` damages it."""

    def __init__(self, mount: Path, medium: str | None) -> None:
        self.tier = mount / "ssd"
        self.medium = medium
        """The type of the mounted file system; ``None`` for a folder on the machine's disk, never filled."""
        self._filler = mount / "filler"

    def fill(self) -> None:
        """Fill the disk until it has no space for another chunk."""
        if self.medium is None:
            return
        descriptor = os.open(self._filler, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            filled = 0
            step = FILL_BYTES
            while step >= PAGE_BYTES:
                try:
                    os.posix_fallocate(descriptor, filled, step)
                except OSError:
                    step //= 2
                else:
                    filled += step
        finally:
            os.close(descriptor)

    def empty(self) -> None:
        """Undo :meth:`fill`."""
        self._filler.unlink(missing_ok=True)

    def files(self) -> list[Path]:
        """Return the files of all chunks, sorted by name."""
        return sorted(self.tier.rglob("*.kv"))

    def used(self) -> int:
        """Return the bytes of all chunks."""
        total = 0
        for file in self.files():
            with suppress(OSError):  # Evicted meanwhile.
                status = file.lstat()
                total += status.st_size if stat.S_ISREG(status.st_mode) else 0
        return total


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Disk]:
    """Mount a disk of ``mib`` MiB in ``folder``: ext4 on a loop device or, if that fails, a tmpfs.

    Without permission to mount, use the folder itself.
    """
    mount = folder / "disk"
    mount.mkdir()
    image = folder / "disk.image"
    medium = _mount(mount, image, mib) if os.geteuid() == 0 else None
    try:
        yield Disk(mount, medium)
    finally:
        if medium is not None:
            # Lazily if an exiting process still has a file open there.
            if subprocess.run(["umount", str(mount)], check=False, capture_output=True).returncode:
                subprocess.run(["umount", "-l", str(mount)], check=False, capture_output=True)
            image.unlink(missing_ok=True)


def _mount(mount: Path, image: Path, mib: int) -> str | None:
    with image.open("wb") as opened:
        opened.truncate(mib << 20)
    mounts = {
        "ext4": [
            ["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image)],
            ["mount", "-o", "loop", str(image), str(mount)],
        ],
        "tmpfs": [["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(mount)]],
    }
    for medium, commands in mounts.items():
        try:
            for command in commands:
                subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return medium
    return None
