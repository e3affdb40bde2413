"""The transport ``tcp`` with peers that violate its protocol, stall, or disconnect."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from kvtier.backends.base import Outcome
from kvtier.concurrency.sockets.connection import POLL_SECONDS, Connection, Deadline
from kvtier.testing.backend import is_poisoned
from kvtier.testing.relay import Relay
from kvtier.testing.transport_sides import MIB, Certificate, Side, dial_to, fill, holds, pattern, until
from kvtier.transports.base import Access, Link, RemoteSpan
from kvtier.transports.tcp import TcpTransport
from kvtier.transports.tcp.wire import RequestReader, answer_bytes, encode_answer, encode_request
from tests.rigs.certificates import make_certificate

pytestmark = pytest.mark.anyio

OK, FAILED = Outcome.OK, Outcome.FAILED
SHORT = 0.4
LONG = 60.0


@asynccontextmanager
async def side(
    deadline: float = LONG, capacity: int = 40 * MIB, certificate: Certificate | None = None, **settings: int
) -> AsyncIterator[Side]:
    raw = {"type": "tcp", "deadline": deadline, **settings}
    async with Side.open(TcpTransport, raw, capacity, certificate) as opened:
        yield opened


@asynccontextmanager
async def open_link(
    to: Side, port: int | None = None, certificate: Certificate | None = None
) -> AsyncIterator[Link]:
    link = await to.transport.connect(to.transport.endpoint, dial_to(port or to.port, certificate))
    try:
        yield link
    finally:
        await link.close()


@contextmanager
def connect_raw(to: Side) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", to.port)) as connected:
        connected.settimeout(30)
        yield connected


async def receive(connected: socket.socket, length: int) -> bytes:
    data = await anyio.to_thread.run_sync(connected.recv, length, socket.MSG_WAITALL)
    assert isinstance(data, bytes)
    return data


async def assert_serves(served: Side, certificate: Certificate | None = None) -> None:
    """Assert that another client is served."""
    (span,) = served.grants.grant([5000], Access.READ, 3)
    async with open_link(served, certificate=certificate) as link:
        view = memoryview(bytearray(5000))
        with anyio.fail_after(30):
            assert list(await link.read([(span, view)])) == [OK]
    assert view == pattern(3, 5000)


async def closed_by_peer(connected: socket.socket) -> bool:
    """Discard received bytes until the peer closes the connection."""

    def drain() -> bool:
        try:
            while connected.recv(1 << 20):
                pass
        except ConnectionResetError:
            pass
        return True

    return await anyio.to_thread.run_sync(drain)


# Clients.


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: peer\r\n\r\n",
        b"\0" * 100,
        b"\xff" * 100_000,
        pattern(1, 5000),
        encode_request(Access.READ, []),
        encode_request(Access.READ, [RemoteSpan(1, 2, 1 << 63)]),
        encode_request(Access.WRITE, [RemoteSpan(1, 2, (1 << 64) - 1)] * 5),
        encode_request(Access.READ, [RemoteSpan(1, 2, 3)]) + b"and more",
    ],
)
async def test_garbage_closes_connection(garbage: bytes) -> None:
    async with side() as served:
        with connect_raw(served) as connected:
            connected.sendall(garbage)
            assert await closed_by_peer(connected)
        assert served.transfer_leases == 0
        await assert_serves(served)


async def test_incomplete_request_times_out_and_idle_client_does_not() -> None:
    """An incomplete request is closed after the deadline; an idle connection stays open."""
    async with side(deadline=SHORT) as served:
        (span,) = served.grants.grant([5000], Access.READ, 1)
        request = encode_request(Access.READ, [span])
        with connect_raw(served) as unresponsive, connect_raw(served) as connected:
            connected.sendall(request[:-1])
            assert await closed_by_peer(connected)
            unresponsive.sendall(request)
            answer = await receive(unresponsive, answer_bytes(1) + 5000)
            assert answer[answer_bytes(1) :] == pattern(1, 5000)
        await until(lambda: served.transfer_leases == 0)


async def test_incomplete_write_payload_times_out() -> None:
    async with side(deadline=SHORT) as served:
        (span,) = served.grants.grant([MIB], Access.WRITE, 1)
        with connect_raw(served) as connected:
            connected.sendall(encode_request(Access.WRITE, [span]) + bytes(1000))
            await until(lambda: served.transfer_leases == 1)
            assert await closed_by_peer(connected)
        await until(lambda: served.transfer_leases == 0)
        await assert_serves(served)


async def test_client_that_disconnects_releases_leases() -> None:
    async with side() as served:
        readable, writable = (
            served.grants.grant([16 * MIB], access, 1)[0] for access in (Access.READ, Access.WRITE)
        )
        for request in (
            encode_request(Access.READ, [readable]),
            encode_request(Access.WRITE, [writable]) + bytes(100_000),
        ):
            with connect_raw(served) as connected:
                connected.sendall(request)
                await until(lambda: served.transfer_leases == 1)
            await until(lambda: served.transfer_leases == 0)
        await assert_serves(served)


@pytest.mark.parametrize("with_tls", [False, True])
async def test_client_that_closes_with_closed_window_is_released(tmp_path: Path, *, with_tls: bool) -> None:
    """TCP acknowledges the FIN but no data, so the kernel reports no error before its own timeout."""
    certificate = None
    if with_tls:
        files = make_certificate(tmp_path / "certificate")
        certificate = Certificate(str(files.certificate), str(files.key))
    async with side(certificate=certificate) as served:
        (span,) = served.grants.grant([16 * MIB], Access.READ, 1)
        connection = await anyio.to_thread.run_sync(dial_to(served.port, certificate), Deadline(LONG))
        connection.deadline = Deadline(LONG)
        connection.send([encode_request(Access.READ, [span])])
        await until(lambda: served.transfer_leases == 1)
        # By now the sending thread has returned the socket to the event loop.
        await anyio.sleep(3 * POLL_SECONDS)
        with connection.detach() as closing:
            socket.socket.shutdown(closing, socket.SHUT_WR)
            await until(lambda: served.transfer_leases == 0)
        await assert_serves(served, certificate)


async def test_clients_that_do_not_read_block_no_thread() -> None:
    """Clients that do not read: others are served meanwhile, and they are disconnected by the deadline."""
    async with side(deadline=3.0, threads=2) as served:
        (span,) = served.grants.grant([16 * MIB], Access.READ, 1)
        clients = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(12)]
        for connected in clients:
            connected.sendall(encode_request(Access.READ, [span]))
        await until(lambda: served.transfer_leases == len(clients))
        await assert_serves(served)
        assert served.transfer_leases > 0
        await until(lambda: served.transfer_leases == 0)
        for connected in clients:
            connected.close()
        await assert_serves(served)


async def test_slow_reader_receives_everything() -> None:
    async with side() as served:
        size = 12 * MIB
        (span,) = served.grants.grant([size], Access.READ, 1)
        with connect_raw(served) as connected:
            connected.sendall(encode_request(Access.READ, [span]))
            data = bytearray()
            while len(data) < answer_bytes(1) + size:
                data += await receive(connected, min(MIB, answer_bytes(1) + size - len(data)))
                await anyio.sleep(0.03)
        assert await holds(memoryview(data)[answer_bytes(1) :], 1)
        await until(lambda: served.transfer_leases == 0)


async def test_idle_connections_need_no_threads() -> None:
    async with side() as served:
        before = threading.active_count()
        clients = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(50)]
        await assert_serves(served)
        assert threading.active_count() < before + 25
        for connected in clients:
            connected.close()


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with side() as served:
        spans = served.grants.grant([3000] * 30, Access.READ, 0)
        (target,) = served.grants.grant([3000], Access.WRITE, 50)
        with connect_raw(served) as connected:
            reads = [encode_request(Access.READ, [span]) for span in spans]
            write = encode_request(Access.WRITE, [target]) + pattern(99, 3000)
            connected.sendall(b"".join([*reads[:20], write, *reads[20:]]))
            for index in range(20):
                answer = await receive(connected, answer_bytes(1) + 3000)
                assert answer == encode_answer(Access.READ, [True]) + pattern(index, 3000)
            assert await receive(connected, answer_bytes(1)) == encode_answer(Access.WRITE, [True])
            for index in range(20, 30):
                answer = await receive(connected, answer_bytes(1) + 3000)
                assert answer == encode_answer(Access.READ, [True]) + pattern(index, 3000)
        assert bytes(served.arena.view(target.offset, 3000)) == pattern(99, 3000)


# Servers.


@contextmanager
def serve_each(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """Run a server that passes each connection to a function; yields its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:
                return
            with connected:
                answer(connected)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def send_reply(answer: bytes, connected: socket.socket) -> None:
    connected.recv(1 << 16)
    connected.sendall(answer)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 100,
        b"\xff" * 200,
        encode_answer(Access.WRITE, [True]) + bytes(100),
        encode_answer(Access.READ, [True, True]) + bytes(100),
        encode_answer(Access.READ, [True])[:8] + b"\x07" + bytes(100),
    ],
)
async def test_invalid_answer_fails_the_read(answer: bytes) -> None:
    """Fails long before the deadline, because a retry cannot help."""
    async with side() as local:
        with serve_each(partial(send_reply, answer)) as port:
            async with open_link(local, port) as link:
                view = local.arena.view(0, 5000)
                with anyio.fail_after(30):
                    assert list(await link.read([(RemoteSpan(1, 0, 5000), view)])) == [FAILED]
                assert is_poisoned(view)
                del view


