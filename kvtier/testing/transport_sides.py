"""The two sides of the transport conformance suite: one in the test process, one in a process of its own.

A side is an arena, its grants, the transport, and for transports over connections a minimal listener and
dialer without authentication. Requests to the other process and its answers are lines of JSON:
``[name, arguments]``, and ``{"result": ...}`` or ``{"error": why}``.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup
from xxhash import xxh3_128_hexdigest

from kvtier.backends.base import Outcome
from kvtier.concurrency.sockets.connection import Connection, Deadline, TLSConnection
from kvtier.concurrency.tasks import open_background_tasks
from kvtier.memory.arena import Arena
from kvtier.memory.slices import Lease
from kvtier.rpc.listener import accept_all
from kvtier.testing.noise import noise, poison, same
from kvtier.testing.relay import Relay
from kvtier.transports.base import Access, Dial, Link, RemoteSpan, SupportsConnections, Transport
from kvtier.units import MIB

LOOPBACK = "127.0.0.1"
TIMEOUT_SECONDS = 60.0
"""How long to wait for a condition."""
Method = Literal["read", "write"]
Buffer = bytes | bytearray | memoryview

_PATTERN_BYTES = MIB + 13
"""Not a multiple of any page or part size, so that bytes at a wrong offset differ."""


class Certificate(NamedTuple):
    """The files of a self-signed certificate, for connections over TLS."""

    certificate: str
    key: str


def pattern(seed: int, length: int) -> bytes:
    """Return pseudo-random bytes that depend on the seed only."""
    once = noise(b"pattern %d" % seed, min(length, _PATTERN_BYTES))
    return (once * -(-length // max(len(once), 1)))[:length]


def allocate(arena: Arena, lengths: Sequence[int]) -> list[Lease]:
    """Allocate memory in an arena. Fails if it is too small."""
    leases = [lease for length in lengths if (lease := arena.allocate(length)) is not None]
    assert len(leases) == len(lengths), "the test's arena is too small"
    return leases


class SimpleGrants:
    """A minimal implementation of ``Grants``."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._granted: dict[int, tuple[Access | None, list[Lease]]] = {}
        self.checksums: dict[RemoteSpan, bytes] = {}
        """Of the spans that the transport has hashed, as they arrived last."""

    @property
    def leases(self) -> int:
        """Number of leases held by the grants themselves."""
        return sum(len(slices) for _, slices in self._granted.values())

    def grant(self, lengths: Sequence[int], access: Access | None, seed: int) -> list[RemoteSpan]:
        """Grant a slice of each length, filled with ``pattern(seed)``, ``pattern(seed + 1)`` and so on.

        ``access``: ``None`` allows both kinds.
        """
        slices = allocate(self._arena, lengths)
        for index, lease in enumerate(slices):
            lease.view[:] = pattern(seed + index, lease.length)
        self._arena.settle()
        number = secrets.randbits(63)
        self._granted[number] = (access, slices)
        return [RemoteSpan(number, lease.offset, lease.length) for lease in slices]

    def revoke(self, number: int) -> None:
        """End a grant."""
        _, slices = self._granted.pop(number)
        for lease in slices:
            lease.release()

    def clear(self) -> None:
        """End all grants."""
        for number in list(self._granted):
            self.revoke(number)

    def hold(self, span: RemoteSpan, access: Access) -> Lease | None:
        """See :class:`kvtier.transports.base.Grants`."""
        granted, slices = self._granted.get(span.grant, (None, []))
        if granted not in (access, None) or span.length < 0:
            return None
        for lease in slices:
            if lease.offset <= span.offset and span.offset + span.length <= lease.offset + lease.length:
                return lease.share()
        return None

    def arrived(self, span: RemoteSpan, checksum: bytes) -> None:
        """See :class:`kvtier.transports.base.Grants`."""
        self.checksums[span] = checksum


