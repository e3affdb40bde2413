"""A real InfiniStore server on loopback, over TCP. Needs no RDMA device."""

from __future__ import annotations

import ctypes
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata, util
from pathlib import Path
from typing import Any, ClassVar

from kvtier.backends.infinistore.backend import Pointer, read_pointer
from kvtier.backends.infinistore.protocol import InfiniStoreConnection
from kvtier.concurrency.sockets.connection import Deadline
from kvtier.memory.keys import ChunkKey
from kvtier.testing.servers import TIMEOUT_SECONDS, Server, free_port

HOST = "127.0.0.1"
NEWEST_UVLOOP = (0, 21)
"""The server uses uvloop's internals, and crashes with a newer version."""
VERBS = Path(__file__).with_name("infinistore_verbs.c")

_LAUNCH = """
import sys
from infinistore import server

server.prevent_oom = lambda: None  # Needs privileges.
sys.argv[1:] = {arguments!r}
server.main()
"""


class InfiniStoreServer(Server):
    """An InfiniStore server with 1 GB of memory and a fake RDMA device."""

    type: ClassVar[str] = "infinistore"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port = free_port()
        self._manage_port = free_port()
        self._verbs = folder / "verbs.so"

    @classmethod
    def missing(cls) -> str | None:
        """See :meth:`Server.missing`."""
        if util.find_spec("infinistore") is None or util.find_spec("uvloop") is None:
            return "infinistore is not installed: pip install infinistore==0.2.35 uvloop==0.21.0"
        version = tuple(map(int, metadata.version("uvloop").split(".")[:2]))
        if version > NEWEST_UVLOOP:
            return f"InfiniStore's server crashes with uvloop {version}: pip install uvloop==0.21.0"
        if shutil.which("cc") is None:
            return "a C compiler is missing: apt-get install gcc libc6-dev"
        try:
            ctypes.CDLL("libibverbs.so.1")
        except OSError:
            return "libibverbs is missing: apt-get install libibverbs1"
        return None

    def tier(self) -> dict[str, Any]:
        """See :meth:`Server.tier`."""
        return {"type": self.type, "url": f"infinistore://{HOST}:{self.port}", "connection": "tcp"}

    def corrupt(self, key: ChunkKey, prefix: str = "kvtier:") -> bool:
        """See :meth:`Server.corrupt`."""
        base = f"{prefix}{key.hex()}".encode()
        with self.connected() as connection:
            pointer = read_pointer(connection, base)
            if pointer is None:
                return False
            value = bytearray(pointer.length)
            connection.get(pointer.name(base), memoryview(value))
            value[len(value) // 2] ^= 1
            replaced = Pointer(pointer.nonce[::-1], pointer.length)
            connection.put(replaced.name(base), memoryview(value))
            connection.put(base, replaced.pack())
        return True

    @contextmanager
    def connected(self) -> Iterator[InfiniStoreConnection]:
        """Open a connection for a test's own requests. Raises ``OSError``."""
        connection = InfiniStoreConnection(socket.AF_INET)
        connection.deadline = Deadline(TIMEOUT_SECONDS)
        try:
            connection.connect((HOST, self.port))
            yield connection
        finally:
            connection.close()

    def _launch(self) -> None:
        if not self._verbs.exists():
            command = ["cc", "-shared", "-fPIC", "-w", "-o", str(self._verbs), str(VERBS)]
            subprocess.run(command, check=True, capture_output=True)
        arguments = [
            *("--service-port", str(self.port), "--manage-port", str(self._manage_port)),
            *("--prealloc-size", "1", "--minimal-allocate-size", "16"),
            *("--dev-name", "mlx5_0", "--link-type", "IB", "--log-level", "warning"),
        ]
        launch = _LAUNCH.format(arguments=arguments)
        self._spawn([sys.executable, "-c", launch], {"LD_PRELOAD": str(self._verbs)})

    def _answers(self) -> bool:
        try:
            with self.connected() as connection:
                return list(connection.exist([b"anything"])) == [False]
        except OSError:
            return False
