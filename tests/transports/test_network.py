"""The emulated network itself: delay, rate, loss and cuts work as configured, and nothing is leaked."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from tests.rigs.network import Host, Network, NetworkError
from tests.rigs.network.network import ROOT
from tests.rigs.waiting import wait_until

TIMEOUT_SECONDS = 30.0
PORT = 5000
SLEEP = ["sleep", "1000"]


@pytest.fixture(autouse=True)
def _skip_if_unsupported() -> None:
    if reason := Network.missing():
        pytest.skip(reason)


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as network:
        yield network


def datagrams(host: Host) -> socket.socket:
    bound = host.socket(kind=socket.SOCK_DGRAM)
    bound.bind((host.address, PORT))
    bound.settimeout(TIMEOUT_SECONDS)
    return bound


def connected(network: Network) -> tuple[socket.socket, socket.socket]:
    """Open a TCP connection from the first host to the second, and return both ends."""
    near, far = network.hosts
    with far.socket() as listener:
        listener.bind((far.address, PORT))
        listener.listen()
        ours = near.socket()
        ours.connect((far.address, PORT))
        theirs, _ = listener.accept()
    ours.settimeout(TIMEOUT_SECONDS)
    theirs.settimeout(TIMEOUT_SECONDS)
    return ours, theirs


def receive(connection: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length and (data := connection.recv(1 << 20)):
        received += data
    return bytes(received)


def wait_until_exited(pid: int) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still running"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_datagrams_arrive_unchanged(network: Network) -> None:
    near, far = network.hosts
    sent = [bytes([number]) * size for number, size in enumerate([1, 100, 1472, 9000, 65_000])]
    with datagrams(near) as ours, datagrams(far) as theirs:
        for data in sent:
            ours.sendto(data, (far.address, PORT))
        assert [theirs.recvfrom(1 << 16) for _ in sent] == [(data, (near.address, PORT)) for data in sent]


def test_connection_transfers_megabytes_unchanged(network: Network) -> None:
    data = os.urandom(16 << 20)
    ours, theirs = connected(network)
    with ours, theirs:
        sending = Thread(target=ours.sendall, args=[data])
        sending.start()
        received = receive(theirs, len(data))
        sending.join()
    assert received == data
    assert network.counts.delivered_bytes > len(data)
    assert network.counts.overflowed == network.counts.lost == network.counts.cut_off == 0


def test_host_reaches_only_itself(network: Network) -> None:
    near, _ = network.hosts
    with near.socket() as listener, near.socket() as ours:
        listener.bind(("127.0.0.1", PORT))
        listener.listen()
        ours.connect(("127.0.0.1", PORT))
    with socket.create_server(("127.0.0.1", 0)) as outside, near.socket() as ours:
        with pytest.raises(ConnectionRefusedError):
            ours.connect(outside.getsockname())
        with pytest.raises(OSError, match="unreachable"):
            ours.connect(("192.0.2.1", PORT))


def test_process_sees_interfaces_of_its_host(network: Network) -> None:
    interfaces = [
        host.popen(["ls", "/sys/class/net"], stdout=subprocess.PIPE, text=True).communicate()[0].split()
        for host in network.hosts
    ]
    assert interfaces == [["link0", "lo"]] * 2


def test_delay_applies_each_way_and_keeps_order(network: Network) -> None:
    near, far = network.hosts
    with datagrams(near) as ours, datagrams(far) as theirs:
        network.delay(0.05)
        start = time.monotonic()
        ours.sendto(b"there", (far.address, PORT))
        _, sender = theirs.recvfrom(100)
        assert time.monotonic() - start >= 0.05
        theirs.sendto(b"and back", sender)
        ours.recv(100)
        assert time.monotonic() - start >= 0.1

        for number in range(100):
            if number == 50:
                network.delay(0)  # Later packets must not overtake packets in flight.
            ours.sendto(bytes([number]), (far.address, PORT))
        assert [theirs.recv(100) for _ in range(100)] == [bytes([number]) for number in range(100)]


def test_rate_is_limited(network: Network) -> None:
    near, far = network.hosts
    network.rate(100_000)
    with datagrams(near) as ours, datagrams(far) as theirs:
        start = time.monotonic()
        for _ in range(10):
            ours.sendto(bytes(3_000), (far.address, PORT))
        for _ in range(10):
            theirs.recv(1 << 16)
        assert time.monotonic() - start >= 0.3


def test_rate_limited_queue_is_bounded(network: Network) -> None:
    near, far = network.hosts
    network.rate(1)
    with datagrams(near) as ours:
        for _ in range(400):
            ours.sendto(bytes(60_000), (far.address, PORT))
        wait_until(lambda: network.counts.overflowed > 100)
        assert network.counts.delivered == 0


def test_loss_is_random_and_reproducible() -> None:
    lost = []
    for seed in (1, 1, 2):
        with Network(seed=seed) as network:
            near, far = network.hosts
            network.loss(0.2)
            with datagrams(near) as ours, datagrams(far):
                for number in range(1000):
                    ours.sendto(str(number).encode(), (far.address, PORT))
                wait_until(lambda: network.counts.delivered + network.counts.lost == 1000)
            lost.append(network.counts.lost)
    assert lost[0] == lost[1]
    assert all(100 < count < 300 for count in lost)


def test_tcp_retransmits_lost_packets(network: Network) -> None:
    ours, theirs = connected(network)
    data = os.urandom(8 << 20)
    network.loss(0.1)
    with ours, theirs:
        sending = Thread(target=ours.sendall, args=[data])
        sending.start()
        received = receive(theirs, len(data))
        sending.join()
    assert received == data
    assert network.counts.lost > 0


def test_cut_drops_everything_until_healed(network: Network) -> None:
    near, far = network.hosts
    with datagrams(near) as ours, datagrams(far) as theirs:
        network.delay(1000)
        ours.sendto(b"on its way", (far.address, PORT))
        wait_until(lambda: network.counts.in_flight == 1)
        network.cut()
        assert network.is_cut
        network.delay(0)
        ours.sendto(b"lost", (far.address, PORT))
        theirs.sendto(b"lost, too", (near.address, PORT))
        wait_until(lambda: network.counts.cut_off == 3)
        network.heal()
        assert not network.is_cut
        ours.sendto(b"here", (far.address, PORT))
        assert theirs.recv(100) == b"here"
        assert network.counts.delivered == 1


def test_connection_survives_cut(network: Network) -> None:
    ours, theirs = connected(network)
    with ours, theirs:
        network.cut()
        ours.sendall(b"later")
        wait_until(lambda: network.counts.cut_off > 0)
        network.heal()
        assert theirs.recv(100) == b"later"


def test_cut_after_a_number_of_bytes(network: Network) -> None:
    ours, theirs = connected(network)
    size = 8 << 20
    network.cut_after(size // 2)
    received = []
    with ours, theirs:
        threads = [
            Thread(target=ours.sendall, args=[bytes(size)]),
            Thread(target=lambda: received.append(receive(theirs, size))),
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: network.is_cut)
        assert size // 2 <= network.counts.delivered_bytes < size
        network.heal()
        for thread in threads:
            thread.join()
    assert received == [bytes(size)]


def test_one_of_three_hosts_is_cut_off() -> None:
    with Network(hosts=3) as network:
        first, second, third = network.hosts
        with (
            datagrams(first) as first_socket,
            datagrams(second) as second_socket,
            datagrams(third) as third_socket,
        ):
            network.cut(third)
            first_socket.sendto(b"to three", (third.address, PORT))
            third_socket.sendto(b"from three", (first.address, PORT))
            wait_until(lambda: network.counts.cut_off == 2)
            first_socket.sendto(b"to two", (second.address, PORT))
            assert second_socket.recv(100) == b"to two"
            network.heal(third)
            first_socket.sendto(b"to three", (third.address, PORT))
            assert third_socket.recv(100) == b"to three"


def test_close_leaks_nothing() -> None:
    descriptors = set(Path("/proc/self/fd").iterdir())
    with Network() as network:
        # The shell's child outlives it, in its own session.
        shell = network.hosts[0].popen(
            ["sh", "-c", "setsid sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True
        )
        assert shell.stdout is not None
        with shell.stdout as output:
            grandchild = int(output.readline())
        sleeper = network.hosts[1].popen(SLEEP)
    assert shell.returncode == sleeper.returncode == -signal.SIGKILL
    wait_until_exited(grandchild)
    assert set(Path("/proc/self/fd").iterdir()) == descriptors
    network.close()
    with pytest.raises(OSError, match="does not exist any more"):
        network.hosts[0].socket()


KILLED_TEST = """
import sys, time
from threading import Thread
from tests.rigs.network import Network

network = Network()
sleepers = []
# Started from a thread that exits, which must not end the process.
thread = Thread(target=lambda: sleepers.append(network.hosts[1].popen(["sleep", "1000"])))
thread.start()
thread.join()
print(network.switch.pid, sleepers[0].pid, flush=True)
time.sleep(1000)
"""


def test_killed_test_leaks_no_processes() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_TEST], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as test:
        assert test.stdout is not None
        pids = [int(pid) for pid in test.stdout.readline().split()]
        assert all(is_alive(pid) for pid in pids)
        test.kill()
    for pid in pids:
        wait_until_exited(pid)


def test_dead_switch_is_reported() -> None:
    with Network() as network:
        sleeper = network.hosts[0].popen(SLEEP)
        network.switch.kill()
        network.switch.wait()
        with pytest.raises(NetworkError, match="exited"):
            network.cut()
        sleeper.kill()


def test_setup_failure_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NetworkError, match=r"No such file.*'ip'"):
        Network()
    with pytest.raises(NetworkError, match="0 hosts"):
        Network(hosts=0)
    Network.missing.cache_clear()
    try:
        assert "iproute2" in (Network.missing() or "")
    finally:
        Network.missing.cache_clear()
