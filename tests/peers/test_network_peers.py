"""Instances on several hosts as each other's peers, over a network that is slow, lossy, and cut at times."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvtier.testing.network import Host, Network
from tests.hosts import PATIENCE_SECONDS, HostProcess, wait_for

PROGRAM = "tests.peers.network_process"
PORT = 8200
MIB = 1 << 20
PAYLOAD = 1_000_000
COUNT = 24
KINDS: dict[str, dict[str, Any]] = {
    "tcp": {},
    # All hosts are one machine, and UCX would rather use its memory.
    "nixl": {"ucx": {"TLS": "tcp,self", "NET_DEVICES": Host.device}},
}


class Instances:
    """One on each host; each names all others as its peers, and holds a prompt of its own."""

    def __init__(self, network: Network, kind: str, deadline: str, patience: str) -> None:
        self.network = network
        self.all = [HostProcess(host, PROGRAM) for host in network.hosts]
        self.before = [one.do("resources") for one in self.all]
        addresses = [f"{host.address}:{PORT}" for host in network.hosts]
        transport = {"type": kind, "deadline": deadline, **KINDS[kind]}
        for one, address in zip(self.all, addresses, strict=True):
            others = [other for other in addresses if other != address]
            one.do("open", listen=address, others=others, peer={"transport": transport, "patience": patience})

    def store(self, holder: int, start: int = 0) -> None:
        self.all[holder].do("store", start=start, count=COUNT, payload=PAYLOAD)

    def fetch(self, reader: int, start: int = 0) -> int:
        """How many chunks of that prompt come from its peers."""
        ready, seconds = self.all[reader].do("fetch", start=start, count=COUNT, payload=PAYLOAD)
        # Far beyond any deadline that is set here.
        assert seconds < PATIENCE_SECONDS
        count: int = ready
        return count

    def states(self, reader: int) -> list[str]:
        """What it says of its peers."""
        return [peer["state"] for peer in self.all[reader].do("status")["peers"]]

    def close(self) -> None:
        """In good order, and nothing is left of anything."""
        for one in self.all:
            assert one.do("is_at_rest"), one.do("status")
        for one in self.all:
            one.do("close")
        for one, before in zip(self.all, self.before, strict=True):
            left = one.do("comes_back_to", before=before)
            assert not left, left

    def kill(self) -> None:
        for one in self.all:
            one.kill()


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    if reason := Network.missing():
        pytest.skip(reason)
    name: str = request.param
    if name == "nixl" and importlib.util.find_spec("nixl") is None:
        pytest.skip("nixl is not installed: pip install kvtier[nixl]")
    return name


@contextmanager
def opened(kind: str, *, hosts: int = 2, deadline: str = "60s", patience: str = "20s") -> Iterator[Instances]:
    with Network(hosts) as network:
        instances = Instances(network, kind, deadline, patience)
        try:
            yield instances
            instances.close()
        finally:
            instances.kill()


few_nixl = pytest.mark.parametrize(
    "kind", ["tcp", pytest.param("nixl", marks=pytest.mark.slow)], indirect=True
)
"""It takes seconds to start on each host."""


@few_nixl
def test_a_slow_and_lossy_network(kind: str) -> None:
    with opened(kind) as instances:
        instances.store(holder=0)
        instances.store(holder=1, start=COUNT)
        instances.network.delay(0.02)
        wait_for(lambda: instances.fetch(reader=0, start=COUNT) == COUNT)
        wait_for(lambda: instances.fetch(reader=1) == COUNT)
        instances.network.loss(0.02)
        wait_for(lambda: instances.fetch(reader=0, start=COUNT) == COUNT)
        wait_for(lambda: instances.fetch(reader=1) == COUNT)
        assert instances.network.counts.lost > 0


@few_nixl
def test_a_cut_that_outlasts_the_deadline(kind: str) -> None:
    with opened(kind, deadline="1s") as instances:
        network, (near, _) = instances.network, instances.all
        instances.store(holder=1)
        wait_for(lambda: instances.fetch(reader=0) == COUNT)

        network.cut_after(8 * MIB)
        near.begin("fetch", start=0, count=COUNT, payload=PAYLOAD)
        wait_for(lambda: network.is_cut)
        ready, seconds = near.answer()
        assert ready < COUNT
        # A deadline, and what it takes to give up; the patience for look-ups alone is twenty times as long.
        assert seconds < PATIENCE_SECONDS / 3
        wait_for(lambda: instances.states(reader=0) != ["connected"])
        assert instances.fetch(reader=0) == 0

        network.heal()
        wait_for(lambda: instances.fetch(reader=0) == COUNT)
        wait_for(lambda: instances.states(reader=0) == ["connected"])


@few_nixl
def test_of_three_one_is_cut_off(kind: str) -> None:
    # On a busy machine any peer may fall silent for a moment, and cost a miss.
    with opened(kind, hosts=3, deadline="4s") as instances:
        network = instances.network
        instances.store(holder=1)
        instances.store(holder=2)
        wait_for(lambda: instances.states(reader=0) == ["connected"] * 2)
        wait_for(lambda: instances.fetch(reader=0) == COUNT)
        network.cut(network.hosts[2])
        wait_for(lambda: instances.states(reader=0)[1] != "connected")
        wait_for(lambda: instances.fetch(reader=0) == COUNT)
        assert instances.states(reader=0)[1] != "connected"
        network.heal()
        wait_for(lambda: instances.states(reader=0) == ["connected"] * 2)
        wait_for(lambda: instances.fetch(reader=0) == COUNT)


@few_nixl
def test_pushing_over_a_slow_and_lossy_network(kind: str) -> None:
    with opened(kind) as instances:
        network, (near, far) = instances.network, instances.all
        network.delay(0.02)
        network.loss(0.02)
        near.do("hand_over", to=f"{far.host.address}:{PORT}", start=0, count=COUNT)
        far.begin("await_pushed", start=0, count=COUNT, seconds=PATIENCE_SECONDS)
        instances.store(holder=0)
        assert near.do("finish", seconds=PATIENCE_SECONDS) == COUNT
        assert far.answer()[0] == COUNT


@few_nixl
def test_a_cut_in_the_middle_of_a_push(kind: str) -> None:
    """Whoever waits does so no longer than it wants to, and later the same prompt can be pushed again."""
    with opened(kind, deadline="1s") as instances:
        network, (near, far) = instances.network, instances.all
        to = f"{far.host.address}:{PORT}"
        wait_for(lambda: instances.states(reader=0) == ["connected"])
        instances.store(holder=0)
        network.cut_after(8 * MIB)
        near.do("hand_over", to=to, start=0, count=COUNT)
        far.begin("await_pushed", start=0, count=COUNT, seconds=2.0)
        wait_for(lambda: network.is_cut)
        ready, seconds = far.answer()
        assert ready < COUNT
        assert seconds < PATIENCE_SECONDS / 3
        assert near.do("finish", seconds=1.0) < COUNT
        network.heal()

        def pushed() -> bool:
            near.do("hand_over", to=to, start=0, count=COUNT)
            leading: int = near.do("finish", seconds=10.0)
            return leading == COUNT

        wait_for(pushed)
        assert far.do("await_pushed", start=0, count=COUNT, seconds=1.0)[0] == COUNT
