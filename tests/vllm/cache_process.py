"""``kvtier serve`` for one test: started, stopped, killed and asked what it holds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvtier.bridge import client
from kvtier.errors import ChannelError

CHUNK = 128
"""Tokens in a chunk: half a MiB of KV of the small Llama."""
MIB = 1 << 20
PATIENCE_SECONDS = 60.0
"""How long something that must happen may take; nothing is judged by it."""
START_SECONDS = 240.0
"""A process that starts imports all it needs: a second idle, more than a minute beside thirty others."""


class CacheProcess:
    """A cache process whose disk tier and socket outlive it, so that it can be started again."""

    def __init__(
        self,
        folder: Path,
        *,
        ram: dict[str, Any] | None = None,
        ssd: dict[str, Any] | None = None,
        pool: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """``ram`` and ``ssd`` are settings of the two tiers that differ from the usual ones.

        With ``pool``, the settings of a shared pool, that takes the place of the disk.
        """
        self.disk = folder / "ssd"
        memory = {"name": "ram", "type": "cpu", "capacity": 64 * MIB, **(ram or {})}
        disk = {
            "name": "ssd",
            "type": "disk",
            "path": str(self.disk),
            "capacity": 256 * MIB,
            "queue": 64 * MIB,
            "deadline": PATIENCE_SECONDS,
        }
        self.settings = {
            "socket": str(folder / "kv.sock"),
            "chunk_tokens": CHUNK,
            "prefetch": {"policy": "wait"},
            "tiers": [memory, {"name": "pool", **pool} if pool else {**disk, **(ssd or {})}],
            **settings,
        }
        self._config = folder / "kvtier.yaml"
        self._config.write_text(json.dumps(self.settings))  # JSON is YAML
        self.log = folder / "cache.log"
        self._hold = folder / "hold"
        self._process: subprocess.Popen[bytes] | None = None
        self.environment: dict[str, str] = {}
        """Variables for it beside those of the test, from the next start on."""

    @property
    def pid(self) -> int | None:
        """``None`` while it does not run."""
        return None if self._process is None else self._process.pid

    @property
    def socket(self) -> Path:
        return Path(self.settings["socket"])

    @property
    def connector(self) -> dict[str, Any]:
        """What the connector of an engine is told, in vLLM's ``kv_connector_extra_config``."""
        return self.settings

    def start(self, *, fault: Sequence[str] = ()) -> None:
        """Start it and wait until it answers; ``fault`` as in ``faulty_serve.py``."""
        self._hold.touch()
        faulty = [str(Path(__file__).with_name("faulty_serve.py")), str(self._hold), *fault]
        program = faulty if fault else ["-m", "kvtier", "serve"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *program],
                env={**environment, **self.environment, "KVTIER_CONFIG_FILE": str(self._config)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.wait_until(lambda status: True, START_SECONDS)

    def let_go(self) -> None:
        """Let the disk end what a fault ``hold-...`` keeps it at."""
        self._hold.unlink(missing_ok=True)

    def stop(self) -> None:
        """SIGTERM, and wait: what is on its way to the disk gets there."""
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """SIGSTOP: it answers nobody, and lets go of nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, sent: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(sent)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, sent: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(sent)
            self._process.wait(PATIENCE_SECONDS)
            self._process = None

    def status(self) -> dict[str, Any]:
        """What it holds. Raises :class:`ChannelError` where it does not answer."""
        return client.status(self.socket)

    def wait_until(
        self, condition: Callable[[dict[str, Any]], bool], seconds: float = PATIENCE_SECONDS
    ) -> dict[str, Any]:
        """The first status that fulfils ``condition``."""
        deadline = time.monotonic() + seconds
        status: dict[str, Any] = {}
        while time.monotonic() < deadline:
            try:
                status = self.status()
            except ChannelError:
                assert self._process is None or self._process.poll() is None, self.tail()
            else:
                if condition(status):
                    return status
            time.sleep(0.01)
        raise AssertionError(f"did not happen: {json.dumps(status, indent=2)}\n{self.tail()}")

    def wait_until_gone(self, pid: int) -> None:
        """Wait for the end of a cache process that a connector started."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline, f"process {pid} is still there"
            time.sleep(0.05)

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def wait_until_idle(self) -> None:
        """Nothing is leased, reserved, looked up, fetched or waiting to be written, and nothing leaks."""
        self.wait_until(is_idle)

    def wait_until_stored(self, tokens: int) -> None:
        """At least the whole chunks of ``tokens`` tokens are in memory and on disk."""
        self.wait_until(lambda status: all(tier["chunks"] >= tokens // CHUNK for tier in status["tiers"]))
        self.wait_until_idle()


def is_idle(status: dict[str, Any]) -> bool:
    """Whether a status shows that nobody holds anything: memory is leased by the chunks in it alone."""
    held = sum(engine[what] for engine in status["engines"] for what in ("leases", "reservations", "tickets"))
    under_way = status["flights"] + status["pending_bytes"]
    return bool(held == under_way == 0 and status["arena"]["leases"] == status["tiers"][0]["chunks"])
