"""A cache process that an engine starts: one for equal settings, and loud where it cannot start."""

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

from .conftest import answers, hello, wait_until


@pytest.fixture(autouse=True)
def _own_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    made = make_settings(tmp_path)
    yield made
    path = default_address(made)
    if answers(path):
        os.kill(status(path)["pid"], signal.SIGKILL)


def make_settings(tmp_path: Path, **more: Any) -> Settings:
    tiers = [
        {"name": "ram", "type": "cpu", "capacity": "4MiB"},
        {"name": "ssd", "type": "disk", "path": str(tmp_path / "ssd"), "capacity": "8MiB"},
    ]
    return Settings(tiers=tiers, linger=0.3, **more)


def test_the_address_follows_from_the_settings(tmp_path: Path) -> None:
    one = default_address(make_settings(tmp_path))
    assert one == default_address(make_settings(tmp_path))
    assert one != default_address(make_settings(tmp_path, chunk_tokens=512))
    assert one.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    default_address(make_settings(tmp_path)).parent.chmod(0o755)
    with pytest.raises(ChannelError, match="open to others"):
        default_address(make_settings(tmp_path))


def test_it_is_started_once_and_leaves_after_its_engine(settings: Settings) -> None:
    path = default_address(settings)
    process = CacheProcess(settings, path)
    scheduler = SchedulerBridge(hello("scheduler"), path, process.start)
    process.start_and_wait(scheduler.connect)
    pid = status(path)["pid"]
    other = CacheProcess(settings, path)
    second = SchedulerBridge(hello("scheduler"), path, other.start)
    other.start_and_wait(second.connect)
    assert status(path)["pid"] == pid
    second.close()
    scheduler.close()
    wait_until(lambda: not path.exists())


def test_many_that_start_at_once_end_up_with_one(settings: Settings) -> None:
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
    starters = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    pids = {starter.communicate(timeout=60)[0].strip() for starter in starters}
    assert pids == {str(status(path)["pid"])}


def test_one_that_cannot_start_says_why(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "ssd").write_text("a file where the folder should be")
    process = CacheProcess(settings, default_address(settings))
    scheduler = SchedulerBridge(hello("scheduler"), default_address(settings))
    with pytest.raises(ChannelError, match=r"could not start: .*ssd"):
        process.start_and_wait(scheduler.connect)


def test_it_is_started_again_after_it_was_killed(settings: Settings) -> None:
    path = default_address(settings)
    process = CacheProcess(settings, path)
    scheduler = SchedulerBridge(hello("scheduler"), path, process.start_in_background)
    process.start_and_wait(scheduler.connect)
    os.kill(status(path)["pid"], signal.SIGKILL)
    wait_until(lambda: (scheduler.poll(), not scheduler.connected)[1])
    wait_until(scheduler.ready, seconds=30)
    scheduler.close()


def test_an_engine_that_runs_does_not_wait_while_it_is_started(
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