async def test_read_from_closed_port_fails() -> None:
    async with side() as local:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        async with open_link(local, port) as link:
            with anyio.fail_after(30):
                for _ in range(2):
                    item = (RemoteSpan(1, 0, 500), memoryview(bytearray(500)))
                    assert list(await link.read([item] * 3)) == [FAILED] * 3


async def test_read_resumes_at_the_byte_where_it_stopped() -> None:
    """Every connection of the peer breaks after 1000 bytes."""
    content = pattern(1, 20_000)
    requested: list[RemoteSpan] = []

    def answer(connected: socket.socket) -> None:
        reader = RequestReader()
        while (request := reader.next()) is None:
            data = connected.recv(1 << 16)
            if not data:
                return
            reader.feed(data)
        requested.extend(request.spans)
        payload = b"".join(content[span.offset : span.offset + span.length] for span in request.spans)
        connected.sendall(encode_answer(Access.READ, [True] * len(request.spans)) + payload[:1000])
        # Closing with an unread request would discard the sent bytes.
        connected.shutdown(socket.SHUT_WR)
        while connected.recv(1 << 16):
            pass

    async with side(connections=1) as local:
        with serve_each(answer) as port:
            async with open_link(local, port) as link:
                views = [memoryview(bytearray(length)) for length in (300, 4100, 1, 0, 2500)]
                offsets = [17, 5000, 19_999, 3, 700]
                items = [
                    (RemoteSpan(7, offset, len(view)), view)
                    for offset, view in zip(offsets, views, strict=True)
                ]
                with anyio.fail_after(30):
                    assert list(await link.read(items)) == [OK] * 5
    for offset, view in zip(offsets, views, strict=True):
        assert view == content[offset : offset + len(view)]
    assert RemoteSpan(7, 5700, 3400) in requested


