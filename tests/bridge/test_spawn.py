"""Cache processes started by engines: one per settings, and errors if one cannot start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvtier import Settings
from kvtier.bridge import spawn
from kvtier.bridge.client import SchedulerBridge, status
from kvtier.bridge.spawn import CacheProcess, default_address
from kvtier.concurrency import placement
from kvtier.concurrency.placement import Placement
from kvtier.errors import ChannelError
from tests.rigs.bridges import hello, is_serving
from tests.rigs.waiting import wait_until

BIND = 2
"""MPOL_BIND of set_mempolicy(2)."""


@pytest.fixture(autouse=True)
def _own_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    config = make_settings(tmp_path)
    yield config
    path = default_address(config)
    if is_serving(path):
        os.kill(status(path)["pid"], signal.SIGKILL)


def make_settings(tmp_path: Path, **more: Any) -> Settings:
    tiers = [
        {"name": "ram", "type": "cpu", "capacity": "4MiB"},
        {"name": "ssd", "type": "disk", "path": str(tmp_path / "ssd"), "capacity": "8MiB"},
    ]
    return Settings(tiers=tiers, linger=0.3, **more)


def test_address_is_derived_from_settings(tmp_path: Path) -> None:
    address = default_address(make_settings(tmp_path))
    assert address == default_address(make_settings(tmp_path))
    assert address != default_address(make_settings(tmp_path, chunk_tokens=512))
    assert address.parent.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for a socket in it, unlike that of a worker's ``tmp_path``."""
    with tempfile.TemporaryDirectory(prefix="kvt-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def fallback(short: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only fallback for the socket's folder."""
    folder = short / "fallback"
    folder.mkdir()
    monkeypatch.setattr(spawn, "FALLBACKS", (str(folder),))
    for name in spawn.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return folder


def _open_to_others(base: Path) -> None:
    (base / f"kvtier-{os.getuid()}").mkdir(mode=0o755)


def _of_another_user(base: Path) -> None:
    (base / f"kvtier-{os.getuid()}").mkdir(mode=0o700)
    os.chown(base / f"kvtier-{os.getuid()}", 1234, -1)


def _a_link(base: Path) -> None:
    (base / "elsewhere").mkdir(mode=0o700)
    (base / f"kvtier-{os.getuid()}").symlink_to(base / "elsewhere")


def _a_file(base: Path) -> None:
    (base / f"kvtier-{os.getuid()}").touch()


@pytest.mark.parametrize(
    "spoil",
    [
        _open_to_others,
        pytest.param(_of_another_user, marks=pytest.mark.skipif(os.getuid() != 0, reason="needs root")),
        _a_link,
        _a_file,
        Path.rmdir,
    ],
)
@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "TMPDIR"])
def test_unusable_folder_is_skipped(
    tmp_path: Path,
    short: Path,
    fallback: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    spoil: Callable[[Path], None],
) -> None:
    base = short / "base"
    base.mkdir()
    monkeypatch.setenv(variable, str(base))
    spoil(base)
    assert default_address(make_settings(tmp_path)).parent.parent == fallback
    monkeypatch.setattr(spawn, "FALLBACKS", ())
    with pytest.raises(ChannelError, match=rf"set `socket` in the settings \(.*{base}.*\)"):
        default_address(make_settings(tmp_path))


