"""A real Redis server on loopback: plain or TLS, optionally with a password or a memory limit."""

from __future__ import annotations

import shutil
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from kvtier.backends.redis import protocol
from kvtier.backends.redis.protocol import ErrorReply, encode, log_in
from kvtier.concurrency.sockets.connection import Connection, Deadline, TLSConnection
from kvtier.memory.keys import ChunkKey
from kvtier.testing.servers import TIMEOUT_SECONDS, Server, free_port

HOST = "127.0.0.1"


class TLSFiles(NamedTuple):
    """PEM files for a server, and for its clients to verify it."""

    certificate: Path
    """For the host ``127.0.0.1``."""
    key: Path
    authority: Path


class RedisServer(Server):
    """A ``redis-server`` without persistence.

    ``maxmemory`` is a size in Redis' syntax. Beyond it the server refuses writes, unless ``options`` (command
    line options) change that. ``unix``: listen on a Unix socket only.
    """

    type: ClassVar[str] = "redis"
    remedy: ClassVar[str] = "redis-server is not installed: apt-get install redis-server"
    """The result of :meth:`missing` without the program."""

    def __init__(
        self,
        folder: Path,
        *,
        password: str | None = None,
        maxmemory: str | None = None,
        tls: TLSFiles | None = None,
        unix: bool = False,
        options: Sequence[str] = (),
    ) -> None:
        super().__init__(folder)
        self.port = 0 if unix else free_port()
        self.password = password
        self._tls = tls
        self._unix_socket = folder / "s" if unix else None
        self._options = [
            *(["--requirepass", password] if password else []),
            *(["--maxmemory", maxmemory, "--maxmemory-policy", "noeviction"] if maxmemory else []),
            *options,
        ]

    @classmethod
    def missing(cls) -> str | None:
        """See :meth:`Server.missing`."""
        return None if cls.program() else cls.remedy

    @classmethod
    def program(cls) -> str | None:
        """Return the server's executable; ``None`` if it is not installed."""
        return shutil.which("redis-server")

    def tier(self) -> dict[str, Any]:
        """See :meth:`Server.tier`."""
        secure = "s" if self._tls else ""
        url = f"{self.type}{secure}://{HOST}:{self.port}"
        return {
            "type": self.type,
            "url": f"unix://{self._unix_socket}" if self._unix_socket else url,
            **({"password": self.password} if self.password else {}),
            **({"ca_file": str(self._tls.authority)} if self._tls else {}),
        }

    def command(self, *arguments: str | bytes) -> bytes | int:
        """Run a command, and return its reply, a status or a number. Raises ``OSError``, also for errors."""
        encoded = (argument.encode() if isinstance(argument, str) else argument for argument in arguments)
        with self.connection() as connection:
            connection.send([encode(*encoded)])
            reply = protocol.read_reply(connection)
        if isinstance(reply, ErrorReply):
            raise ConnectionError(reply.message)
        return reply

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Open an authenticated connection for a test's own commands. Raises ``OSError``."""
        family = socket.AF_UNIX if self._unix_socket else socket.AF_INET
        connection = TLSConnection(family, _lenient(self._tls), HOST) if self._tls else Connection(family)
        try:
            with Deadline(TIMEOUT_SECONDS).bounds(connection):
                connection.connect(str(self._unix_socket) if self._unix_socket else (HOST, self.port))
                log_in(connection, None, self.password, 0)
                yield connection
        finally:
            connection.close()

    def corrupt(self, key: ChunkKey) -> bool:
        """See :meth:`Server.corrupt`."""
        name = b"kvtier:" + key.hex().encode()
        middle = int(self.command("STRLEN", name)) // 2
        byte = bytearray(1)
        with self.connection() as connection:
            connection.send([encode(b"GETRANGE", name, b"%d" % middle, b"%d" % middle)])
            protocol.value_into(connection, memoryview(byte))
        self.command("SETRANGE", name, str(middle), bytes([byte[0] ^ 0x10]))
        return True

    def _launch(self) -> None:
        self._spawn(
            [str(self.program()), *self._listening(), "--save", "", "--appendonly", "no", *self._options]
        )

    def _listening(self) -> list[str]:
        if self._unix_socket:
            return ["--port", "0", "--unixsocket", str(self._unix_socket)]
        if self._tls is None:
            return ["--bind", HOST, "--port", str(self.port)]
        certificate, key, authority = map(str, self._tls)
        return [
            *("--bind", HOST, "--port", "0", "--tls-port", str(self.port)),
            *("--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", authority),
            *("--tls-auth-clients", "no"),
        ]

    def _answers(self) -> bool:
        try:
            return self.command("PING") == b"PONG"
        except OSError:
            return False


def _lenient(tls: TLSFiles) -> ssl.SSLContext:
    """Return a TLS context for this class, since a test may use another host's or a client certificate."""
    context = ssl.create_default_context(cafile=tls.authority)
    context.check_hostname = False
    context.load_cert_chain(tls.certificate, tls.key)
    return context
