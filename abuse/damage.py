"""Damage to the folder of a disk tier, with or without a process that uses it."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from soak.disks import Disk

FILES = 8
"""At most this many are damaged in a round."""
CHANGES = {
    "flipped bits": "flip-bits",
    "truncated files": "truncate-files",
    "garbled files": "garble-files",
    "removed files": "remove-files",
}
KINDS = [*CHANGES, "links", "folders and pipes", "unreadable folders", "foreign files", "removed folder"]


class Damage:
    """What a round puts into a folder, and takes out again."""

    def __init__(self, disk: Disk, generator: random.Random) -> None:
        self.planted: list[Path] = []
        self._disk = disk
        self._generator = generator

    def apply(self, kind: str) -> int:
        """Damage the folder; return the number of files or folders."""
        if kind in CHANGES:
            return self._disk.damage(CHANGES[kind], FILES, self._generator)
        match kind:
            case "links":
                links = [lambda path: path.symlink_to(path), lambda path: path.symlink_to("/dev/zero")]
                return self._replace(self._disk.files(), [*links, lambda path: path.symlink_to("/nowhere")])
            case "folders and pipes":
                return self._replace(self._disk.files(), [Path.mkdir, os.mkfifo])
            case "unreadable folders":  # Also for root, whom permissions do not stop.
                folders = sorted({file.parent for file in self._disk.files()})
                return self._replace(folders, [lambda path: path.symlink_to(path), Path.touch])
            case "foreign files":
                names = [
                    "x",
                    ".hidden",
                    "n" * 255,
                    "new\nline",
                    "\udcff",
                    "0" * 64 + ".kv",
                    "000",
                    "fff",
                    "..",
                ]
                return sum(
                    map(self._plant, [*names, "001/x", f"002/{'2' * 64}.kv", f"002/{'1' * 64}.kv.tmp"])
                )
            case "removed folder":
                shutil.rmtree(self._disk.tier, ignore_errors=True)
                if self._generator.random() < 0.7:
                    self._disk.tier.mkdir(exist_ok=True)
                return 1
        raise ValueError(kind)

    def undo(self) -> None:
        """Remove what was planted."""
        for path in self.planted:
            with suppress(OSError):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    def _replace(self, paths: list[Path], replacements: list[Callable[[Path], object]]) -> int:
        chosen = self._generator.sample(paths, min(FILES, len(paths)))
        for path in chosen:
            with suppress(OSError):  # Evicted meanwhile, or written again.
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                self._generator.choice(replacements)(path)
                self.planted.append(path)
        return len(chosen)

    def _plant(self, name: str) -> bool:
        path = self._disk.tier / name
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(self._generator.randbytes(self._generator.choice([0, 100, 70_000])))
            self.planted.append(path)
            return True
        return False