class Side:
    """An open transport with its arena. Create with :meth:`open`."""

    def __init__(self, arena: Arena, transport: Transport, port: int) -> None:
        self.arena = arena
        self.transport = transport
        self.grants = SimpleGrants(arena)
        self.port = port
        """The port it listens on; 0 if the transport needs no connections."""

    @property
    def transfer_leases(self) -> int:
        """Number of leases on this arena, without those of the grants."""
        return self.arena.leases - self.grants.leases

    def allocate(self, lengths: Sequence[int]) -> list[Lease]:
        """Allocate memory in the arena. Fails if it is too small."""
        return allocate(self.arena, lengths)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        kind: type[Transport],
        settings: Mapping[str, Any],
        capacity: int,
        certificate: Certificate | None = None,
        address: str = LOOPBACK,
    ) -> AsyncIterator[Side]:
        """Open a transport on an arena filled with a sentinel byte. Close it when the block exits.

        Fails if a transfer holds a lease then.
        """
        arena = Arena.create(capacity)
        await anyio.to_thread.run_sync(poison, arena.view(0, arena.capacity))
        transport = kind(kind.settings_type.model_validate(dict(settings)))
        side = cls(arena, transport, 0)
        try:
            await transport.open(arena, side.grants)
            try:
                async with _listening(transport, certificate, address) as side.port:
                    yield side
            finally:
                await transport.close()
                side.grants.clear()
            assert arena.leases == 0, f"{arena.leases} leases are still open after close"
        finally:
            arena.close()


@asynccontextmanager
async def _listening(
    transport: Transport, certificate: Certificate | None, address: str
) -> AsyncIterator[int]:
    if not isinstance(transport, SupportsConnections):
        yield 0
        return
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.certificate, certificate.key)
        context.load_verify_locations(certificate.certificate)
        context.verify_mode = ssl.CERT_REQUIRED
        # No session tickets: an idle connection with unread data counts as broken.
        context.num_tickets = 0
    listener = socket.create_server((address, 0), backlog=128)
    listener.setblocking(False)
    with listener:
        async with open_background_tasks() as tasks:
            tasks.start_soon(accept_all, listener, partial(_serve, transport, context))
            yield listener.getsockname()[1]


async def _serve(
    transport: SupportsConnections, context: ssl.SSLContext | None, connected: socket.socket, _: object
) -> None:
    with suppress(OSError):
        secured = connected if context is None else await _secured(context, connected)
        with secured:
            await transport.serve(secured)


async def _secured(context: ssl.SSLContext, connected: socket.socket) -> socket.socket:
    secured = context.wrap_socket(connected, server_side=True, do_handshake_on_connect=False)
    secured.settimeout(5)
    try:
        await anyio.to_thread.run_sync(secured.do_handshake)
    except BaseException:
        secured.close()
        raise
    return secured


def dial_to(port: int, certificate: Certificate | None = None, address: str = LOOPBACK) -> Dial:
    """Return a ``Dial`` to a side, by default on this host."""
    return partial(_dial, (address, port), certificate)


def _dial(address: tuple[str, int], certificate: Certificate | None, deadline: Deadline) -> Connection:
    connection: Connection
    if certificate is None:
        connection = Connection(socket.AF_INET)
    else:
        context = ssl.create_default_context(cafile=certificate.certificate)
        context.load_cert_chain(Path(certificate.certificate), Path(certificate.key))
        connection = TLSConnection(socket.AF_INET, context, LOOPBACK)
    try:
        with deadline.bounds(connection):
            connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def dial_nowhere(_: Deadline) -> Connection:
    """Raise ``OSError``. The ``Dial`` for transports that need no connections."""
    raise OSError("this transport must not need connections")


