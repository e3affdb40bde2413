"""Cache processes started by engines: one per settings, and errors if one cannot start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier import Settings
from kvtier.bridge.client import SchedulerBridge, status
from kvtier.bridge.spawn import CacheProcess, default_address
from kvtier.errors import ChannelError

from .conftest import hello, is_serving, wait_until


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


def test_folder_accessible_to_others_is_refused(tmp_path: Path) -> None:
    default_address(make_settings(tmp_path)).parent.chmod(0o755)
    with pytest.raises(ChannelError, match="accessible to other users"):
        default_address(make_settings(tmp_path))


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
    child = process._child
    assert child is not None
    wait_until(lambda: not Path("/proc", str(child.pid)).exists())
    assert os.getpid() not in list(ancestors(status(path)["pid"]))


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
    with pytest.raises(ChannelError, match=r"failed to start: .*ssd"):
        process.start_and_wait(scheduler.connect)


def test_killed_process_is_restarted(settings: Settings) -> None:
    path = default_address(settings)
    process = CacheProcess(settings, path)
    scheduler = SchedulerBridge(hello("scheduler"), path, process.start_in_background)
    process.start_and_wait(scheduler.connect)
    os.kill(status(path)["pid"], signal.SIGKILL)
    wait_until(lambda: (scheduler.poll(), not scheduler.connected)[1])
    wait_until(scheduler.ready, seconds=30)
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
    scheduler._retry_at = 0.0
    assert not scheduler.ready()
    assert not started.is_set()
    may_start.set()
    assert started.wait(60)
