"""The demo's subprocesses, vLLM servers, ``kvtier serve`` and ``kvtier proxy``, and how they start and end.

Each leads a session of its own, so that one signal reaches it with all its children and a Ctrl-C in the
terminal reaches the demo alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

POLL_SECONDS = 0.1
STOP_SECONDS = 40.0
TAIL_LINES = 40
ERROR_LINES = 5
_ERROR = re.compile(r"\b\w*(?:Error|Exception|UnsupportedEngine)\b: .*")

CONNECTOR = {
    "kv_connector": "KVTierConnector",
    "kv_connector_module_path": "kvtier.integrations.vllm.connector",
}


class DemoFailed(Exception):
    """The demo cannot go on. The message says why, with the end of the log that tells more."""


class Server:
    """A subprocess that serves, and its log."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Block until ``ready``. Raises :class:`DemoFailed` where the process ends, or the time is over."""
        deadline = time.monotonic() + seconds
        while not ready():
            if self._process.poll() is not None:
                raise self.failure(f"ended with status {self._process.returncode}")
            if time.monotonic() > deadline:
                raise self.failure(f"was not ready in {seconds:.0f} s")
            time.sleep(POLL_SECONDS)

    def failure(self, what: str) -> DemoFailed:
        """An error about this server that ends in the last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        # What went wrong first is said long before the end, in the log of a process below this one.
        errors = dict.fromkeys(match[0] for line in lines if (match := _ERROR.search(line)))
        told = ["", "Errors in it, the first one first:", *list(errors)[:ERROR_LINES]] if errors else []
        return DemoFailed("\n".join([f"{self.name} {what}; its log ends in", *lines[-TAIL_LINES:], *told]))

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """End the process and all its children with kill -9; harmless when they are gone."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Ask it to end, and wait; kill it where it does not listen."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        self.kill()

    def _signal(self, sent: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, sent)


def start_cache(config: Path, log: Path, name: str = "the cache process") -> Server:
    """``kvtier serve``, with the settings in the file ``config`` and no others."""
    command = [sys.executable, "-m", "kvtier", "serve"]
    return Server(name, command, _environment(config), log)


def start_proxy(
    *, port: int, prefill: Sequence[str], decode: Sequence[str], log: Path, arguments: Sequence[str] = ()
) -> Server:
    """``kvtier proxy`` on 127.0.0.1, in front of the engines with these URLs."""
    command = [
        *(sys.executable, "-m", "kvtier", "proxy", "--listen", f"127.0.0.1:{port}"),
        *(word for url in prefill for word in ("--prefill", url)),
        *(word for url in decode for word in ("--decode", url)),
        *arguments,
    ]
    return Server("the proxy", command, _environment(None), log)


def start_vllm(
    model: str,
    *,
    port: int,
    config: Path | None,
    log: Path,
    max_tokens: int,
    arguments: Sequence[str],
    connector: bool = True,
    kv_role: str = "kv_both",
    scratch: Path | None = None,
    name: str = "vLLM",
    variables: Mapping[str, str] | None = None,
) -> Server:
    """A vLLM server on 127.0.0.1, with kvtier's connector in the role ``kv_role`` or without.

    ``arguments`` are vLLM's, and win over these. ``scratch`` is a folder with a short name for sockets and
    temporary files, which vLLM leaves behind where it is killed. ``variables`` are added to its environment.
    """
    transfer = json.dumps({**CONNECTOR, "kv_role": kv_role})
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", str(max_tokens)),
        *(("--kv-transfer-config", transfer) if connector else ()),
        "--enable-prompt-tokens-details",
        "--enforce-eager",
        *("--distributed-executor-backend", "uni"),
        *arguments,
    ]
    environment = {
        **_environment(config),
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "VLLM_NO_USAGE_STATS": "1",
        **({"TMPDIR": str(scratch)} if scratch is not None else {}),
        **(variables or {}),
    }
    return Server(name, command, environment, log)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _environment(config: Path | None) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    return inherited if config is None else {**inherited, "KVTIER_CONFIG_FILE": str(config)}
