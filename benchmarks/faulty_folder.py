"""A folder whose disk is faulty, for any process: files of another folder, through FUSE.

Needs Linux with ``/dev/fuse``, libfuse 3 (``apt-get install fuse3``) and permission to mount.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvtier.units import MIB

READY_SECONDS = 30
POLL_SECONDS = 0.05
SLOW_SECONDS_PER_MIB = 8.0
TIMES = ("atime", "ctime", "mtime")


class FaultyFolder:
    """The folder, healthy at first."""

    def __init__(self, folder: Path) -> None:
        """``folder``: an empty one for its files."""
        self.path = folder / "disk"
        """Where it is mounted."""
        self.files = folder / "files"
        """Its files without a fault."""
        self.fault = ""
        """The fault now."""
        self._file = folder / "fault"
        """Tells it to the process that serves the folder."""

    def set(self, fault: str) -> None:
        """Begin a fault, or with an empty one end it.

        ``full``: writes find no room; ``unreadable``: reads fail; ``hanging``: reads wait until it ends;
        ``slow``: each read takes eight seconds for each MiB.
        """
        self.fault = fault
        self._file.write_text(fault)

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """Mount it. Raises :class:`SystemExit` if it cannot be."""
        for folder in (self.path, self.files):
            folder.mkdir(parents=True)
        self.set("")
        command = [sys.executable, "-m", "benchmarks.faulty_folder", *map(str, (self.files, self.path))]
        process = subprocess.Popen([*command, str(self._file)], cwd=Path(__file__).parents[1])
        try:
            deadline = time.monotonic() + READY_SECONDS
            while not self.path.is_mount():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{self.path} was not mounted: is there a /dev/fuse, and libfuse3?")
                time.sleep(POLL_SECONDS)
            yield
        finally:
            self.set("")
            subprocess.run(["umount", "--lazy", str(self.path)], check=False)
            process.terminate()
            process.wait()

    def corrupt(self) -> None:
        """Overwrite 64 KiB in the middle of each file."""
        for path in self.files.rglob("*"):
            if path.is_file() and path.stat().st_size > MIB // 4:
                with path.open("r+b") as file:
                    file.seek(path.stat().st_size // 2)
                    file.write(os.urandom(1 << 16))


def main() -> None:
    """Serve the folder until it is unmounted."""
    import mfusepy

    files, mount, fault_file = map(Path, sys.argv[1:])

    def fault() -> str:
        return fault_file.read_text()

    def at(path: str) -> Path:
        return files / path.lstrip("/")

    class Files(mfusepy.Operations):  # type: ignore[misc]
        """Passes calls on to the folder, with the fault of the moment."""

        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            found = at(path).lstat()
            values = {
                f"st_{name}": getattr(found, f"st_{name}") for name in ("gid", "mode", "nlink", "size", "uid")
            }
            return {**values, **{f"st_{name}": getattr(found, f"st_{name}_ns") for name in TIMES}}

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *(entry.name for entry in at(path).iterdir())]

        def statfs(self, path: str) -> dict[str, int]:
            found = os.statvfs(at(path))
            return {
                name: getattr(found, name)
                for name in dir(found)
                if name.startswith("f_") and name != "f_fsid"
            }

        def chmod(self, path: str, mode: int) -> None:
            at(path).chmod(mode)

        def chown(self, path: str, uid: int, gid: int) -> None:
            os.chown(at(path), uid, gid)

        def mkdir(self, path: str, mode: int) -> None:
            at(path).mkdir(mode)

        def rmdir(self, path: str) -> None:
            at(path).rmdir()

        def unlink(self, path: str) -> None:
            at(path).unlink()

        def rename(self, old: str, new: str, *flags: int) -> None:
            at(old).rename(at(new))

        def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
            os.utime(at(path), ns=times or (time.time_ns(),) * 2)

        def truncate(self, path: str, length: int, fh: int | None = None) -> None:
            os.truncate(at(path), length)

        def open(self, path: str, flags: int) -> int:
            return os.open(at(path), flags & ~os.O_DIRECT)

        def create(self, path: str, mode: int, fi: object = None) -> int:
            return os.open(at(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

        def release(self, path: str, fh: int) -> None:
            os.close(fh)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            if size >= 1 << 16:  # Not what is needed to find files.
                while fault() == "hanging":
                    time.sleep(POLL_SECONDS)
                if fault() == "unreadable":
                    raise mfusepy.FuseOSError(errno.EIO)
                if fault() == "slow":
                    time.sleep(SLOW_SECONDS_PER_MIB * size / MIB)
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            if fault() == "full":
                raise mfusepy.FuseOSError(errno.ENOSPC)
            return os.pwrite(fh, data, offset)

        def fsync(self, path: str, datasync: int, fh: int) -> None:
            os.fsync(fh)

    with suppress(RuntimeError):  # Raised when it is terminated.
        mfusepy.FUSE(Files(), str(mount), foreground=True, direct_io=True)


if __name__ == "__main__":
    main()