class OtherProcess:
    """A handle on the process. Make no calls while the process is paused."""

    def __init__(self, module: str = __name__, environment: Mapping[str, str] | None = None) -> None:
        """``module``: runs :func:`serve_commands`. ``environment``: by default, that of this process."""
        self._module = module
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process unless it is running. Blocks only while spawning it."""
        if self._process is not None and self._process.poll() is None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Transports are passed by module name, so everything the tests can import must be importable.
            env={**(self._environment or os.environ), "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # Ctrl-C must not end it before the links to it are closed.
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._running.pid

    @property
    def is_running(self) -> bool:
        """Whether the process was started and not killed."""
        return self._process is not None

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the process was not started"
        return self._process

    async def do(self, name: str, **arguments: object) -> Any:  # noqa: ANN401 - what JSON can hold
        """Like :meth:`call`, in a worker thread."""
        return await anyio.to_thread.run_sync(partial(self.call, name, **arguments))

    def call(self, name: str, **arguments: object) -> Any:  # noqa: ANN401 - what JSON can hold
        """Run one of the process's commands, such as those of :class:`Commands`, and return its result."""
        process = self._running
        assert process.stdin is not None
        assert process.stdout is not None
        with self._lock:
            process.stdin.write(json.dumps([name, arguments]).encode() + b"\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        if not reply:
            raise ConnectionError(f"the other process exited with code {process.wait()}")
        answer = json.loads(reply)
        if "error" in answer:
            raise AssertionError(f"in the other process: {answer['error']}")
        return answer["result"]

    async def open(
        self,
        kind: type[Transport],
        settings: dict[str, Any],
        capacity: int,
        certificate: Certificate | None,
    ) -> tuple[bytes, int]:
        """Open a side in the process. Return its endpoint, and the port that it listens on."""
        answer = await self.do(
            "open", kind=name_of(kind), settings=settings, capacity=capacity, certificate=certificate
        )
        return bytes.fromhex(answer["endpoint"]), answer["port"]

    async def grant(
        self, lengths: Sequence[int], *, access: Access | None = Access.READ, seed: int = 0
    ) -> list[RemoteSpan]:
        """Grant slices in the process; see ``SimpleGrants.grant``."""
        spans = await self.do("grant", lengths=lengths, access=access and access.value, seed=seed)
        return [RemoteSpan(*span) for span in spans]

    async def digest(self, offset: int, length: int) -> str:
        """Return the 128-bit XXH3 digest of a range of the process's arena."""
        digest: str = await self.do("digest", offset=offset, length=length)
        return digest

    def pause(self) -> None:
        """Send SIGSTOP, and wait until the process is stopped."""
        self._running.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._running.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """Send SIGCONT."""
        self._running.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has exited. Idempotent."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process = None


def name_of(kind: type[Transport]) -> str:
    """Return the name of a transport in the command ``open``."""
    return f"{kind.__module__}:{kind.__qualname__}"


class Commands:
    """The commands of a process with a side."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()

    async def open(
        self,
        kind: str,
        settings: dict[str, Any],
        capacity: int,
        certificate: Sequence[str] | None = None,
        address: str = LOOPBACK,
    ) -> dict[str, object]:
        """Open the side. ``kind``: the transport's :func:`name_of`."""
        module, _, name = kind.partition(":")
        transport: Any = attrgetter(name)(importlib.import_module(module))
        self._certificate = Certificate(*certificate) if certificate else None
        self.side = await self._stack.enter_async_context(
            Side.open(transport, settings, capacity, self._certificate, address)
        )
        return {"endpoint": self.side.transport.endpoint.hex(), "port": self.side.port}

    async def close(self) -> None:
        """Close everything that was opened. Fails if a transfer holds a lease then."""
        stack, self._stack = self._stack, AsyncExitStack()
        await stack.aclose()
        # An arena that is closed while garbage holds a view of it is unmapped only with its object.
        del self.side

    async def grant(self, lengths: list[int], access: str | None, seed: int = 0) -> list[RemoteSpan]:
        """See :meth:`SimpleGrants.grant`."""
        return self.side.grants.grant(lengths, Access(access) if access else None, seed)

    async def revoke(self, grant: int) -> None:
        """End a grant."""
        self.side.grants.revoke(grant)

    async def connect(self, endpoint: str, port: int, address: str = LOOPBACK) -> None:
        """Link this side to another one."""
        dial = dial_to(port, self._certificate, address) if port else dial_nowhere
        self.link: Link = await self.side.transport.connect(bytes.fromhex(endpoint), dial)
        self._stack.push_async_callback(self.link.close)


class _SuiteCommands(Commands):
    def __init__(self, tasks: TaskGroup) -> None:
        super().__init__()
        self._tasks = tasks

    async def transfer_leases(self) -> int:
        return self.side.transfer_leases

    async def arena_path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.side.arena.fd}"

    async def digest(self, offset: int, length: int) -> str:
        return xxh3_128_hexdigest(self.side.arena.view(offset, length))

    async def resources(self) -> list[int]:
        return resources()

    async def read(self, spans: list[list[int]]) -> dict[str, list[str]]:
        """Read spans into this arena. Return the outcomes, and the digests of the memory."""
        leases = self.side.allocate([length for _, _, length in spans])
        items = [(RemoteSpan(*span), lease.view) for span, lease in zip(spans, leases, strict=True)]
        try:
            outcomes = await self.link.read(items)
            digests = [xxh3_128_hexdigest(view) for _, view in items]
        finally:
            del items
            for lease in leases:
                lease.release()
        return {"outcomes": [outcome.value for outcome in outcomes], "digests": digests}

    async def read_repeatedly(self, spans: list[list[int]]) -> None:
        """Start a task that reads the spans in a loop, and return at once."""

        async def read() -> None:
            while True:
                outcomes = (await self.read(spans))["outcomes"]
                assert set(outcomes) <= {Outcome.OK.value, Outcome.FAILED.value}, outcomes

        self._tasks.start_soon(read)


