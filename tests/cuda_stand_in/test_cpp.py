"""The C++ tests of the CUDA layer: csrc/tests/cuda_stand_in."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.rigs.cuda_stand_in.building import CPP_TESTS, build


@pytest.mark.parametrize("name", CPP_TESTS)
def test_cpp_tests_pass_on_the_stand_in(name: str) -> None:
    if not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler")
    program = build(f"test_{name}") / f"test_{name}"
    result = subprocess.run([program], capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
