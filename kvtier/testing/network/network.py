"""What a test says to the network, and what it starts on its hosts."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, Self

from kvtier.errors import KVTierError
from kvtier.testing.network import namespaces, relay


class NetworkError(KVTierError):
    """The network cannot be made, or its process has died."""


class Counts(NamedTuple):
    """What has become of the packets since the network was made, in both directions together."""

    carried: int
    carried_bytes: int
    """With the headers of IP and what is in it."""
    lost: int
    """By :meth:`Network.loss`."""
    cut_off: int
    """By :meth:`Network.cut`; those on their way at that moment among them."""
    overflown: int
    """Dropped because too much was waiting for a network with a rate."""
    under_way: int
    """At this moment."""


class Host:
    """One host: its loopback, and the device :attr:`device` with the address :attr:`address`."""

    device = relay.DEVICE

    def __init__(self, number: int, namespace: int) -> None:
        self.address = relay.address(number)
        self.number = number
        self._namespace = namespace
        self._processes: list[subprocess.Popen[Any]] = []

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:  # noqa: ANN401 - as Popen
        """Start a process on this host; the options are those of ``subprocess.Popen``.

        Its number is the command's own. Files are those of this machine, but /sys shows the host's devices.
        It is killed when the network is closed, or when this process dies, and so is whatever it starts.
        """
        pass_fds = (*options.pop("pass_fds", ()), self._namespace)
        arguments = [namespaces.__file__, str(self._namespace), str(os.getpid()), *command]
        process = subprocess.Popen([sys.executable, "-I", "-S", *arguments], pass_fds=pass_fds, **options)
        self._processes.append(process)
        return process

    def socket(
        self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM, protocol: int = 0
    ) -> socket.socket:
        """A socket of this host, for this process. Raises ``OSError``."""
        made: list[socket.socket] = []

        def make() -> None:
            with suppress(OSError):
                namespaces.enter(self._namespace)
                made.append(socket.socket(family, kind, protocol))

        # A thread of its own, which never has to find its way back.
        thread = Thread(target=make, name="kvtier-network")
        thread.start()
        thread.join()
        if not made:
            raise OSError("the host is gone")
        return made[0]

    def kill(self) -> None:
        """End the processes that were started here, but not yet what they have started."""
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """After :meth:`kill`: let go of everything."""
        for process in self._processes:
            process.wait()
        os.close(self._namespace)


class Network:
    """Hosts that reach each other and nobody else. Blocks for as long as its process needs; one thread.

    At first it is as fast as it can be and loses nothing. What is set is in force when the method returns,
    and holds for what is sent from then on.
    """

    def __init__(self, hosts: int = 2, *, seed: int = 0) -> None:
        """Make it. ``seed`` begins the row of random numbers by which packets are lost.

        Raises :class:`NetworkError`.
        """
        if not 1 <= hosts <= relay.MAX_HOSTS:
            raise NetworkError(f"{hosts} hosts: a network has 1 to {relay.MAX_HOSTS}")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            arguments = [theirs.fileno(), os.getpid(), hosts, seed]
            # In a session of its own: a Ctrl+C is for the test, which closes the network then.
            self._relay = subprocess.Popen(
                [sys.executable, "-c", f"from {relay.__name__} import main; main()", *map(str, arguments)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        message, descriptors, _, _ = socket.recv_fds(self._control, relay.MAX_MESSAGE_BYTES, hosts)
        self.hosts = tuple(Host(number, descriptor) for number, descriptor in enumerate(descriptors, 1))
        try:
            self._state = self._read(message)
        except BaseException:
            self.close()
            raise

    @staticmethod
    @cache
    def missing() -> str | None:
        """Why there can be no network here, and what to do about it; ``None`` where there can."""
        if shutil.which("ip") is None:
            return "the command ip is missing: install the package iproute2"
        if os.geteuid() != 0:
            return "hosts of their own are network namespaces, which only root may make"
        if not Path("/dev/net/tun").exists():
            return "there is no /dev/net/tun: load the module tun, or give it to this container"
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
        """Kill whatever runs on the hosts, and end them. Harmless when repeated."""
        if self._control.fileno() < 0:
            return
        # First, or one that is just being started would come to its host when all is over.
        for host in self.hosts:
            host.kill()
        self._control.close()
        self._relay.wait()
        for host in self.hosts:
            host.close()

    def delay(self, seconds: float) -> None:
        """How long each packet takes from host to host, at least; an answer takes as long again."""
        self._ask(delay=float(seconds))

    def loss(self, share: float) -> None:
        """Which share of the packets is lost, from 0 to 1."""
        self._ask(loss=float(share))

    def rate(self, bytes_a_second: float | None) -> None:
        """How much each host can send; ``None``: as much as it can."""
        self._ask(rate=float(bytes_a_second or 0))

    def cut(self, *hosts: Host) -> None:
        """Cut these hosts off, or all: nothing comes through, and what is on its way is lost."""
        self._ask(cut=[host.number - 1 for host in hosts or self.hosts])

    def cut_after(self, carried_bytes: int) -> None:
        """:meth:`cut` all hosts once so many more bytes have come through: in the middle of a transfer."""
        self._ask(cut_after=carried_bytes)

    def heal(self, *hosts: Host) -> None:
        """The inverse of :meth:`cut`; a :meth:`cut_after` that is still to come is taken back, too."""
        self._ask(heal=[host.number - 1 for host in hosts or self.hosts], cut_after=0)

    @property
    def is_cut(self) -> bool:
        """Whether any host is cut off."""
        self._ask()
        return any(self._state["is_cut"])

    @property
    def counts(self) -> Counts:
        """What has become of the packets so far."""
        self._ask()
        return Counts(*(self._state[name] for name in Counts._fields))

    def _ask(self, **request: object) -> None:
        message = b""
        with suppress(OSError):
            self._control.send(json.dumps(request).encode())
            message = self._control.recv(relay.MAX_MESSAGE_BYTES)
        self._state = self._read(message)

    def _read(self, message: bytes) -> dict[str, Any]:
        if not message:
            raise NetworkError("the network's process has ended")
        state: dict[str, Any] = json.loads(message)
        if "error" in state:
            raise NetworkError(f"the network cannot be made: {state['error']}")
        return state
