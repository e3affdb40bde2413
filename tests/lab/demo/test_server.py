"""The demo's subprocesses: start, failure with a useful message, and complete removal."""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

import httpx
import pytest

from kvtier.errors import ChannelError
from kvtier.lab.demo.server import DemoFailed, Server, running_servers

PARENT = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"])
print(child.pid, flush=True)
time.sleep(1000)
"""


def python(code: str, log: Path) -> Server:
    return Server("it", [sys.executable, "-c", code], os.environ, log)


def test_kill_waits_for_the_end_of_the_children(tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = python(PARENT, log)
    server.wait_until(lambda: log.read_text().endswith("\n"), 30)
    child = os.pidfd_open(int(log.read_text()))
    assert not has_exited(child)
    server.kill()
    assert has_exited(child)
    os.close(child)
    server.kill()


def has_exited(process: int) -> bool:
    """Whether a process, given by its pidfd, has exited."""
    return bool(select.select([process], [], [], 0)[0])


def test_exited_server_reports_its_first_error(tmp_path: Path) -> None:
    code = "print('ValueError: the cause'); print('noise\\n' * 100); raise SystemExit(3)"
    server = python(code, tmp_path / "log")
    with pytest.raises(DemoFailed) as failed:
        server.wait_until(lambda: False, 30)
    message = str(failed.value)
    assert message.startswith("it exited with status 3; its log ends in\nnoise")
    assert message.endswith("ValueError: the cause")
    server.kill()


def test_first_errors_are_errors(tmp_path: Path) -> None:
    lines = [
        "(APIServer pid=1) WARNING 11-27 02:08:58 [x.py:2] may cause `OSError: [Errno 24] Too many`.",
        "(APIServer pid=1) INFO 11-27 02:08:58 [x.py:1] no triton: ModuleNotFoundError: No module",
        "2026-11-27 02:07:05,666 WARNING kvtier: tier pool: ValueError: odd",
        "    raise ValueError(f'ValueError: {problem}')",
        "x.py:24: DeprecationWarning: OSError: is deprecated",
        "ValueError: first",
        "huggingface_hub.errors.HFValidationError: second",
        "(EngineCore pid=2) ERROR 11-27 02:08:58 [core.py:1] RuntimeError: third",
        "2026-11-27 02:07:05,666 ERROR kvtier: TierError: odd",
        "(Worker_TP1 pid=3) kvtier.errors.UnsupportedEngine: fourth",
        "error: tier 'ssd': the sixth, which is not shown",
    ]
    (tmp_path / "log").write_text("\n".join([*lines, ""]))
    server = python("", tmp_path / "log")
    message = str(server.failure("ended"))
    server.kill()
    assert message.partition("First errors in the log:\n")[2].splitlines() == [
        "ValueError: first",
        "huggingface_hub.errors.HFValidationError: second",
        "RuntimeError: third",
        "TierError: odd",
        "kvtier.errors.UnsupportedEngine: fourth",
    ]


def test_server_that_is_never_ready(tmp_path: Path) -> None:
    server = python("import time; time.sleep(1000)", tmp_path / "log")
    with pytest.raises(DemoFailed, match="was not ready in 0 s"):
        server.wait_until(lambda: False, 0.2)
    server.stop()


@pytest.mark.parametrize(
    ("command", "error", "named"),
    [
        (["sleep", "1000"], ChannelError("no answer"), "cache"),
        (["sleep", "1000"], httpx.ConnectError("no answer"), "vllm"),
        (["sleep", "1000"], ExceptionGroup("both", [httpx.ConnectError("no answer")]), "vllm"),
        (["true"], httpx.ConnectError("no answer"), "cache"),
    ],
    ids=["cache", "engine", "group", "exited"],
)
def test_failed_request_names_the_server_that_has_exited_or_was_asked(
    command: list[str], error: Exception, named: str, tmp_path: Path
) -> None:
    cache = Server("cache", command, os.environ, tmp_path / "cache")
    vllm = Server("vllm", ["sleep", "1000"], os.environ, tmp_path / "vllm")

    def ask() -> None:
        with running_servers() as servers:
            servers += [cache, vllm]
            while command == ["true"] and not cache.ended:
                time.sleep(0.01)
            raise error

    with pytest.raises(DemoFailed, match=rf"^{named} failed to respond \(no answer\); its log ends in"):
        ask()
    assert cache.ended
    assert vllm.ended
