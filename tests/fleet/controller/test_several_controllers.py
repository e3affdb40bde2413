"""Three controllers and two instances, each in its own process: leaders are killed, paused and cut off.

No operation that was acknowledged is lost, and no chunk.
"""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtier.testing.relay import Relay
from kvtier.testing.servers import free_port
from tests.rigs.controller_process import ControllerProcess
from tests.rigs.node_process import NodeProcess
from tests.rigs.nodes import CHUNK_BYTES, prompt
from tests.rigs.servers.redis import RedisServer
from tests.rigs.waiting import wait_until

CHUNKS = 20
TOKENS = prompt(CHUNKS)
MOVE = {"old_position": ["a", "ram"], "new_position": ["b", "ram"], "tokens": TOKENS}
BACK = {"old_position": ["b", "ram"], "new_position": ["a", "ram"], "tokens": TOKENS}


class Fleet:
    """Three controllers and two instances. The first one, behind a relay, holds the prompt."""

    def __init__(self, folder: Path, relay: Relay, port: int, redis: RedisServer) -> None:
        self.relay = relay
        self.redis = redis
        # An instance must not give up a paused leader before that loses its lease.
        options = ["--instance-timeout", "60s", "--heartbeat", "0.2s"]
        state = redis.tier()["url"]
        self.controllers = [ControllerProcess(folder, *options, state=state) for _ in range(3)]
        urls = [controller.url for controller in self.controllers]
        self.a = NodeProcess("a", urls, ram=64, listen=f"127.0.0.1:{port}", advertise=relay.port)
        self.b = NodeProcess("b", urls, ram=64)

    def start(self) -> None:
        for process in (*self.controllers, self.a, self.b):
            process.start()
        self.a.call("store", chunks=CHUNKS)
        for controller in self.controllers:
            self.wait_until_ready(controller)

    def wait_until_ready(self, controller: ControllerProcess) -> None:
        """Wait until both instances have registered with a controller, and it has indexed the prompt."""
        wait_until(lambda: controller.get("/healthz")["instances"] == 2)
        wait_until(lambda: sum(held(controller).values()) >= CHUNKS)

    @property
    def leader(self) -> ControllerProcess:
        """The one that leads, once there is one."""
        found: list[ControllerProcess] = []

        def is_found() -> bool:
            found[:] = [each for each in self.controllers if leads(each)]
            return len(found) == 1

        wait_until(is_found)
        return found[0]

    def others(self, controller: ControllerProcess) -> list[ControllerProcess]:
        return [each for each in self.controllers if each is not controller]

    def close(self) -> None:
        for process in (self.a, self.b):
            process.kill()
        for controller in self.controllers:
            controller.close()


def leads(controller: ControllerProcess) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return bool(controller.get("/healthz")["leads"])
    return False


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    if reason := RedisServer.missing():
        pytest.skip(reason)
    folder = tmp_path / "redis"
    folder.mkdir()
    port = free_port()
    with RedisServer(folder) as redis, Relay.to(port) as relay:
        fleet = Fleet(tmp_path, relay, port, redis)
        with contextlib.closing(fleet):
            fleet.start()
            yield fleet


def held(controller: ControllerProcess) -> dict[str, int]:
    """Return how many chunks each instance holds in memory, by the index of this very controller."""
    samples = re.findall(
        r'^kvtier_controller_chunks\{instance="(\w)",tier="ram"\} (\S+)$', controller.metrics(), re.MULTILINE
    )
    return {instance: int(float(chunks)) for instance, chunks in samples if float(chunks)}


def start_move(fleet: Fleet, controller: ControllerProcess) -> Any:
    """Ask a controller for a move, and hold it once some chunks have arrived."""
    fleet.relay.hold_after(9 * CHUNK_BYTES)
    accepted = controller.post("/move", **MOVE)
    wait_until(lambda: fleet.relay.is_holding)
    return accepted


