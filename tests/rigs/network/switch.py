"""The network between the hosts: a process that forwards or drops every packet.

Each host is a network namespace with a TUN device; only this process has them open. When the process that
started it closes its control socket, for any reason, it kills everything on the hosts and exits. So nothing
remains after a ``kill -9`` of a test.

Requests and answers are JSON packets on that socket. An answer confirms that the request is in force.

See Linux' tuntap.rst and if_tun.h. A device opened with IFF_VNET_HDR puts a virtio_net_hdr of 10 bytes before
each packet. It is forwarded unchanged, so that no checksums have to be computed.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.rigs.network import namespaces

NETWORK = (10, 77, 0)
"""The first bytes of each host's address. The last byte is its number, from 1."""
DEVICE = "link0"
MAX_HOSTS = 250
MAX_MESSAGE_BYTES = 1 << 16
QUEUE_BYTES = 16 << 20
"""Queue size of each host on a network with a rate. Further packets are dropped, as routers do."""

_TUNSETIFF = 0x4004_54CA
_TUNSETOFFLOAD = 0x4004_54D0
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000
_IFF_VNET_HDR = 0x4000
_TUN_F_CSUM = 0x01
_VIRTIO_HEADER_BYTES = 10
_DESTINATION = slice(_VIRTIO_HEADER_BYTES + 16, _VIRTIO_HEADER_BYTES + 20)

_MTU = 65_520
"""Nearly the maximum, because Python handles each packet."""
_DEVICE_QUEUE = 10_000
"""In packets. Large, because the device drops further ones, which the test has not requested."""
_PACKETS_PER_READ = 64
_LONGEST_PAUSE = 1000.0
"""In seconds. epoll supports at most 24 days."""


def address(number: int) -> str:
    """Return the address of a host."""
    return ".".join(map(str, (*NETWORK, number)))


class _Waiting(NamedTuple):
    """A packet in flight."""

    due: float
    target: _Port
    packet: bytes


class _Port:
    """The connection of one host to the network."""

    def __init__(self, number: int) -> None:
        """Create the host. Raises ``OSError`` and ``subprocess.CalledProcessError``."""
        self.is_cut = False
        self.waiting: deque[_Waiting] = deque()
        self.free_at = 0.0
        """When the last packet has been sent, given the network's rate."""
        namespaces.leave()
        self.namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self.device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(self.device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
        fcntl.ioctl(self.device, _TUNSETOFFLOAD, _TUN_F_CSUM)
        with suppress(FileNotFoundError):  # A kernel without IPv6.
            # Hosts must not send packets that the test does not cause.
            Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
            Path(f"/proc/sys/net/ipv6/conf/{DEVICE}/disable_ipv6").write_text("1")
        for command in (
            "link set lo up",
            f"link set {DEVICE} up mtu {_MTU} txqueuelen {_DEVICE_QUEUE}",
            f"address add {address(number)}/24 dev {DEVICE}",
        ):
            subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)


