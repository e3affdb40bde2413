"""A small disk for a tier, which can be filled without filling the machine's disk."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FILL_BYTES = 1 << 20
PAGE_BYTES = 4096


class Disk:
    """The folder of a disk tier, with methods that damage it without the tier's knowledge."""

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

    def damage(self, kind: str, count: int, generator: random.Random) -> int:
        """Damage up to ``count`` files. Return the number of chosen files."""
        files = self.files()
        chosen = generator.sample(files, min(count, len(files)))
        for file in chosen:
            with suppress(OSError):  # Evicted meanwhile.
                _damage(file, kind, generator)
        return len(chosen)


def _damage(file: Path, kind: str, generator: random.Random) -> None:
    if kind == "remove-files":
        file.unlink()
        return
    size = file.stat().st_size
    where = generator.randrange(size)
    if kind == "truncate-files":
        os.truncate(file, where)
        return
    # Not "wb", which would create a file that was just deleted.
    with file.open("r+b") as opened:
        if kind == "garble-files":
            # Not the header, so that only the checksum detects the damage.
            opened.seek(PAGE_BYTES)
            opened.write(generator.randbytes(max(size - PAGE_BYTES, 0)))
            return
        opened.seek(where)
        byte = opened.read(1)[0]
        opened.seek(where)
        opened.write(bytes([byte ^ 1 << generator.randrange(8)]))


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
