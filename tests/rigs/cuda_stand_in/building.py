"""Build the stand-in for CUDA, and what runs on it, in a folder of its own.

Tests do so on demand. As a program it builds everything, ahead of the tests, because that takes a minute.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SANITIZER = os.environ.get("KVTIER_TEST_SANITIZER", "")
"""With which the stand-in is built: ``address`` or ``thread``; else without. See test_sanitizers.py."""
CPP_TESTS = ("cuda_stand_in", "cuda", "cuda_errors")


def build(*targets: str, sources: Path = ROOT / "csrc", folder: Path | None = None) -> Path:
    """Build targets, incrementally, and return the folder that they are in."""
    folder = folder or ROOT / "build" / f"cuda-stand-in{'-' * bool(SANITIZER)}{SANITIZER}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Other workers of pytest need it as well.
        if not (folder / "CMakeCache.txt").exists():
            _run("-S", str(sources), "-B", str(folder), *_options(sources))
        _run("--build", str(folder), "-j2", *(f"--target={target}" for target in targets))
    return folder / "tests" / "cuda_stand_in"


def _options(sources: Path) -> list[str]:
    nanobind = subprocess.run(
        [sys.executable, "-m", "nanobind", "--cmake_dir"], capture_output=True, text=True, check=True
    )
    settings = {
        "KVTIER_PYTHON": "OFF",
        "KVTIER_TESTS": "ON",
        # Mutated sources may have unused parameters.
        "KVTIER_WERROR": "ON" if sources == ROOT / "csrc" else "OFF",
        "KVTIER_CUDA_STAND_IN_PYTHON": "ON",
        "KVTIER_SANITIZE": SANITIZER,
        "CMAKE_BUILD_TYPE": "Debug",  # Half of the time that an optimized build takes.
        "CMAKE_CXX_FLAGS": "-DNDEBUG",  # Without nanobind's warnings: pytest keeps what failed tests used.
        "Python_EXECUTABLE": sys.executable,
        "nanobind_DIR": nanobind.stdout.strip(),
    }
    return [f"-D{name}={value}" for name, value in settings.items()]


def _run(*arguments: str) -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    cmake = shutil.which("cmake", path=path)
    assert cmake, "cmake is missing: pip install --group test"
    # Sanitizers that this process runs with are not meant for the compiler.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    result = subprocess.run([cmake, *arguments], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


if __name__ == "__main__":
    build("cuda_stand_in", "native_cuda_on_stand_in", *(f"test_{name}" for name in CPP_TESTS))
