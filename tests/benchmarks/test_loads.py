"""The loads of a busy machine end with the process that started them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.waiting import wait_until

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "signal_number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_loads_end_with_their_benchmark(tmp_path: Path, signal_number: signal.Signals) -> None:
    command = [sys.executable, "-m", "benchmarks.busy", "--small", "--conditions", "nice"]
    process = subprocess.Popen([*command, "--folder", str(tmp_path)], cwd=ROOT, stderr=subprocess.DEVNULL)

    def children() -> list[Path]:
        return [path for path in Path("/proc").glob("[0-9]*") if descends(path, process.pid)]

    def command_of(path: Path) -> bytes:
        try:
            return (path / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return b""  # It has just exited.

    def is_loaded() -> bool:
        lines = [command_of(path) for path in children()]
        return any(b"loads.py" in line for line in lines) and any(b"busy_process" in line for line in lines)

    try:
        wait_until(is_loaded, seconds=120)
        processes = children()
        process.send_signal(signal_number)
        process.wait(60)
        wait_until(lambda: not any(is_running(path) for path in processes), seconds=60)
    finally:
        process.kill()
        process.wait()
    assert signal_number is signal.SIGKILL or list(tmp_path.iterdir()) == []


def descends(process: Path, parent: int) -> bool:
    """Whether a process is a child of another."""
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1]) == parent
    except OSError:
        return False


def is_running(process: Path) -> bool:
    """Whether the process runs. A zombie does not."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
