"""A short soak run: it works, its report is complete, and it leaves nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from soak.leaks import describe
from soak.stack import children, is_running
from tests.rigs.servers.redis import RedisServer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make install"),
    pytest.mark.skipif(RedisServer.missing() is not None, reason=str(RedisServer.missing())),
]
ROOT = Path(__file__).parents[2]


def command(folder: Path, *arguments: str) -> list[str]:
    program = [sys.executable, "-m", "soak", "--transport", "tcp", "--work-dir", str(folder)]
    return [*program, *arguments]


def test_short_run_completes_requests_during_faults(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ["--seconds", "30", "--seed", "1", "--keep", "--report", str(report)]
    result = subprocess.run(
        command(tmp_path / "new", *arguments), cwd=ROOT, capture_output=True, text=True, check=False
    )
    found = json.loads(report.read_text())
    # Other tests on the same machine may delay a step. No other finding is acceptable.
    assert found["found"].keys() <= {"stalled step"}, result.stdout + result.stderr
    assert result.returncode == (0 if found["passed"] else 1)
    assert found["counts"]["answers"] > 50
    assert found["counts"]["cached tokens"] > 0
    assert len(found["timeline"]) >= 5
    assert found["hooks"]["build_connector_meta"]["calls"] > 0
    assert not Path(f"{found['logs']}/tcp/disk").exists()


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    run = subprocess.Popen(command(tmp_path, "--seconds", "300"), cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while not list(tmp_path.glob("*/tcp/cache-1.log")):
            assert run.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        started = children(run.pid)
        assert started
        run.send_signal(signal.SIGINT)
        assert run.wait(120) == 130
    finally:
        run.kill()
        run.wait()
    # The resource tracker of multiprocessing exits slightly later.
    while remaining := [pid for pid in started if is_running(pid)]:
        assert time.monotonic() < deadline + 120, describe(remaining)
        time.sleep(0.2)
