"""Damage to the folder of a disk tier, with or without a process that uses it."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from soak.disks import PAGE_BYTES, Disk

COUNT = 8
CHANGES = ("flip-bits", "truncate-files", "garble-files", "remove-files")
KINDS = (*CHANGES, "plant-files", "hide-folders", "remove-folder")

_Replacement = Callable[[Path], object]
_LOOP: _Replacement = lambda path: path.symlink_to(path)  # noqa: E731
IN_PLACE_OF_FILES: Sequence[_Replacement] = (
    _LOOP,
    lambda path: path.symlink_to("/dev/zero"),
    lambda path: path.symlink_to("/nowhere"),
    Path.mkdir,
    os.mkfifo,
)
IN_PLACE_OF_FOLDERS: Sequence[_Replacement] = (_LOOP, Path.touch)
"""Cannot be listed, not even by root, whom permissions do not stop."""
FOREIGN = (
    "x",
    ".hidden",
    "n" * 255,
    "new\nline",
    "\udcff",
    "0" * 64 + ".kv",
    "000",
    "fff",
    "001/x",
    f"002/{'2' * 64}.kv",
    f"002/{'1' * 64}.kv.tmp",
)


class Damage:
    """What was done to a folder without its process's knowledge, and what of it can be undone."""

    def __init__(self, disk: Disk, generator: random.Random) -> None:
        self._disk = disk
        self._generator = generator
        self._planted: list[Path] = []
        self._hidden: list[tuple[Path, Path]] = []
        """Folders, and where they are meanwhile."""

    def apply(self, kind: str, count: int = COUNT) -> int:
        """Damage up to ``count`` files or folders; return their number."""
        match kind:
            case "plant-files":
                replaced = self._chosen(self._disk.files(), count)
                names = self._generator.sample(FOREIGN, min(count, len(FOREIGN)))
                return sum(map(self._replace, replaced)) + sum(map(self._plant, names))
            case "hide-folders":
                folders = sorted({file.parent for file in self._disk.files()})
                return sum(map(self._hide, self._chosen(folders, count)))
            case "remove-folder":
                shutil.rmtree(self._disk.tier, ignore_errors=True)
                if self._generator.random() < 0.7:
                    self._disk.tier.mkdir(exist_ok=True)
                return 1
        return sum(self._change(file, kind) for file in self._chosen(self._disk.files(), count))

    def undo(self) -> None:
        """Remove what was planted, and put back what was hidden."""
        for path in self._planted:
            with suppress(OSError):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        for path, hidden in self._hidden:
            try:
                hidden.rename(path)
            except OSError:  # The process has made another, or the whole folder was removed.
                shutil.rmtree(hidden, ignore_errors=True)

    def _chosen(self, paths: list[Path], count: int) -> list[Path]:
        return self._generator.sample(paths, min(count, len(paths)))

    def _replace(self, path: Path) -> bool:
        with suppress(OSError):  # Evicted meanwhile, or written again.
            path.unlink()
            self._generator.choice(IN_PLACE_OF_FILES)(path)
            self._planted.append(path)
            return True
        return False

    def _plant(self, name: str) -> bool:
        path = self._disk.tier / name
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            if path.exists():
                return False
            path.write_bytes(self._generator.randbytes(self._generator.choice([0, 100, 70_000])))
            self._planted.append(path)
            return True
        return False

    def _hide(self, path: Path) -> bool:
        hidden = self._disk.tier.with_name(f"hidden-{path.name}")
        with suppress(OSError):
            path.rename(hidden)
            self._hidden.append((path, hidden))
            # The process may be quicker, and make the folder again.
            self._generator.choice(IN_PLACE_OF_FOLDERS)(path)
            self._planted.append(path)
            return True
        return False

    def _change(self, file: Path, kind: str) -> bool:
        with suppress(OSError):  # Evicted meanwhile.
            _change(file, kind, self._generator)
            return True
        return False


def _change(file: Path, kind: str, generator: random.Random) -> None:
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
