"""tools/system_packages.py with stubs of dpkg-query and apt-get that record their arguments."""

from __future__ import annotations

import importlib
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parent.parent / "tools"
LINES = (TOOLS / "system_packages.txt").read_text().splitlines()
ALL = {name for line in LINES if (name := line.partition("#")[0].strip())}

Stub = Callable[..., None]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, patched not to wait and not to change this machine."""
    monkeypatch.syspath_prepend(str(TOOLS))
    for name in ("system_packages", "progress"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("system_packages")
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(module, "POLICY", tmp_path / "policy-rc.d")
    monkeypatch.setattr(module.os, "geteuid", lambda: 0)
    return module


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Replace a command with a shell script. PATH contains only these stubs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def write(name: str, *lines: str) -> None:
        path = folder / name
        path.write_text("\n".join(["#!/bin/sh", f"PATH={os.defpath}", f"cd {tmp_path}", *lines, ""]))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    return write


def listing(*packages: str) -> str:
    """Return a command that prints dpkg-query output: these packages, a provider and a removed one."""
    lines = [
        "installed\\tbase-files, base (= 1:2.3)",
        "config-files\\tlibnuma1, ",
        *(f"installed\\t{name}, " for name in packages),
    ]
    return "printf '" + "".join(f"{line}\\n" for line in lines) + "'"


def test_each_package_has_a_reason(tool: ModuleType) -> None:
    needed = tool.required()
    assert needed.keys() == ALL >= {"redis-server", "g++", "chromium"}
    assert all(needed.values())


def test_no_output_if_all_packages_are_installed(
    tool: ModuleType, stub: Stub, capfd: pytest.CaptureFixture[str]
) -> None:
    stub("dpkg-query", listing(*ALL))
    tool.main()
    assert capfd.readouterr() == ("", "")


def test_provided_package_counts_as_installed(
    tool: ModuleType, stub: Stub, capfd: pytest.CaptureFixture[str]
) -> None:
    stub("dpkg-query", listing(*ALL - {"librdmacm1"}, "librdmacm1t64, librdmacm1 (= 50.0-2)"))
    tool.main()
    assert capfd.readouterr() == ("", "")


def test_root_installs_missing_packages_without_starting_services(
    tool: ModuleType, stub: Stub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stub("dpkg-query", listing(*ALL - {"redis-server", "libnuma1"}))
    stub(
        "apt-get",
        'echo "$@" >>arguments',
        "./policy-rc.d; echo $? $DEBIAN_FRONTEND >>policy",
        "echo 'Get:1 http://deb bookworm/main amd64 libnuma1 amd64 2.0'",
        "echo 'Setting up libnuma1:amd64 (2.0) ...'",
    )
    tool.main()
    update, install = (tmp_path / "arguments").read_text().splitlines()
    assert update.endswith(" update")
    assert install.endswith(" install --yes --no-install-recommends redis-server libnuma1")
    assert "--option=APT::Sandbox::User=root" in install
    assert (tmp_path / "policy").read_text() == "101 noninteractive\n" * 2
    assert not (tmp_path / "policy-rc.d").exists()
    out, err = capfd.readouterr()
    first, last = out.splitlines()
    assert first == "installing system packages redis-server, libnuma1"
    assert last.startswith("  done in")
    assert err == ""


def test_existing_policy_rc_d_is_kept(
    tool: ModuleType, stub: Stub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "policy-rc.d").write_text("the machine's")
    stub("dpkg-query", listing())
    stub("apt-get", "exit 0")
    tool.main()
    assert (tmp_path / "policy-rc.d").read_text() == "the machine's"
    assert "  done in" in capfd.readouterr().out


def test_stale_policy_rc_d_allows_services(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = subprocess.Popen(["/bin/true"])
    dead.wait()
    monkeypatch.setattr(tool.os, "getpid", lambda: dead.pid)
    policy = tmp_path / "policy-rc.d"
    with tool.services_disabled():
        assert subprocess.run([policy]).returncode == 0


def test_failed_apt_is_retried(
    tool: ModuleType, stub: Stub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stub("dpkg-query", listing())
    stub("apt-get", "[ -e tried ] && exit 0", "touch tried", "echo no route to host", "exit 100")
    tool.main()
    out, err = capfd.readouterr()
    assert "failed; retrying" in out
    assert out.splitlines()[-1].startswith("  done in")
    assert err == ""


def test_apt_failure_prints_the_command_to_run(
    tool: ModuleType, stub: Stub, capfd: pytest.CaptureFixture[str]
) -> None:
    stub("dpkg-query", listing(*ALL - {"redis-server", "gcc"}))
    stub("apt-get", "echo E: Unable to locate package redis-server", "exit 100")
    tool.main()
    out, err = capfd.readouterr()
    assert err == "E: Unable to locate package redis-server\n"
    assert "apt-get could not install them" in out
    assert "  sudo apt-get install -y --no-install-recommends redis-server gcc\n" in out
    assert "the tier type redis is tested with a real Redis" in out


def test_without_root_prints_the_command_to_run(
    tool: ModuleType, stub: Stub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool.os, "geteuid", lambda: 1000)
    stub("dpkg-query", listing(*ALL - {"libnuma1"}))
    stub("apt-get", "echo must not be called", "exit 100")
    tool.main()
    out, err = capfd.readouterr()
    assert out.count("libnuma1") == 2
    assert "to install them, run" in out
    assert "must not be called" not in out + err
    assert "  sudo apt-get install -y --no-install-recommends libnuma1\n" in out


@pytest.mark.usefixtures("stub")
def test_system_without_dpkg_is_told_the_names_only(
    tool: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    tool.main()
    out, _ = capfd.readouterr()
    assert "this system has no dpkg" in out
    assert "apt-get" not in out
    assert all(name in out for name in ALL)


def test_runs_as_a_script(stub: Stub, capfd: pytest.CaptureFixture[str]) -> None:
    stub("dpkg-query", listing(*ALL))
    assert subprocess.run([sys.executable, TOOLS / "system_packages.py"]).returncode == 0
    assert capfd.readouterr() == ("", "")
