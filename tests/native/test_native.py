"""Whether the native core was built, and that kvtier says so where it was not."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys

import pytest

from kvtier import native
from kvtier.cli.checks import check_native


def test_it_was_built_where_a_compiler_is() -> None:
    """Fails, not skips: an install that silently fell back to Python alone would pass everything else."""
    if not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("there is no C++ compiler")
    assert native.available(), native.summary()


def test_it_says_what_it_is() -> None:
    if not native.available():
        pytest.skip(native.summary())
    info = native.core.build_info()
    assert set(info) == {"abi", "compiler", "avx2", "avx512", "io_uring"}
    assert info["abi"] == native.ABI
    assert str(info["compiler"]).startswith(("gcc", "clang"))
    assert str(info["compiler"]) in native.summary()


def test_the_flags_are_those_of_the_processor() -> None:
    if not native.available():
        pytest.skip(native.summary())
    with open("/proc/cpuinfo") as file:  # noqa: PTH123
        flags = set(next((line for line in file if line.startswith("flags")), "").split())
    assert native.core.build_info()["avx2"] == ("avx2" in flags)


def run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout + done.stderr


def test_it_can_be_left_out() -> None:
    told = run("from kvtier import native; print(native.available(), native.summary())", KVTIER_NATIVE="0")
    assert told.startswith("False missing (KVTIER_NATIVE leaves it out)")


@pytest.mark.parametrize("told", [{"compiler": "gcc"}, {"abi": native.ABI + 1}], ids=["none", "another"])
def test_one_of_other_sources_is_left_out(told: dict[str, object]) -> None:
    """Not called with what it does not know."""
    program = (
        "import sys, types\n"
        "outdated = sys.modules['kvtier._native'] = types.ModuleType('kvtier._native')\n"
        f"outdated.build_info = lambda: {told}\n"
        "from kvtier import native\n"
        "from kvtier.keys import chunk_keys, root_key\n"
        "print(native.available(), native.summary(), len(chunk_keys(root_key(bytes(32)), range(128), 64)))"
    )
    said = run(program, KVTIER_NATIVE="")
    assert said.startswith("False missing (it was built of other sources")
    assert said.strip().endswith("2")


def test_one_warning_where_it_is_missing() -> None:
    program = (
        "import sys; sys.modules['kvtier._native'] = None\n"
        "from kvtier import native\n"
        "native.warn_if_missing(); native.warn_if_missing()"
    )
    told = run(program, KVTIER_NATIVE="")
    assert told.count("without its native core") == 1
    assert "g++" in told


def test_doctor_tells_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "why_not", lambda: "no such file")
    assert check_native() == ("native core", "warn", "missing: no such file", native.ADVICE)
    monkeypatch.undo()
    if native.available():
        assert check_native() == ("native core", "ok", native.summary(), "")


def test_no_warning_where_it_is_there(caplog: pytest.LogCaptureFixture) -> None:
    if not native.available():
        pytest.skip(native.summary())
    with caplog.at_level(logging.WARNING, logger="kvtier"):
        native.warn_if_missing()
    assert not caplog.records
