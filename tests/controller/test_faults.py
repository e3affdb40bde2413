"""Source, target and controller killed in the middle of a move: every event ends, and nothing is lost.

All of them are processes of their own. A relay stands before the source, so that the middle of a move lasts
as long as a test likes.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtier.testing.relay import Relay
from kvtier.testing.servers.base import free_port
from tests.controller.holding import CHUNK_BYTES, CHUNK_TOKENS, PATIENCE, prompt
from tests.controller.instance_process import InstanceProcess

CHUNKS = 20
TOKENS = prompt(CHUNKS)
MOVE = {"old_position": ["a", "ssd"], "new_position": ["b", "ram"], "tokens": TOKENS}


class Controller:
    """``kvtier controller`` on a port that outlives it."""

    def __init__(self, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._client = httpx.Client(base_url=self.url, timeout=30, trust_env=False)

    def start(self) -> None:
        listen, state = self.url.removeprefix("http://"), str(self._folder / "state.sqlite")
        command = [sys.executable, "-m", "kvtier", "controller", "--listen", listen, "--state", state]
        with (self._folder / "controller.log").open("ab") as log:
            self._process = subprocess.Popen([*command, "--silence", "2s", "--heartbeat", "0.2s"], stderr=log)
        until(self._is_up)

    def kill(self) -> None:
        """``kill -9``. Harmless when repeated."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        self.kill()
        self._client.close()

    def ask(self, path: str, **body: Any) -> Any:
        answer = self._client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def get(self, path: str, **query: Any) -> Any:
        return self._client.get(path, params=query).raise_for_status().json()

    def ended(self, accepted: Any) -> Any:
        event = self.get(f"/events/{accepted['event_id']}", wait=PATIENCE)
        assert event["state"] in ("done", "failed"), event
        return event

    def held(self, instance: str, tier: str) -> int:
        """How many leading chunks of the prompt."""
        tokens: int = self.ask("/lookup", tokens=TOKENS)["instances"].get(instance, {}).get(tier, 0)
        return tokens // CHUNK_TOKENS

    def in_step(self) -> set[str]:
        return {
            one["instance"] for one in self.get("/instances")["instances"] if one["in_step"] and one["models"]
        }

    def _is_up(self) -> bool:
        try:
            return bool(self.get("/healthz"))
        except httpx.TransportError:
            return False


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.01)


class Cluster:
    """A controller and two instances. The source has the prompt on its disk, behind a relay."""

    def __init__(self, folder: Path, relay: Relay, port: int) -> None:
        self.relay = relay
        self.controller = Controller(folder)
        url = self.controller.url
        listen = f"127.0.0.1:{port}"
        disk = {"disk": str(folder / "a")}
        self.a = InstanceProcess("a", url, ram=24, listen=listen, advertise=relay.port, **disk)
        self.b = InstanceProcess("b", url, ram=24)

    def start(self) -> None:
        self.controller.start()
        self.a.start()
        self.b.start()
        until(lambda: self.controller.in_step() == {"a", "b"})
        self.a.store(CHUNKS)
        until(lambda: self.controller.held("a", "ram") == CHUNKS)
        places = {"old_position": ["a", "ram"], "new_position": ["a", "ssd"]}
        self.controller.ended(self.controller.ask("/move", **places, tokens=TOKENS))
        assert self.controller.held("a", "ssd") == CHUNKS

    def begin(self) -> Any:
        """A move that is held up when some chunks have arrived."""
        self.relay.hold_after(9 * CHUNK_BYTES)
        accepted = self.controller.ask("/move", **MOVE)
        assert accepted["num_tokens"] == len(TOKENS)
        until(lambda: self.relay.is_holding)
        return accepted

    def complete(self) -> None:
        """Ask for the move again: then everything is at the target, and whole."""
        until(lambda: self.controller.in_step() == {"a", "b"})
        event = self.controller.ended(self.controller.ask("/move", **MOVE))
        assert event["state"] == "done", event
        assert event["result"]["reason"] is None
        assert self.controller.held("b", "ram") == CHUNKS
        # Its memory may still have what it raised for a move that failed, as it has whatever was asked for.
        assert self.controller.held("a", "ssd") == 0
        assert self.b.intact(CHUNKS)
        assert self.a.at_rest()
        assert self.b.at_rest()

    def close(self) -> None:
        for process in (self.a, self.b):
            # It may be stopped: a kill ends it all the same.
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


def test_the_source_is_killed_in_the_middle_of_a_move(cluster: Cluster) -> None:
    accepted = cluster.begin()
    cluster.a.kill()
    cluster.relay.cut()
    event = cluster.controller.ended(accepted)
    assert event["state"] == "failed"
    assert "'a'" in event["error"]
    cluster.relay.heal()
    cluster.relay.let_go()
    cluster.a.start()
    until(lambda: cluster.controller.in_step() == {"a", "b"})
    arrived = cluster.controller.held("b", "ram")
    assert arrived == event["result"]["chunks"]
    assert cluster.controller.held("a", "ssd") == CHUNKS, "nobody could tell it to delete anything"
    cluster.complete()


@pytest.mark.slow
def test_the_target_is_killed_in_the_middle_of_a_move(cluster: Cluster) -> None:
    accepted = cluster.begin()
    cluster.b.kill()
    event = cluster.controller.ended(accepted)
    assert event["state"] == "failed"
    assert "the target 'b' went away" in event["error"]
    assert cluster.controller.held("a", "ssd") == CHUNKS
    cluster.relay.let_go()
    cluster.b.start()
    cluster.complete()


def test_the_controller_is_killed_in_the_middle_of_a_move(cluster: Cluster) -> None:
    accepted = cluster.begin()
    cluster.controller.kill()
    cluster.relay.let_go()
    cluster.controller.start()
    event = cluster.controller.ended(accepted)
    assert event["state"] == "failed"
    assert "the controller was restarted" in event["error"]
    until(lambda: cluster.controller.in_step() == {"a", "b"})
    assert cluster.controller.held("a", "ssd") == CHUNKS, "nothing was confirmed to it"
    cluster.complete()


@pytest.mark.slow
def test_an_instance_that_is_silent_is_dropped_and_taken_back(cluster: Cluster) -> None:
    cluster.b.signal(signal.SIGSTOP)
    accepted = cluster.controller.ask("/move", **MOVE)
    event = cluster.controller.ended(accepted)
    assert event["state"] == "failed"
    assert "it has said nothing for 2 s" in event["error"]
    assert cluster.controller.in_step() == {"a"}
    assert cluster.controller.held("a", "ssd") == CHUNKS
    cluster.b.signal(signal.SIGCONT)
    cluster.complete()
