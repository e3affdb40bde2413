"""Transports between two hosts, over a network that is slow, loses packets, and is cut for a while."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvtier.testing.network import Network
from tests.hosts import PATIENCE_SECONDS, HostProcess, wait_for

PROGRAM = "tests.transports.network_process"
MIB = 1 << 20
KINDS: dict[str, dict[str, Any]] = {
    "tcp": {},
    # Both hosts are one machine, and UCX would rather use its memory.
    "nixl": {"ucx": {"TLS": "tcp,self", "NET_DEVICES": "link0"}},
}
LENGTHS = [4096, 1, 5 * MIB + 4099, 65_536, 2 * MIB, 12_345]
LONG = [32 * MIB]
TURNS = 25

Spans = list[list[int]]


class Pair:
    """Two hosts with a side of the transport on each; the near one reads and writes."""

    def __init__(self, network: Network, kind: str, deadline: str) -> None:
        self.network = network
        self.near, self.far = (HostProcess(host, PROGRAM) for host in network.hosts)
        settings = {"type": kind, "deadline": deadline, **KINDS[kind]}
        self.before = [side.do("resources") for side in (self.near, self.far)]
        for side in (self.near, self.far):
            side.begin("open", settings=settings, address=side.host.address)
        self.near.answer()
        self.near.do("connect", address=self.far.host.address, **self.far.answer())

    def granted(self, lengths: list[int], access: str = "read", seed: int = 0) -> Spans:
        spans: Spans = self.far.do("grant", lengths=lengths, access=access, seed=seed)
        return spans

    def read(self, spans: Spans) -> set[str]:
        """The outcomes; what is said to have been read is right."""
        return self.checked(self.near.do("read", spans=spans))

    @staticmethod
    def checked(read: dict[str, list[Any]]) -> set[str]:
        assert all(
            right for outcome, right in zip(read["outcomes"], read["right"], strict=True) if outcome == "ok"
        )
        return set(read["outcomes"])

    def begin_and_cut(self, spans: Spans, after: int) -> None:
        """Begin to read and cut the network in the middle; the read's answer is due."""
        self.network.cut_after(after)
        self.near.begin("read", spans=spans)
        while not self.network.is_cut:
            if self.near.has_answered:  # On a busy machine a second may be over before that.
                assert self.checked(self.near.answer()) == {"failed"}
                self.near.begin("read", spans=spans)
            time.sleep(0.001)

    def check_rest(self) -> None:
        """No transfer holds anything, and none that has failed has touched its memory afterwards."""
        for side in (self.near, self.far):
            assert side.do("untouched")
            assert side.do("is_at_rest")

    def resources(self) -> int:
        """Descriptors, threads and tasks of both."""
        return sum(self.near.do("resources")) + sum(self.far.do("resources"))

    def close(self) -> None:
        """In good order, and nothing is left of anything."""
        self.check_rest()
        for side, before in zip((self.near, self.far), self.before, strict=True):
            side.do("close")
            left = side.do("comes_back_to", before=before)
            assert not left, left

    def kill(self) -> None:
        for side in (self.near, self.far):
            side.kill()


