"""Instances on several hosts as peers, over a slow, lossy and partitioned network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.rigs import instance_process
from tests.rigs.hosts import ON_HOSTS, TIMEOUT_SECONDS, HostProcess, transport_on_hosts
from tests.rigs.network import Network
from tests.rigs.waiting import wait_until

PORT = 8200
MIB = 1 << 20
PAYLOAD = 1_000_000
COUNT = 24


class Instances:
    """One instance per host, each with all others as its peers."""

    def __init__(self, network: Network, kind: str, deadline: str, timeout: str) -> None:
        self.network = network
        self.all = [HostProcess(host, instance_process.MODULE) for host in network.hosts]
        self.before = [instance.call("resources") for instance in self.all]
        addresses = [f"{host.address}:{PORT}" for host in network.hosts]
        transport = {"type": kind, "deadline": deadline, **ON_HOSTS[kind]}
        for instance, address in zip(self.all, addresses, strict=True):
            others = [other for other in addresses if other != address]
            instance.call(
                "open", listen=address, others=others, peer={"transport": transport, "timeout": timeout}
            )

    def store(self, holder: int, start: int = 0) -> None:
        self.all[holder].call("store", numbers=list(range(start, start + COUNT)), payload=PAYLOAD)

    def fetch(self, reader: int, start: int = 0) -> int:
        """Return the number of leading chunks of the prompt that are fetched from peers."""
        ready, seconds = self.all[reader].call("fetch", start=start, count=COUNT, payload=PAYLOAD)
        # Far beyond any deadline set here.
        assert seconds < TIMEOUT_SECONDS
        count: int = ready
        return count

    def states(self, reader: int) -> list[str]:
        """Return the states of its peers."""
        return [peer["state"] for peer in self.all[reader].call("status")["peers"]]

    def close(self) -> None:
        """Close all instances, and check that nothing is leaked."""
        for instance in self.all:
            assert instance.call("is_idle"), instance.call("status")
        for instance in self.all:
            instance.call("close")
        for instance, before in zip(self.all, self.before, strict=True):
            leak = instance.call("wait_for_baseline", before=before)
            assert not leak, leak

    def kill(self) -> None:
        for instance in self.all:
            instance.kill()


@pytest.fixture(params=list(ON_HOSTS))
def kind(request: pytest.FixtureRequest) -> str:
    return transport_on_hosts(request.param)


@contextmanager
def open_instances(
    kind: str, *, hosts: int = 2, deadline: str = "60s", timeout: str = "20s"
) -> Iterator[Instances]:
    with Network(hosts) as network:
        instances = Instances(network, kind, deadline, timeout)
        try:
            yield instances
            instances.close()
        finally:
            instances.kill()


few_nixl = pytest.mark.parametrize(
    "kind", ["tcp", pytest.param("nixl", marks=pytest.mark.slow)], indirect=True
)
"""NIXL takes seconds to start on each host."""


@few_nixl
def test_fetch_over_slow_and_lossy_network(kind: str) -> None:
    with open_instances(kind) as instances:
        instances.store(holder=0)
        instances.store(holder=1, start=COUNT)
        instances.network.delay(0.02)
        wait_until(lambda: instances.fetch(reader=0, start=COUNT) == COUNT)
        wait_until(lambda: instances.fetch(reader=1) == COUNT)
        instances.network.loss(0.02)
        wait_until(lambda: instances.fetch(reader=0, start=COUNT) == COUNT)
        wait_until(lambda: instances.fetch(reader=1) == COUNT)
        assert instances.network.counts.lost > 0


@few_nixl
def test_partition_longer_than_deadline(kind: str) -> None:
    with open_instances(kind, deadline="1s") as instances:
        network, (near, _) = instances.network, instances.all
        instances.store(holder=1)
        wait_until(lambda: instances.fetch(reader=0) == COUNT)

        network.cut_after(8 * MIB)
        near.send("fetch", start=0, count=COUNT, payload=PAYLOAD)
        wait_until(lambda: network.is_cut)
        ready, seconds = near.result()
        assert ready < COUNT
        # A deadline and the time to give up. The timeout of lookups alone is 20 times as long.
        assert seconds < TIMEOUT_SECONDS / 3
        wait_until(lambda: instances.states(reader=0) != ["connected"])
        assert instances.fetch(reader=0) == 0

        network.heal()
        wait_until(lambda: instances.fetch(reader=0) == COUNT)
        wait_until(lambda: instances.states(reader=0) == ["connected"])


@few_nixl
def test_one_of_three_hosts_is_partitioned(kind: str) -> None:
    # On a busy machine any peer may be unresponsive for a moment, which causes a miss.
    with open_instances(kind, hosts=3, deadline="4s") as instances:
        network = instances.network
        instances.store(holder=1)
        instances.store(holder=2)
        wait_until(lambda: instances.states(reader=0) == ["connected"] * 2)
        wait_until(lambda: instances.fetch(reader=0) == COUNT)
        network.cut(network.hosts[2])
        wait_until(lambda: instances.states(reader=0)[1] != "connected")
        wait_until(lambda: instances.fetch(reader=0) == COUNT)
        assert instances.states(reader=0)[1] != "connected"
        network.heal()
        wait_until(lambda: instances.states(reader=0) == ["connected"] * 2)
        wait_until(lambda: instances.fetch(reader=0) == COUNT)


@few_nixl
def test_push_over_slow_and_lossy_network(kind: str) -> None:
    with open_instances(kind) as instances:
        network, (near, far) = instances.network, instances.all
        network.delay(0.02)
        network.loss(0.02)
        near.call("transfer_kv", to=f"{far.host.address}:{PORT}", numbers=list(range(COUNT)))
        far.send("await_pushed", start=0, count=COUNT, seconds=TIMEOUT_SECONDS)
        instances.store(holder=0)
        assert near.call("finish", seconds=TIMEOUT_SECONDS) == COUNT
        assert far.result()[0] == COUNT


@few_nixl
def test_partition_during_push(kind: str) -> None:
    """A lookup waits no longer than its timeout, and the prompt can be pushed again later."""
    with open_instances(kind, deadline="1s") as instances:
        network, (near, far) = instances.network, instances.all
        to = f"{far.host.address}:{PORT}"
        wait_until(lambda: instances.states(reader=0) == ["connected"])
        instances.store(holder=0)
        network.cut_after(8 * MIB)
        near.call("transfer_kv", to=to, numbers=list(range(COUNT)))
        far.send("await_pushed", start=0, count=COUNT, seconds=2.0)
        wait_until(lambda: network.is_cut)
        ready, seconds = far.result()
        assert ready < COUNT
        assert seconds < TIMEOUT_SECONDS / 3
        assert near.call("finish", seconds=1.0) < COUNT
        network.heal()

        def pushed() -> bool:
            near.call("transfer_kv", to=to, numbers=list(range(COUNT)))
            leading: int = near.call("finish", seconds=10.0)
            return leading == COUNT

        wait_until(pushed)
        assert far.call("await_pushed", start=0, count=COUNT, seconds=1.0)[0] == COUNT
