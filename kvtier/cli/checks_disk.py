"""Checks of ``kvtier doctor`` on folders: whether they can be written, and what to do if not."""

from __future__ import annotations

import errno
import mmap
import os
import shlex
import shutil
import stat
import tempfile
from pathlib import Path

from kvtier.cli.check import Check
from kvtier.settings import LocalTierSettings
from kvtier.units import format_size

_OTHER = "or set another `path`"


def check_direct_io(name: str, path: Path) -> Check:
    """Check that a folder, or its nearest existing parent, can be written with O_DIRECT."""
    name = f"disk of {name}"
    if obstacle := find_obstacle(path):
        return Check(name, "fail", *obstacle)
    folder = nearest_folder(path)
    where = str(path) if folder == path else f"{path} (to be created in {folder})"
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".kvtier-doctor-") as file:
            try:
                descriptor = os.open(file.name, os.O_WRONLY | os.O_DIRECT)
            except OSError:
                found = f"{where} can be written, but not with O_DIRECT"
                return Check(
                    name,
                    "warn",
                    found,
                    "use a local file system such as ext4 or xfs; this one works, but slower",
                )
            try:
                with mmap.mmap(-1, mmap.PAGESIZE) as page:
                    os.write(descriptor, page)
            finally:
                os.close(descriptor)
    except OSError as error:
        return Check(name, "fail", f"{where} cannot be written: {error.strerror}", remedy_of(error, path))
    return Check(name, "ok", f"{where} can be written with O_DIRECT")


def check_disk_room(tier: LocalTierSettings, path: Path) -> Check:
    """Check that the disk has room for the tier's capacity, less what it holds already."""
    from kvtier.backends.disk.backend import walk

    folder = nearest_folder(path)
    name = f"room for tier {tier.name}"
    errors: list[OSError] = []
    try:
        files = walk(path, lambda _, error: errors.append(error)) if _is_folder(path) else ()
        held = sum(map(_bytes_of, files))
        free = shutil.disk_usage(folder).free
    except OSError as error:
        errors.append(error)
    if errors:
        first = errors[0]
        remedy = "make all of the folder readable for this user: what cannot be read counts as used"
        if first.errno not in (errno.EACCES, errno.EPERM):
            remedy = remedy_of(first, Path(first.filename or path))
        return Check(name, "warn", str(first), remedy)
    found = f"{format_size(free)} free and {format_size(held)} held, capacity {format_size(tier.capacity)}"
    if free + held < tier.capacity:
        return Check(
            name, "warn", found, "lower the tier's capacity, or free disk space: writes to a full disk fail"
        )
    return Check(name, "ok", found)


def _bytes_of(file: Path) -> int:
    """Return the size of a chunk; 0 if a running cache process has removed it meanwhile."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def nearest_folder(path: Path) -> Path:
    """Return the folder itself, or its nearest existing parent."""
    return next((folder for folder in (path, *path.parents) if _is_folder(folder)), Path("/"))


def find_obstacle(path: Path) -> tuple[str, str] | None:
    """Return what keeps ``path`` from being a folder, and the remedy. ``None``: it is one, or can be made."""
    for part in reversed((path, *path.parents)):
        try:
            if stat.S_ISDIR(part.stat().st_mode):
                continue
        except FileNotFoundError:
            if not part.is_symlink():
                return None
            return f"{part} is a link to nothing", f"rm {_quoted(part)}, {_OTHER}"
        except OSError as error:
            return f"{part} cannot be used: {error.strerror}", remedy_of(error, part)
        return f"{part} is not a folder", f"move it away: mv {_quoted(part)} {_quoted(part)}.old, {_OTHER}"
    return None


def remedy_of(error: OSError, path: Path) -> str:
    """Return the remedy for a folder that cannot be written because of ``error``."""
    if error.errno == errno.EROFS:
        return f"mount -o remount,rw {_quoted(_mount_point(path))}, {_OTHER}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"mkdir -p {_quoted(path)} && chown {os.getuid()} {_quoted(path)}, {_OTHER}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"free disk space and inodes: df -h -i {_quoted(nearest_folder(path))}, {_OTHER}"
    if error.errno == errno.ELOOP:
        return f"it leads to itself: rm {_quoted(path)}, {_OTHER}"
    if error.errno == errno.ENAMETOOLONG:
        return "set a shorter `path`"
    if error.errno in (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN):
        return f"check the medium and its mount (dmesg), {_OTHER}"
    return "set another `path`"


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 - pathlib raises for some names


def _mount_point(path: Path) -> Path:
    folder = nearest_folder(path)
    return next(part for part in (folder, *folder.parents) if part.is_mount() or part == part.parent)


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
