"""`kvtier demo` with a real vLLM server."""

from __future__ import annotations

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
    """A short path: it contains Unix sockets, whose paths are limited to 107 bytes."""
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


def processes_using(folder: Path) -> list[str]:
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


def test_demo_passes_and_cleans_up(folder: Path) -> None:
    with start_demo(folder) as demo:
        shown = demo.communicate()[0]
    assert demo.returncode == 0, shown
    assert shown.count("yes") == 3
    assert [path.name for path in folder.iterdir()] == ["model"]
    assert processes_using(folder) == []


SLOW_DISK = """
import sys
import yaml
from kvtier.cli import main
from kvtier.lab.demo import run

write = run._Demo._write_settings

def write_slow(self):
    write(self)
    settings = yaml.safe_load(self.work.config().read_text())
    settings["tiers"][1]["deadline"] = "0.001s"
    self.work.config().write_text(yaml.safe_dump(settings))

run._Demo._write_settings = write_slow
sys.argv = ["kvtier", *sys.argv[1:]]
main()
"""


def test_slow_disk_is_named_as_the_cause_and_logs_are_kept(folder: Path) -> None:
    command = ["demo", "--tokens", "2000", "--work-dir", str(folder)]
    demo = subprocess.run(
        [sys.executable, "-c", SLOW_DISK, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
        check=False,
    )
    assert demo.returncode == 1, demo.stdout
    assert "✗ warm from disk, both restarted" in demo.stdout
    assert "tier ssd: deadline of 1ms exceeded reading" in demo.stdout
    (kept,) = folder.glob("run-*")
    assert str(kept) in demo.stdout
    assert {"cache.log", "vllm.log"} <= {path.name for path in kept.iterdir()}
    assert "cache process: tier ssd: deadline of 1ms exceeded" in (kept / "vllm.log").read_text()
    assert processes_using(folder) == []


def test_disaggregated_demo_passes_and_cleans_up(folder: Path) -> None:
    with start_demo(folder, "--disaggregated") as demo:
        shown = demo.communicate()[0]
    assert demo.returncode == 0, shown
    assert "│ prefiller and decoder │" in shown
    assert "yes" in shown
    assert [path.name for path in folder.iterdir()] == ["model"]
    assert processes_using(folder) == []


@pytest.mark.parametrize("options", [[], ["--disaggregated"]], ids=["one", "disaggregated"])
def test_interrupted_demo_leaves_nothing(folder: Path, options: list[str]) -> None:
    with start_demo(folder, *options) as demo:
        assert demo.stdout is not None
        while "starting vLLM" not in demo.stdout.readline():
            assert demo.poll() is None
        time.sleep(2)
        demo.send_signal(signal.SIGINT)
        demo.communicate()
    assert demo.returncode != 0
    assert [path.name for path in folder.iterdir()] == ["model"]
    assert processes_using(folder) == []


def test_folder_without_a_model_is_reported_with_the_log_of_vllm(folder: Path) -> None:
    model = folder / "nothing"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    with start_demo(folder, "--model", str(model)) as demo:
        shown = demo.communicate()[0]
    assert demo.returncode == 1
    assert "its log ends in" in shown
    assert processes_using(folder) == []
