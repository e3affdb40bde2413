"""Source, target and controller are killed during a move: every event ends, and nothing is lost.

Each runs in its own process. A relay in front of the source lets a test hold a move halfway.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.relay import Relay
from kvtier.testing.servers import free_port
from tests.rigs.controller_process import ControllerProcess
from tests.rigs.node_process import NodeProcess
from tests.rigs.nodes import CHUNK_BYTES, CHUNK_TOKENS, prompt
from tests.rigs.waiting import wait_until

CHUNKS = 20
TOKENS = prompt(CHUNKS)
MOVE = {"old_position": ["a", "ssd"], "new_position": ["b", "ram"], "tokens": TOKENS}


class Controller(ControllerProcess):
    """A controller that soon notices an instance that is gone."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "--instance-timeout", "2s", "--heartbeat", "0.2s")

    def held(self, instance: str, tier: str) -> int:
        """Return the number of leading chunks of the prompt that a tier holds."""
        return self.lookup(TOKENS).get(instance, {}).get(tier, 0) // CHUNK_TOKENS

    def wait_until_ready(self, *names: str) -> None:
        """Wait until exactly these instances have reported all their chunks, and the model."""
        self.wait_until_registered(*names)
        self.wait_until(lambda: all(found["models"] for found in self.get("/instances")["instances"]))


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
        self.controller.wait_until_ready("a", "b")
        self.a.call("store", chunks=CHUNKS)
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
        """Repeat the move, and check that it is complete."""
        self.controller.wait_until_ready("a", "b")
        event = self.controller.wait_for_end(self.controller.post("/move", **MOVE))
        assert event["state"] == "done", event
        assert event["result"]["reason"] is None
        self.check_moved()

    def check_moved(self) -> None:
        """Check that everything is at the target, unchanged."""
        assert self.controller.held("b", "ram") == CHUNKS
        # Memory may still hold chunks that were promoted for the failed move.
        assert self.controller.held("a", "ssd") == 0
        assert self.b.call("is_intact", chunks=CHUNKS)
        for instance in (self.a, self.b):
            instance.call("wait_until_idle")

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
    cluster.controller.wait_until_ready("a", "b")
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
    assert (event["state"], event["error"]) == ("done", None)
    cluster.check_moved()


@pytest.mark.slow
def test_unresponsive_instance_is_disconnected_and_readmitted(cluster: Cluster) -> None:
    cluster.b.signal(signal.SIGSTOP)
    accepted = cluster.controller.post("/move", **MOVE)
    event = cluster.controller.wait_for_end(accepted)
    assert event["state"] == "failed"
    assert "no message for 2 s" in event["error"]
    cluster.controller.wait_until_registered("a")
    assert cluster.controller.held("a", "ssd") == CHUNKS
    cluster.b.signal(signal.SIGCONT)
    cluster.complete()
