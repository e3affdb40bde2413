"""`kvtier demo` itself, with a real vLLM server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make install"),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, as there are sockets below it whose paths may have 107 bytes only."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as name:
        yield Path(name)


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


def test_the_demo_passes_and_cleans_up(folder: Path) -> None:
    with start_demo(folder) as demo:
        shown = demo.communicate()[0]
    assert demo.returncode == 0, shown
    assert shown.count("yes") == 3
    assert [path.name for path in folder.iterdir()] == ["model"]
    assert processes_that_mention(folder) == []


def test_the_disaggregated_demo_passes_and_cleans_up(folder: Path) -> None:
    with start_demo(folder, "--disaggregated") as demo:
        shown = demo.communicate()[0]
    assert demo.returncode == 0, shown
    assert "│ prefiller and decoder │" in shown
    assert "yes" in shown
    assert [path.name for path in folder.iterdir()] == ["model"]
    assert processes_that_mention(folder) == []


@pytest.mark.parametrize("options", [[], ["--disaggregated"]], ids=["one", "disaggregated"])
def test_an_interrupted_demo_leaves_nothing(folder: Path, options: list[str]) -> None:
    with start_demo(folder, *options) as demo:
        assert demo.stdout is not None
        while "starting vLLM" not in demo.stdout.readline():
            assert demo.poll() is None
        time.sleep(2)
        demo.send_signal(signal.SIGINT)
        demo.communicate()
    assert demo.returncode != 0
    assert [path.name for path in folder.iterdir()] == ["model"]
    assert processes_that_mention(folder) == []


def test_a_model_that_is_not_there(folder: Path) -> None:
    with start_demo(folder, "--model", json.dumps(str(folder / "nothing"))) as demo:
        shown = demo.communicate()[0]
    assert demo.returncode == 1
    assert "its log ends in" in shown
    assert processes_that_mention(folder) == []
