"""Run ``kvtier controller`` for one test and query it over HTTP."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from kvtier.testing.servers import free_port
from tests.rigs.cache_process import START_SECONDS, TIMEOUT_SECONDS, StoppableProcess
from tests.rigs.forks import python


class ControllerProcess(StoppableProcess):
    """A controller whose address and state survive it, so that it can be restarted."""

    def __init__(self, folder: Path, *options: str, state: str | None = None) -> None:
        """``state`` is the URL of a server, if it is not a file in the ``folder``."""
        self.url = f"http://127.0.0.1:{free_port()}"
        listen = self.url.removeprefix("http://")
        self.log = folder / f"controller-{listen.rpartition(':')[2]}.log"
        self.state = folder / "controller.sqlite"
        self._arguments = ["--listen", listen, "--state", state or str(self.state), *options]
        self._http = httpx.Client(base_url=self.url, timeout=TIMEOUT_SECONDS, trust_env=False, verify=False)

    def start(self) -> None:
        """Start the process and wait until it answers."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
        with self.log.open("ab") as output:
            self._process = python(
                "kvtier",
                "controller",
                *self._arguments,
                environment=environment,
                stdout=output,
                stderr=output,
            )
        self.wait_until(self._is_up, seconds=START_SECONDS)

    def close(self) -> None:
        self.kill()
        self._http.close()

    def get(self, path: str, **query: Any) -> Any:
        return self._http.get(path, params=query).raise_for_status().json()

    def metrics(self) -> str:
        return self._http.get("/metrics").raise_for_status().text

    def post(self, path: str, **body: Any) -> Any:
        answer = self._http.post(path, json=body)
        assert answer.is_success, answer.text
        return answer.json()

    def lookup(self, tokens: Sequence[int]) -> dict[str, dict[str, int]]:
        """Return the number of leading tokens held, by instance and tier."""
        instances: dict[str, dict[str, int]] = self.post("/lookup", tokens=list(tokens))["instances"]
        return instances

    def wait_until_held(self, tokens: Sequence[int], **held: dict[str, int]) -> None:
        """Wait until the instances hold exactly ``held`` of these tokens: numbers by instance and tier."""
        found: list[dict[str, dict[str, int]]] = [{}]

        def is_held() -> bool:
            found[0] = self.lookup(tokens)
            return found[0] == held

        self.wait_until(is_held, lambda: f"found {found[0]}, expected {held}")

    def wait_until_registered(self, *names: str) -> None:
        """Wait until exactly these instances are registered, and have reported all their chunks."""
        self.wait_until(lambda: self._up_to_date() == set(names))

    def move(
        self, old: tuple[str, str], new: tuple[str, str], tokens: Sequence[int], **options: Any
    ) -> dict[str, Any]:
        """Move, wait for the end, and return the event."""
        accepted = self.post("/move", old_position=old, new_position=new, tokens=list(tokens), **options)
        event = self.wait_for_end(accepted)
        assert event["num_tokens"] == accepted["num_tokens"]
        return event

    def wait_for_end(self, accepted: Any) -> dict[str, Any]:
        """Wait for the end of an event, and return it."""
        event: dict[str, Any] = self.get(f"/events/{accepted['event_id']}", wait=TIMEOUT_SECONDS)
        assert event["ended_at"] is not None, (event, self.tail())
        return event

    def wait_until(
        self,
        condition: Callable[[], bool],
        describe: Callable[[], str] = lambda: "",
        seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            self.check_running()
            assert time.monotonic() < deadline, f"condition not met: {describe()}\n{self.tail()}"
            time.sleep(0.02)

    def _is_up(self) -> bool:
        try:
            return bool(self.get("/healthz")["status"] == "ok")
        except httpx.HTTPError:
            return False

    def _up_to_date(self) -> set[str]:
        return {found["instance"] for found in self.get("/instances")["instances"] if found["up_to_date"]}
