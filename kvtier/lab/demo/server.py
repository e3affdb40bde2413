"""Start and stop the demo's subprocesses: vLLM servers, ``kvtier serve`` and ``kvtier proxy``.

Each subprocess leads its own session, so that a signal to its process group reaches all its children, and a
Ctrl-C in the terminal reaches only the demo.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from kvtier.errors import ChannelError, KVTierError

POLL_SECONDS = 0.1
STOP_SECONDS = 40.0
KILLED_SECONDS = 2.0
TAIL_LINES = 40
ERROR_LINES = 5
_ERROR = re.compile(
    r"(?:\([^()]*\) ?)?"  # The process.
    r"(?:(?:[\d-]+ [\d:,]+ )?ERROR (?:kvtier:|.*?\]) *)?"  # As kvtier and vLLM log.
    r"((?:[\w.]*(?:Error|Exception|UnsupportedEngine)|error): .*)"
)
"""An error at the beginning of a message. Warnings and code may mention some."""

CONNECTOR = {
    "kv_connector": "KVTierConnector",
    "kv_connector_module_path": "kvtier.integrations.vllm.connector",
}


class DemoFailed(KVTierError):
    """The demo cannot continue. The message contains the reason and the end of the relevant log."""


class Server:
    """A server subprocess and its log."""

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
        """Block until ``ready()``. Raises :class:`DemoFailed` if the process exits or time runs out."""
        deadline = time.monotonic() + seconds
        while not ready():
            if self._process.poll() is not None:
                raise self.failure(f"exited with status {self._process.returncode}")
            if time.monotonic() > deadline:
                raise self.failure(f"was not ready in {seconds:.0f} s")
            time.sleep(POLL_SECONDS)

    def failure(self, what: str) -> DemoFailed:
        """Return an error with the last lines of the log and the first errors in it."""
        lines = self.log.read_text(errors="replace").splitlines()
        # The root cause is usually far above the end, logged by a child process.
        errors = dict.fromkeys(match[1] for line in lines if (match := _ERROR.match(line)))
        first = ["", "First errors in the log:", *list(errors)[:ERROR_LINES]] if errors else []
        return DemoFailed("\n".join([f"{self.name} {what}; its log ends in", *lines[-TAIL_LINES:], *first]))

    @property
    def ended(self) -> bool:
        """Whether the process has exited."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the process and all its children with SIGKILL. Harmless if they have exited."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        # Its children may still be writing to a folder that is removed next. The wait is bounded, because the
        # first process of a container reaps them, or does not.
        until = time.monotonic() + KILLED_SECONDS
        while self._signal(0) and time.monotonic() < until:
            time.sleep(0.01)

    def stop(self) -> None:
        """Send SIGTERM and wait; kill the process if it does not exit in time."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        self.kill()  # Its children may outlive it.

    def _signal(self, number: int) -> bool:
        """Send a signal to the process and its children; 0 sends none. Return whether there are any."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True


class Servers(list[Server]):
    """Running servers, in the order of their start: cache processes first."""

    def stop(self) -> None:
        """Stop all in reverse order: engines before their cache processes."""
        while self:
            self[-1].stop()
            self.pop()

    def failure(self, error: BaseException) -> DemoFailed:
        """Wrap an error of a request, with the log of a server that has exited, or else of the one asked."""
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, DemoFailed):
            return error
        if not self:
            return DemoFailed(str(error))
        asked = self[0] if isinstance(error, ChannelError) else self[-1]
        server = next((server for server in self if server.ended), asked)
        return server.failure(f"failed to respond ({error})")


@contextlib.contextmanager
def running_servers() -> Iterator[Servers]:
    """Yield a list for servers, and kill those in it at the end. Raises: DemoFailed: a request failed."""
    servers = Servers()
    try:
        yield servers
    except (httpx.HTTPError, ChannelError, ExceptionGroup) as error:
        raise servers.failure(error) from error
    finally:
        for server in reversed(servers):
            server.kill()


def start_cache(config: Path, log: Path, name: str = "the cache process") -> Server:
    """Start ``kvtier serve`` with the settings file ``config``; ``KVTIER_*`` variables are not inherited."""
    command = [sys.executable, "-m", "kvtier", "serve"]
    return Server(name, command, _environment(config), log)


def start_proxy(
    *, port: int, prefill: Sequence[str], decode: Sequence[str], log: Path, arguments: Sequence[str] = ()
) -> Server:
    """Start ``kvtier proxy`` on 127.0.0.1 for the engines at these URLs."""
    command = [
        *(sys.executable, "-m", "kvtier", "proxy", "--listen", f"127.0.0.1:{port}"),
        *(argument for url in prefill for argument in ("--prefill", url)),
        *(argument for url in decode for argument in ("--decode", url)),
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
    """Start a vLLM server on 127.0.0.1, with kvtier's connector in the role ``kv_role`` or without it.

    ``arguments`` are passed to vLLM and override the defaults. ``scratch`` is a folder with a short path for
    sockets and temporary files, which a killed vLLM leaves behind. ``variables`` extend its environment.
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


def _environment(config: Path | None) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    return inherited if config is None else {**inherited, "KVTIER_CONFIG_FILE": str(config)}