async def test_consecutive_reads_over_one_connection() -> None:
    """Each begins at the moment at which the one before has ended, and nothing is queued any more."""
    async with side(connections=1) as served, open_link(served) as link:
        (span,) = served.grants.grant([5000], Access.READ, 1)
        with anyio.fail_after(LONG / 2):
            for _ in range(10):
                assert list(await link.read([(span, memoryview(bytearray(5000)))])) == [OK]


async def test_concurrent_reads_and_writes_over_one_connection() -> None:
    """Neither side blocks on the other to receive."""
    async with side(connections=1, capacity=80 * MIB) as served:
        (source,) = served.grants.grant([16 * MIB], Access.READ, 1)
        (target,) = served.grants.grant([16 * MIB], Access.WRITE, 2)
        async with open_link(served) as link:
            fetched, sent = (memoryview(bytearray(16 * MIB)) for _ in range(2))
            await fill(sent, 5)
            outcomes: list[Outcome] = []

            async def read() -> None:
                outcomes.extend(await link.read([(source, fetched)]))

            async def write() -> None:
                outcomes.extend(await link.write([(sent, target)]))

            with anyio.fail_after(30):
                for _ in range(3):
                    async with anyio.create_task_group() as tasks:
                        for call in (read, write, read, write):
                            tasks.start_soon(call)
        assert outcomes == [OK] * 12
        assert await holds(fetched, 1)
        assert await holds(served.arena.view(target.offset, 16 * MIB), 5)


