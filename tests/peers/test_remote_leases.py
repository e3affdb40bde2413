"""Remote leases, outages and throughput, on a fake clock."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import pytest

from kvtier.peers.client import Outage
from kvtier.peers.remote_leases import RemoteLease, RemoteLeases, usable_seconds
from kvtier.peers.throughput import REMEMBERED_SECONDS, PeerThroughput, fastest
from kvtier.testing.backend import make_key
from tests.rigs.clock import Clock


class Released:
    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __call__(self, leases: Iterable[RemoteLease]) -> None:
        self.numbers += [lease.number for lease in leases]


def lease(number: int, ends: float, key: int | None = None) -> RemoteLease:
    return RemoteLease(make_key(number if key is None else key), 77, number, 0, 10, True, ends)


def test_leases_are_bounded_and_expire() -> None:
    clock, released = Clock(), Released()
    leases = RemoteLeases(released, limit=3, clock=clock)
    leases.add([lease(number, 1010.0) for number in range(3)])
    leases.add([lease(3, 1020.0)])
    assert released.numbers == [0], "the oldest is released"
    assert leases.find(make_key(0)) is None
    assert leases.find(make_key(3)) is not None
    clock.now += 10.0
    assert leases.find(make_key(1)) is None
    assert leases.take(make_key(2)) is None
    assert len(leases) == 1
    assert released.numbers == [0], "expired leases need no release"


def test_lease_is_taken_once() -> None:
    released = Released()
    leases = RemoteLeases(released, clock=Clock())
    leases.add([lease(1, 1010.0)])
    assert leases.take(make_key(1)) is not None
    assert leases.take(make_key(1)) is None
    leases.drop([make_key(1)])
    assert not released.numbers


def test_newest_lease_of_a_chunk_is_kept() -> None:
    released = Released()
    leases = RemoteLeases(released, clock=Clock())
    leases.add([lease(1, 1010.0, key=5), lease(2, 1011.0, key=6)])
    leases.add([lease(3, 1012.0, key=5)])
    assert released.numbers == [1]
    found = leases.find(make_key(5))
    assert found is not None
    assert found.number == 3
    leases.drop([make_key(5), make_key(6), make_key(7)])
    assert released.numbers == [1, 3, 2]
    assert len(leases) == 0


@pytest.mark.parametrize(("lease", "usable"), [(10.0, 9.5), (1.0, 0.5), (0.2, 0.1)])
def test_end_of_lease_is_not_used(lease: float, usable: float) -> None:
    assert usable_seconds(lease) == pytest.approx(usable)


def test_outage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("kvtier")
    caplog.set_level(logging.INFO, "kvtier")
    outage = Outage(logger, "there:1")
    outage.end()
    for _ in range(3):
        outage.begin("lost", "it is gone")
    outage.end()
    outage.end()
    assert [record.getMessage() for record in caplog.records] == [
        "peer there:1: it is gone; continuing without it",
        "peer there:1: answers again",
    ]


def test_throughput_of_a_peer_is_that_of_overlapping_reads() -> None:
    clock = Clock()
    peer = PeerThroughput(clock)
    peer.begin(4 << 20)
    peer.begin(4 << 20)
    clock.now += 1.0
    peer.end(4 << 20, 4 << 20)
    clock.now += 1.0
    peer.end(4 << 20, 4 << 20)
    assert peer.seconds_per_byte == pytest.approx(2.0 / (8 << 20))
    clock.now += REMEMBERED_SECONDS + 1
    assert peer.seconds_per_byte is None


def test_throughput_of_a_new_peer_is_known_while_it_is_read_from() -> None:
    clock = Clock()
    peer = PeerThroughput(clock)
    peer.begin(64 << 20)
    clock.now += 1.0
    peer.end(1 << 19, 1 << 19)
    assert peer.seconds_per_byte is None
    clock.now += 1.0
    peer.end(1 << 19, 1 << 19)
    assert peer.seconds_per_byte == pytest.approx(2.0 / (1 << 20))


def test_fastest_peer_is_chosen_and_equal_ones_share() -> None:
    clock = Clock()
    peers = [PeerThroughput(clock) for _ in range(3)]
    for peer, seconds in zip(peers, (1.0, 1.0, 5.0), strict=True):
        peer.begin(64 << 20)
        clock.now += seconds
        peer.end(64 << 20, 64 << 20)
    chosen = []
    for _ in range(110):
        index = fastest(peers, 1 << 20)
        peers[index].assign(1 << 20)
        chosen.append(index)
    assert [chosen.count(index) for index in range(3)] == pytest.approx([50, 50, 10], abs=6)
    for index in chosen:
        peers[index].release(1 << 20)
    assert not any(peer.in_flight for peer in peers)