@pytest.fixture(params=list(KINDS), scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    if reason := Network.missing():
        pytest.skip(reason)
    name: str = request.param
    if name == "nixl" and importlib.util.find_spec("nixl") is None:
        pytest.skip("nixl is not installed: pip install kvtier[nixl]")
    return name


@contextmanager
def opened(kind: str, deadline: str) -> Iterator[Pair]:
    with Network() as network:
        pair = Pair(network, kind, deadline)
        try:
            yield pair
        finally:
            pair.kill()


@pytest.fixture(scope="module")
def patient_pair(kind: str) -> Iterator[Pair]:
    """One for all tests of a transport that never pass the deadline: NIXL takes seconds to start."""
    with opened(kind, deadline="60s") as pair:
        yield pair
        pair.close()


@pytest.fixture
def patient(patient_pair: Pair) -> Iterator[Pair]:
    yield patient_pair
    network = patient_pair.network
    network.delay(0)
    network.loss(0)
    network.heal()
    patient_pair.far.do("clear")


@pytest.fixture
def hasty(kind: str) -> Iterator[Pair]:
    """Its deadline is a second."""
    with opened(kind, deadline="1s") as pair:
        yield pair
        pair.close()


def write_and_check(hosts: Pair) -> None:
    spans = hosts.granted(LENGTHS, "write")
    assert set(hosts.near.do("write", spans=spans, seed=100)) == {"ok"}
    assert hosts.far.do("holds", spans=spans, seed=100)


def test_delay(patient: Pair) -> None:
    patient.network.delay(0.02)
    assert patient.read(patient.granted(LENGTHS)) == {"ok"}
    write_and_check(patient)


def test_loss(patient: Pair) -> None:
    patient.network.loss(0.02)
    spans = patient.granted(LENGTHS)
    # Until some packets were lost, which the first time does not see to with certainty.
    while patient.network.counts.lost < 5:
        assert patient.read(spans) == {"ok"}
        write_and_check(patient)


def test_a_cut_that_heals_in_time(patient: Pair) -> None:
    network = patient.network
    spans = patient.granted(LONG)
    assert patient.read(patient.granted(LENGTHS)) == {"ok"}

    before = network.counts.carried_bytes
    patient.begin_and_cut(spans, 24 * MIB)
    # Somebody has sent something again, and nobody was told of it.
    cut_off = network.counts.cut_off
    wait_for(lambda: network.counts.cut_off >= cut_off + 2)
    network.heal()
    assert patient.checked(patient.near.answer()) == {"ok"}
    # It went on where it stopped.
    assert network.counts.carried_bytes - before < (24 + 32) * MIB


@pytest.mark.parametrize(
    "kind", ["tcp", pytest.param("nixl", marks=pytest.mark.slow)], indirect=True, scope="module"
)
def test_a_cut_that_outlasts_the_deadline(hasty: Pair) -> None:
    network = hasty.network
    long, short = hasty.granted(LONG), hasty.granted(LENGTHS)
    wait_for(lambda: hasty.read(short) == {"ok"})

    hasty.begin_and_cut(long, 8 * MIB)
    began = time.monotonic()
    assert hasty.checked(hasty.near.answer()) == {"failed"}
    assert hasty.read(short) == {"failed"}
    assert set(hasty.near.do("write", spans=hasty.granted(LENGTHS, "write"), seed=0)) == {"failed"}
    # Three deadlines: no other bound on how long they took is as short as this.
    assert time.monotonic() - began < PATIENCE_SECONDS / 2

    network.heal()
    wait_for(lambda: hasty.read(short) == {"ok"})
    wait_for(lambda: hasty.read(long) == {"ok"})
    write_and_check(hasty)
    hasty.check_rest()


@pytest.mark.slow
def test_cuts_again_and_again(hasty: Pair) -> None:
    network = hasty.network
    long, short = hasty.granted(LONG), hasty.granted(LENGTHS)
    wait_for(lambda: hasty.read(short) == {"ok"})
    for turn in range(TURNS):
        hasty.begin_and_cut(long, (1 + turn * 7 % 31) * MIB)
        if turn % 2:
            assert hasty.checked(hasty.near.answer()) == {"failed"}
            network.heal()
        else:
            network.heal()
            # How soon TCP finds out is its own business.
            assert hasty.checked(hasty.near.answer()) <= {"ok", "failed"}
        wait_for(lambda: hasty.read(long) == {"ok"})
        hasty.check_rest()
        if turn == 4:
            before = hasty.resources()
    # It may be connected more often than it was, but not once more for each cut.
    wait_for(lambda: hasty.resources() < before + TURNS - 5)
