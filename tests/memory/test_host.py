"""The memory of the host, and the limits of cgroups. Files stand in for those of the kernel."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.backends.cpu import HugePageSettings
from kvtier.backends.disk.backend import DiskSettings
from kvtier.cache import TieredCache
from kvtier.errors import SettingsError
from kvtier.memory import host
from kvtier.settings import Settings

MEBIBYTE = 1 << 20
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")
UNLIMITED = 9223372036854771712


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of the cgroups, which contains none."""
    monkeypatch.setattr(host, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host, "_MEMBERSHIP", tmp_path / "membership")
    return tmp_path / "cgroup"


def enter(cgroups: Path, membership: str) -> None:
    cgroups.with_name("membership").write_text(membership)


def limit(folder: Path, names: tuple[str, str, str], most: int | str, used: int = 0, cached: int = 0) -> None:
    """Write what the kernel reports of a cgroup. ``used`` includes ``cached``, the page cache."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{most}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - cached}\n{names[2]} {cached}\n")


def assert_unlimited() -> None:
    info = host.memory_info()
    assert host.smallest_limit().limit_bytes == info["MemTotal"] - info["Hugetlb"]
    assert host.available_bytes() == pytest.approx(info["MemAvailable"], rel=0.2)


def test_memory_without_limit_is_that_of_the_host(cgroups: Path) -> None:
    assert_unlimited()
    enter(cgroups, "4:memory:/a/b\n0::/a/b\n")
    assert_unlimited()
    limit(cgroups / "a", V2, "max")
    limit(cgroups / "memory/a", V1, UNLIMITED)
    assert_unlimited()


@pytest.mark.parametrize(
    ("root", "membership", "names"),
    [("", "0::/a/b/c", V2), ("memory", "5:cpu:/\n4:memory:/a/b/c\n0::/", V1)],
    ids=["v2", "v1"],
)
@pytest.mark.parametrize("folder", ["a/b/c", "a", ""])
def test_memory_is_that_of_the_smallest_cgroup_around(
    root: str, membership: str, names: tuple[str, str, str], folder: str, cgroups: Path
) -> None:
    enter(cgroups, membership)
    limit(cgroups / root / "a/b", names, 9 * MEBIBYTE, 2 * MEBIBYTE)
    limit(cgroups / root / folder, names, 3 * MEBIBYTE, 2 * MEBIBYTE)
    limit(cgroups / root / "other", names, MEBIBYTE)
    assert host.smallest_limit()[:2] == (3 * MEBIBYTE, cgroups / root / folder / names[0])
    assert host.available_bytes() == MEBIBYTE
    limit(cgroups / root / "a/b", names, 9 * MEBIBYTE, 9 * MEBIBYTE)
    assert host.smallest_limit().limit_bytes == 3 * MEBIBYTE
    assert host.available_bytes() == 0


@pytest.mark.parametrize(("root", "names"), [("", V2), ("memory", V1)])
def test_page_cache_is_available(root: str, names: tuple[str, str, str], cgroups: Path) -> None:
    enter(cgroups, "4:memory:/a\n0::/a")
    limit(cgroups / root / "a", names, 10 * MEBIBYTE, used=9 * MEBIBYTE, cached=7 * MEBIBYTE)
    assert host.available_bytes() == 8 * MEBIBYTE


def huge_tiers() -> list[HugePageSettings]:
    return [HugePageSettings(name="ram", type="hugepage", capacity=5 * MEBIBYTE)]


def test_reserved_huge_pages_do_not_reduce_available_memory() -> None:
    assert host.huge_page_bytes(huge_tiers(), {"HugePages_Free": 3}) == 5 * MEBIBYTE
    assert host.huge_page_bytes(huge_tiers(), {"HugePages_Free": 1}) == 2 * MEBIBYTE
    normal = [tier.model_copy(update={"type": "cpu"}) for tier in huge_tiers()]
    assert host.huge_page_bytes(normal, {"HugePages_Free": 3}) == 0


@pytest.mark.anyio
async def test_a_tier_larger_than_the_cgroup_is_refused(
    cgroups: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(cgroups, "0::/slice/service")
    limit(cgroups / "slice", V2, 4 * MEBIBYTE)
    info = host.memory_info()
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(host, "_MEMINFO", meminfo)
    settings = Settings.model_validate({"tiers": [{"name": "ram", "type": "hugepage", "capacity": "5MiB"}]})
    for free in (0, 1, 3):
        lines = {**info, "HugePages_Free": free}.items()
        meminfo.write_text("".join(f"{name}: {value}\n" for name, value in lines))
        if free == 0:
            with pytest.raises(SettingsError) as raised:
                async with TieredCache.open(settings):
                    pass
            assert str(raised.value) == (
                f"the `capacity` of tier 'ram' is 5MiB, and {cgroups}/slice/memory.max allows 4MiB: lower it"
            )
        else:
            async with TieredCache.open(settings):
                pass


@pytest.mark.anyio
@pytest.mark.parametrize(("kind", "refused"), [("tmpfs", True), ("ext4", False)])
async def test_a_disk_tier_on_a_tmpfs_takes_memory(
    kind: str, refused: bool, cgroups: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "21 1 0:19 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n"
        f"30 1 {os.major(device)}:{os.minor(device)} / / rw,relatime shared:1 master:2 - {kind} none rw\n"
    )
    monkeypatch.setattr(host, "_MOUNTS", mounts)
    enter(cgroups, "0::/a")
    limit(cgroups / "a", V2, 6 * MEBIBYTE)
    tiers = [
        {"name": "ram", "type": "cpu", "capacity": "4MiB"},
        {"name": "ssd", "type": "disk", "path": str(tmp_path / "new/folder"), "capacity": "3MiB"},
    ]
    settings = Settings.model_validate({"tiers": tiers})
    if not refused:
        async with TieredCache.open(settings):
            pass
        return
    with pytest.raises(SettingsError) as raised:
        async with TieredCache.open(settings):
            pass
    assert str(raised.value) == (
        "the `capacity` of tier 'ram' and tier 'ssd' is 7MiB, and "
        f"{cgroups}/a/memory.max allows 6MiB: lower it"
    )


def test_a_tier_takes_no_more_than_its_tmpfs_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"30 1 {os.major(device)}:{os.minor(device)} / / rw - tmpfs tmpfs rw\n")
    monkeypatch.setattr(host, "_MOUNTS", mounts)
    tier = DiskSettings(name="ssd", type="disk", path=tmp_path, capacity=1 << 60)
    assert host.tmpfs_bytes(tier) == shutil.disk_usage(tmp_path).total
    monkeypatch.setattr(host, "_MOUNTS", tmp_path / "missing")
    assert host.tmpfs_bytes(tier) == 0
    assert host.tmpfs_bytes(huge_tiers()[0]) == 0


@pytest.mark.anyio
async def test_a_disk_without_room_for_its_tiers_is_found_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = 3 * MEBIBYTE
    monkeypatch.setattr(host, "disk_usage", lambda _: SimpleNamespace(free=free))

    async def found(*capacities: str) -> list[str]:
        tiers = [{"name": "ram", "type": "cpu", "capacity": "4MiB"}]
        tiers += [
            {"name": f"d{at}", "type": "disk", "path": str(tmp_path / f"d{at}"), "capacity": capacity}
            for at, capacity in enumerate(capacities)
        ]
        async with TieredCache.open(Settings.model_validate({"tiers": tiers, "chunk_tokens": 64})) as cache:
            findings = [str(finding) for finding in cache.findings.latest()]
            model = cache.model("llama", token_bytes=8192)
            assert await model.store(range(128), bytearray(128 * 8192))
            assert await cache.drain(60)
        return findings

    assert await found("3MiB") == []
    free -= MEBIBYTE  # What it has written.
    assert await found("3MiB") == []
    expected = (
        "tier d0, d1: 2MiB free and 1.01MiB held, capacity 4MiB: "
        "set a `capacity` of at most 3.01MiB in all, or free disk space"
    )
    assert await found("3MiB", "1MiB") == [expected]
    assert expected in caplog.text