def test_long_temporary_directory_is_skipped(
    tmp_path: Path, fallback: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on HPC clusters: a Unix socket's path has at most 107 bytes."""
    base = tmp_path / ("long" * 25)
    base.mkdir()
    monkeypatch.setenv("TMPDIR", str(base))
    address = default_address(make_settings(tmp_path))
    assert address.parent.parent == fallback
    assert default_address(make_settings(tmp_path)) == address
    monkeypatch.setattr(spawn, "FALLBACKS", ())
    with pytest.raises(ChannelError, match=r"set `socket` .* is too long: .* at most 107 bytes"):
        default_address(make_settings(tmp_path))


def test_process_has_the_servers_placement(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the thread that starts it, which vLLM has bound to a core and a NUMA node."""
    path = default_address(settings)
    process = CacheProcess(settings, path)
    server = Placement.current()
    monkeypatch.setenv(placement.VARIABLE, json.dumps(server))
    scheduler = SchedulerBridge(hello("scheduler"), path)

    def start() -> None:
        Placement(server.cpus[-1:], BIND, placement.allowed_nodes()[:1]).apply()
        process.start_and_wait(scheduler.connect)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    report = status(path)
    folder = Path(f"/proc/{report['pid']}")
    assert report["placement"] == server.describe()
    assert placement.VARIABLE.encode() not in (folder / "environ").read_bytes()
    for task in (folder / "task").iterdir():
        assert os.sched_getaffinity(int(task.name)) == set(server.cpus)
    assert " bind:" not in (folder / "numa_maps").read_text()
    scheduler.close()


def test_process_exits_after_engines_that_overlapped(settings: Settings) -> None:
    path = default_address(settings)
    engines = [SchedulerBridge(hello("scheduler", name), path) for name in "abc"]
    CacheProcess(settings, path).start_and_wait(engines[0].connect)
    for leaving, joining in pairwise(engines):
        joining.connect()
        leaving.close()
        wait_until(lambda: len(status(path)["engines"]) == 1)
    assert [engine["name"] for engine in status(path)["engines"]] == ["c"]
    engines[-1].close()
    wait_until(lambda: not path.exists())


def test_process_is_shared_and_exits_after_last_engine(settings: Settings) -> None:
    path = default_address(settings)
    process = CacheProcess(settings, path)
    scheduler = SchedulerBridge(hello("scheduler"), path, process.start)
    process.start_and_wait(scheduler.connect)
    pid = status(path)["pid"]
    second_process = CacheProcess(settings, path)
    second = SchedulerBridge(hello("scheduler"), path, second_process.start)
    second_process.start_and_wait(second.connect)
    assert status(path)["pid"] == pid
    second.close()
    scheduler.close()
    wait_until(lambda: not path.exists())


def test_process_is_no_descendant_of_the_engine(settings: Settings) -> None:
    """vLLM kills the descendants of an engine that it stops."""
    path = default_address(settings)
    process = CacheProcess(settings, path)
    process.start_and_wait(lambda: status(path))
    pid = status(path)["pid"]
    # Once the child that has started it has exited.
    wait_until(lambda: os.getpid() not in list(ancestors(pid)))
    assert status(path)["pid"] == pid, "it serves without that child"


def ancestors(pid: int) -> Iterator[int]:
    """Yield the parent of a process, its parent, and so on."""
    while pid:
        pid = int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])
        yield pid


def test_concurrent_starts_share_one_process(settings: Settings) -> None:
    path = default_address(settings)
    code = (
        "import sys\n"
        "from kvtier import Settings\n"
        "from kvtier.bridge.client import status\n"
        "from kvtier.bridge.spawn import CacheProcess, default_address\n"
        "settings = Settings.model_validate_json(sys.argv[1])\n"
        "path = default_address(settings)\n"
        "CacheProcess(settings, path).start_and_wait(lambda: print(status(path)['pid']))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, settings.model_dump_json()]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    pids = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert pids == {str(status(path)["pid"])}


def test_failed_start_is_reported(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "ssd").write_text("a file where the folder should be")
    process = CacheProcess(settings, default_address(settings))
    scheduler = SchedulerBridge(hello("scheduler"), default_address(settings))
    with pytest.raises(ChannelError, match=r"failed to start: .*ssd.*log: .*kvtier config check") as failed:
        process.start_and_wait(scheduler.connect)
    assert failed.value.__suppress_context__, "that nothing answers yet is not the reason"


def test_killed_process_is_restarted(settings: Settings) -> None:
    path = default_address(settings)
    process = CacheProcess(settings, path)
    scheduler = SchedulerBridge(hello("scheduler"), path, process.start_in_background)
    process.start_and_wait(scheduler.connect)
    killed = status(path)["pid"]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: (scheduler.poll(), not scheduler.connected)[1])
    wait_until(scheduler.ready, seconds=30)
    assert status(path)["pid"] != killed
    scheduler.close()


def test_running_engine_does_not_wait_for_restart(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_start, started = threading.Event(), threading.Event()

    def start(_: CacheProcess) -> None:
        may_start.wait(60)
        started.set()

    monkeypatch.setattr(CacheProcess, "start", start)
    process = CacheProcess(settings, default_address(settings))
    scheduler = SchedulerBridge(hello("scheduler"), default_address(settings), process.start_in_background)
    assert not scheduler.ready()
    scheduler.retry_now()
    assert not scheduler.ready()
    assert not started.is_set()
    may_start.set()
    assert started.wait(60)
