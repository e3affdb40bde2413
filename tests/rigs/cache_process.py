"""Run ``kvtier serve`` for one test: start, stop, kill and query it. Other processes are stopped likewise."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, Self

from kvtier.bridge import client
from kvtier.bridge.spawn import default_address
from kvtier.errors import ChannelError
from kvtier.settings import load_settings
from tests.rigs.forks import Forked, forks_with_vllm

CHUNK = 128
"""Tokens per chunk: half a MiB of KV of the small Llama."""
MIB = 1 << 20
TIMEOUT_SECONDS = 60.0
"""Upper bound for whatever a test waits for; no assertion depends on it."""
START_SECONDS = 240.0
"""Upper bound for a process start: imports take 1 s when idle, over a minute next to thirty processes."""


class Process(Protocol):
    """What is needed of a ``subprocess.Popen``."""

    @property
    def pid(self) -> int: ...
    def send_signal(self, signum: int, /) -> None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float, /) -> object: ...


class StoppableProcess:
    """What tests do to a running process, and its log."""

    log: Path
    _process: Process | None = None

    @property
    def pid(self) -> int | None:
        """``None`` while the process is not running."""
        return None if self._process is None else self._process.pid

    def stop(self) -> None:
        """Send SIGTERM and wait: pending disk writes complete."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL and wait. Does nothing if the process is not running."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Send SIGSTOP: the process answers nothing, releases nothing, and its connections stay open."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, signum: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(signum)

    def _end(self, signum: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(signum)
            self._process.wait(TIMEOUT_SECONDS)
            self._process = None

    def check_running(self) -> None:
        """Fail with the end of the log if the process has exited."""
        assert self._process is None or self._process.poll() is None, self.tail()

    def tail(self, lines: int = 40) -> str:
        """Return the end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class CacheProcess(StoppableProcess):
    """A cache process whose disk tier and socket survive it, so that it can be restarted."""

    def __init__(
        self,
        folder: Path,
        *,
        ram: dict[str, Any] | None = None,
        ssd: dict[str, Any] | None = None,
        pool: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """Write the configuration. The process is not started.

        ``ram`` and ``ssd`` override settings of the two tiers. ``pool``, the settings of a shared pool,
        replaces the disk tier.
        """
        self.disk = folder / "ssd"
        memory = {"name": "ram", "type": "cpu", "capacity": 64 * MIB, **(ram or {})}
        disk = {
            "name": "ssd",
            "type": "disk",
            "path": str(self.disk),
            "capacity": 256 * MIB,
            "queue": 64 * MIB,
            "deadline": TIMEOUT_SECONDS,
        }
        self.settings = {
            "socket": str(folder / "kv.sock"),
            "chunk_tokens": CHUNK,
            "partial_chunks": False,  # Most tests count whole chunks; see test_block_hits.py for the others.
            "prefetch": {"policy": "wait"},
            "tiers": [memory, {"name": "pool", **pool} if pool else {**disk, **(ssd or {})}],
            **settings,
        }
        self.config = folder / "kvtier.yaml"
        self.config.write_text(json.dumps(self.settings))  # JSON is YAML
        self.log = folder / "cache.log"
        self._hold = folder / "hold"
        self.environment: dict[str, str] = {}
        """Additional environment variables, from the next start on."""

    @property
    def socket(self) -> Path:
        return Path(self.settings["socket"])

    @property
    def connector(self) -> dict[str, Any]:
        """The settings of an engine's connector: vLLM's ``kv_connector_extra_config``."""
        return self.settings

    def start(self, *, fault: Sequence[str] = ()) -> Self:
        """Start the process, wait until it answers, and return it. ``fault`` is as in ``faulty_serve.py``."""
        self._hold.touch()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
        environment = {**inherited, **self.environment, "KVTIER_CONFIG_FILE": str(self.config)}
        self._process = self._run(environment, fault)
        self.wait_until(lambda status: True, START_SECONDS)
        return self

    def _run(self, environment: dict[str, str], fault: Sequence[str]) -> Process:
        faulty = [str(Path(__file__).with_name("faulty_serve.py")), str(self._hold), *fault]
        program = faulty if fault else ["-m", "kvtier", "serve"]
        with self.log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, *program],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def release_disk(self) -> None:
        """Complete the disk operations that a ``hold-...`` fault blocks."""
        self._hold.unlink(missing_ok=True)

    def status(self) -> dict[str, Any]:
        """Return the status. Raises :class:`ChannelError` if the process does not answer."""
        return client.status(self.socket)

    def wait_until(
        self, condition: Callable[[dict[str, Any]], bool], seconds: float = TIMEOUT_SECONDS
    ) -> dict[str, Any]:
        """Return the first status that fulfils ``condition``."""
        deadline = time.monotonic() + seconds
        status: dict[str, Any] = {}
        while time.monotonic() < deadline:
            try:
                status = self.status()
            except ChannelError:
                self.check_running()
            else:
                if condition(status):
                    return status
            time.sleep(0.01)
        raise AssertionError(f"condition not met: {json.dumps(status, indent=2)}\n{self.tail()}")

    def wait_until_exited(self, pid: int) -> None:
        """Wait until a cache process that a connector started has exited."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline, f"process {pid} is still running"
            time.sleep(0.05)

    def wait_until_idle(self) -> None:
        """Wait until no lease, reservation, lookup, fetch or pending write is left, and no memory leaks."""
        self.wait_until(is_idle)

    def wait_until_stored(self, tokens: int) -> None:
        """Wait until idle with at least the whole chunks of ``tokens`` tokens in memory and on disk."""
        self.wait_until(lambda status: all(tier["chunks"] >= tokens // CHUNK for tier in status["tiers"]))
        self.wait_until_idle()


class ForkedCacheProcess(CacheProcess):
    """A cache process that is forked like the engines: it starts at once, where an interpreter takes seconds.

    That ``kvtier serve`` starts as a command is tested in ``tests/bridge`` and ``tests/lab/demo``.
    """

    def _run(self, environment: dict[str, str], fault: Sequence[str]) -> Process:
        forks_with_vllm()  # Now, with vLLM: tests start engines next.
        with self.log.open("ab") as log:
            arguments = (str(self._hold), list(fault))
            return Forked(_serve, arguments, environment=environment, stdout=log, stderr=log)


class StartedCacheProcess(CacheProcess):
    """A cache process that runs from the start of its first engine on. Its engines get no ``socket``."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        del self.settings["socket"]
        self._socket = default_address(load_settings(self.settings))
        self.log = self._socket.with_suffix(".log")

    @property
    def pid(self) -> int | None:
        with suppress(ChannelError):
            return int(self.status()["pid"])
        return None

    @property
    def socket(self) -> Path:
        return self._socket

    def _signal(self, signum: signal.Signals) -> None:
        pid = self.pid
        assert pid is not None, self.tail()
        os.kill(pid, signum)

    def _end(self, signum: signal.Signals) -> None:
        """End the process and remove its files."""
        pid = self.pid
        if pid is not None:
            os.kill(pid, signum)
            self.wait_until_exited(pid)
        for path in self._socket.parent.glob(f"{self._socket.stem}.*"):
            path.unlink()


def _serve(hold: str, fault: Sequence[str]) -> None:
    """Run ``kvtier serve``. The process's main function."""
    from tests.rigs import faulty_serve

    faulty_serve.serve(Path(hold), fault)


def is_idle(status: dict[str, Any]) -> bool:
    """Whether nothing is in flight, and the stored chunks hold the only leases on memory."""
    held = sum(engine[key] for engine in status["engines"] for key in ("leases", "reservations", "tickets"))
    in_flight = status["flights"] + status["pending_bytes"]
    return bool(held == in_flight == 0 and status["arena"]["leases"] == status["tiers"][0]["chunks"])
