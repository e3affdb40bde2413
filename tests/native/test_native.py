"""The native core: whether it was built, and the warnings if not."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys

import pytest

from kvtier import native
from kvtier.cli.checks import check_native


def test_native_core_is_built_if_a_compiler_exists() -> None:
    """Fails instead of skipping: an installation that fell back to pure Python would pass all other tests."""
    if not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler")
    assert native.available(), native.summary()


def test_build_info_says_what_was_compiled() -> None:
    if not native.available():
        pytest.skip(native.summary())
    info = native.core.build_info()
    assert set(info) == {"abi", "compiler", "avx2", "avx512", "io_uring"}
    assert info["abi"] == native.ABI
    assert str(info["compiler"]).startswith(("gcc", "clang"))
    assert str(info["compiler"]) in native.summary()


def test_cpu_flags_match_proc_cpuinfo() -> None:
    if not native.available():
        pytest.skip(native.summary())
    with open("/proc/cpuinfo") as file:  # noqa: PTH123
        flags = set(next((line for line in file if line.startswith("flags")), "").split())
    assert native.core.build_info()["avx2"] == ("avx2" in flags)


def run(program: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout + result.stderr


def test_disabled_by_kvtier_native() -> None:
    output = run("from kvtier import native; print(native.available(), native.summary())", KVTIER_NATIVE="0")
    assert output.startswith("False missing (disabled by KVTIER_NATIVE)")


@pytest.mark.parametrize("info", [{"compiler": "gcc"}, {"abi": native.ABI + 1}], ids=["none", "another"])
def test_outdated_build_is_ignored(info: dict[str, object]) -> None:
    """A build from other sources may not know the current functions."""
    program = (
        "import sys, types\n"
        "outdated = sys.modules['kvtier._native'] = types.ModuleType('kvtier._native')\n"
        f"outdated.build_info = lambda: {info}\n"
        "from kvtier import native\n"
        "from kvtier.memory.keys import chunk_keys, root_key\n"
        "print(native.available(), native.summary(), len(chunk_keys(root_key(bytes(32)), range(128), 64)))"
    )
    output = run(program, KVTIER_NATIVE="")
    assert output.startswith("False missing (built from other sources")
    assert output.strip().endswith("2")


def test_missing_core_is_logged_once() -> None:
    program = (
        "import sys; sys.modules['kvtier._native'] = None\n"
        "from kvtier import native\n"
        "native.warn_if_missing(); native.warn_if_missing()"
    )
    output = run(program, KVTIER_NATIVE="")
    assert output.count("without the native core") == 1
    assert "g++" in output


def test_doctor_reports_the_native_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "missing_reason", lambda: "no such file")
    assert check_native() == ("native core", "warn", "missing: no such file", native.ADVICE)
    monkeypatch.undo()
    if native.available():
        assert check_native() == ("native core", "ok", native.summary(), "")


def test_no_warning_if_available(caplog: pytest.LogCaptureFixture) -> None:
    if not native.available():
        pytest.skip(native.summary())
    with caplog.at_level(logging.WARNING, logger="kvtier"):
        native.warn_if_missing()
    assert not caplog.records
