"""The wheels of a release, installed as users do: in an empty environment, without a compiler."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"
NEWEST = (3, 99)


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a script."""
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


def run(program: Path, *arguments: str | Path, path: Path) -> str:
    """Run a program that finds only what is in one folder, and return what it prints."""
    result = subprocess.run(
        [program, *arguments],
        env={"PATH": str(path), "HOME": str(path), "PIP_CACHE_DIR": os.environ.get("PIP_CACHE_DIR", "")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def links(readme: str) -> Sequence[str]:
    return re.findall(r"\]\(([^)]+)\)", readme)


def test_links_of_the_readme_are_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = load("pypi_readme", monkeypatch)
    project = {"urls": {"Source": "https://example.com/kvtier"}, "version": "1.2.3"}
    text = provider.dynamic_metadata({}, project)["readme"]["text"]
    before, after = links((ROOT / "README.md").read_text()), links(text)
    assert [link.removeprefix("https://example.com/kvtier/blob/v1.2.3/") for link in after] == before
    assert all(link.startswith(("https://", "#")) for link in after)
    assert any(link.endswith("/docs/operating.md#when-something-fails") for link in after)


def test_tool_asks_for_a_missing_python(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = load("build_wheels", monkeypatch)
    monkeypatch.setattr(tool, "pythons", lambda: iter([Path("/bin/false")]))
    with pytest.raises(SystemExit, match=r"no Python 3\.12 or newer found"):
        tool.python_of(tool.STABLE_ABI)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheels for this machine."""
    absent = [name for name in ("build", "auditwheel", "twine", "ziglang") if find_spec(name) is None]
    if absent:
        pytest.skip(f"not installed: {', '.join(absent)} (make wheels does)")
    with pytest.MonkeyPatch.context() as patch:
        tool = load("build_wheels", patch)
        if not any((version := tool.version_of(python)) and version >= (3, 12) for python in tool.pythons()):
            pytest.skip("no Python 3.12 or newer")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, TOOLS / "build_wheels.py", "--arch", platform.machine(), "--dist", folder]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_metadata_is_that_of_the_project(dist: Path) -> None:
    wheels = sorted(dist.glob("*.whl"))
    assert [wheel.name.split("-")[2:4] for wheel in wheels] == [["cp311", "cp311"], ["cp312", "abi3"]]
    with zipfile.ZipFile(wheels[0]) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    labels = [url.partition(",")[0] for url in metadata.get_all("Project-URL", [])]
    assert labels == ["Homepage", "Documentation", "Source", "Changelog", "Issues"]
    text = metadata.get_payload()
    assert isinstance(text, str)
    assert all(link.startswith(("https://", "#")) for link in links(text))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("newest", [False, True], ids=["3.11", "newest"])
def test_wheel_works_without_a_compiler(
    dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newest: bool
) -> None:
    tool = load("build_wheels", monkeypatch)
    found = {tool.version_of(python): python for python in tool.pythons()}
    found.pop(None, None)
    version = max(found) if newest else (3, 11)
    environment = tmp_path / "empty"
    subprocess.run([found[version], "-m", "venv", environment], check=True)
    programs = environment / "bin"
    assert shutil.which("c++", path=str(programs)) is None
    pip = programs / "pip"
    run(pip, "install", "--no-index", "--no-deps", "--find-links", dist, "kvtier", path=programs)
    run(pip, "install", "kvtier", path=programs)
    summary = run(programs / "python", "-m", "kvtier.native", path=programs)
    assert "built with clang" in summary
    assert "io_uring" in summary
    processor = Path("/proc/cpuinfo").read_text()
    assert ("avx2" in summary) == (" avx2 " in processor)
    assert ("avx512" in summary) == (" avx512bw " in processor)
    assert ("CUDA" in summary) == (shutil.which("nvcc") is not None)
    assert re.fullmatch(r"kvtier \d+\.\d+\.\d+\n", run(programs / "kvtier", "--version", path=programs))
    report = run(programs / "kvtier", "doctor", path=programs)
    assert "native core" in report
    assert "FAIL" not in report
