"""``kvtier proxy`` and stub engines in their own processes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtier.testing.servers import free_port
from tests.rigs.forks import ROOT, Forked, python
from tests.rigs.waiting import LIMIT_SECONDS, wait_until

from .conftest import PROMPT


class Engine:
    """A stub engine that can be killed and restarted."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        self.process = python("tests.fleet.proxy.stub_process", str(self.port), stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class ProxyProcess:
    """``kvtier proxy`` with a short check interval, and a client of it."""

    def __init__(
        self, prefillers: list[Engine], decoders: list[Engine], log: Path, *, fork: bool, files: int = 0
    ) -> None:
        """Without ``fork``, start the command as a user does, with a hard limit of open files if given."""
        options = ["--listen", "127.0.0.1:0", "--check", "100ms"]
        options += [part for engine in prefillers for part in ("--prefill", engine.url)]
        options += [part for engine in decoders for part in ("--decode", engine.url)]
        command = ["bash", "-c", f'ulimit -n {files} && exec "$@"', "-"] if files else []
        command += [sys.executable, "-m", "kvtier", "proxy", *options]
        self.log = log
        self.process: Forked | subprocess.Popen[str]
        with log.open("wb") as file:
            self.process = (
                python("kvtier", "proxy", *options, stdout=subprocess.PIPE, stderr=file)
                if fork
                else subprocess.Popen(
                    command,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    text=True,
                )
            )
        self.wait_until(lambda: "proxy listening on" in log.read_text())
        found = re.search(r"proxy listening on (\S+),", log.read_text())
        assert found
        self.client = httpx.Client(base_url=found[1], trust_env=False, verify=False, timeout=LIMIT_SECONDS)
        self.wait_until(lambda: set(self.states().values()) == {"up"})

    def states(self) -> dict[str, str]:
        return {engine["url"]: engine["state"] for engine in self.client.get("/engines").json()}

    def wait_until(self, condition: Callable[[], object]) -> None:
        try:
            wait_until(condition)
        except TimeoutError as error:
            raise AssertionError(self.log.read_text()) from error

    def complete(self, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={**PROMPT, **fields})

    def wait(self) -> str:
        """Wait for the exit, and return the output."""
        output, _ = self.process.communicate(timeout=LIMIT_SECONDS)
        assert self.process.returncode == 0, self.log.read_text()
        return output

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.communicate()


Start = Callable[..., tuple[ProxyProcess, list[Engine], list[Engine]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a proxy in front of as many prefill and decode engines."""
    with ExitStack() as stack:

        def start_all(
            prefillers: int, decoders: int, *, fork: bool = True, files: int = 0
        ) -> tuple[ProxyProcess, list[Engine], list[Engine]]:
            engines = []
            for _ in range(prefillers + decoders):
                engines.append(Engine())
                stack.callback(engines[-1].kill)
            one, other = engines[:prefillers], engines[prefillers:]
            proxy = ProxyProcess(one, other, tmp_path / "log", fork=fork, files=files)
            stack.callback(proxy.close)
            return proxy, one, other

        yield start_all