def resources() -> list[int]:
    """Return the numbers of file descriptors, threads and tasks of this process."""
    tasks = len(anyio.get_running_tasks())
    return [len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), tasks]


async def _main() -> None:
    async with anyio.create_task_group() as tasks:
        await serve_commands(_SuiteCommands(tasks))
        # A task that reads repeatedly, or a library's thread, would keep the process alive.
        os._exit(0)


async def serve_commands(commands: object) -> None:
    """Call the methods that standard input asks for, one at a time, until it ends."""
    # Library output on stdout must not mix with the answers.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            name, arguments = json.loads(line)
            try:
                answer = {"result": await getattr(commands, name)(**arguments)}
            except BaseException as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer, default=str) + "\n")
            answers.flush()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; fail after ``TIMEOUT_SECONDS``."""
    with anyio.fail_after(TIMEOUT_SECONDS):
        while not condition():  # noqa: ASYNC110 - of another process or thread
            await anyio.sleep(0.005)


def none_greater(now: Sequence[Sequence[int]], before: Sequence[Sequence[int]]) -> bool:
    """Return whether no number has increased."""
    return all(
        count <= earlier
        for row, row_before in zip(now, before, strict=True)
        for count, earlier in zip(row, row_before, strict=True)
    )


def part(span: RemoteSpan, start: int, length: int) -> RemoteSpan:
    """Return a part of a span."""
    return RemoteSpan(span.grant, span.offset + start, length)


async def holds(view: memoryview, seed: int) -> bool:
    """Return whether memory contains ``pattern(seed)``."""
    return await anyio.to_thread.run_sync(lambda: same(view, pattern(seed, len(view))))


async def fill(view: memoryview, seed: int) -> None:
    """Fill memory with ``pattern(seed)``."""
    view[:] = await anyio.to_thread.run_sync(pattern, seed, len(view))


@dataclass
class Linked:
    """This process's side, the other process, and the link to it."""

    here: Side
    other: OtherProcess
    endpoint: bytes
    link: Link
    relay: Relay | None
    leases: list[Lease] = field(default_factory=list)

    def views(self, lengths: Sequence[int]) -> list[memoryview]:
        """Allocate memory in this process's arena until the test ends. It contains the sentinel byte."""
        leases = self.here.allocate(lengths)
        self.leases += leases
        return [lease.view for lease in leases]

    async def read(self, spans: Sequence[RemoteSpan]) -> tuple[list[Outcome], list[memoryview]]:
        """Read each span into newly allocated memory."""
        views = self.views([span.length for span in spans])
        return list(await self.transfer("read", spans, views)), views

    async def write(self, views: Sequence[memoryview], spans: Sequence[RemoteSpan]) -> list[Outcome]:
        """Write each view to its span."""
        return list(await self.transfer("write", spans, views))

    def transfer(
        self, method: Method, spans: Sequence[RemoteSpan], views: Sequence[memoryview]
    ) -> Coroutine[Any, Any, Sequence[Outcome]]:
        """Read the spans into the views, or write the views to the spans."""
        if method == "read":
            return self.link.read(list(zip(spans, views, strict=True)))
        return self.link.write(list(zip(views, spans, strict=True)))

    async def there(self, span: RemoteSpan, content: Buffer) -> bool:
        """Return whether the other side's memory has this content."""
        return await self.other.digest(span.offset, span.length) == xxh3_128_hexdigest(content)

    async def assert_no_leases(self) -> None:
        """Wait until no transfer holds a lease in the other process; fail after ``TIMEOUT_SECONDS``."""
        with anyio.fail_after(TIMEOUT_SECONDS):
            while await self.other.do("transfer_leases"):  # noqa: ASYNC110 - of another process
                await anyio.sleep(0.01)


if __name__ == "__main__":
    anyio.run(_main)