async def test_close_does_not_wait_for_connecting() -> None:
    """An unresponsive peer does not delay closing."""
    is_connected = threading.Event()

    def dial(deadline: Deadline) -> Connection:
        connection = Connection(socket.AF_INET)
        try:
            with deadline.bounds(connection), socket.create_server(("127.0.0.1", 0)) as listener:
                connection.connect(listener.getsockname())
                is_connected.set()
                connection.take(memoryview(bytearray(1)))
        except BaseException:
            connection.close()
            raise
        return connection

    async with side() as local:
        link = await local.transport.connect(local.transport.endpoint, dial)
        with anyio.move_on_after(0.2):
            await link.read([(RemoteSpan(1, 0, 10), memoryview(bytearray(10)))])
        assert is_connected.is_set()
        start = time.monotonic()
        await link.close()
        assert time.monotonic() - start < 10


async def test_error_in_dial_is_logged_and_fails_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    """Logged, and the batch fails by its deadline."""

    def dial(_: Deadline) -> Connection:
        raise ZeroDivisionError("a fault")

    async with side(deadline=SHORT) as local:
        link = await local.transport.connect(local.transport.endpoint, dial)
        assert list(await link.read([(RemoteSpan(1, 0, 1), memoryview(bytearray(1)))])) == [FAILED]
        await link.close()
    assert "a fault" in caplog.text


async def test_views_and_spans_must_have_equal_length() -> None:
    async with side() as local, open_link(local) as link:
        with pytest.raises(ValueError, match="5000"):
            await link.read([(RemoteSpan(1, 0, 5000), memoryview(bytearray(10)))])


@pytest.mark.parametrize("end", ["cut", "deadline", "cancelled"])
async def test_arena_memory_is_freed_without_garbage_collection(end: str) -> None:
    """Closing an arena frees its memory, however its last transfer ended."""

    async def run_once() -> None:
        async with side(deadline=SHORT) as served, side(deadline=SHORT) as local:
            (span,) = await anyio.to_thread.run_sync(served.grants.grant, [32 * MIB], Access.READ, 1)
            with Relay.to(served.port) as relay:
                async with open_link(local, relay.port) as link:
                    relay.hold_after(MIB)
                    call = asyncio.ensure_future(link.read([(span, local.arena.view(0, 32 * MIB))]))
                    await until(lambda: relay.is_holding)
                    if end == "cut":
                        relay.cut()
                    elif end == "cancelled":
                        call.cancel()
                    await asyncio.wait([call])
                    assert call.cancelled() or list(call.result()) == [FAILED]
                    del call

    def arenas() -> int:
        return Path("/proc/self/maps").read_text().count("kvtier-arena")

    gc.collect()
    before = arenas()
    gc.disable()
    try:
        await run_once()
        await until(lambda: arenas() <= before)
    finally:
        gc.enable()
