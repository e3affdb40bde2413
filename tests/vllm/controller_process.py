"""``kvtier controller`` for one test, asked over HTTP as an operator would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from kvtier.testing.servers.base import free_port
from tests.vllm.cache_process import PATIENCE_SECONDS, START_SECONDS


class ControllerProcess:
    """A controller whose address and state outlive it, so that it can be started again."""

    def __init__(self, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = folder / "controller.log"
        self._state = folder / "controller.sqlite"
        self._process: subprocess.Popen[bytes] | None = None
        self._http = httpx.Client(base_url=self.url, timeout=PATIENCE_SECONDS, trust_env=False)

    def start(self) -> None:
        """Start it and wait until it answers."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
        command = [sys.executable, "-m", "kvtier", "controller"]
        options = ["--listen", self.url.removeprefix("http://"), "--state", str(self._state)]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, *options], env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self.wait_until(self._is_up, seconds=START_SECONDS)

    def kill(self) -> None:
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait(PATIENCE_SECONDS)
            self._process = None

    def pause(self) -> None:
        """SIGSTOP: connections stay, and nothing is answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, sent: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(sent)

    @property
    def pid(self) -> int | None:
        """``None`` while it does not run."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        self.kill()
        self._http.close()

    def get(self, path: str, **query: Any) -> Any:
        return self._http.get(path, params=query).raise_for_status().json()

    def post(self, path: str, **body: Any) -> Any:
        answer = self._http.post(path, json=body)
        assert answer.is_success, answer.text
        return answer.json()

    def lookup(self, tokens: Sequence[int]) -> dict[str, dict[str, int]]:
        """By instance and tier how many leading tokens it holds."""
        instances: dict[str, dict[str, int]] = self.post("/lookup", tokens=list(tokens))["instances"]
        return instances

    def wait_until_held(self, tokens: Sequence[int], **held: dict[str, int]) -> None:
        """Wait until the instances hold just so many of these tokens, by the names of their tiers."""
        found: list[dict[str, dict[str, int]]] = [{}]

        def is_held() -> bool:
            found[0] = self.lookup(tokens)
            return found[0] == held

        self.wait_until(is_held, lambda: f"{found[0]} is held instead of {held}")

    def wait_until_registered(self, *names: str) -> None:
        """Wait until these instances, and no others, have told all that they hold."""
        self.wait_until(lambda: self._in_step() == set(names))

    def move(
        self, old: tuple[str, str], new: tuple[str, str], tokens: Sequence[int], **options: Any
    ) -> dict[str, Any]:
        """Move, and wait for the end: the event."""
        accepted = self.post("/move", old_position=old, new_position=new, tokens=list(tokens), **options)
        event = self.ended(accepted["event_id"])
        assert event["num_tokens"] == accepted["num_tokens"]
        return event

    def ended(self, event_id: str) -> dict[str, Any]:
        """An event, when it is over."""
        event: dict[str, Any] = self.get(f"/events/{event_id}", wait=PATIENCE_SECONDS)
        assert event["ended_at"] is not None, (event, self.tail())
        return event

    def wait_until(
        self,
        condition: Callable[[], bool],
        what: Callable[[], str] = lambda: "",
        seconds: float = PATIENCE_SECONDS,
    ) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self._process is None or self._process.poll() is None, self.tail()
            assert time.monotonic() < deadline, f"did not happen: {what()}\n{self.tail()}"
            time.sleep(0.02)

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _is_up(self) -> bool:
        try:
            return bool(self.get("/healthz")["status"] == "ok")
        except httpx.HTTPError:
            return False

    def _in_step(self) -> set[str]:
        return {each["instance"] for each in self.get("/instances")["instances"] if each["in_step"]}