class Switch:
    """A single-threaded loop that forwards packets until its control socket is closed."""

    def __init__(self, control: socket.socket, hosts: int, seed: int) -> None:
        home = os.open("/proc/self/ns/net", os.O_RDONLY)
        try:
            self.ports = [_Port(number) for number in range(1, hosts + 1)]
        finally:
            namespaces.enter(home)
            os.close(home)
        self._control = control
        self._random = random.Random(seed)
        self._buffer = memoryview(bytearray(_VIRTIO_HEADER_BYTES + _MTU))
        self._by_address = {bytes((*NETWORK, number)): port for number, port in enumerate(self.ports, 1)}
        self._delay = 0.0
        self._loss = 0.0
        self._rate = 0.0
        self._bytes_until_cut = 0
        self._counts = {"delivered": 0, "delivered_bytes": 0, "lost": 0, "cut_off": 0, "overflowed": 0}

    def run(self) -> None:
        """Forward packets and handle requests until the control socket is closed."""
        poll = select.epoll()
        poll.register(self._control, select.EPOLLIN)
        by_device = {port.device: port for port in self.ports}
        for device in by_device:
            poll.register(device, select.EPOLLIN)
        while True:
            for descriptor, _ in poll.poll(self._pause()):
                if descriptor in by_device:
                    self._read_packets(by_device[descriptor])
                elif not self._handle_request():
                    return
            self._deliver_due()

    def answer(self, descriptors: Sequence[int] = ()) -> None:
        """Send the current state."""
        in_flight = sum(len(port.waiting) for port in self.ports)
        state = {**self._counts, "in_flight": in_flight, "is_cut": [port.is_cut for port in self.ports]}
        socket.send_fds(self._control, [json.dumps(state).encode()], list(descriptors))

    def _handle_request(self) -> bool:
        message = self._control.recv(MAX_MESSAGE_BYTES)
        if not message:
            return False
        request: dict[str, Any] = json.loads(message)
        self._delay = request.get("delay", self._delay)
        self._loss = request.get("loss", self._loss)
        self._rate = request.get("rate", self._rate)
        self._bytes_until_cut = request.get("cut_after", self._bytes_until_cut)
        self._cut(self.ports[number] for number in request.get("cut", ()))
        for number in request.get("heal", ()):
            self.ports[number].is_cut = False
        self.answer()
        return True

    def _cut(self, ports: Iterable[_Port]) -> None:
        for cut in ports:
            cut.is_cut = True
            for port in self.ports:
                left = [item for item in port.waiting if cut not in (port, item.target)]
                self._counts["cut_off"] += len(port.waiting) - len(left)
                port.waiting = deque(left)

    def _pause(self) -> float | None:
        """Return the seconds until the next packet is due; ``None`` if no packet is in flight."""
        dues = [port.waiting[0].due for port in self.ports if port.waiting]
        return min(max(min(dues) - time.monotonic(), 0.0), _LONGEST_PAUSE) if dues else None

    def _read_packets(self, port: _Port) -> None:
        for _ in range(_PACKETS_PER_READ):
            try:
                packet = self._buffer[: os.readv(port.device, [self._buffer])]
            except BlockingIOError:
                return
            # Packets to other destinations, such as IPv6 multicast, are dropped.
            target = self._by_address.get(bytes(packet[_DESTINATION]))
            if target is None:
                continue
            if port.is_cut or target.is_cut:
                self._counts["cut_off"] += 1
            elif self._loss and self._random.random() < self._loss:
                self._counts["lost"] += 1
            elif self._delay or self._rate or port.waiting:
                self._enqueue(port, target, packet)
            else:
                self._deliver(target, packet)

    def _enqueue(self, port: _Port, target: _Port, packet: memoryview) -> None:
        due = now = time.monotonic()
        if self._rate:
            start = max(now, port.free_at)
            if (start - now) * self._rate > QUEUE_BYTES:
                self._counts["overflowed"] += 1
                return
            due = port.free_at = start + len(packet) / self._rate
        due += self._delay
        if port.waiting:
            due = max(due, port.waiting[-1].due)
        port.waiting.append(_Waiting(due, target, bytes(packet)))

    def _deliver_due(self) -> None:
        for port in self.ports:
            while port.waiting and port.waiting[0].due <= time.monotonic():
                _, target, packet = port.waiting.popleft()
                self._deliver(target, packet)

    def _deliver(self, target: _Port, packet: bytes | memoryview) -> None:
        length = len(packet) - _VIRTIO_HEADER_BYTES
        with suppress(OSError):  # The host is out of memory, or its device is down.
            os.write(target.device, packet)
            self._counts["delivered"] += 1
            self._counts["delivered_bytes"] += length
        if self._bytes_until_cut:
            self._bytes_until_cut = max(self._bytes_until_cut - length, 0)
            if not self._bytes_until_cut:
                self._cut(self.ports)


def kill_all_in(descriptors: Sequence[int], spared: int) -> None:
    """Send SIGKILL to all processes in these namespaces except ``spared``, until no process is left."""
    ours = {(os.fstat(descriptor).st_dev, os.fstat(descriptor).st_ino) for descriptor in descriptors}
    found = True
    while found:
        found = False
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and int(folder.name) != spared:
                found |= _kill_if_in(ours, int(folder.name))
        time.sleep(0.001 if found else 0)


def _kill_if_in(namespaces: set[tuple[int, int]], process: int) -> bool:
    try:
        # Open the pidfd first, so that the pid cannot be reused between the check and the signal.
        descriptor = os.pidfd_open(process)
    except OSError:
        return False
    try:
        where = Path(f"/proc/{process}/ns/net").stat()
        if (where.st_dev, where.st_ino) not in namespaces:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def main() -> None:
    """Run the network's process. Arguments: ``CONTROL PARENT HOSTS SEED``."""
    control = socket.socket(fileno=int(sys.argv[1]))
    parent = int(sys.argv[2])

    def exit_if_orphaned(*_: object) -> None:
        if os.getppid() != parent:  # Otherwise only the parent's thread has exited.
            sys.exit()

    signal.signal(signal.SIGTERM, exit_if_orphaned)
    # In addition to the closed socket, which a forked child of the test may keep open.
    namespaces.signal_at_parents_death(signal.SIGTERM)
    try:
        switch = Switch(control, hosts=int(sys.argv[3]), seed=int(sys.argv[4]))
    except (OSError, subprocess.CalledProcessError) as error:
        output = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else ""
        control.send(json.dumps({"error": f"{error} {output}".strip()}).encode())
        return
    inside = [port.namespace for port in switch.ports]
    try:
        switch.answer(inside)
        switch.run()
    finally:
        kill_all_in(inside, spared=parent)
