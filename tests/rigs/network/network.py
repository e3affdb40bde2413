"""The test's interface to the network and its hosts."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, Self

from kvtier.errors import KVTierError
from tests.rigs.forks import ROOT, Forked, run_module
from tests.rigs.network import namespaces, switch


class NetworkError(KVTierError):
    """The network could not be created, or its process exited."""


class Counts(NamedTuple):
    """Packet counts since the network was created, over both directions."""

    delivered: int
    """Received by a host."""
    delivered_bytes: int
    """Including IP and transport headers."""
    lost: int
    """Dropped by :meth:`Network.loss`."""
    cut_off: int
    """Dropped by :meth:`Network.cut`, including packets in flight at that moment."""
    overflowed: int
    """Dropped because the queue of a network with a rate was full."""
    in_flight: int
    """Currently in the network."""


class Host:
    """One host, with a loopback device, and the device :attr:`device` with the address :attr:`address`."""

    device = switch.DEVICE

    def __init__(self, number: int, namespace: int) -> None:
        self.address = switch.address(number)
        self.number = number
        self._namespace = namespace
        self._processes: list[subprocess.Popen[Any] | Forked] = []

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on this host. ``options`` are those of ``subprocess.Popen``.

        Its pid is that of the command. It shares this machine's file system, but /sys shows the host's
        devices. It and its child processes are killed when the network is closed or this process exits.
        """
        pass_fds = (*options.pop("pass_fds", ()), self._namespace)
        arguments = [namespaces.__file__, str(self._namespace), str(os.getpid()), *command]
        process = subprocess.Popen([sys.executable, "-I", "-S", *arguments], pass_fds=pass_fds, **options)
        self._processes.append(process)
        return process

    def python(self, module: str) -> Forked:
        """Run ``python -m MODULE`` on this host in a forked process, with pipes to its stdin and stdout."""
        with Connection(os.dup(self._namespace)) as namespace:
            arguments = (namespace, module)
            process = Forked(_run_module, arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._processes.append(process)
        return process

    def socket(
        self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM, protocol: int = 0
    ) -> socket.socket:
        """Create a socket of this host, for use by this process. Raises ``OSError``."""
        made: list[socket.socket] = []

        def make() -> None:
            with suppress(OSError):
                namespaces.enter(self._namespace)
                made.append(socket.socket(family, kind, protocol))

        # In a new thread, which never has to leave the namespace.
        thread = Thread(target=make, name="kvtier-network")
        thread.start()
        thread.join()
        if not made:
            raise OSError("the host does not exist any more")
        return made[0]

    def kill(self) -> None:
        """Kill the processes started with :meth:`popen` or :meth:`python`, but not their child processes."""
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """Release all resources. Call after :meth:`kill`."""
        for process in self._processes:
            process.wait()
        os.close(self._namespace)


class Network:
    """An isolated network of hosts. Methods block briefly; use from one thread.

    Initially there is no delay, no loss and no rate limit. A setting is in force when its method returns, and
    applies to packets sent from then on.
    """

    def __init__(self, hosts: int = 2, *, seed: int = 0) -> None:
        """Create the network. ``seed`` determines which packets are lost. Raises :class:`NetworkError`."""
        if not 1 <= hosts <= switch.MAX_HOSTS:
            raise NetworkError(f"{hosts} hosts: a network has 1 to {switch.MAX_HOSTS}")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            arguments = [theirs.fileno(), os.getpid(), hosts, seed]
            # In a new session, so that Ctrl+C interrupts only the test, which then closes the network.
            self.switch = subprocess.Popen(
                [sys.executable, "-c", f"from {switch.__name__} import main; main()", *map(str, arguments)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=ROOT,
            )
        message, descriptors, _, _ = socket.recv_fds(self._control, switch.MAX_MESSAGE_BYTES, hosts)
        self.hosts = tuple(Host(number, descriptor) for number, descriptor in enumerate(descriptors, 1))
        """All hosts, in a fixed order."""
        try:
            self._state = self._read(message)
        except BaseException:
            self.close()
            raise

    @staticmethod
    @cache
    def missing() -> str | None:
        """Return why a network cannot be created here, with the remedy; ``None`` if it can."""
        if shutil.which("ip") is None:
            return "the command ip is missing: install the package iproute2"
        if os.geteuid() != 0:
            return "network namespaces need root"
        if not Path("/dev/net/tun").exists():
            return "/dev/net/tun is missing: load the module tun, or pass the device to this container"
        try:
            Network(hosts=1).close()
        except NetworkError as error:
            return str(error)
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes on the hosts, and remove the hosts. Idempotent."""
        if self._control.fileno() < 0:
            return
        # First: a process that is just starting could otherwise enter its host after the clean-up.
        for host in self.hosts:
            host.kill()
        self._control.close()
        self.switch.wait()
        for host in self.hosts:
            host.close()

    def delay(self, seconds: float) -> None:
        """Set the minimum one-way latency between hosts; a round trip takes twice as long."""
        self._request(delay=float(seconds))

    def loss(self, share: float) -> None:
        """Set the share of packets to drop, from 0 to 1."""
        self._request(loss=float(share))

    def rate(self, bytes_a_second: float | None) -> None:
        """Limit how much each host can send; ``None``: unlimited."""
        self._request(rate=float(bytes_a_second or 0))

    def cut(self, *hosts: Host) -> None:
        """Disconnect these hosts, or all. Packets in flight are dropped."""
        self._request(cut=[host.number - 1 for host in hosts or self.hosts])

    def cut_after(self, delivered_bytes: int) -> None:
        """Disconnect all hosts after so many more bytes were delivered: in the middle of a transfer."""
        self._request(cut_after=delivered_bytes)

    def heal(self, *hosts: Host) -> None:
        """Reconnect these hosts, or all, and cancel a pending :meth:`cut_after`."""
        self._request(heal=[host.number - 1 for host in hosts or self.hosts], cut_after=0)

    @property
    def is_cut(self) -> bool:
        """Whether any host is disconnected."""
        self._request()
        return any(self._state["is_cut"])

    @property
    def counts(self) -> Counts:
        """The current packet counts."""
        self._request()
        return Counts(*(self._state[name] for name in Counts._fields))

    def _request(self, **request: object) -> None:
        message = b""
        with suppress(OSError):
            self._control.send(json.dumps(request).encode())
            message = self._control.recv(switch.MAX_MESSAGE_BYTES)
        self._state = self._read(message)

    def _read(self, message: bytes) -> dict[str, Any]:
        if not message:
            raise NetworkError("the network's process exited")
        state: dict[str, Any] = json.loads(message)
        if "error" in state:
            raise NetworkError(f"cannot create the network: {state['error']}")
        return state


def _run_module(namespace: Connection, module: str) -> None:
    """Run a module on a host. The process's main function."""
    namespaces.enter(namespace.fileno())
    namespace.close()
    # Check only now: from here on, the clean-up of the namespace after the test's exit finds this process.
    test = multiprocessing.parent_process()
    if test is None or not test.is_alive():
        sys.exit("the test's process has exited")
    namespaces.see_own_devices()
    run_module(module)
