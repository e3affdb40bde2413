"""`kvtier demo` itself, with a real vLLM server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make install"),
]


def start_demo(folder: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvtier", "demo", "--tokens", "2000", "--work-dir", str(folder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )


def processes_that_mention(folder: Path) -> list[str]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                line = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in line:
                found.append(process.name)
    return found


def test_the_demo_passes_and_cleans_up(tmp_path: Path) -> None:
    with start_demo(tmp_path) as demo:
        shown = demo.communicate()[0]
    assert demo.returncode == 0, shown
    assert shown.count("yes") == 3
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert processes_that_mention(tmp_path) == []


def test_an_interrupted_demo_leaves_nothing(tmp_path: Path) -> None:
    with start_demo(tmp_path) as demo:
        assert demo.stdout is not None
        while "starting vLLM" not in demo.stdout.readline():
            assert demo.poll() is None
        time.sleep(2)
        demo.send_signal(signal.SIGINT)
        demo.communicate()
    assert demo.returncode != 0
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert processes_that_mention(tmp_path) == []


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with start_demo(tmp_path, "--model", json.dumps(str(tmp_path / "nothing"))) as demo:
        shown = demo.communicate()[0]
    assert demo.returncode == 1
    assert "its log ends in" in shown
    assert processes_that_mention(tmp_path) == []
