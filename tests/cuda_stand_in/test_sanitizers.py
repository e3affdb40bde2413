"""The tests in Python on the stand-in, with sanitizers. Those in C++: ``make native-asan native-tsan``."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.rigs.cuda_stand_in.building import ROOT, SANITIZER

LIBRARIES = {"address": "libasan.so", "thread": "libtsan.so"}
OPTIONS = {
    # Python itself never frees everything.
    "ASAN_OPTIONS": "detect_leaks=0",
    # Python and torch are not instrumented.
    "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:report_signal_unsafe=0:exitcode=66",
}


def located(library: str) -> str:
    """Return the path of a library of the compiler."""
    command = ["c++", f"-print-file-name={library}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(bool(SANITIZER), reason="runs with a sanitizer already")
@pytest.mark.parametrize("sanitizer", LIBRARIES)
def test_sanitizers_find_nothing(sanitizer: str) -> None:
    # The sanitizer intercepts exceptions, and finds the functions for them only in a library that is loaded.
    libraries = [located(name) for name in (LIBRARIES[sanitizer], "libstdc++.so.6")]
    folder = "tests/cuda_stand_in"
    tests = [f"{folder}/test_{subject}.py" for subject in ("copies", "copy_errors", "staging")]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--timeout=600", *tests],
        env={**os.environ, **OPTIONS, "LD_PRELOAD": " ".join(libraries), "KVTIER_TEST_SANITIZER": sanitizer},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, output[-8000:]
    assert "Sanitizer" not in output, output[-8000:]