def test_leader_killed_during_a_move(fleet: Fleet) -> None:
    leader = fleet.leader
    other, another = fleet.others(leader)
    accepted = start_move(fleet, other)
    leader.kill()
    fleet.relay.release()
    # Asked at once, while none leads.
    event = another.wait_for_end(accepted)
    assert (event["state"], event["error"]) == ("done", None)
    assert fleet.leader is not leader
    wait_until(lambda: held(other) == held(another) == {"b": CHUNKS})
    assert fleet.b.call("is_intact", chunks=CHUNKS)
    leader.start()
    fleet.wait_until_ready(leader)
    assert leader.get(f"/events/{accepted['event_id']}") == event
    assert held(leader) == {"b": CHUNKS}


def test_paused_leader_deletes_nothing_that_the_next_one_has_moved(fleet: Fleet) -> None:
    """Its move would delete at the source what the move back has just brought there."""
    leader = fleet.leader
    other, _ = fleet.others(leader)
    accepted = start_move(fleet, leader)
    leader.pause()
    fleet.relay.release()
    assert other.wait_for_end(accepted)["state"] == "done"
    assert other.wait_for_end(other.post("/move", **BACK))["state"] == "done"
    leader.resume()
    wait_until(lambda: not leads(leader))
    # It first reads what the instances have reported meanwhile, and is refused what it has sent.
    wait_until(lambda: held(leader) == {"a": CHUNKS})
    assert held(other) == {"a": CHUNKS}
    assert fleet.a.call("is_intact", chunks=CHUNKS)


@pytest.mark.slow
def test_no_operation_is_lost_whenever_leaders_are_killed(fleet: Fleet) -> None:
    generator = random.Random(42)
    accepted: list[Any] = []
    for number in range(6):
        deadline = time.monotonic() + generator.uniform(0.0, 0.5)
        leader = fleet.leader
        while time.monotonic() < deadline or len(accepted) < 3 * number:
            body = MOVE if len(accepted) % 2 == 0 else BACK
            accepted.append(generator.choice(fleet.others(leader)).post("/move", **body))
        leader.kill()
        leader.start()
        fleet.wait_until_ready(leader)
    states = {fleet.leader.wait_for_end(each)["state"] for each in accepted}
    assert states == {"done"}
    places = {"b": CHUNKS} if len(accepted) % 2 else {"a": CHUNKS}
    for controller in fleet.controllers:
        wait_until(lambda controller=controller: held(controller) == places)
    assert (fleet.b if len(accepted) % 2 else fleet.a).call("is_intact", chunks=CHUNKS)
    assert len(accepted) >= 15


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "paused"])
def test_server_of_the_state_fails(how: str, fleet: Fleet) -> None:
    leader = fleet.leader
    before = leader.post("/pin", instance="a", tier="ram", tokens=TOKENS)
    assert leader.wait_for_end(before)["state"] == "done"
    fleet.redis.pause() if how == "paused" else fleet.redis.kill()
    wait_until(lambda: not any(map(leads, fleet.controllers)))
    for controller in fleet.controllers:
        assert controller.lookup(TOKENS) == {"a": {"ram": len(TOKENS)}}
    if how == "paused":
        fleet.redis.resume()
    else:
        fleet.redis.start()
    leader = fleet.leader
    # Without persistence, a server that was killed has forgotten it. The instance has not.
    wait_until(lambda: leader.get("/pins")["total"] == (1 if how == "paused" else 0))
    assert len(fleet.a.call("pinned")) == CHUNKS
    assert leader.wait_for_end(leader.post("/move", **MOVE))["state"] == "done"


def test_replaced_state_is_accepted_after_the_instances_have_restarted(fleet: Fleet) -> None:
    """Terms grow with time, also on a server that has lost everything."""
    first = fleet.leader
    fleet.redis.kill()
    wait_until(lambda: not any(map(leads, fleet.controllers)))
    fleet.redis.start()
    assert fleet.leader.wait_for_end(first.post("/move", **MOVE))["state"] == "done"
