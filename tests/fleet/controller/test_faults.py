"""Source, target and controller are killed during a move: every event ends, and nothing is lost.

Each runs in its own process. A relay in front of the source lets a test hold a move halfway.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtier.testing.relay import Relay
from kvtier.testing.servers import free_port
from tests.fleet.controller.node_process import NodeProcess
from tests.fleet.controller.nodes import CHUNK_BYTES, CHUNK_TOKENS, TIMEOUT_SECONDS, prompt
from tests.rigs.forks import Forked, python
from tests.rigs.waiting import wait_until

CHUNKS = 20
TOKENS = prompt(CHUNKS)
MOVE = {"old_position": ["a", "ssd"], "new_position": ["b", "ram"], "tokens": TOKENS}


class Controller:
    """``kvtier controller`` on a fixed port, so that it can be restarted."""

    def __init__(self, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._folder = folder
        self._process: Forked | None = None
        self._client = httpx.Client(base_url=self.url, timeout=30, trust_env=False, verify=False)

    def start(self) -> None:
        listen, state = self.url.removeprefix("http://"), str(self._folder / "state.sqlite")
        options = ["--listen", listen, "--state", state, "--instance-timeout", "2s", "--heartbeat", "0.2s"]
        with (self._folder / "controller.log").open("ab") as log:
            self._process = python("kvtier", "controller", *options, stderr=log)
        wait_until(self._is_up)

    def kill(self) -> None:
        """Send SIGKILL, and wait. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        self.kill()
        self._client.close()

    def post(self, path: str, **body: Any) -> Any:
        answer = self._client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def get(self, path: str, **query: Any) -> Any:
        return self._client.get(path, params=query).raise_for_status().json()

    def wait_for_end(self, accepted: Any) -> Any:
        event = self.get(f"/events/{accepted['event_id']}", wait=TIMEOUT_SECONDS)
        assert event["state"] in ("done", "failed"), event
        return event

    def held(self, instance: str, tier: str) -> int:
        """Return the number of leading chunks of the prompt that a tier holds."""
        tokens: int = self.post("/lookup", tokens=TOKENS)["instances"].get(instance, {}).get(tier, 0)
        return tokens // CHUNK_TOKENS

    def up_to_date(self) -> set[str]:
        instances = self.get("/instances")["instances"]
        return {found["instance"] for found in instances if found["up_to_date"] and found["models"]}

    def _is_up(self) -> bool:
        try:
            return bool(self.get("/healthz"))
        except httpx.TransportError:
            return False


class Cluster:
    """A controller and two instances. The source, behind a relay, holds the prompt on its disk."""

    def __init__(self, folder: Path, relay: Relay, port: int) -> None:
        self.relay = relay
        self.controller = Controller(folder)
        url = self.controller.url
        listen = f"127.0.0.1:{port}"
        disk = {"disk": str(folder / "a")}
        self.a = NodeProcess("a", url, ram=24, listen=listen, advertise=relay.port, **disk)
        self.b = NodeProcess("b", url, ram=24)

    def start(self) -> None:
        self.controller.start()
        self.a.start()
        self.b.start()
        wait_until(lambda: self.controller.up_to_date() == {"a", "b"})
        self.a.store(CHUNKS)
        wait_until(lambda: self.controller.held("a", "ram") == CHUNKS)
        places = {"old_position": ["a", "ram"], "new_position": ["a", "ssd"]}
        self.controller.wait_for_end(self.controller.post("/move", **places, tokens=TOKENS))
        assert self.controller.held("a", "ssd") == CHUNKS

    def start_move(self) -> Any:
        """Start a move, and hold it once some chunks have arrived."""
        self.relay.hold_after(9 * CHUNK_BYTES)
        accepted = self.controller.post("/move", **MOVE)
        assert accepted["num_tokens"] == len(TOKENS)
        wait_until(lambda: self.relay.is_holding)
        return accepted

    def complete(self) -> None:
        """Repeat the move, and check that everything is at the target, unchanged."""
        wait_until(lambda: self.controller.up_to_date() == {"a", "b"})
        event = self.controller.wait_for_end(self.controller.post("/move", **MOVE))
        assert event["state"] == "done", event
        assert event["result"]["reason"] is None
        assert self.controller.held("b", "ram") == CHUNKS
        # Memory may still hold chunks that were promoted for the failed move.
        assert self.controller.held("a", "ssd") == 0
        assert self.b.is_intact(CHUNKS)
        assert self.a.wait_until_idle()
        assert self.b.wait_until_idle()

    def close(self) -> None:
        for process in (self.a, self.b):
            # SIGKILL works on a paused process, too.
            process.kill()
        self.controller.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    port = free_port()
    with Relay.to(port) as relay:
        cluster = Cluster(tmp_path, relay, port)
        with contextlib.closing(cluster):
            cluster.start()
            yield cluster


def test_source_killed_during_a_move(cluster: Cluster) -> None:
    accepted = cluster.start_move()
    cluster.a.kill()
    cluster.relay.cut()
    event = cluster.controller.wait_for_end(accepted)
    assert event["state"] == "failed"
    assert "'a'" in event["error"]
    cluster.relay.heal()
    cluster.relay.release()
    cluster.a.start()
    wait_until(lambda: cluster.controller.up_to_date() == {"a", "b"})
    arrived = cluster.controller.held("b", "ram")
    assert arrived == event["result"]["chunks"]
    assert cluster.controller.held("a", "ssd") == CHUNKS, "it received no command to delete"
    cluster.complete()


@pytest.mark.slow
def test_target_killed_during_a_move(cluster: Cluster) -> None:
    accepted = cluster.start_move()
    cluster.b.kill()
    event = cluster.controller.wait_for_end(accepted)
    assert event["state"] == "failed"
    assert "the target 'b' disconnected" in event["error"]
    assert cluster.controller.held("a", "ssd") == CHUNKS
    cluster.relay.release()
    cluster.b.start()
    cluster.complete()


def test_controller_killed_during_a_move(cluster: Cluster) -> None:
    accepted = cluster.start_move()
    cluster.controller.kill()
    cluster.relay.release()
    cluster.controller.start()
    event = cluster.controller.wait_for_end(accepted)
    assert event["state"] == "failed"
    assert "the controller was restarted" in event["error"]
    wait_until(lambda: cluster.controller.up_to_date() == {"a", "b"})
    assert cluster.controller.held("a", "ssd") == CHUNKS, "it received no confirmation"
    cluster.complete()


@pytest.mark.slow
def test_unresponsive_instance_is_disconnected_and_readmitted(cluster: Cluster) -> None:
    cluster.b.signal(signal.SIGSTOP)
    accepted = cluster.controller.post("/move", **MOVE)
    event = cluster.controller.wait_for_end(accepted)
    assert event["state"] == "failed"
    assert "no message for 2 s" in event["error"]
    assert cluster.controller.up_to_date() == {"a"}
    assert cluster.controller.held("a", "ssd") == CHUNKS
    cluster.b.signal(signal.SIGCONT)
    cluster.complete()
