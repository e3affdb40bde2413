"""The processes of a run, each of which can be killed, stopped and started again."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from abuse.hostile import Addresses
from kvtier.bridge import client
from kvtier.errors import ChannelError, KVTierError
from kvtier.testing.servers import free_port
from soak.disks import Disk
from tests.rigs.cache_process import StoppableProcess

ROOT = Path(__file__).parents[1]
START_SECONDS = 120.0
POLL_SECONDS = 0.05
MIB = 1 << 20
RAM_BYTES, DISK_BYTES = 8 * MIB, 16 * MIB
NAMES = ["cache-0", "cache-1", "controller", "proxy"]


class AbuseError(KVTierError):
    """A process does not start, or does not answer."""


class Process(StoppableProcess):
    """A program, with its output in a log."""

    def __init__(self, name: str, folder: Path, arguments: list[str], answers: Callable[[], bool]) -> None:
        """``answers``: whether it answers at present."""
        self.name = name
        self.answers = answers
        self.log = folder / f"{name}.log"
        self.logged = 0
        """How many bytes of the log have been checked."""
        self._arguments = arguments

    @property
    def exited(self) -> int | None:
        """The exit status, if it has exited by itself."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start it, and wait until it answers. Raises :class:`AbuseError`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self._arguments],
                cwd=ROOT,
                env=kept,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.wait_until_it_answers()

    def wait_until_it_answers(self, seconds: float = START_SECONDS) -> None:
        """Raises :class:`AbuseError` if it exits, or does not answer in time."""
        deadline = time.monotonic() + seconds
        while not self.answers():
            if self.exited is not None or time.monotonic() > deadline:
                raise AbuseError(f"{self.name} does not answer, exit status {self.exited}: {self.tail()}")
            time.sleep(POLL_SECONDS)

    def anonymous_bytes(self) -> int:
        """Return how much memory it has, without the arena."""
        return self._proc("status", "RssAnon") << 10

    def descriptors(self) -> int:
        """Return how many descriptors it has open."""
        return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())

    def _proc(self, file: str, field: str) -> int:
        lines = Path(f"/proc/{self.pid}/{file}").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(field)), 0)


class Stack:
    """Two cache processes that are peers, their controller, and a proxy before two stand-ins for engines."""

    def __init__(self, folder: Path) -> None:
        secret = secrets.token_hex(32)
        names = ["controller", "proxy", "peer-0", "peer-1", "metrics-0", "metrics-1", "prefill", "decode"]
        ports = {name: free_port() for name in names}
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        self._http = httpx.Client(timeout=10.0, trust_env=False, verify=False)
        self._urls = urls
        self.processes: dict[str, Process] = {}
        self.sockets = [folder / f"{number}.sock" for number in range(2)]
        self.disks = [Disk(folder / f"disk-{number}", None) for number in range(2)]
        self.addresses = [
            Addresses(
                self.sockets[number],
                ports[f"peer-{number}"],
                secret.encode(),
                ports["controller"],
                ports["proxy"],
                ports[f"metrics-{number}"],
            )
            for number in range(2)
        ]

        def add(name: str, arguments: list[str], answers: Callable[[], bool]) -> None:
            self.processes[name] = Process(name, folder, arguments, answers)

        state, listen = str(folder / "controller.sqlite"), "127.0.0.1:{}".format
        arguments = ["kvtier", "controller", "--listen", listen(ports["controller"]), "--state", state]
        add("controller", arguments, partial(self.get, "controller", "/healthz"))
        for number in range(2):
            settings = {
                "socket": str(self.sockets[number]),
                "chunk_tokens": 64,
                "tiers": [
                    {"name": "ram", "type": "cpu", "capacity": RAM_BYTES},
                    {
                        "name": "ssd",
                        "type": "disk",
                        "path": str(self.disks[number].tier),
                        "capacity": DISK_BYTES,
                    },
                ],
                "peer": {
                    "listen": listen(ports[f"peer-{number}"]),
                    "others": [listen(ports[f"peer-{1 - number}"])],
                    "secret": secret,
                    "transport": {"type": "tcp"},
                },
                "controller": {"url": urls["controller"], "instance_id": f"instance-{number}"},
                "metrics": {"listen": listen(ports[f"metrics-{number}"])},
            }
            file = folder / f"cache-{number}.yaml"
            file.write_text(json.dumps(settings))
            arguments = ["kvtier", "serve", "-c", str(file)]
            add(f"cache-{number}", arguments, partial(self._serves, number))
        for name in ("prefill", "decode"):
            arguments = ["tests.fleet.proxy.stub_process", str(ports[name])]
            add(name, arguments, partial(self.get, name, "/health"))
        arguments = ["kvtier", "proxy", "--listen", listen(ports["proxy"]), "--check", "100ms"]
        arguments += ["--prefill", urls["prefill"], "--decode", urls["decode"]]
        add("proxy", arguments, self._completes)

    def status(self, number: int) -> dict[str, Any]:
        """Return a cache process's status. Raises :class:`ChannelError`."""
        return client.status(self.sockets[number])

    def get(self, name: str, path: str) -> bool:
        """Return whether an HTTP server answers a path."""
        with suppress(httpx.HTTPError):
            return self._http.get(self._urls[name] + path).is_success
        return False

    def close(self) -> None:
        """Close the connections that ask the processes."""
        self._http.close()

    def _serves(self, number: int) -> bool:
        with suppress(ChannelError):
            healthy = self.get(f"metrics-{number}", "/healthz") and self.get(f"metrics-{number}", "/metrics")
            return healthy and bool(self.status(number))
        return False

    def _completes(self) -> bool:
        with suppress(httpx.HTTPError):
            body = {"model": "m", "prompt": "word " * 50}
            answer = self._http.post(self._urls["proxy"] + "/v1/completions", json=body)
            return answer.is_success and self.get("proxy", "/health")
        return False


@contextmanager
def running(folder: Path) -> Iterator[Stack]:
    """Run all processes within the block."""
    built = Stack(folder)
    with ExitStack() as stack:
        stack.callback(built.close)
        for process in built.processes.values():
            stack.callback(process.kill)
            process.start()
        yield built
